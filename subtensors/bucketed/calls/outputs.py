"""The results of a program at the bucket's size, from which each call cuts its true sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from subtensors.bucketed.calls.flatten_objects import opened_results
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.true_sizes import HostSize, TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factors, is_padded, size_of
from subtensors.dispatch.sizes.expressions import size_on_host
from subtensors.padded.autograd import unwrap_with_grad
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.padded.padding import unpad_value

if TYPE_CHECKING:
    import sympy

Cut = Callable[[], Any]
"""Returns one leaf of a call's result, in memory of its own."""


@dataclass(frozen=True)
class Output:
    """One leaf of a program's result.

    Args:
        value: a tensor of the bucket's size, or any other value.
        dims: a padded tensor's dims.
        symbols, buckets, rows: those of its true sizes.
    """

    value: Any
    dims: tuple[Factors, ...] | None = None
    symbols: tuple[sympy.Symbol, ...] = ()
    buckets: tuple[int, ...] = ()
    rows: int | None = None

    def cut(self, host: dict[sympy.Symbol, HostSize]) -> Cut:
        """Return a function that copies a call's part of this leaf, cut to these true sizes.

        Args:
            host: every symbol's true size.
        """
        value = self.value
        if not isinstance(value, Tensor):
            return lambda: value
        if self.dims is None or not any(map(is_padded, self.dims)):
            return lambda: value.clone(memory_format=torch.preserve_format)
        known = {symbol: host[symbol] for symbol in self.symbols}
        if self.rows is None and all(len(factors) == 1 for factors in self.dims):
            numbers: Any = known
            shape = [size_on_host(size_of(factors), numbers) for factors in self.dims]
            stride = value.stride()
            offset = value.storage_offset()
            contiguous = torch.contiguous_format
            return lambda: value.as_strided(shape, stride, offset).clone(memory_format=contiguous)
        sizes = self._sizes(known)
        whole = PaddedValue(value, self.dims, sizes)

        def general() -> Any:
            part = unpad_value(whole)
            return [row.clone() for row in part] if isinstance(part, list) else part.clone()

        return general

    def _sizes(self, known: dict[sympy.Symbol, HostSize]) -> TrueSizes:
        host = tuple(known[symbol] for symbol in self.symbols)
        if self.rows is not None:
            host = tuple((size,) * self.rows if isinstance(size, int) else size for size in host)
        return TrueSizes(self.symbols, self.buckets, torch.tensor(host, dtype=torch.int64), host)


class Outputs:
    """The whole result of a program.

    Args:
        leaves: the leaves of the result.
        spec: its structure.
        is_leaf: whether the result is itself a leaf.
    """

    def __init__(self, leaves: list[Output], spec: Any, is_leaf: bool) -> None:
        self.leaves, self.spec, self.is_leaf = leaves, spec, is_leaf

    def detached(self) -> Outputs:
        """Return the same outputs, detached from the autograd graph."""
        leaves = [replace(x, value=x.value.detach()) if isinstance(x.value, Tensor) else x for x in self.leaves]
        return Outputs(leaves, self.spec, self.is_leaf)

    def tensors(self) -> list[Tensor]:
        """Return the leaves that are tensors."""
        return [x.value for x in self.leaves if isinstance(x.value, Tensor)]

    def roots(self) -> list[int]:
        """Return the indices of the leaves that require grad."""
        return [i for i, x in enumerate(self.leaves) if isinstance(x.value, Tensor) and x.value.requires_grad]

    def elsewhere(self, places: Mapping[Tensor, Tensor]) -> Outputs:
        """Return the same outputs with some tensors replaced by others."""
        leaves = [
            replace(x, value=places.get(x.value, x.value)) if isinstance(x.value, Tensor) else x for x in self.leaves
        ]
        return Outputs(leaves, self.spec, self.is_leaf)

    @staticmethod
    def of(result: Any, given: Sequence[Any] = ()) -> Outputs:
        """Build the outputs of a program from its result, any pytree; PaddedTensors in it are cut for each call.

        Args:
            result: the result; an object that holds tensors, such as a cache, is copied with its tensors.
            given: the program's arguments, which are returned as they are.
        """
        leaves, spec = pytree.tree_flatten(opened_results(result, {id(x) for x in given}))
        return Outputs([_output(leaf) for leaf in leaves], spec, len(leaves) == 1 and leaves[0] is result)

    def cuts(self, host: dict[sympy.Symbol, HostSize]) -> list[Cut]:
        """Return for each leaf a function that copies a call's part of it, cut to these true sizes."""
        return [leaf.cut(host) for leaf in self.leaves]

    def assembled(self, leaves: list[Any]) -> Any:
        """Return the result with these leaves."""
        return leaves[0] if self.is_leaf else pytree.tree_unflatten(leaves, self.spec)


def _output(leaf: Any) -> Output:
    if not isinstance(leaf, PaddedTensor):
        return Output(leaf)
    value = unwrap_with_grad(leaf)
    sizes = value.sizes
    if sizes is None:
        return Output(value.dense)
    return Output(value.dense, value.dims, sizes.symbols, sizes.buckets, sizes.rows)
