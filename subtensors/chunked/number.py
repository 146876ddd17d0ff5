"""Numbers that wait: a loss or a measure of chunked rows, which is computed when something reads it.

Sums, differences and multiples of such numbers are recorded, and wait as well. Everything else reads a number: it is
computed then, in one pass with what else is held of the same product (`dispatch/chunked/shared_pass.py`), and a plain
tensor takes its place.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
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
    is_recording,
    version_and_address,
)
from subtensors.dispatch.chunked.record import record
from subtensors.dispatch.chunked.shared_pass import UNSETTLED, evaluate_number, has_gradients, hold, observe
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find, tree_map_only
from subtensors.dispatch.torch_internals.autograd import (
    BACKWARDS,
    has_saved_tensor_hooks,
    is_transforming,
    retains_graph,
    set_leaf_hooks,
)
from subtensors.dispatch.torch_internals.dispatcher import is_traced

aten = torch.ops.aten


class NumberRef(AliasRef):
    """A reference to a number."""

    __slots__ = ("user",)

    user: weakref.ref[Tensor]
    """The tensor for the user."""

    def pending(self) -> LazyValue | None:
        """Return the value; None where its numbers are known."""
        value = self._value
        is_known = value.tensor is not None or value.observed is not None
        return None if is_known or (value.node is None and value.waiting is None) else value

    @property
    def may_be_differentiated(self) -> bool:
        """True if it requires grad, and the user holds more than a detached number of it."""
        return self._value.needs_grad and self.user() is not None

    def take_notice(self) -> None:
        """Release what a number that is known was to be computed from, if the user can't ask for its gradient."""
        observed = self._value.observed
        if self._value.tensor is None and observed is not None and not self.may_be_differentiated:
            self._replace(observed)

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
        like = value.like
        return like.shape, like.stride(), like.dtype, value.device

    def tensor(self, is_read: bool = False) -> Tensor:
        """Return the number as a plain tensor.

        Args:
            is_read: whether no gradient of it is needed.
        """
        if torch.is_inference_mode_enabled():  # what is computed there never has a backward
            with torch.inference_mode(False):
                return self.tensor(is_read)
        value = self._value
        if value.tensor is None and (is_read or not value.needs_grad):
            observed = value.observed
            known = observe(value, self.may_be_differentiated) if observed is None else observed
            self.take_notice()
            if value.tensor is None:
                return known
        tensor = value.tensor
        if tensor is None:
            waiting, alone = value.waiting, None
            if waiting is not None and waiting.axis is not None and len(waiting.axis.root.holders) == 1:
                alone = waiting.alone  # nothing else waits, to share a pass with
            with torch.set_grad_enabled(True):
                tensor = None if alone is None else alone()
                tensor = value.tensor = evaluate_number(value) if tensor is None else tensor
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
        self._value, self.writes = value, self.writes + 1
        return tensor

    def backward(self, grad: Tensor) -> None:
        """Go on with the backward of a function that got the waiting number itself."""
        self.tensor().backward(grad, retain_graph=retains_graph())  # type: ignore[no-untyped-call]


class DetachedRef(AliasRef):
    """A reference to a number without its gradient, in the memory of the number."""

    __slots__ = ("number",)

    def __init__(self, number: NumberRef) -> None:
        super().__init__(number.value.description())
        self.number = number

    @property
    def needs_grad(self) -> bool:
        """False."""
        return False

    @property
    def value(self) -> LazyValue:
        """The current value, recorded where the number waits."""
        if self.number.pending() is None:
            return constant(self.number.tensor(is_read=True).detach())
        out: LazyValue = record(aten.detach.default, self.number.value)
        return out


class ChunkedNumber(LazyTensor):
    """A number of chunked rows that was not computed yet; to its user a tensor like any other."""

    viewed: Tensor
    """For a view of a number, that number: while a user holds the view, its gradient can be asked for."""

    def realize(self) -> Tensor:
        """Return the number as a plain tensor."""
        return _plain(self, is_read=False)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        observed = self._ref.value.observed if self._ref.value.tensor is None else None
        return repr(self.realize() if observed is None else observed)

    @classmethod
    def result_of(cls, value: LazyValue) -> Tensor:
        """Return a number that is made of others, which waits as they do."""
        return number_of(value) if may_wait(value.like, value.device) else evaluate_number(value)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        named = kwargs or {}
        if func in _DETACHED and args and (detached := _detached(args[0])) is not None:
            return detached
        is_waiting = func in _COMBINATIONS or (func in _UPDATES and _may_update(args[0]))
        if is_waiting and not is_transforming() and all(map(_is_term, (*args, *named.values()))):
            try:
                numbers: list[ChunkedNumber] = tree_find(ChunkedNumber, args)
                for x in numbers if torch.is_grad_enabled() else ():
                    if _number_ref(x).value.observed is not None:
                        x.realize()  # a write through an alias of what was observed is seen in that memory alone
                if any(_number_ref(x).pending() is not None for x in numbers):
                    out = record_call(cls, func, args, named)
                    if isinstance(out, ChunkedNumber) and out._ref.base is not None and out is not numbers[0]:
                        out.viewed = numbers[0]
                    return out
            except NeedsMaterialize:
                pass
        is_read = func in _READS or (func in _COMBINATIONS and not torch.is_grad_enabled())

        def plain(x: PyTree) -> PyTree:
            return _plain(x, is_read or (func is Tensor.cpu and _is_released(x))) if isinstance(x, ChunkedNumber) else x

        if func in _PARTS:
            of_backward = named.get("inputs") if func in BACKWARDS else args[0]
            inputs = args[1] if func is torch.autograd.grad else of_backward
            # Before the numbers that they are part of, whose backward passes them then.
            for x in () if inputs is None else tree_find(ChunkedNumber, inputs):
                _check_unobserved(x)
                plain(x)
        if any(isinstance(x, (list, tuple, dict)) for x in (*args, *named.values())):
            args, named = tree_map_only(ChunkedNumber, plain, (args, named))
        operands = [plain(x) for x in args]
        out = func(*operands, **{key: plain(x) for key, x in named.items()})
        first: PyTree = args[0] if args else None
        if isinstance(first, ChunkedNumber) and out is operands[0] and out.requires_grad and not first.requires_grad:
            return _replaced(first, out)  # by what was written to it, or asked of it
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        numbers: list[ChunkedNumber] = tree_find(ChunkedNumber, (args, kwargs))
        has_gradient = torch.is_grad_enabled() and any(x._ref.is_of_gradients for x in numbers)
        if is_recording() or func.is_view or has_gradient:
            return handle_torch_dispatch(cls, func, args, kwargs or {})
        args, named = tree_map_only(ChunkedNumber, lambda x: _plain(x, True), (args, kwargs or {}))
        return func(*args, **named)


def may_wait(like: Tensor, device: torch.device) -> bool:
    """Return whether a number may be computed later: no context has to see its ops, and writes to what it reads show.

    Args:
        like: a tensor that it is computed from, or its metadata.
        device: of the number.
    """
    if torch.is_inference_mode_enabled() or has_saved_tensor_hooks():
        return False
    if type(like) not in PLAIN_TYPES and is_traced(like):
        return False
    return device.type == "cpu" or (device.type == "cuda" and not torch.cuda.is_current_stream_capturing())


def waiting_number(dtype: torch.dtype, device: torch.device, grad: bool, waiting: Waiting) -> ChunkedNumber:
    """Return the tensor for the user of a number of which nothing is recorded yet."""
    value = LazyValue(_number_like(dtype), device, None, None, grad)
    value.waiting = waiting
    return number_of(value)


@functools.cache
def _number_like(dtype: torch.dtype) -> Tensor:
    return torch.empty((), dtype=dtype, device="meta")


def number_of(value: LazyValue) -> ChunkedNumber:
    """Return the tensor for the user of a number that waits."""
    ref = NumberRef(value)
    out: ChunkedNumber = number_tensor(ChunkedNumber, ref, ref.backward if value.needs_grad else None)  # type: ignore[assignment]
    ref.user = weakref.ref(out)
    if value.waiting is not None and value.waiting.axis is not None:
        value.waiting.axis.root.holders[weakref.ref(ref)] = None
    else:
        hold(ref, value)
    if not value.needs_grad:
        UNSETTLED[weakref.ref(ref)] = None
    return out


def result_of_rows(value: LazyValue) -> Tensor:
    """Return a value without the rows to the user: a number waits, anything else is computed.

    A number beside which nothing has a gradient, as in an evaluation, is computed as well: no backward would read what
    it waits for before that is written to.
    """
    if value.ndim or value.tensor is not None or not may_wait(value.like, value.device) or not has_gradients(value):
        return evaluate(value)
    value.waiting = value.waiting or Waiting()
    return number_of(value)


def _detached(x: PyTree) -> Tensor | None:
    """Return a number without its gradient, which waits as it does; None where it is known."""
    ref = x._ref if isinstance(x, ChunkedNumber) else None
    if not isinstance(ref, NumberRef) or ref.pending() is None or not _is_term(x):
        return None
    UNSETTLED[weakref.ref(ref)] = None  # it may be all that the user keeps
    return number_tensor(ChunkedNumber, DetachedRef(ref), None)


def _replaced(x: ChunkedNumber, tensor: Tensor) -> ChunkedNumber:
    """Make a number without a gradient stand for a plain tensor that requires grad, and return it."""
    x._ref = ref = NumberRef(constant(tensor))
    ref.user = weakref.ref(x)
    with torch._C.DisableTorchFunctionSubclass():
        x.requires_grad_()
        set_leaf_hooks(x, OrderedDict({0: ref.backward}))
    return x


def _number_ref(x: ChunkedNumber) -> NumberRef:
    ref = x._ref
    while not isinstance(ref, NumberRef):  # a view, or a number without its gradient
        base = ref.number if isinstance(ref, DetachedRef) else ref.base
        assert base is not None
        ref = base
    return ref


def _is_released(x: ChunkedNumber) -> bool:
    """Return whether a number has a value only, since the backward of one that it was part of has run."""
    value = _number_ref(x).value
    return value.tensor is None and value.node is None and value.observed is not None


def _check_unobserved(x: ChunkedNumber) -> None:
    """Raise RuleError for a number that the backward of another one will not pass: a view, or one computed with it."""
    if not isinstance(x._ref, NumberRef):
        raise RuleError("the gradient of a view of a number of chunked rows: take that of the number, or of realize()")
    if x._ref.value.observed is not None:
        raise RuleError(
            "the gradient of a number of chunked rows that was computed as part of another one: the other's backward "
            "takes one pass, without it; realize() it, register hooks, or call retain_grad() before the other is read"
        )


def _plain(x: ChunkedNumber, is_read: bool) -> Tensor:
    """Return the plain tensor in place of a number, connected to the function that returned the number itself."""
    tensor = _plain_of(x._ref, is_read)
    with torch._C.DisableTorchFunctionSubclass():
        function = x.grad_fn
    if function is None:
        return tensor
    out: Tensor = _Passed.apply(x, (tensor.detach().clone(),))  # type: ignore[no-untyped-call]
    return out


def _plain_of(ref: AliasRef, is_read: bool) -> Tensor:
    """Return the plain tensor of a reference to a number, to a view of one, or to one without its gradient."""
    if isinstance(ref, NumberRef):
        return ref.tensor(is_read)
    if isinstance(ref, DetachedRef):
        return ref.number.tensor(is_read=True).detach()
    assert ref.base is not None
    assert ref.view_call is not None
    op, args, kwargs, index = ref.view_call
    view: Tensor = tree_find(Tensor, op(_plain_of(ref.base, is_read), *args, **kwargs))[index]
    return view if ref.needs_grad else view.detach()


class _Passed(torch.autograd.Function):
    """The gradient of one number and the memory of another, in a tuple since it is no input of the function."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, number: Tensor, memory: tuple[Tensor]) -> Tensor:
        return memory[0].detach()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _may_update(x: object) -> bool:
    """Return whether a call that writes to its first operand may be recorded: one that nothing has read."""
    if not isinstance(x, ChunkedNumber) or isinstance(x._ref, DetachedRef) or not torch.is_grad_enabled():
        return False
    return x._ref.value.tensor is None and x._ref.value.observed is None


def _is_term(x: object) -> bool:
    """Return whether a number can be added to, or multiplied by, something without reading it."""
    if isinstance(x, ChunkedNumber):
        with torch._C.DisableTorchFunctionSubclass():
            return x.grad_fn is None
    if isinstance(x, (list, tuple)):
        return all(map(_is_term, x))
    if isinstance(x, Tensor):
        return type(x) in PLAIN_TYPES and x.ndim <= 1
    return x is None or isinstance(x, (int, float))


def _functions(names: str) -> set[object]:
    return {getattr(home, name) for home in (torch, Tensor) for name in names.split() if hasattr(home, name)}


_COMBINATIONS = _functions(
    """add sub mul div neg rsub subtract multiply divide true_divide negative __add__ __radd__ __sub__ __rsub__ __mul__
    __rmul__ __truediv__ __neg__ sum mean squeeze unsqueeze reshape view float double stack cat
    concat concatenate __getitem__"""
)
"""Functions whose results wait as their operands do."""

_UPDATES = _functions("add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__")
"""Functions that make such a number of their first operand."""

_GETTERS = "shape dtype device layout ndim requires_grad is_cuda is_cpu is_sparse is_quantized is_nested is_meta"
METADATA_QUERIES = _functions(
    "size dim stride numel is_floating_point is_complex element_size is_contiguous __len__ __hash__"
)
"""Functions that the tensor's own metadata answers, without its values."""

_METADATA = METADATA_QUERIES | {getattr(Tensor, name).__get__ for name in _GETTERS.split()}
"""The same, and getters."""

_READS = _functions(
    """item tolist isnan isfinite isinf __float__ __int__ __bool__ __index__ __format__ __lt__ __gt__
    __le__ __ge__ __eq__ __ne__ lt gt le ge eq ne"""
)
"""Functions that need no gradient of the number."""

_DETACHED = _functions("detach")
"""Functions that give a number without its gradient."""

_READS.add(Tensor.data.__get__)  # type: ignore[attr-defined]
_READS |= _DETACHED

_PARTS = BACKWARDS | _functions("register_hook retain_grad")
"""Functions that ask for the gradient of the numbers that they are given, or those of them that are inputs."""
