"""Rules of chunked values over torch's own op_db: values and gradients, chunked along each end of the shape."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import subtensors as st

# What these give is whatever the memory held; or numbers for all rows, which chunks draw from seeds of their own.
UNINITIALISED = {
    "nn.functional.multi_head_attention_forward",
    "empty",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "empty_strided",
    "empty_permuted",
    "resize_",
}

# The decomposition of a matrix is known up to signs and phases.
UP_TO_A_FACTOR = {"linalg.eig", "linalg.eigh", "linalg.svd", "svd", "pca_lowrank", "svd_lowrank", "linalg.lstsq"}

# Torch's own derivative of its statistics alone is not that of all its results together.
STATISTICS = {"native_group_norm"}


def samples(op: OpInfo, count: int) -> Iterable[SampleInput]:
    dtypes = op.supported_dtypes("cpu")
    if not dtypes:
        return []
    dtype = torch.float64 if torch.float64 in dtypes else next(iter(sorted(dtypes, key=str)))
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    return islice(op.sample_inputs("cpu", dtype, requires_grad=grad), count)


def outcome(call: Callable[..., Any], sample: SampleInput, dim: int | None, every: bool) -> Any:
    """Results and gradients with operands chunked along a dim: all with rows there, or the first; None for plain."""
    leaves: list[Tensor] = []
    chunked: list[bool] = []

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            return x
        copy = x.detach().clone().requires_grad_(x.requires_grad)
        leaves.append(copy)
        taken = dim is not None and copy.ndim > 0 and (every or not any(chunked))
        chunked.append(taken)
        return st.chunk(copy, dim=dim, rows=2) if taken and dim is not None else copy

    args, kwargs = optree.tree_map(leaf, ((sample.input, *sample.args), sample.kwargs), none_is_leaf=True)
    torch.manual_seed(0)
    out = call(*args, **kwargs)
    dense = [x.realize() if isinstance(x, st.ChunkedTensor) else x for x in optree.tree_leaves(out)]
    flowing = [x for x in dense if isinstance(x, Tensor) and x.requires_grad]
    if flowing:
        weights = [torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).view(x.shape).to(x.dtype) for x in flowing]
        torch.autograd.backward(flowing, weights)
    return [x.detach() if isinstance(x, Tensor) else x for x in dense], [x.grad for x in leaves]


def compare(actual: Any, expected: Any) -> None:
    for a, e in zip(actual[0], expected[0], strict=True):
        if isinstance(e, Tensor):
            torch.testing.assert_close(a, e, equal_nan=True)
        else:
            assert type(a) is type(e)
    for a, e in zip(actual[1], expected[1], strict=True):
        if e is None or a is None:
            assert a is None or not a.any()
            assert e is None or not e.any()
        else:
            torch.testing.assert_close(a, e, equal_nan=True)


@pytest.fixture(autouse=True)
def without_notes_on_realized_operands(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "subtensors.chunked")


def sweep(ops: Iterable[OpInfo], count: int) -> tuple[list[str], int]:
    failures, covered = [], 0
    for op in ops:
        if op.name in UNINITIALISED | UP_TO_A_FACTOR | STATISTICS:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = list(samples(op, count))
            except RuntimeError:
                continue
            for place, sample in enumerate(found):
                try:
                    expected = outcome(op.op, sample, None, False)
                except Exception:  # a sample that torch itself refuses
                    continue
                for dim, every in ((0, False), (-1, False), (0, True)):
                    try:
                        compare(outcome(op.op, sample, dim, every), expected)
                        covered += 1
                    except Exception as error:  # told at the end, with the others
                        text = f"{type(error).__name__} {str(error)[:200]}"
                        failures.append(f"{op.formatted_name} sample {place} dim {dim} every {every}: {text}")
    return failures, covered


def test_the_ops_of_op_db_give_the_same_results_as_on_plain_tensors() -> None:
    failures, covered = sweep(op_db, 2)
    assert not failures, "\n".join(failures)
    assert covered > 1500
