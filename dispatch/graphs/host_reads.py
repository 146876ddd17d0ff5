"""Reads of values on the host, which no graph can capture: noticed on a CPU, where nothing would refuse them.

A capture computes nothing, so what a program asks of the device in it (`.item()`, the length of a boolean selection) is
not there: CUDA ends the capture. A CPU has every value at hand and goes on. `HostReads` watches a run for what would
have ended it: above autograd by the names of functions that copy to the host, and below it by op, also of the ops that
composite functions and rules consist of. Rules that take true sizes from the host ask `needs_host`.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode, resolve_name

from subtensors.dispatch.graphs.collectives import WatchedOps
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree

_COPIES_TO_HOST = frozenset([Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__repr__])
"""Functions that copy to the host without an op where the tensor is there already."""

_CHECKS_ON_CPU = frozenset([torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile])
"""Functions that read values to check them on a CPU, and nowhere else."""

_OWN_READS = ("subtensors.optim.", "subtensors.kernels.", "subtensors.dispatch.fused.")
"""Parts of this library that compute another way on a GPU."""

aten = torch.ops.aten


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[HostReads] = []


_active = _Active()


class HostReads(TorchFunctionMode):
    """A context that notes the first thing in it that waits for values on the host.

    Example:
        >>> with HostReads() as reads:
        ...     _ = torch.ones(2).sum().item()
        >>> reads.first
        'torch.Tensor.item'
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = ""
        """The name of the first function that did; "" if none did."""
        self.unpadded_reason = ""
        """The reason why this function ran on unpadded data; "" if it read values."""
        self.line = ""
        """`file:line` of the program from which it was called; "" if it was called by a library."""
        self.function: Callable[..., PyTree] | None = None
        """The torch function that the program is calling; None if it is in none."""
        self._contexts = ExitStack()

    def __enter__(self) -> HostReads:
        _active.stack.append(self)
        self._contexts.enter_context(_capturing_in_words())
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        self._contexts.push(super().__exit__)
        self._contexts.enter_context(_Ops(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._contexts.close()
        _active.stack.remove(self)

    def __torch_function__(
        self, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        if func in _COPIES_TO_HOST:
            self.note(resolve_name(func) or str(func))
        self.function, before = func, self.function
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.function = before

    def running(self) -> str:
        """Return the name of the torch function that the program is calling; "" if it is in none."""
        return resolve_name(self.function) or "" if self.function is not None else ""

    def reason(self) -> str:
        """Return the reason why no graph holds what was run, in words; "" if it read nothing."""
        line = f" ({self.line})" * bool(self.line)
        if self.unpadded_reason:
            # Without sizes, so that calls of all sizes share one reason.
            why = re.sub(r"\b(of|bucket) \d+\b", r"\1 n", self.unpadded_reason)
            return f"{self.first} runs on the unpadded data, whose size a graph doesn't know{line}: {why}"
        advice = "keep it on the device, as torch.where and clamp keep a decision"
        return f"{self.first} reads values on the host, which a graph can't wait for{line}; {advice}" * bool(self.first)

    def note(self, name: str, unpadded_reason: str = "") -> None:
        """Note a read of values, or of true sizes for a call on unpadded data; the first one counts."""
        frame: FrameType = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _OWN_FRAMES:
            frame = frame.f_back
        if self.first or str(frame.f_globals.get("__name__")).startswith(_OWN_READS):
            return
        self.first, self.line, self.unpadded_reason = name, program_line(frame), unpadded_reason


_TORCHS = "torch.utils._python_dispatch torch.overrides torch._tensor torch._ops"
_OWN_FRAMES = (__name__, WatchedOps.__module__, *_TORCHS.split())


def program_line(frame: FrameType | None) -> str:
    """Return `file:line` of the innermost frame that is neither torch's nor this library's; "" if a library called."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("subtensors.bucketed."):
            return ""
        if _is_programs(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def error_line(error: BaseException) -> str:
    """Return `file:line` of the program's innermost line that raised an error; "" if only libraries are known."""
    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_programs(frame)
    ]
    return lines[-1] if lines else ""


def _is_programs(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in ("torch", "subtensors")


def needs_host(values: Tensor, name: str, unpadded_reason: str = "") -> bool:
    """Return whether a read of values would end a capture that is under way; `HostReads` notes it.

    Args:
        values: the tensor whose values, or sizes, are to be read.
        name: of the reader, if no torch function is running.
        unpadded_reason: the reason why it runs on unpadded data, if that is what it needs the true sizes for.
    """
    if values.is_cuda:
        return torch.cuda.is_current_stream_capturing()
    for reads in _active.stack:
        reads.note(reads.running() or name, unpadded_reason)
    return False


@contextmanager
def unwatched() -> Iterator[None]:
    """A context in which `needs_host` notes nothing: what is read in it, a graph need not read."""
    before, _active.stack = _active.stack, []
    try:
        yield
    finally:
        _active.stack = before


_patches = 0
_patching = threading.Lock()
_is_capturing = torch.cuda.is_current_stream_capturing


def _is_watched_or_capturing() -> bool:
    return bool(_active.stack) or _is_capturing()


@contextmanager
def _capturing_in_words() -> Iterator[None]:
    """A context in which torch tells this thread that a graph is being captured: models read less if there is one."""
    global _patches
    with _patching:
        _patches += 1
        torch.cuda.is_current_stream_capturing = _is_watched_or_capturing
    try:
        yield
    finally:
        with _patching:
            _patches -= 1
            if not _patches:
                torch.cuda.is_current_stream_capturing = _is_capturing


class _Ops(WatchedOps):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def note(self, op: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> None:
        is_checked = self._reads.function in _CHECKS_ON_CPU
        if isinstance(op, OpOverload) and not is_checked and _reads_values(op, args, kwargs):
            self._reads.note(self._reads.running() or str(op))


def _reads_values(op: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    """Return whether a GPU waits for values in this call of an op."""
    if any(isinstance(x, Tensor) and x.is_meta for x in args):
        return False
    if op.overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        # One number for all positions of a mask is filled in without counting them.
        return bool(masks) and (op.overloadpacket is aten.index or args[2].numel() != 1)
    if op.overloadpacket is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    if op.overloadpacket is aten.one_hot:
        return bool((args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1)
    tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    return op is aten.equal.default or any(tag in op.tags for tag in tags)
