"""A binding that stands in for an overload computes the same, for all that torch's own test database calls."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from subtensors.dispatch.torch_internals.ops import binding_of

aten = torch.ops.aten

SHARES = 4
SAMPLES = 2

Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


class Calls(TorchDispatchMode):
    """A context that notes the ops of a function, composite ones in one piece where inference mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Call] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, OpOverload):
            self.found.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def calls_of(op: Any) -> Iterator[Call]:
    for dtype in {torch.float32, torch.int64} & set(op.dtypes):
        for sample in list(op.sample_inputs("cpu", dtype, requires_grad=False))[:SAMPLES]:
            calls = Calls()
            # Some samples need a GPU, or gradients; what they had called by then is taken.
            with contextlib.suppress(RuntimeError, NotImplementedError, AssertionError), torch.inference_mode(), calls:
                op(sample.input, *sample.args, **sample.kwargs)
            yield from calls.found


def copied(tree: Any) -> Any:
    """The same with the contiguous tensors cloned, for ops that write; others keep their strides."""
    return pytree.tree_map_only(
        Tensor, lambda t: t.clone() if t.layout is torch.strided and t.is_contiguous() else t, tree
    )


def are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
            return False
        return a.layout is not torch.strided or (a.stride() == b.stride() and bool(a.eq(b).logical_or(a != a).all()))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(are_equal, a, b))
    return bool(a == b or a != a)


@pytest.mark.parametrize("share", range(SHARES))
def test_a_binding_computes_what_its_overload_does(share: int) -> None:
    tried = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db[share::SHARES]:
            for func, args, kwargs in calls_of(op):
                binding = binding_of(func, kwargs)
                is_random = torch.Tag.nondeterministic_seeded in func.tags
                reads_beyond = func is aten.as_strided.default  # of a view, whose clone has less memory
                if binding is getattr(func, "_op", func) or is_random or reads_beyond or "empty" in func.name():
                    continue
                (own_args, own_kwargs), (args, kwargs) = copied((args, kwargs)), copied((args, kwargs))
                assert are_equal(func(*args, **kwargs), binding(*own_args, **own_kwargs)), func
                tried.add(func)
    assert len(tried) > 100


def test_an_overload_without_a_binding_that_is_equal_is_called_itself() -> None:
    x = torch.randn(2, 3)
    assert binding_of(aten.hinge_embedding_loss.default, {})(x, x.sign()).shape == ()
    assert torch.hinge_embedding_loss(x, x.sign()).shape == (2, 3)  # type: ignore[attr-defined]  # torch's has no stub
    formats = {"memory_format": 0}
    assert binding_of(aten.contiguous.default, formats)(x.t(), **formats).is_contiguous()
    assert binding_of(aten.unsqueeze.default, {}) is torch.unsqueeze
