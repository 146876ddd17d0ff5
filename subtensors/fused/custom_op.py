"""A fused call in a compiled graph: ops that declare what they write.

Dynamo records `subtensors::fused_lists` with TensorLists as its tensors, one node however many elements they
have. When the lists are taken apart below, `_on_lists` decides: packed lists are flats, so the compiler gets
the math itself; the elements of other lists go to one opaque op, `subtensors::fused`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.lists.list_call import ListCall
from subtensors.lists.tensor_list import TensorList
from subtensors.lists.torch_function import RULES


class Signature(NamedTuple):
    """The properties that all calls from one place in a compiled function share."""

    fusion: FusedFunction
    kinds: tuple[Any, ...]
    """For each argument, ("list", dtype), ("tensor", dtype, rank), ("float",), ("int",) or ("static", value)."""
    names: tuple[str | None, ...]
    written: tuple[int, ...]
    is_traceable: bool
    """True if tensors may stand for its dynamic scalars; False where an op insists on a number, as `alpha=` does."""


signatures: dict[str, Signature] = {}
"""By name, which a graph holds: so what was compiled is kept, one entry for all functions that do the same."""


def place(values: Sequence[Any], names: Sequence[str | None]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments, from values and the keyword of each; None for a positional one."""
    args = [v for v, name in zip(values, names, strict=True) if name is None]
    return args, {name: v for v, name in zip(values, names, strict=True) if name is not None}


def _arguments(
    signature: str, count: int, writes: Sequence[Any], reads: Sequence[Any], numbers: Sequence[Any], spread: bool
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the fused function; `spread`: a list arrives as its `count` elements, not as one value."""
    _, kinds, names, written, _ = signatures[signature]
    sources = {True: iter(writes), False: iter(reads)}
    remaining = iter(numbers)
    values: list[Any] = []
    for position, kind in enumerate(kinds):
        source = sources[position in written]
        match kind[0]:
            case "list":
                values.append(TensorColumn([next(source) for _ in range(count)]) if spread else next(source))
            case "tensor":
                values.append(next(source))
            case "float" | "int":
                values.append(next(remaining))
            case _:
                values.append(kind[1])
    return place(values, names)


torch.library.define(
    "subtensors::fused", "(str signature, int count, Tensor(a!)[] writes, Tensor[] reads, Tensor[] numbers) -> ()"
)


@torch.library.impl("subtensors::fused", "CompositeExplicitAutograd")
def _run(
    signature: str, count: int, writes: Sequence[Tensor], reads: Sequence[Tensor], numbers: Sequence[Tensor]
) -> None:
    fusion, kinds, *_ = signatures[signature]
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
    """The call on lists: the math itself on packed ones, one op on all elements of others."""
    signature, writes, reads, numbers = call.args
    if signatures[signature].is_traceable and all(x.arena is not None for x in call.lists):
        args, kwargs = _arguments(signature, 1, writes, reads, numbers, spread=False)
        signatures[signature].fusion.function(*args, **kwargs)
        return
    count = len(call.lists[0].tensors)

    def spread(values: Sequence[Tensor]) -> list[Tensor]:
        return [t for v in values for t in (v.tensors if isinstance(v, TensorList) else [v])]

    torch.ops.subtensors.fused(signature, count, spread(writes), spread(reads), numbers)
