"""`st.fused`: single-tensor maths that runs as one kernel over whole lists."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import optree
import torch
from torch import Tensor

from subtensors.dispatch.fusion import Elements, Fusion
from subtensors.tensor_list import TensorList
from subtensors.tree_structure import first_difference

P = ParamSpec("P")
R = TypeVar("R")


class Fused(Generic[P, R]):
    """A function of single-tensor maths that takes TensorLists; made by `st.fused`.

    Args:
        function: straight-line maths on tensors and numbers.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        self.fusion = Fusion(function)
        functools.update_wrapper(self, function)
        _registry.append(self)
        self.key = len(_registry) - 1

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Do the maths to every element of the lists among the arguments."""
        if torch.compiler.is_compiling():
            return _compiling(self, args, kwargs)  # type: ignore[no-any-return]
        args, kwargs, lists = _open_lists(self.__name__, args, kwargs)  # type: ignore[assignment, attr-defined]
        result = self.fusion(*args, **kwargs)
        return optree.tree_map(lambda leaf: _close_list(leaf, lists), result, none_is_leaf=True)  # type: ignore[arg-type, return-value]

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """What a call with these arguments runs: groups of elements, kernels, and why anything is slower."""
        args, kwargs, _ = _open_lists(self.__name__, args, kwargs)  # type: ignore[assignment, attr-defined]
        return self.fusion.explain(*args, **kwargs)

    @property
    def traces(self) -> int:
        """How often the function was traced."""
        return self.fusion.traces


_registry: list[Fused[Any, Any]] = []


def fused(function: Callable[P, R]) -> Fused[P, R]:
    """Make a function of single-tensor maths run as one kernel over lists of tensors.

    The function is written for one tensor: any pointwise torch op, in-place updates, comparisons, casts,
    whole-tensor reductions (`norm`, `sum`, `max`, ...), 0-d tensors and Python numbers. Called with
    TensorLists it is traced once and lowered to one Triton kernel per sweep between reductions, however
    many tensors there are; on a CPU the traced program runs through torch. Floats and ints stay live: a new
    value neither traces nor compiles nor waits for the device. bools, None and strings are part of the
    signature, so an `if` on them is fine.

    Args:
        function: straight-line maths on tensors and numbers; returns None, a tensor or a nest of tensors.

    Returns:
        A callable of the same arguments, each tensor one where a TensorList may stand. With plain tensors
        only, it is the same maths. Results are TensorLists, or plain tensors when no argument was a list.

    Raises:
        RuleError: at the first call, when the maths needs a value or a shape on the host, or holds an op
            that is not element by element; names the source line.
        ValueError: the lists' structures differ; names the first path that does.

    Example:
        >>> import torch, subtensors as st
        >>> @st.fused
        ... def sgd(p, g, *, lr):
        ...     p.sub_(lr * g)
        >>> p = st.TensorList({"w": torch.ones(2, 2), "b": torch.zeros(3)})
        >>> sgd(p, st.TensorList({"w": torch.ones(2, 2), "b": torch.ones(3)}), lr=0.5)
        >>> p["b"]
        tensor([-0.5000, -0.5000, -0.5000])
    """
    return Fused(function)


def _open_lists(
    name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[TensorList]]:
    """The arguments with `Elements` for lists, and the lists."""
    lists: list[TensorList] = []

    def opened(leaf: Any) -> Any:
        if not isinstance(leaf, TensorList):
            return leaf
        if lists and (difference := first_difference(lists[0].treespec, leaf.treespec)):
            raise ValueError(f"{name}: TensorLists of different structure, at {difference}")
        lists.append(leaf)
        return Elements(leaf.tensors)

    args, kwargs = optree.tree_map(opened, (tuple(args), kwargs), none_is_leaf=True)  # type: ignore[arg-type, assignment]
    return args, kwargs, lists  # type: ignore[return-value]


def _close_list(leaf: Any, lists: list[TensorList]) -> Any:
    """A list for `Elements`: the argument itself when they are its own."""
    if not isinstance(leaf, Elements):
        return leaf
    for known in lists:
        if all(a is b for a, b in zip(leaf, known.tensors, strict=True)):
            return known
    return lists[0].like(leaf)


# --- under torch.compile ---------------------------------------------------------------------------------


def _compiling(fused: Fused[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call as the compiler should see it.

    Packed lists are one tensor a group, so the maths is handed over as it stands. Unpacked ones go to one
    opaque op that says what it writes, unless the maths returns new tensors or takes nested arguments.
    """
    leaves = [*args, *kwargs.values()]
    lists = [leaf for leaf in leaves if isinstance(leaf, TensorList)]
    simple = all(isinstance(leaf, (Tensor, int, float, str, type(None))) for leaf in leaves)
    if not simple or all(x.arena is not None for x in lists):
        return fused.function(*args, **kwargs)
    kinds: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, TensorList):
            kinds.append(("list", *[(t.dtype, t.dim() == 0, str(t.device)) for t in leaf.tensors[:1]]))
        elif isinstance(leaf, Tensor):
            kinds.append(("tensor", (leaf.dtype, leaf.dim() == 0, str(leaf.device))))
        elif isinstance(leaf, float):
            kinds.append(("float",))
        elif isinstance(leaf, int) and not isinstance(leaf, bool):
            kinds.append(("int",))
        else:
            kinds.append(("static", leaf))
    names = [None] * len(args) + list(kwargs)
    signature, written = _opaque_signature(fused.key, tuple(kinds), tuple(names))
    if signature < 0:
        return fused.function(*args, **kwargs)
    writes: list[Tensor] = []
    reads: list[Tensor] = []
    numbers: list[Tensor] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, TensorList):
            (writes if position in written else reads).extend(leaf.tensors)
        elif isinstance(leaf, Tensor):
            (writes if position in written else reads).append(leaf)
        elif kinds[position][0] in ("float", "int"):
            numbers.append(torch.scalar_tensor(leaf, dtype=torch.float64))
    torch.ops.subtensors.fused(signature, len(lists[0]), writes, reads, numbers)
    return None


_signatures: list[tuple[Fused[Any, Any], tuple[Any, ...], tuple[str | None, ...], frozenset[int]]] = []


@torch.compiler.assume_constant_result
def _opaque_signature(key: int, kinds: tuple[Any, ...], names: tuple[str | None, ...]) -> tuple[int, tuple[int, ...]]:
    """A number for this kind of call, and which leaves it writes; -1 when it can't be opaque."""
    fused = _registry[key]

    def stand_in(kind: tuple[Any, ...]) -> Any:
        match kind:
            case ("list", (dtype, is_number, device)):
                return Elements([torch.empty(() if is_number else (1,), dtype=dtype, device=device)])
            case ("tensor", (dtype, is_number, device)):
                return torch.empty(() if is_number else (1,), dtype=dtype, device=device)
            case ("float",):
                return 0.5
            case ("int",):
                return 1
            case (_, value):
                return value

    values = [stand_in(kind) for kind in kinds]
    args = [v for v, name in zip(values, names, strict=True) if name is None]
    kwargs = {name: v for v, name in zip(values, names, strict=True) if name is not None}
    with torch.no_grad():
        written = fused.fusion.writes(*args, **kwargs)
    if written is None:
        return -1, ()
    entry = (fused, kinds, names, frozenset(written))
    if entry not in _signatures:
        _signatures.append(entry)
    return _signatures.index(entry), tuple(written)


torch.library.define(
    "subtensors::fused",
    "(int signature, int count, Tensor(a!)[] writes, Tensor[] reads, Tensor[] numbers) -> ()",
)


@torch.library.impl("subtensors::fused", "CompositeExplicitAutograd")
def _run_opaque(
    signature: int, count: int, writes: Sequence[Tensor], reads: Sequence[Tensor], numbers: Sequence[Tensor]
) -> None:
    fused, kinds, names, written = _signatures[signature]
    sources = {True: iter(writes), False: iter(reads)}
    remaining = iter(numbers)
    values: list[Any] = []
    for position, kind in enumerate(kinds):
        source = sources[position in written]
        match kind:
            case ("list", *_):
                values.append(Elements([next(source) for _ in range(count)]))
            case ("tensor", _):
                values.append(next(source))
            case ("float",):
                values.append(float(next(remaining)))
            case ("int",):
                values.append(int(next(remaining)))
            case (_, value):
                values.append(value)
    args = [v for v, name in zip(values, names, strict=True) if name is None]
    kwargs = {name: v for v, name in zip(values, names, strict=True) if name is not None}
    with torch.no_grad():
        fused.fusion(*args, **kwargs)


@torch.library.register_fake("subtensors::fused")
def _fake_opaque(
    signature: int, count: int, writes: Sequence[Tensor], reads: Sequence[Tensor], numbers: Sequence[Tensor]
) -> None:
    return None
