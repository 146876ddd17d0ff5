"""The writes of single-tensor math, seen from inside: while it is traced, or where it runs on tensors one by one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from subtensors.dispatch.fused.op_tracer import OpTracer
from subtensors.dispatch.fused.proxies import ProxyTensor
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.kernels.fused.program import Ref


class WriteWatch:
    """The tensors that some math may write, and which of them it has written since.

    Example:
        >>> import torch
        >>> x, y = torch.ones(2), torch.ones(2)
        >>> watch = WriteWatch([x, y])
        >>> _ = x.add_(1)
        >>> [watch.has_written(0), watch.has_written(1)]
        [True, False]
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self._before = list(map(_version, self.tensors))

    def has_written(self, index: int) -> bool:
        """Return whether a tensor was written; True where no one can tell."""
        now = _version(self.tensors[index])
        return now is None or now != self._before[index]

    def drops(self, index: int) -> bool:
        """Return whether a value that was computed from a tensor, while it is traced, is in none of the tensors."""
        source = self.tensors[index]
        first = self._before[index]
        if not isinstance(source, ProxyTensor) or not isinstance(source.tracer, OpTracer) or first is None:
            return False
        tracer = source.tracer
        offset = len(tracer.parameters)
        reads = [{a.index for a in step.args if isinstance(a, Ref)} for step in tracer.instructions]
        derived = {first}
        for number, operands in enumerate(reads, offset):
            if operands & derived:
                derived.add(number)
        stored = {t.slot.value for t in self.tensors if isinstance(t, ProxyTensor)}
        for number, operands in reversed([*enumerate(reads, offset)]):
            if number in stored:
                stored |= operands
        return bool(derived - stored - {first})


def _version(t: Tensor) -> int | None:
    """A number that is another one after a write; None where nobody counts writes."""
    if isinstance(t, ProxyTensor):
        return t.slot.value
    return t._version if type(t) in PLAIN_TYPES and not t.is_inference() else None
