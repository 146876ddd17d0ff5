"""Write the page that says what the sweep over optim_db covers.

python tests/support/optim_parity_page.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from optim_oracle import (
    ADAFACTOR_SHAPE_SETS,
    DTYPES,
    SHAPE_SETS,
    STEPS,
    error_and_bound,
    exact_adafactor_maker,
    exact_maker,
    makers,
    sample_arguments,
    start,
    train,
)
from optimizers import TORCH_NAMES

NAMES = [*TORCH_NAMES, "Adafactor"]

PAGE = Path(__file__).parents[2] / "docs" / "optim-parity.md"

TEXT = """# Parity with torch.optim

Written by `tests/support/optim_parity_page.py` from the sweep of `tests/optim/test_optim_parity.py`. For every class
that torch has too, and every sample of arguments that torch's own `optim_db` holds for it, {steps} steps are taken here
and by torch, on tensors of {shapes} shapes and on one alone. A figure is the largest distance from the float64 truth
over those runs, as a share of what it may be: 1.5 times torch's own distance, and one rounding. The truth is torch's
class in float64, one tensor after the other. Torch {version}, CPU; the tests take the same steps on a GPU.

| class | {dtypes} |
|---|{lines}|
{rows}

Muon, whose steps torch computes in bfloat16 whatever the parameters are, has tests of its own.

The arguments, each beside the defaults:

| class | samples |
|---|---|
{samples}
"""


def samples(name: str) -> list[str]:
    """The arguments of each sample of a class, as they are written in a call."""
    given = sample_arguments(name, "cpu", torch.float32)
    return ["`" + (", ".join(f"{key}={_text(value)}" for key, value in s.kwargs.items()) or "()") + "`" for s in given]


def _text(value: Any) -> str:
    return f"tensor({value.item():.3g})" if isinstance(value, torch.Tensor) else repr(value)


def largest_share(name: str, dtype: torch.dtype) -> float:
    """The largest error of a class over its samples, as a share of the bound."""
    shares = [0.0]
    for shapes in (SHAPE_SETS if name != "Adafactor" else ADAFACTOR_SHAPE_SETS).values():
        values = start("cpu", dtype, shapes)
        for sample in sample_arguments(name, "cpu", dtype):
            kwargs = sample.kwargs
            make, make_theirs = makers(name, kwargs)
            is_factored = name == "Adafactor"
            make_exact = exact_adafactor_maker(kwargs, dtype) if is_factored else exact_maker(name, kwargs)
            ours, theirs = train(make, values, dtype)[0], train(make_theirs, values, dtype)[0]
            truth, _ = train(make_exact, values, torch.float64)
            error, bound = error_and_bound(ours, theirs, truth, dtype)
            shares.append(error / bound)
    return max(shares)


def page() -> str:
    """The page, measured now."""
    torch.set_num_threads(1)
    rows = [
        f"| `{name}` | " + " | ".join(f"{largest_share(name, dtype):.0%}" for dtype in DTYPES) + " |" for name in NAMES
    ]
    return TEXT.format(
        steps=STEPS,
        shapes=len(SHAPE_SETS["many tensors"]),
        version=torch.__version__.partition("+")[0],
        dtypes=" | ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES),
        lines="|".join(["---"] * len(DTYPES)),
        rows="\n".join(rows),
        samples="\n".join(f"| `{name}` | {', '.join(samples(name))} |" for name in NAMES),
    )


if __name__ == "__main__":
    PAGE.write_text(page())
