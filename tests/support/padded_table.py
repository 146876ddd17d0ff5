"""Write what torch's ops do on padded tensors: `python tests/support/padded_table.py docs/padded-ops.md`."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from padded_conformance import outcomes
from torch.testing._internal.common_methods_invocations import op_db

SAMPLES = 12
DECIDING = 3
"""The first samples, of which the table tells what decided them."""

# What these give is drawn at random, for the bucket rather than for the true size, or is whatever the memory held.
WITHOUT_VALUES = set(
    """bernoulli multinomial normal nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d
    nn.functional.alpha_dropout nn.functional.feature_alpha_dropout rand_like randn_like randint_like uniform cauchy
    exponential geometric log_normal randint randn rand nn.functional.rrelu nn.functional.fractional_max_pool2d
    nn.functional.fractional_max_pool3d empty_like empty new_empty empty_strided new_empty_strided empty_permuted
    pca_lowrank svd_lowrank""".split()
)

OPS = list(op_db)

INTRODUCTION = """# PaddedTensor, op by op

What every op of torch's own test database does when a dim of an operand is padded, as `tests/support/padded_table.py`
found it with padding of NaN, infinity, 1e30, and indices out of range. Each sample was run with each dim padded, alone
and together with the dims of its size in other operands, in float32. No result and no gradient was wrong: compared with
the unpadded run in float64, none errs more than 1.5 times as much as the unpadded run in float32, and a rounding of its
largest number. Whole numbers and infinities are the same.

- **rule**: for some dim, the op runs on the padded storage; nothing is unpadded.
- **fallback**: for every dim that was tried, it runs on the logical data, in eager mode.
- **refused**: an error says why.
- **-**: there is no gradient, or no sample with a tensor that has a dim to pad.

The second column says what decided the forward: the **class** of each op in it, its dimension **map** (and for what
combines padded positions, the rule of all ops with that map, or of its class), or in one of the first samples a rule of
the op's **own**.

"""


def ways(index: int) -> tuple[str, str, str, list[str], str]:
    """An op's name, its best way forward and backward, its wrong results, and what decided it."""
    op = OPS[index]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable(logging.CRITICAL)
    found = outcomes(op, SAMPLES, values=op.name not in WITHOUT_VALUES)
    wrong = [f"{op.formatted_name} {o.plan}: {o.why}" for o in found if "wrong" in (o.how, o.backward)]
    by = {o.by for o in found if o.turn < DECIDING}
    decided = next((key for key in ("own", "map", "class") if key in by), "")
    return op.formatted_name, best([o.how for o in found]), best([o.backward for o in found]), wrong, decided


def best(found: list[str]) -> str:
    """The best way among outcomes."""
    return next((way for way in ("rule", "fallback", "refused") if way in found), "-")


def page() -> tuple[str, Counter[str], Counter[str], list[str]]:
    """The page, how many ops go which way forward and backward, and all wrong results."""
    with ProcessPoolExecutor(2) as workers:
        rows = list(workers.map(ways, range(len(OPS)), chunksize=4))
    forward, backward = (Counter(row[i] for row in rows) for i in (1, 2))
    applicable = sum(n for way, n in forward.items() if way != "-")
    decided = Counter(row[4] for row in rows)
    shared = decided["class"] + decided["map"]
    counts = (
        f"Of {applicable} ops with a sample that has a dim to pad, {forward['rule']} run by rules forward and "
        f"{backward['rule']} backward; {forward['fallback']} run on the logical data only, {forward['refused']} are "
        f"refused. Classes and dimension maps decide {shared} of the {shared + decided['own']} ops that a rule ran "
        f"for, in each of the first {DECIDING} samples.\n\n"
    )
    lines = [f"| `{name}` | {by} | {ahead} | {back} |" for name, ahead, back, _, by in sorted(rows)]
    text = INTRODUCTION + counts + "| op | by | forward | backward |\n|---|---|---|---|\n" + "\n".join(lines) + "\n"
    return text, forward, backward, [w for row in rows for w in row[3]]


if __name__ == "__main__":
    text, forward, backward, wrong = page()
    print(forward, backward, *wrong, sep="\n")
    Path(sys.argv[1]).write_text(text)
