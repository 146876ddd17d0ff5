"""Parameters and gradients of an optimizer packed into flat tensors, so that a fast check covers all their addresses.

All parameters of a device and dtype are views of one flat tensor, and so are their gradients, to which backward passes
add. Reading the addresses of a thousand tensors takes longer than their update, so the fast check looks at the flat
tensors instead:

    the first and the last parameter start where they did, and the first and the last gradient are the same tensors
    as many tensors share the flat memory as did before: none has left it

That check misses a tensor in the middle that was replaced while something still holds the old one, since as many share
the memory as before. So up to `CHECK_EACH_LIMIT` parameters and their gradients are also checked one by one; where
there are more, each of them is watched, and marks when it is given other memory or another gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn import Parameter

from subtensors.dispatch.graphs.guards import AddressLayoutGuard
from subtensors.dispatch.ops.errors import AddressError
from subtensors.dispatch.torch_internals import memory
from subtensors.lists.packing import pack
from subtensors.optim.versioned_state import Changes
from subtensors.optim.watched_tensors import unwatch, watch
from subtensors.static.static_tensor import static_in_place

CHECK_EACH_LIMIT = 16
"""The largest number of parameters at which each fast check also checks every one of them and its gradient."""


class PackedMemory:
    """The packed parameters of an optimizer, with gradients beside them.

    Args:
        params: leaf tensors, each once; their values stay, their memory moves.

    Raises:
        ValueError: two parameters share part of their memory, or one is no strided torch tensor.

    Example:
        >>> p = [Parameter(torch.ones(2)), Parameter(torch.zeros(3))]
        >>> packed = PackedMemory(p)
        >>> (p[0].sum() + p[1].sum()).backward()
        >>> p[1].grad, packed.is_intact()
        (tensor([1., 1., 1.]), True)
        >>> p[1].grad = None
        >>> packed.is_intact()
        False
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = list(params)
        unwatch(self.params)
        places: Any = list(range(len(self.params)))
        flats, self._layout = pack(self.params, optree.tree_structure(places))
        self._flats = list(map(static_in_place, flats))
        views = self._layout.view(self._flats)
        self.alone = [p for p, view in zip(self.params, views, strict=True) if not _join(p, view)]
        """Parameters with version counters of their own; the others share those of the flat tensors."""
        del views
        self._gradient_flats = [static_in_place(torch.zeros_like(flat)) for flat in flats]
        self._ends = [
            self.params[member]
            for flat in range(len(self._flats))
            if (members := [i for i, group in enumerate(self._layout.groups) if group == flat])
            for member in (members[0], members[-1])
        ]
        self._sharers = memory.Sharers(self._flats)
        self._gradient_sharers = memory.Sharers(self._gradient_flats)
        self.addresses = _addresses(self.params)
        self._places = _addresses(self._ends)
        for t in self.params:
            torch._dynamo.mark_static_address(t, guard=False)
        self._changes = Changes()
        self._are_few = len(self.params) <= CHECK_EACH_LIMIT
        if not self._are_few:
            watch(self.params, self._changes)
        self.attach()
        self.take_note()

    def attach(self) -> None:
        """Make each gradient a view of the flat one, with the value it has; zero for a parameter that has none."""
        self.gradient_addresses = self._attach()
        self._gradient_guard = AddressLayoutGuard(list(map(_gradient, self.params)) if self._are_few else [])
        self._gradient_ends = list(map(_gradient, self._ends))

    @torch.no_grad()
    def _attach(self) -> list[int]:
        places = self._layout.view(self._gradient_flats)
        for p, place in zip(self.params, places, strict=True):
            if p.grad is None:
                p.grad = place.zero_()
            elif p.grad.data_ptr() != place.data_ptr() or p.grad.stride() != place.stride():
                p.grad = place.copy_(p.grad)
        return [g.data_ptr() for g in places]

    def take_note(self) -> None:
        """Record the current sharers of the flat memory as the expected ones, after a full check found no change."""
        self.unwatch_gradients()
        if not self._are_few:
            watch(map(_gradient, self.params), self._changes)
        self._guard = AddressLayoutGuard(self.params if self._are_few else [])
        self._mark = self._changes.mark
        self._counts = self._sharers.counts()
        self._gradient_counts = self._gradient_sharers.counts()

    def unwatch_gradients(self) -> None:
        """Give the gradients their plain class back: one that replaces them is plain, and a step tells types apart."""
        unwatch(map(_gradient, self.params))

    def is_intact(self) -> bool:
        """Return whether a fast check finds all parameters and gradients in their packed places."""
        return (
            self._sharers.counts() == self._counts
            and _addresses(self._ends) == self._places
            and self._has_gradients_at_a_glance()
            and (not self._are_few or self._guard.matches(self.params))
        )

    def _has_gradients_at_a_glance(self) -> bool:
        return (
            self._changes.mark is self._mark
            and self._gradient_sharers.counts() == self._gradient_counts
            and all(map(is_, map(_gradient, self._ends), self._gradient_ends))
            and (not self._are_few or self._has_each_gradient())
        )

    def _has_each_gradient(self) -> bool:
        gradients = list(map(_gradient, self.params))
        return not any(g is None for g in gradients) and self._gradient_guard.matches(gradients)

    def check(self) -> None:
        """Check the address of every parameter.

        Raises:
            AddressError: one is not where it was packed.
        """
        for i, (p, address) in enumerate(zip(self.params, self.addresses, strict=True)):
            if p.data_ptr() != address:
                raise AddressError(
                    f"packed parameter {i}, of shape {tuple(p.shape)}, is not where it was packed: write into it with "
                    "copy_() rather than assigning to .data, or call opt.capture(packed=True) to pack it again"
                )

    def describe(self) -> str:
        """Describe the packing in one line."""
        return f"{len(self.params)} parameters and their gradients are packed into {len(self._flats)} flat tensors each"

    def zero_gradients(self) -> None:
        """Set all gradients to zero, where they are or where they belong."""
        if not self._has_gradients_at_a_glance():
            self.attach()
        with torch.no_grad():
            for flat in self._gradient_flats:
                flat.zero_()

    def others(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The given parameters that are not packed."""
        given = list(params)
        if len(given) == len(self.params) and all(map(is_, given, self.params)):
            return []
        own = set(map(id, self.params))
        return [p for p in given if id(p) not in own]

    def tell_autograd(self) -> None:
        """Count a write to all parameters."""
        torch.autograd.graph.increment_version([*self._flats, *self.alone])


_gradient = attrgetter("grad")


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _join(p: Tensor, place: Tensor) -> bool:
    """Give the parameter the memory of this view, and its version counter; False where it can't be given the counter.

    A counter comes with a tensor, so the parameter's is swapped for one that was made of the view. What others hold of
    the parameter (DDP, compiled code, graphs of autograd) would not follow it.
    """
    p.data = place
    is_observed = p._backward_hooks or p._post_accumulate_grad_hooks
    if type(p) is not Parameter or is_observed or memory.use_count(p) != 1:
        return False
    joined = Parameter(place, p.requires_grad)
    joined.grad = p.grad
    vars(joined).update(vars(p))
    try:
        torch.utils.swap_tensors(p, joined)
    except RuntimeError:  # there are weak references to it
        return False
    return True
