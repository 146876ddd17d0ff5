"""A fused call while Dynamo traces it. Imported at the first such call, since `assume_constant_result` loads Dynamo."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.fused.fused_function import SHARED_ADVICE
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import PyTree
from subtensors.fused.custom_ops import CompiledCall, Kind, compiled_calls, functions, split_by_keyword
from subtensors.lists.tensor_list import TensorList


def call_opaque(key: int, values: Sequence[PyTree], names: tuple[str | None, ...]) -> bool:
    """Put one fused call into the graph being traced.

    Returns:
        False, having done nothing, when the math returns tensors or an argument is nested.
    """
    kinds: list[Kind] = []
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
    torch.ops.subtensors.fused(
        signature,
        1,  # of lists their rule counts the elements
        [v for i, v in tensors if i in written],
        [v for i, v in tensors if i not in written],
        # The compiler turns a product into a tensor input, so a number that changes does not recompile.
        [
            v * torch.ones((), dtype=torch.float64, device="cpu")
            for i, v in enumerate(values)
            if kinds[i][0] in ("float", "int")
        ],
    )
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _signature(key: int, kinds: tuple[Kind, ...], names: tuple[str | None, ...]) -> tuple[str, tuple[int, ...]]:
    """The name of this kind of call and the arguments that it writes; no name when it returns tensors.

    The name is a hash of the call's program, since compiled graphs are cached on disk by the constants in them.
    """

    def example(kind: Kind) -> PyTree:
        match kind:
            case ("list", torch.dtype() as dtype):
                return TensorColumn([torch.empty(1, dtype=dtype, device="cpu")])
            case ("tensor", torch.dtype() as dtype, int() as rank):
                return torch.empty((1,) * rank, dtype=dtype, device="cpu")
            case ("float",):
                return 0.5
            case ("int",):
                return 1
            case (_, value):
                return value

    fusion = functions[key]
    args, kwargs = split_by_keyword([example(kind) for kind in kinds], names)
    with torch.no_grad():
        written = fusion.writes(*args, **kwargs)
        if written is None:
            return "", ()
        is_traceable = fusion.takes_tensors_for_numbers(*args, **kwargs)
    if any(kinds[i][0] == "tensor" for i in written) and any(kind[0] == "list" for kind in kinds):
        raise RuleError(f"{fusion.name} writes to a tensor that all elements share: {SHARED_ADVICE}")
    entry = CompiledCall(fusion, kinds, names, written, is_traceable)
    name = hashlib.sha256(f"{fusion.digest(*args, **kwargs)} {kinds} {names}".encode()).hexdigest()
    compiled_calls[name] = entry
    return name, written
