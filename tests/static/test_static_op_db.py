"""Every function of torch's op_db reads and writes static tensors as it does plain ones, and moves none."""

from __future__ import annotations

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

# These return uninitialized memory.
UNINITIALISED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}

# The last bits of these depend on the address of LAPACK's work area.
LAST_BITS_VARY = {"linalg.lstsq"}

# These move or resize their argument, which a static tensor refuses.
RELOCATING_OPS = {"resize_", "resize_as_", "set_", "as_strided_", "as_strided"}


def samples(op: OpInfo, count: int) -> Iterable[SampleInput]:
    dtypes = op.supported_dtypes("cpu")
    if not dtypes:
        return []
    dtype = torch.float64 if torch.float64 in dtypes else next(iter(sorted(dtypes, key=str)))
    return islice(op.sample_inputs("cpu", dtype, requires_grad=False), count)


def place(tree: Any, how: Callable[[Tensor], Tensor]) -> Any:
    def leaf(x: Any) -> Any:
        is_plain = type(x) is Tensor and x.layout is torch.strided
        return how(x) if is_plain else x

    return optree.tree_map(leaf, tree, none_is_leaf=True)


def outcome(call: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    try:
        return call()
    except Exception as error:  # compared with that of a plain tensor
        return type(error)


def bits(t: Tensor) -> Tensor:
    """Return the tensor's bytes, NaNs included."""
    if t.layout is not torch.strided:
        t = t.to_dense()
    t = t.detach()
    return torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)).view(torch.uint8)


CONVERSIONS = frozenset("to float double half bfloat16 int long short char byte bool cfloat cdouble type_as".split())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = (a.dtype, a.shape, a.layout, a.stride() if a.layout is torch.strided else None) == (
            b.dtype, b.shape, b.layout, b.stride() if b.layout is torch.strided else None
        )  # fmt: skip
        return alike and torch.equal(bits(a), bits(b))
    return type(a) is type(b) and (isinstance(a, (type, torch.Generator)) or a == b or a != a)


def differences(op: OpInfo, form: Callable[..., Any], sample: SampleInput) -> str:
    """Return the difference between the call on plain tensors and on static ones; empty if there is none."""
    given = ((sample.input, *sample.args), sample.kwargs)
    # In the dense layout of a static tensor, so that the layouts of results are equal too.
    plain, static = (place(given, how) for how in (lambda t: torch.empty_like(t).copy_(t), st.static))
    held = [x for x in optree.tree_leaves(static, none_is_leaf=True) if type(x) is st.StaticAddressTensor]
    at = [(t.data_ptr(), t.shape) for t in held]
    wants, gets = (outcome(lambda c=call: form(*c[0], **c[1])) for call in (plain, static))
    if gets is st.AddressError and optree.tree_leaves(plain)[0].shape != held[0].shape:
        return ""  # an op that let the tensor grow
    if [t.data_ptr() for t in held] != [address for address, _ in at]:
        return "moved"
    if not all(map(same, *(optree.tree_leaves(x, none_is_leaf=True) for x in (plain, static)))):
        return "other values were written"
    leaves = [optree.tree_leaves(x, none_is_leaf=True) for x in (wants, gets)]
    if len(leaves[0]) != len(leaves[1]):
        return f"{wants} became {gets}"
    if op.name not in UNINITIALISED | LAST_BITS_VARY and not all(map(same, *leaves)):
        return f"{wants} became {gets}"
    odd = [x for x in leaves[1] if type(x) is st.StaticAddressTensor and not any(x is t for t in held)]
    return "" if not odd or op.name in CONVERSIONS else "a result is static"


@pytest.mark.parametrize("count", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_every_function_reads_and_writes_static_tensors_as_plain_ones(count: int) -> None:
    failures, covered = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db:
            try:
                found = list(samples(op, count))
            except RuntimeError:
                continue
            forms = [f for f in (op.op, op.method_variant, op.inplace_variant) if f is not None]
            for sample in found:
                for form in forms:
                    if op.name in RELOCATING_OPS or getattr(form, "__name__", "") in RELOCATING_OPS:
                        continue
                    covered += 1
                    if difference := differences(op, form, sample):
                        failures.append(f"{op.formatted_name} {form}: {difference[:300]}")
    assert not failures, "\n".join(failures)
    assert covered > 1000
