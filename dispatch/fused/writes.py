"""The writes of single-tensor math, seen from inside: while it is traced, or where it runs on tensors one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from subtensors.dispatch.fused.op_tracer import OpTracer
from subtensors.dispatch.fused.proxies import ProxyTensor
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.kernels.fused.program import Ref


class WriteWatch:
    """The tensors that some math may write, by name, and which of them it has written since.

    Example:
        >>> import torch
        >>> x, y = torch.ones(2), torch.ones(2)
        >>> watch = WriteWatch({"x": [x], "y": [y]})
        >>> _ = x.add_(1)
        >>> watch.unwritten()
        ['y']
    """

    def __init__(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        self.tensors = tensors
        self._before = {name: list(map(_version, own)) for name, own in tensors.items()}

    def unwritten(self) -> list[str]:
        """The names of which no tensor was written, as far as writes are counted."""
        now = {name: list(map(_version, own)) for name, own in self.tensors.items()}
        return [name for name, versions in now.items() if None not in versions and versions == self._before[name]]

    def drops(self, name: str) -> bool:
        """Return whether a value computed from the first tensor of a name, while it is traced, is in no tensor."""
        source, first = self.tensors[name][0], self._before[name][0]
        if not isinstance(source, ProxyTensor) or not isinstance(source.tracer, OpTracer) or first is None:
            return False
        tracer = source.tracer
        offset = len(tracer.parameters)
        reads = [{a.index for a in step.args if isinstance(a, Ref)} for step in tracer.instructions]
        derived = {first}
        for number, operands in enumerate(reads, offset):
            if operands & derived:
                derived.add(number)
        stored = {t.slot.value for own in self.tensors.values() for t in own if isinstance(t, ProxyTensor)}
        for number, operands in reversed([*enumerate(reads, offset)]):
            if number in stored:
                stored |= operands
        return bool(derived - stored - {first})


def _version(t: Tensor) -> int | None:
    """A number that is another one after a write; None where nobody counts writes."""
    if isinstance(t, ProxyTensor):
        return t.slot.value
    return t._version if type(t) in PLAIN_TYPES and not t.is_inference() else None
