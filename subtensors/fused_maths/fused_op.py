"""A fused call in a compiled graph: ops that declare what they write.

Dynamo records `subtensors::fused_lists` with TensorLists as its tensors, one node however many elements they
have. When the lists are taken apart below, `_on_lists` decides: packed lists are flats, so the compiler gets
the maths itself; the elements of other lists go to one opaque op, `subtensors::fused`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from subtensors.dispatch.errors import RuleError
from subtensors.dispatch.fused_maths.columns import Elements
from subtensors.dispatch.fused_maths.fusion import SHARED_ADVICE, Fusion
from subtensors.dispatch.lists.mapping import ListCall
from subtensors.lists.list_calls import RULES
from subtensors.lists.tensor_list import TensorList


class _Signature(NamedTuple):
    """What is the same for every call from one place in a compiled function."""

    fusion: Fusion
    kinds: tuple[Any, ...]
    """For each argument, ("list", dtype), ("tensor", dtype, rank), ("float",), ("int",) or ("static", value)."""
    names: tuple[str | None, ...]
    written: tuple[int, ...]
    is_traceable: bool
    """May tensors stand for its live numbers? Not where an op insists on a number, as `alpha=` does."""


_fusions: WeakValueDictionary[int, Fusion] = WeakValueDictionary()
_numbers = itertools.count()
_signatures: dict[str, _Signature] = {}
"""By name, which a graph holds: so what was compiled is kept, one entry for all functions that do the same."""


def register(fusion: Fusion) -> int:
    """A number by which the compiler names this fusion; it does not keep it alive."""
    number = next(_numbers)
    _fusions[number] = fusion
    return number


def call_opaque(key: int, values: Sequence[Any], names: tuple[str | None, ...]) -> bool:
    """Put one fused call into the graph being traced.

    Args:
        key: the fusion, as `register` numbered it.
        values: its arguments.
        names: the keyword of each; None for a positional one.

    Returns:
        False, having done nothing, when the maths returns tensors or an argument is nested.
    """
    kinds: list[Any] = []
    for value in values:
        if isinstance(value, TensorList):
            kinds.append(("list", value.dtype[0]))  # type: ignore[index]
        elif isinstance(value, Tensor):
            kinds.append(("tensor", value.dtype, value.dim()))
        elif isinstance(value, float):
            kinds.append(("float",))
        elif isinstance(value, int) and not isinstance(value, bool):
            kinds.append(("int",))
        elif isinstance(value, (bool, str, type(None))):
            kinds.append(("static", value))
        else:
            return False
    signature, written = _signature(key, tuple(kinds), names)
    if not signature:
        return False
    tensors = [(i, v) for i, v in enumerate(values) if isinstance(v, Tensor)]
    torch.ops.subtensors.fused_lists(
        signature,
        [v for i, v in tensors if i in written],
        [v for i, v in tensors if i not in written],
        # As a product, which the compiler turns into a tensor input, a number that changes does not recompile.
        [
            v * torch.ones((), dtype=torch.float64, device="cpu")
            for i, v in enumerate(values)
            if kinds[i][0] in ("float", "int")
        ],
    )
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _signature(key: int, kinds: tuple[Any, ...], names: tuple[str | None, ...]) -> tuple[str, tuple[int, ...]]:
    """The name of this kind of call and which arguments it writes; no name when it returns tensors.

    The name is made from what the call does: compiled graphs are cached on disk under what they hold.
    """

    def stand_in(kind: tuple[Any, ...]) -> Any:
        match kind:
            case ("list", dtype):
                return Elements([torch.empty(1, dtype=dtype, device="cpu")])
            case ("tensor", dtype, rank):
                return torch.empty((1,) * rank, dtype=dtype, device="cpu")
            case ("float",):
                return 0.5
            case ("int",):
                return 1
            case (_, value):
                return value

    fusion = _fusions[key]
    args, kwargs = _place([stand_in(kind) for kind in kinds], names)
    with torch.no_grad():
        written = fusion.writes(*args, **kwargs)
        if written is None:
            return "", ()
        is_traceable = fusion.takes_tensors_for_numbers(*args, **kwargs)
    if any(kinds[i][0] == "tensor" for i in written) and any(kind[0] == "list" for kind in kinds):
        raise RuleError(f"{fusion.name} writes to a tensor that all elements share: {SHARED_ADVICE}")
    entry = _Signature(fusion, kinds, names, written, is_traceable)
    name = hashlib.sha256(f"{fusion.digest(*args, **kwargs)} {kinds} {names}".encode()).hexdigest()
    _signatures[name] = entry
    return name, written


def _place(values: Sequence[Any], names: Sequence[str | None]) -> tuple[list[Any], dict[str, Any]]:
    args = [v for v, name in zip(values, names, strict=True) if name is None]
    return args, {name: v for v, name in zip(values, names, strict=True) if name is not None}


def _arguments(
    signature: str, count: int, writes: Sequence[Any], reads: Sequence[Any], numbers: Sequence[Any], spread: bool
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the fused function; `spread`: a list arrives as its `count` elements, not as one value."""
    _, kinds, names, written, _ = _signatures[signature]
    sources = {True: iter(writes), False: iter(reads)}
    remaining = iter(numbers)
    values: list[Any] = []
    for position, kind in enumerate(kinds):
        source = sources[position in written]
        match kind[0]:
            case "list":
                values.append(Elements([next(source) for _ in range(count)]) if spread else next(source))
            case "tensor":
                values.append(next(source))
            case "float" | "int":
                values.append(next(remaining))
            case _:
                values.append(kind[1])
    return _place(values, names)


torch.library.define(
    "subtensors::fused", "(str signature, int count, Tensor(a!)[] writes, Tensor[] reads, Tensor[] numbers) -> ()"
)


@torch.library.impl("subtensors::fused", "CompositeExplicitAutograd")
def _run(
    signature: str, count: int, writes: Sequence[Tensor], reads: Sequence[Tensor], numbers: Sequence[Tensor]
) -> None:
    fusion, kinds, *_ = _signatures[signature]
    numeric = [k[0] for k in kinds if k[0] in ("float", "int")]
    live = [float(n) if k == "float" else int(n) for n, k in zip(numbers, numeric, strict=True)]
    args, kwargs = _arguments(signature, count, writes, reads, live, spread=True)
    with torch.no_grad():
        fusion(*args, **kwargs)


@torch.library.register_fake("subtensors::fused")  # type: ignore[untyped-decorator]
def _fake(
    signature: str, count: int, writes: Sequence[Tensor], reads: Sequence[Tensor], numbers: Sequence[Tensor]
) -> None:
    return None


torch.library.define(
    "subtensors::fused_lists", "(str signature, Tensor(a!)[] writes, Tensor[] reads, Tensor[] numbers) -> ()"
)


@torch.library.impl("subtensors::fused_lists", "CompositeExplicitAutograd")
def _run_plain(signature: str, writes: Sequence[Tensor], reads: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
    """The call on plain tensors: a list of one."""
    torch.ops.subtensors.fused(signature, 1, writes, reads, numbers)


@torch.library.register_fake("subtensors::fused_lists")  # type: ignore[untyped-decorator]
def _fake_plain(signature: str, writes: Sequence[Tensor], reads: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
    return None


@RULES.register(torch.ops.subtensors.fused_lists.default)
def _on_lists(call: ListCall) -> None:
    """The call on lists: the maths itself on packed ones, one op on all elements of others."""
    signature, writes, reads, numbers = call.args
    if _signatures[signature].is_traceable and all(x.arena is not None for x in call.lists):
        args, kwargs = _arguments(signature, 1, writes, reads, numbers, spread=False)
        _signatures[signature].fusion.function(*args, **kwargs)
        return
    count = len(call.lists[0].tensors)

    def spread(values: Sequence[Tensor]) -> list[Tensor]:
        return [t for v in values for t in (v.tensors if isinstance(v, TensorList) else [v])]

    torch.ops.subtensors.fused(signature, count, spread(writes), spread(reads), numbers)
