"""Numbers that wait: the loss of chunked rows, which is computed when something reads it.

Sums, differences and multiples of such numbers are recorded, and wait as well. Everything else reads a number: it is
computed then, in the pass of those that it was made part of (`dispatch/chunked/shared_pass.py`), and a plain tensor
takes its place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch._ops import OpOverload

from subtensors.chunked.lazy_tensor import AliasRef, LazyTensor, Metadata, number_tensor
from subtensors.chunked.record_call import handle_torch_dispatch, record_call
from subtensors.dispatch.chunked.evaluation import evaluate
from subtensors.dispatch.chunked.lazy_graph import (
    LazyValue,
    NeedsMaterialize,
    Waiting,
    constant,
    version_and_address,
)
from subtensors.dispatch.chunked.shared_pass import evaluate_number
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_leaves, tree_map
from subtensors.dispatch.torch_internals.autograd import has_saved_tensor_hooks, is_transforming
from subtensors.dispatch.torch_internals.dispatcher import is_traced


class NumberRef(AliasRef):
    """A reference to a number, and to the number that was made of it last."""

    __slots__ = ("joined",)

    def __init__(self, value: LazyValue) -> None:
        super().__init__(value)
        self.joined: weakref.ref[NumberRef] | None = None

    @property
    def value(self) -> LazyValue:
        """The current value: one of its own after a write to the plain tensor, which other numbers must not see."""
        value = self._value
        if value.tensor is not None and value.recorded not in (None, version_and_address(value.tensor)):
            self._replace(value.tensor)
        return self._value

    def metadata(self) -> Metadata:
        """Sizes, strides, dtype and device."""
        value = self._value
        return (), (), value.like.dtype, value.device

    def tensor(self, is_read: bool = False) -> Tensor:
        """Return the number as a plain tensor.

        Args:
            is_read: whether no gradient of it is needed. A number that is part of another is computed with that one.
        """
        if torch.is_inference_mode_enabled():  # what is computed there never has a backward
            with torch.inference_mode(False):
                return self.tensor(is_read)
        value = self._value
        if is_read and value.tensor is None:
            whole = None if value.observed is not None or self.joined is None else self.joined()
            if whole is not None:
                whole.tensor(is_read=True)
            if value.observed is not None:
                return value.observed
        tensor = value.tensor
        if tensor is None and value.waiting is not None and value.waiting.alone is not None:
            with torch.set_grad_enabled(True):
                tensor = value.tensor = value.waiting.alone()
        if tensor is None:
            with torch.set_grad_enabled(True):
                tensor = evaluate_number(value)
        if value.recorded is None:
            value.recorded = version_and_address(tensor)
        value.node = value.waiting = None  # which keep what they read
        if value.observed is None or value.observed.data_ptr() == tensor.data_ptr():
            return tensor
        with torch.set_grad_enabled(True):
            return self._replace(_Passed.apply(tensor, (value.observed,)))  # type: ignore[no-untyped-call]

    def _replace(self, tensor: Tensor) -> Tensor:
        """Replace the value by that of a plain tensor, and return this."""
        value = constant(tensor)
        value.observed = self._value.observed
        self.write(value)
        return tensor

    def backward(self, grad: Tensor) -> None:
        """Go on with the backward of a function that got the waiting number itself."""
        self.tensor().backward(grad)  # type: ignore[no-untyped-call]


class ChunkedNumber(LazyTensor):
    """A number of chunked rows that was not computed yet; to its user a tensor like any other."""

    def realize(self) -> Tensor:
        """Return the number as a plain tensor."""
        return _plain(self, is_read=False)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        observed = self._ref.value.observed if self._ref.value.tensor is None else None
        return repr(self.realize() if observed is None else observed)

    @classmethod
    def result_of(cls, value: LazyValue) -> Tensor:
        """Return a number that is made of others, which waits as they do."""
        if not may_wait(value.needs_grad, value.like, value.device):
            return evaluate_number(value)
        return number_of(value)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        is_waiting = func in _COMBINATIONS or (func in _UPDATES and _may_update(args[0]))
        if is_waiting and not kwargs and not is_transforming() and all(map(_is_term, args)):
            try:
                for x in args:
                    if isinstance(x, ChunkedNumber) and _number_ref(x).value.observed is not None:
                        x.realize()  # a write through an alias of what was observed is seen in that memory alone
                out = record_call(cls, func, args, {})
            except NeedsMaterialize:
                pass
            else:
                _join(args, out)
                return out
        is_read = func in _READS

        def plain(x: PyTree) -> PyTree:
            return _plain(x, is_read or (func is Tensor.cpu and _is_released(x))) if isinstance(x, ChunkedNumber) else x

        named = kwargs or {}
        if func in _PARTS:
            inputs = named.get("inputs") if func in _BACKWARDS else args[1 if func is torch.autograd.grad else 0]
            # Before the numbers that they are part of, whose backward passes them then.
            for x in () if inputs is None else tree_leaves(inputs):
                _check_unobserved(x)
                plain(x)
        if any(isinstance(x, (list, tuple, dict)) for x in (*args, *named.values())):
            args, named = tree_map((args, named), plain)
        return func(*map(plain, args), **{key: plain(x) for key, x in named.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        return handle_torch_dispatch(cls, func, args, kwargs or {})


def may_wait(needs_grad: bool, like: Tensor, device: torch.device) -> bool:
    """Return whether a number may be computed later: it has a gradient, and no context around it has to see its ops.

    Args:
        needs_grad: whether it requires grad.
        like: a tensor that it is computed from, or its metadata.
        device: of the number.
    """
    if not needs_grad or not torch.is_grad_enabled() or has_saved_tensor_hooks():
        return False
    if type(like) not in PLAIN_TYPES and is_traced(like):
        return False
    return device.type == "cpu" or (device.type == "cuda" and not torch.cuda.is_current_stream_capturing())


def waiting_number(dtype: torch.dtype, device: torch.device, waiting: Waiting) -> ChunkedNumber:
    """Return the tensor for the user of a number that requires grad, and of which nothing is recorded yet."""
    value = LazyValue(_number_like(dtype), device, None, None, True)
    value.waiting = waiting
    return number_of(value)


@functools.cache
def _number_like(dtype: torch.dtype) -> Tensor:
    return torch.empty((), dtype=dtype, device="meta")


def number_of(value: LazyValue) -> ChunkedNumber:
    """Return the tensor for the user of a number that waits."""
    ref = NumberRef(value)
    return number_tensor(ChunkedNumber, ref, ref.backward)  # type: ignore[return-value]


def result_of_rows(value: LazyValue) -> Tensor:
    """Return a value without the rows to the user: a number waits, anything else is computed."""
    if value.ndim or value.tensor is not None or not may_wait(value.needs_grad, value.like, value.device):
        return evaluate(value)
    value.waiting = value.waiting or Waiting()
    return number_of(value)


def _number_ref(x: ChunkedNumber) -> NumberRef:
    ref = x._ref
    while not isinstance(ref, NumberRef):  # a view that torch made of it
        assert ref.base is not None
        ref = ref.base
    return ref


def _is_released(x: ChunkedNumber) -> bool:
    """Return whether a number has a value only, since the backward of one that it was part of has run."""
    value = _number_ref(x).value
    return value.tensor is None and value.node is None and value.observed is not None


def _check_unobserved(x: object) -> None:
    """Raise RuleError for a number that the backward of another one will not pass: a view, or one computed with it."""
    if not isinstance(x, ChunkedNumber):
        return
    if not isinstance(x._ref, NumberRef):
        raise RuleError("the gradient of a view of a number of chunked rows: take that of the number, or of realize()")
    if x._ref.value.observed is not None:
        raise RuleError(
            "the gradient of a number of chunked rows that was computed as part of another one: the other's backward "
            "takes one pass, without it; realize() it, register hooks, or call retain_grad() before the other is read"
        )


def _plain(x: ChunkedNumber, is_read: bool) -> Tensor:
    """Return the plain tensor in place of a number, connected to the function that returned the number itself."""
    tensor = (x._ref if isinstance(x._ref, NumberRef) else _number_ref(x)).tensor(is_read)
    with torch._C.DisableTorchFunctionSubclass():
        function = x.grad_fn
    if function is None:
        return tensor
    out: Tensor = _Passed.apply(x, (tensor.detach().clone(),))  # type: ignore[no-untyped-call]
    return out


class _Passed(torch.autograd.Function):
    """The gradient of one number and the memory of another, in a tuple since it is no input of the function."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, number: Tensor, memory: tuple[Tensor]) -> Tensor:
        return memory[0].detach()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _join(parts: Args, whole: Tensor) -> None:
    """Note that a number is made of others, with which these are computed."""
    own = whole._ref if isinstance(whole, ChunkedNumber) else None
    for part in parts:
        ref = part._ref if isinstance(part, ChunkedNumber) else None
        if isinstance(ref, NumberRef) and isinstance(own, NumberRef):
            ref.joined = None if ref is own else weakref.ref(own)


def _may_update(x: object) -> bool:
    """Return whether a call that writes to its first operand may be recorded: one that nothing has read."""
    is_unread = isinstance(x, ChunkedNumber) and x._ref.value.tensor is None and x._ref.value.observed is None
    return is_unread and torch.is_grad_enabled()


def _is_term(x: object) -> bool:
    """Return whether a number can be added to, or multiplied by, something without reading it."""
    if isinstance(x, ChunkedNumber):
        with torch._C.DisableTorchFunctionSubclass():
            return x.grad_fn is None
    return isinstance(x, (int, float)) or (type(x) in PLAIN_TYPES and isinstance(x, Tensor) and x.ndim == 0)


def _functions(names: str) -> set[object]:
    return {getattr(home, name) for home in (torch, Tensor) for name in names.split() if hasattr(home, name)}


_COMBINATIONS = _functions(
    """add sub mul div neg rsub subtract multiply divide true_divide negative __add__ __radd__ __sub__ __rsub__ __mul__
    __rmul__ __truediv__ __neg__ sum mean squeeze float double"""
)
"""Functions whose results wait as their operands do."""

_UPDATES = _functions("add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__")
"""Functions that make such a number of their first operand."""

_GETTERS = "shape dtype device layout ndim requires_grad is_cuda is_cpu is_sparse is_quantized is_nested is_meta"
_METADATA = _functions("size dim stride numel is_floating_point is_complex element_size is_contiguous __hash__")
_METADATA |= {getattr(Tensor, name).__get__ for name in _GETTERS.split()}
"""Functions that the tensor's own metadata answers."""

_READS = _functions(
    """item tolist detach isnan isfinite isinf __float__ __int__ __bool__ __index__ __format__ __lt__ __gt__
    __le__ __ge__ __eq__ __ne__ lt gt le ge eq ne"""
)
"""Functions that need no gradient of the number."""

_READS.add(Tensor.data.__get__)  # type: ignore[attr-defined]

_BACKWARDS: set[object] = {torch.autograd.backward, Tensor.backward}

_PARTS = _BACKWARDS | {torch.autograd.grad} | _functions("register_hook retain_grad")
"""Functions that ask for the gradient of the numbers that they are given, or those of them that are inputs."""
