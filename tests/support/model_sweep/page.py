"""Write what models of transformers do, bucketed: `python -m model_sweep.page docs/models.md` from `tests/support`."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

INTRODUCTION = """# Models of transformers

What tiny models of transformers 5 with random parameters do under `st.bucketed`, unmodified, as
`tests/support/model_sweep` found it. Each is called at several lengths in a bucket and across buckets, 1 among them,
once with `check=False`, so that nothing but the rules answers, and once with the default check. Results, loss and the
gradients of all parameters are compared with the plain model in float64: none errs more than 1.5 times as much as the
plain model in float32, and a few units in the last place of its largest number.

- **rule**: every call is answered by a graph, whose ops ran by rules on padded tensors.
- **true size**: some call runs the plain program, for the reason given.
- **refused**: an error says why.
- **-**: there is nothing to compare.

The table is written on a CPU. On an H200 (torch 2.11, transformers 5.17, 2026-11-28) CUDA graphs answered the uniform
calls of the same models, TF32 off, and none was wrong. Experts ran in bfloat16 there, and were not compared: torch's
grouped product of float32 reads its offsets on the host, so those run at their true size.

In a ragged batch, `st.pad([...])`, rows have lengths of their own, and are compared with the model on each row alone.
A reason is cut where it is long.

"""


def row(name: str) -> tuple[str, str, str, str, str]:
    """A row's family and name, what its uniform and its ragged calls do, and the reasons."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from model_sweep.cases import CASES
    from model_sweep.outcome import ragged, uniform

    case = CASES[name]
    outcomes = [uniform(case, check) for check in (False, True)]
    found = next((o for how in ("wrong", "true size") for o in outcomes if o.how == how), outcomes[0])
    rows = ragged(case) if case.ragged else None
    why = "; ".join(dict.fromkeys(o.why for o in (found, rows) if o is not None and o.why))
    return case.family, name, found.how, rows.how if rows else "-", shortened(why)


def shortened(why: str) -> str:
    """A reason as a cell of the table, without the lines of files that it names."""
    line = re.sub(r" \(/[^()]*:\d+\)", "", " ".join(why.split())).replace("|", "/")
    return line if len(line) <= 160 else f"{line[:157]}..."


def page(rows: list[tuple[str, str, str, str, str]]) -> str:
    """The page made of the rows."""
    uniform, ragged = (Counter(r[i] for r in rows) for i in (2, 3))
    batches = len(rows) - ragged["-"]
    counts = (
        f"Of {len(rows)} models {uniform['rule']} run by rules, with a graph a bucket, and {uniform['true size']} at "
        f"their true size; of {batches} ragged batches {ragged['rule']} run by rules. {uniform['wrong']} are wrong.\n\n"
    )
    lines = ["| model | family | uniform | ragged | why |\n|---|---|---|---|---|"]
    lines += [f"| {name} | {family} | {how} | {of_rows} | {why} |" for family, name, how, of_rows, why in rows]
    return INTRODUCTION + counts + "\n".join(lines) + "\n"


def all_rows() -> list[tuple[str, str, str, str, str]]:
    """Run the sweep on two cores, in the order of the table."""
    from model_sweep.cases import CASES

    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as workers:
        return list(workers.map(row, CASES))


if __name__ == "__main__":
    text = page(all_rows())
    Path(sys.argv[1]).write_text(text)
