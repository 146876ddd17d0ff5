"""Tensors that a captured program makes on the host and copies to the device: `torch.arange(n).to(x.device)`.

A graph can't copy from memory that may be gone or paged out at a replay, so torch refuses to capture such a copy. But
what a program makes on the host without a tensor from elsewhere is the same in each call of its graph, as a number
would be. So the graph keeps a copy in pinned memory, and every replay reads that. The same holds for the lists of
`torch.tensor([0.5, 1], device="cuda")` and `x[:, [-1, 0]]`, which torch makes tensors of on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find

_FROM_DATA = frozenset([torch.tensor, torch.as_tensor, Tensor.new_tensor])
_SHARING_MEMORY = frozenset([torch.from_numpy, torch.frombuffer, torch.asarray, torch.as_tensor])
"""Functions whose results others may write to."""


class HostConstants:
    """The tensors that a program makes on the host while it is captured.

    Attributes:
        pinned: copies, which must live as long as the graph.
    """

    def __init__(self) -> None:
        self.pinned: list[Tensor] = []
        self._made: dict[int, Tensor] = {}
        """By the address of its memory, which all views of it have, one that keeps it."""

    def run(self, func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
        """Run one call of the program, with copies from pinned memory where it copies from the host."""
        if func in (Tensor.to, Tensor.cuda) and self._is_made(args[0]):
            x = args[0]
            like = func(torch.empty(0, dtype=x.dtype, device="cpu"), *args[1:], **kwargs)
            if like.device.type != "cpu":
                return self._copied(x.to(like.dtype), like.device)
        elif func in _FROM_DATA and kwargs.keys() <= {"dtype", "device"} and not tree_find(Tensor, args[-1:]):
            device = kwargs.get("device") or (args[0].device if func is Tensor.new_tensor else torch.empty(0).device)
            return self._copied(func(*args, **{**kwargs, "device": "cpu"}), torch.device(device))
        elif func in (Tensor.__getitem__, Tensor.__setitem__):
            args = args[0], *self._operands(*args)
        out = func(*args, **kwargs)
        self._note(func, tree_find(Tensor, (args, kwargs)), out)
        return out

    def _operands(self, x: Tensor, index: PyTree, *value: PyTree) -> Iterator[PyTree]:
        """Yield an index, and the value that is written there, both on the device."""
        parts = [self._positions(part, x.device) for part in (index if isinstance(index, tuple) else [index])]
        yield tuple(parts) if isinstance(index, tuple) else parts[0]
        picked = [part for part in parts if isinstance(part, Tensor)]
        # Torch writes a number to the places of a mask, or of slices, without a copy.
        is_copied = picked and not any(part.dtype in (torch.bool, torch.uint8) for part in picked)
        yield from [
            torch.full((), n, dtype=x.dtype, device=x.device)
            if is_copied and type(n) in (bool, int, float, complex)  # a padded size is written as the true one
            else n
            for n in value
        ]

    def _positions(self, part: PyTree, device: torch.device) -> PyTree:
        """Return a part of an index, with a list of positions or a tensor that is made on the host on the device."""
        if isinstance(part, (list, tuple, range)) and part and all(type(n) is int for n in part):
            part = torch.tensor(part, device="cpu")
        elif not self._is_made(part):
            return part
        return self._copied(part, device)

    def _copied(self, x: Tensor, device: torch.device) -> Tensor:
        if device.type == "cpu":
            x = x.clone()  # which shares no memory with an array
            self._made[_address(x)] = x
            return x
        self.pinned.append(x.pin_memory())
        return self.pinned[-1].to(device, non_blocking=True)

    def _note(self, func: Callable[..., PyTree], given: list[Tensor], out: PyTree) -> None:
        """Note a tensor that is made on the host; one that takes part in a call with others may hold theirs, too."""
        if all(map(self._is_made, given)):
            if _is_on_host(out) and func not in _SHARING_MEMORY:
                self._made[_address(out)] = out
        else:
            for x in filter(_is_on_host, given):
                self._made.pop(_address(x), None)

    def _is_made(self, x: PyTree) -> bool:
        return _is_on_host(x) and _address(x) in self._made


def _is_on_host(x: PyTree) -> bool:
    return type(x) is Tensor and x.device.type == "cpu" and x.layout is torch.strided


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
