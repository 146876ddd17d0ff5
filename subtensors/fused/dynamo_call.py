"""A fused call while a compiler traces it. Imported by the first of them, since its marks for Dynamo load Dynamo."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.fused.fused_function import SHARED_ADVICE
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.ops.errors import RuleError
from subtensors.fused.custom_op import Signature, place, signatures
from subtensors.fused.fuse import fusion_of
from subtensors.lists.tensor_list import TensorList


def call_opaque(key: int, values: Sequence[Any], names: tuple[str | None, ...]) -> bool:
    """Put one fused call into the graph being traced.

    Args:
        key: the fusion, by its number.
        values: its arguments.
        names: the keyword of each; None for a positional one.

    Returns:
        False, having done nothing, when the math returns tensors or an argument is nested.
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
                return TensorColumn([torch.empty(1, dtype=dtype, device="cpu")])
            case ("tensor", dtype, rank):
                return torch.empty((1,) * rank, dtype=dtype, device="cpu")
            case ("float",):
                return 0.5
            case ("int",):
                return 1
            case (_, value):
                return value

    fusion = fusion_of(key)
    args, kwargs = place([stand_in(kind) for kind in kinds], names)
    with torch.no_grad():
        written = fusion.writes(*args, **kwargs)
        if written is None:
            return "", ()
        is_traceable = fusion.takes_tensors_for_numbers(*args, **kwargs)
    if any(kinds[i][0] == "tensor" for i in written) and any(kind[0] == "list" for kind in kinds):
        raise RuleError(f"{fusion.name} writes to a tensor that all elements share: {SHARED_ADVICE}")
    entry = Signature(fusion, kinds, names, written, is_traceable)
    name = hashlib.sha256(f"{fusion.digest(*args, **kwargs)} {kinds} {names}".encode()).hexdigest()
    signatures[name] = entry
    return name, written
