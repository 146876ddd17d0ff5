"""The results of a program: at the bucket's size, from which each call copies its part, or of a run at true sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from subtensors.bucketed.call_key import flatten_result_objects, is_part_of
from subtensors.bucketed.reachable_state import attributes_of
from subtensors.dispatch.graphs.guards import are_same
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.lazy_storage import realized
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded.padded_size import PaddedSize
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.size_conditions import HostSize
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factors, is_padded, size_of
from subtensors.dispatch.sizes.expressions import size_on_host
from subtensors.padded.autograd import unwrap_with_grad
from subtensors.padded.fallback import write_unpadded
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.padded.padding import unpad_value

if TYPE_CHECKING:
    import sympy

Cut = Callable[[], PyTree]
"""Returns one leaf of a call's result, in memory of its own."""


@dataclass(frozen=True)
class Output:
    """One leaf of a program's result.

    Args:
        value: a tensor of the bucket's size, a size of one, or any other value.
        dims: a padded tensor's dims.
        symbols, buckets, rows: of its true sizes, as in `TrueSizes`.
    """

    value: PyTree
    dims: tuple[Factors, ...] | None = None
    symbols: tuple[sympy.Symbol, ...] = ()
    buckets: tuple[int, ...] = ()
    rows: int | None = None

    def cut(self, host: Mapping[sympy.Symbol, HostSize]) -> Cut:
        """Return a function that copies a call's part of this leaf, cut to these true sizes.

        Args:
            host: every symbol's true size.
        """
        value = self.value
        if isinstance(value, PaddedSize):
            return lambda: value.at(host)
        if not isinstance(value, Tensor):
            return lambda: value
        if self.dims is None or not any(map(is_padded, self.dims)):
            return lambda: value.clone(memory_format=torch.preserve_format)
        known: Any = {symbol: host[symbol] for symbol in self.symbols}
        if self.rows is None and all(len(factors) == 1 for factors in self.dims):
            shape = [size_on_host(size_of(factors), known) for factors in self.dims]
            stride = value.stride()
            offset = value.storage_offset()
            contiguous = torch.contiguous_format
            return lambda: value.as_strided(shape, stride, offset).clone(memory_format=contiguous)
        sizes = self._sizes(known)
        full = PaddedValue(value, self.dims, sizes)
        return lambda: own_copy(unpad_value(full))

    def _sizes(self, known: Mapping[sympy.Symbol, HostSize]) -> TrueSizes:
        host = tuple(known[symbol] for symbol in self.symbols)
        if self.rows is not None:
            host = tuple((size,) * self.rows if isinstance(size, int) else size for size in host)
        return TrueSizes(self.symbols, self.buckets, torch.tensor(host, dtype=torch.int64), host)


class Outputs:
    """The result of a program, all leaves of it.

    Args:
        leaves: the leaves of the result.
        structure: its pytree structure.
        is_leaf: whether the result is itself a leaf.
    """

    def __init__(self, leaves: list[Output], structure: pytree.TreeSpec, is_leaf: bool) -> None:
        self.leaves, self.structure, self.is_leaf = leaves, structure, is_leaf

    def detached(self) -> Outputs:
        """Return the same outputs, detached from the autograd graph."""
        leaves = [replace(x, value=x.value.detach()) if isinstance(x.value, Tensor) else x for x in self.leaves]
        return Outputs(leaves, self.structure, self.is_leaf)

    def tensors(self) -> list[Tensor]:
        """Return the leaves that are tensors."""
        return [x.value for x in self.leaves if isinstance(x.value, Tensor)]

    def grad_indices(self) -> list[int]:
        """Return the indices of the leaves that require grad."""
        return [i for i, x in enumerate(self.leaves) if isinstance(x.value, Tensor) and x.value.requires_grad]

    def with_replaced(self, replacements: Mapping[Tensor, Tensor]) -> Outputs:
        """Return the same outputs with some tensors replaced by others."""
        leaves = [
            replace(x, value=replacements.get(x.value, x.value)) if isinstance(x.value, Tensor) else x
            for x in self.leaves
        ]
        return Outputs(leaves, self.structure, self.is_leaf)

    @staticmethod
    def of(result: PyTree, given: Sequence[PyTree] = ()) -> Outputs:
        """Build the outputs of a program from its result, any pytree; PaddedTensors in it are cut for each call.

        Args:
            result: the result; an object that holds tensors, such as a cache, is copied with its tensors.
            given: the program's arguments, which are returned as they are.
        """
        leaves, spec = pytree.tree_flatten(flatten_result_objects(result, {id(x) for x in given}))
        return Outputs([_output(leaf) for leaf in leaves], spec, len(leaves) == 1 and leaves[0] is result)

    def cuts(self, host: Mapping[sympy.Symbol, HostSize]) -> list[Cut]:
        """Return for each leaf a function that copies a call's part of it, cut to these true sizes."""
        return [leaf.cut(host) for leaf in self.leaves]

    def rebuild(self, leaves: list[PyTree]) -> PyTree:
        """Return the result with these leaves in place of its own."""
        return leaves[0] if self.is_leaf else pytree.tree_unflatten(leaves, self.structure)


def _output(leaf: PyTree) -> Output:
    leaf = realized(leaf)
    if not isinstance(leaf, PaddedTensor):
        return Output(leaf)
    leaf = leaf.realize()
    value = unwrap_with_grad(leaf)
    sizes = value.sizes
    if sizes is None:
        return Output(value.dense)
    return Output(value.dense, value.dims, sizes.symbols, sizes.buckets, sizes.rows)


@contextmanager
def replaced_leaves(tree: PyTree, replacement: Callable[[PyTree], PyTree]) -> Iterator[PyTree]:
    """A context in which the leaves of arguments are replaced; gives the arguments.

    Lists, dicts and dataclasses stay the caller's own, so that what a program writes to them stays written; where they
    still hold a replacement at the end, they get their leaf back.

    Args:
        tree: a pytree; dataclasses in it count as containers.
        replacement: returns what stands for a leaf, which may be the leaf itself.

    Example:
        >>> given = [1, 2]
        >>> with replaced_leaves((given,), lambda x: x * 10) as (inside,):
        ...     print(inside)
        ...     inside.append(3)
        [10, 20]
        >>> given
        [1, 2, 3]
    """
    replacing = _Replacing(replacement)
    try:
        yield replacing.replaced(tree)
    finally:
        for x, part, new in reversed(replacing.written):
            for name, now in _entries(x):
                if now is new:
                    _set_entry(x, name, part)


class _Replacing:
    """The leaves that are replaced; a recursive closure would be a cycle that holds them.

    Attributes:
        written: containers, with a part of each and what replaced it.
    """

    def __init__(self, replacement: Callable[[PyTree], PyTree]) -> None:
        self.replacement = replacement
        self.written: list[tuple[PyTree, object, object]] = []
        self._seen = set[int]()

    def replaced(self, x: PyTree) -> PyTree:
        """Return an argument with its leaves replaced, where it can't be written to, and write to it where it can."""
        if _is_writable(x):
            for name, part in _entries(x) if id(x) not in self._seen else ():
                self._seen.add(id(x))
                if (new := self.replaced(part)) is not part:
                    _set_entry(x, name, new)
                    self.written.append((x, part, new))
            return x
        parts, structure = pytree.tree_flatten(x, is_leaf=is_part_of(x))
        if structure.is_leaf():
            return self.replacement(x)
        new_parts = [*map(self.replaced, parts)]
        return x if are_same(new_parts, parts) else pytree.tree_unflatten(new_parts, structure)


def _is_writable(x: object) -> bool:
    return isinstance(x, (list, dict)) or (dataclasses.is_dataclass(x) and not isinstance(x, (type, Tensor)))


def _entries(x: PyTree) -> list[tuple[Any, object]]:
    return [*(x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else attributes_of(x).items())]


def _set_entry(x: PyTree, name: Any, value: object) -> None:
    if isinstance(x, (list, dict)):
        x[name] = value
    else:
        object.__setattr__(x, name, value)


def run_at_true_sizes(program: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Run a program on unpadded arguments, and return its result with PaddedTensors cut to their valid part.

    A ragged PaddedTensor stands for no one tensor, and is given as it is; so is one of true sizes that the host does
    not know, as in a capture.

    Example:
        >>> import subtensors as st
        >>> x = st.pad(torch.ones(3), {0: st.Dim("n", max=8, buckets=4)})
        >>> run_at_true_sizes(lambda x: x / x.shape[0], (x,), {})
        tensor([0.3333, 0.3333, 0.3333])
    """
    copies: list[tuple[PaddedTensor, Tensor, int]] = []
    padded: list[PyTree] = []

    def unpadded(x: PyTree) -> PyTree:
        if not isinstance(x, PaddedTensor):
            return x
        try:
            plain = x.unpad()
        except RuleError:
            plain = []
        if isinstance(plain, list):
            padded.append(x)
            return x
        if _memory(plain) != _memory(x._dense):  # of flattened dims, which are no view of the storage
            copies.append((x, plain, plain._version))
        return plain

    with replaced_leaves((args, kwargs), unpadded) as (own_args, own_kwargs):
        result = program(*own_args, **own_kwargs)
    for x, plain, version in copies:
        if plain._version != version:
            write_unpadded(x, plain)
    return plain_result(result, padded)


def plain_result(result: PyTree, padded: Sequence[PyTree]) -> PyTree:
    """Return a result with PaddedTensors cut to their valid part, and the true sizes in place of padded ones.

    Args:
        result: of a program.
        padded: the PaddedTensors among its arguments.
    """
    if not padded and not any(isinstance(x, (PaddedTensor, PaddedSize)) for x in pytree.tree_leaves(result)):
        return result
    leaves, structure = pytree.tree_flatten(flatten_result_objects(result, set(map(id, padded))))
    try:
        return pytree.tree_unflatten(cut_and_copy_aliases(leaves, []), structure)
    except RuleError:  # in a capture, or of a batch whose rows are part of a flattened dim
        return result


def cut_and_copy_aliases(results: Iterable[PyTree], aliased: Iterable[object]) -> list[PyTree]:
    """Return the leaves of a result: padded ones cut to their valid part, and copies of those that alias others.

    Args:
        results: leaves of any kind.
        aliased: the program's arguments and state.

    Example:
        >>> x = torch.ones(2)
        >>> [t is x for t in cut_and_copy_aliases([x, x[:1]], [])], [t is x for t in cut_and_copy_aliases([x], [x])]
        ([True, False], [False])
    """
    addresses = set(map(_memory, aliased)) - {None}
    return [_copy_if_aliased(x, addresses) for x in results]


def _copy_if_aliased(x: PyTree, addresses: Collection[int | None]) -> PyTree:
    if isinstance(x, PaddedSize):
        return x.at(dict(zip(x.sizes.symbols, x.sizes.host(), strict=True)))
    if not isinstance(x, PaddedTensor):
        return x.clone() if isinstance(x, Tensor) and _memory(x) in addresses else x
    return own_copy(x.unpad())


def own_copy(part: Tensor | list[Tensor]) -> PyTree:
    """Return an unpadded tensor, or the rows of a ragged one, in memory of its own."""
    return [row.clone() for row in part] if isinstance(part, list) else part.clone()


def _memory(x: object) -> int | None:
    """Return the address of a tensor's storage; None if it has none, or if `x` is no tensor."""
    try:
        return x.untyped_storage().data_ptr() if isinstance(x, Tensor) else None
    except (RuntimeError, NotImplementedError):  # a sparse tensor, or a subclass of several tensors
        return None
