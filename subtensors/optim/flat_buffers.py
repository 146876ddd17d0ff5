"""Parameters and gradients of an optimizer packed into flat tensors, so that a fast check covers all their addresses.

All parameters of a device and dtype are views of one flat tensor, and so are their gradients, to which backward passes
add. Reading the addresses of a thousand tensors takes longer than their update, so the fast check looks at the flat
tensors instead:

    the first and the last parameter start where they did, and the first and the last gradient are the same tensors
    as many tensors share the flat memory as did before: none has left it

That check misses a tensor in the middle that was replaced while something still holds the old one, since as many share
the memory as before. So up to `CHECK_EACH_LIMIT` parameters and their gradients are also checked one by one; where
there are more, each of them is watched (`versions`), and stamps when it is given other memory or another gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_

import optree
import torch
from torch import Tensor
from torch.nn import Parameter

from subtensors.counts import counted
from subtensors.dispatch.graphs.guards import AddressSnapshot, are_same
from subtensors.dispatch.ops.errors import AddressError
from subtensors.dispatch.torch_internals import memory
from subtensors.lists.packing import pack
from subtensors.optim.versions import Version, unwatch, watch
from subtensors.static.static_tensor import static_in_place

CHECK_EACH_LIMIT = 16
"""The largest number of parameters at which each fast check also checks every one of them and its gradient."""


class FlatBuffers:
    """The packed parameters of an optimizer, with gradients beside them.

    Args:
        params: distinct leaf tensors; their memory moves, with its values.

    Raises:
        ValueError: two parameters share memory, or one is no strided torch tensor.

    Example:
        >>> p = [Parameter(torch.ones(2)), Parameter(torch.zeros(3))]
        >>> packed = FlatBuffers(p)
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
        places = [p.data_ptr() for p in self.params if p.layout is torch.strided and p.data_ptr()]
        if len({*places}) < len(places):
            raise ValueError(
                "two parameters have the same memory, and would be given the same gradient: make them one Parameter of "
                "two modules, or leave out packed=True"
            )
        treespec = optree.tree_structure(list(range(len(self.params))))  # type: ignore[arg-type]
        packed = pack(self.params, treespec)
        self._layout, self._flats = packed.layout, list(map(static_in_place, packed.flats))
        views = self._layout.view(self._flats)
        self.separate = [p for p, view in zip(self.params, views, strict=True) if not _share_version(p, view)]
        """Parameters with version counters of their own; the others share those of the flat tensors."""
        del views
        self._gradient_flats = [static_in_place(torch.zeros_like(flat)) for flat in packed.flats]
        self._are_few = len(self.params) <= CHECK_EACH_LIMIT
        members = [[i for i, own in enumerate(self._layout.groups) if own == flat] for flat in range(len(self._flats))]
        ends = [self.params[i] for own in members for i in (own[0], own[-1])]
        self._checked = self.params if self._are_few else ends
        """The parameters that a fast check looks at one by one: all of few, else the ends of each flat tensor."""
        self._sharers = memory.StorageUseCounts([*self._flats, *self._gradient_flats])
        self.addresses = list(map(Tensor.data_ptr, self.params))
        for t in self.params:
            torch._dynamo.mark_static_address(t, guard=False)
        self._version = Version()
        if not self._are_few:
            watch(self.params, self._version)
        self.attach()
        self.remember()

    @torch.no_grad()
    def attach(self) -> None:
        """Make each gradient a view of the flat one, with the value it has; zero for a parameter that has none."""
        views = self._layout.view(self._gradient_flats)
        for p, view in zip(self.params, views, strict=True):
            if p.grad is None:
                p.grad = view.zero_()
            elif p.grad.data_ptr() != view.data_ptr() or p.grad.stride() != view.stride():
                p.grad = view.copy_(p.grad)
        self.gradient_addresses = [view.data_ptr() for view in views]

    def remember(self) -> None:
        """Record what a fast check compares as it is now, after a full check found no change."""
        self.unwatch_gradients()
        if not self._are_few:
            watch(map(_gradient, self.params), self._version)
        self._gradients = list(map(_gradient, self._checked))
        self._guard = AddressSnapshot(self._checked, with_layout=self._are_few)
        self._gradient_guard = AddressSnapshot(self._gradients)
        self._stamp = self._version.stamp
        self._counts = self._sharers.counts()

    def unwatch_gradients(self) -> None:
        """Give the gradients their plain class back: one that replaces them is plain, and a step tells types apart."""
        unwatch(map(_gradient, self.params))

    def is_intact(self) -> bool:
        """Return whether a fast check finds all parameters and gradients in their packed places."""
        return self._has_packed_gradients() and self._guard.matches(self._checked)

    def _has_packed_gradients(self) -> bool:
        return (
            self._version.stamp is self._stamp
            and self._sharers.counts() == self._counts
            and all(map(is_, map(_gradient, self._checked), self._gradients))
            and (not self._are_few or self._gradient_guard.matches(self._gradients))
        )

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
        params, flats = counted(len(self.params), "parameter"), counted(len(self._flats), "flat tensor")
        return f"packed: {params} in {flats}, the gradients in as many"

    def zero_gradients(self) -> None:
        """Set all gradients to zero, and put those that were replaced back into the flat tensors."""
        if not self._has_packed_gradients():
            self.attach()
        with torch.no_grad():
            for flat in self._gradient_flats:
                flat.zero_()

    def not_packed(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The given parameters that are not packed."""
        given = list(params)
        if are_same(given, self.params):
            return []
        own = set(map(id, self.params))
        return [p for p in given if id(p) not in own]

    def increment_versions(self) -> None:
        """Count a write to all parameters, for autograd."""
        torch.autograd.graph.increment_version([*self._flats, *self.separate])


_gradient = attrgetter("grad")


def _share_version(p: Tensor, view: Tensor) -> bool:
    """Give the parameter the memory of this view, and its version counter; False if it can't be given the counter.

    A counter belongs to a tensor, so the parameter is swapped with one that was made of the view. References that DDP,
    compiled code or autograd graphs hold to the parameter would not be swapped.
    """
    p.data = view
    is_observed = p._backward_hooks or p._post_accumulate_grad_hooks
    if type(p) is not Parameter or is_observed or memory.use_count(p) != 1:
        return False
    swapped = Parameter(view, p.requires_grad)
    swapped.grad = p.grad
    vars(swapped).update(vars(p))
    try:
        torch.utils.swap_tensors(p, swapped)
    except RuntimeError:  # there are weak references to it
        return False
    return True
