"""State kept in fewer bits than it is computed in: 8-bit codes with a scale a block, or bfloat16.

An optimizer names in `low_bit` the state entries that tolerate it. In a group with `state_dtype="int8"` such an entry
is a tensor of codes beside one of scales, `<entry>_absmax` (`kernels.fused.blockwise` has the two codes); with
`state_dtype=torch.bfloat16` it is rounded stochastically, so that a change of less than half a step is not lost but
rounded up now and then. Either way the step reads, computes in float32 and writes within its one kernel. Codes of a
sharded parameter are sharded as it is, with blocks and scales of the local shard.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from subtensors.arguments import shown
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.ops.errors import RuleError
from subtensors.kernels.fused import blockwise
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype
from subtensors.optim.dtensor import shard, spread_like
from subtensors.optim.options import ParamGroup
from subtensors.optim.versions import Entry

SCALES = "_absmax"
"""The suffix that turns the name of an entry of codes into the name of its scales."""

MIN_QUANTIZED_NUMEL = 4096
"""Elements below which a tensor's state is not quantized: little would be saved, and norms and biases are delicate."""

T = TypeVar("T", Tensor, TensorColumn)
"""A tensor in the math of one parameter; the column of a batch where the call is put together."""


class Quantized(NamedTuple, Generic[T]):
    """The argument of a step for an entry of codes."""

    codes: T
    scales: T


class StochasticallyRounded(NamedTuple, Generic[T]):
    """The argument of a step for an entry that is rounded to bfloat16 stochastically."""

    stored: T


Stored = Tensor | Quantized[Tensor] | StochasticallyRounded[Tensor]
"""A parameter, master or state entry in the form that it is stored in."""


def check_state_dtype(name: str, state_dtype: object, low_bit: Mapping[str, bool]) -> None:
    """Refuse a `state_dtype` that no state can be kept in.

    Raises:
        ValueError: another value than None, "int8" and torch.bfloat16, or an optimizer without such entries.
    """
    if not isinstance(state_dtype, str | torch.dtype | None) or state_dtype not in (None, "int8", torch.bfloat16):
        raise ValueError(f"Invalid state_dtype: {shown(state_dtype)}; expected 'int8', torch.bfloat16 or None")
    if state_dtype is not None and not low_bit:
        raise ValueError(f"state_dtype={state_dtype!r}: {name} keeps its state as it is; expected None")


def check_sharded_dtypes(dtypes: Collection[torch.dtype | None], sees_shards: bool, is_replicated: bool) -> None:
    """Refuse low-bit dtypes that the state of a sharded parameter can't have.

    Raises:
        RuleError: codes for a step that needs full tensors, or random bits that would differ between processes.
    """
    if any(dtypes) and not sees_shards:
        raise RuleError(
            "state_dtype: this step needs full tensors, and a parameter is sharded over processes (a DTensor); "
            "expected None"
        )
    if torch.bfloat16 in dtypes and is_replicated:
        raise RuleError(
            "state_dtype=torch.bfloat16 rounds by random bits, and processes that hold the same shard (of a DTensor) "
            "would draw different ones; expected 'int8' or None"
        )


def low_bit_dtype(entry: str, p: Tensor, group: ParamGroup, low_bit: Mapping[str, bool]) -> torch.dtype | None:
    """The low-bit dtype that a state entry of this parameter is stored in.

    Returns:
        int8 or uint8 for codes, bfloat16, or None for the dtype that the entry is computed in.
    """
    state_dtype = group.get("state_dtype")
    if state_dtype is None or entry not in low_bit or p.is_complex():
        return None
    if state_dtype == "int8":
        return (torch.int8 if low_bit[entry] else torch.uint8) if p.numel() >= MIN_QUANTIZED_NUMEL else None
    return torch.bfloat16


def convert_entry(state: Entry, name: str, dtype: torch.dtype | None) -> None:
    """Convert an entry of a parameter's state to its `low_bit_dtype`, or back from one."""
    is_quantized = name + SCALES in state
    wants_codes = dtype in (torch.int8, torch.uint8)
    if is_quantized != wants_codes:
        value = _dequantized(state, name)
        state.pop(name + SCALES, None)
        state[name] = value
        if wants_codes:
            scales = blockwise.absmax(shard(value))
            state[name] = spread_like(blockwise.quantize(shard(value), scales, dtype == torch.int8), value)
            state[name + SCALES] = scales
    if dtype == torch.bfloat16 and state[name].dtype != dtype:
        state[name] = state[name].to(dtype)


def dequantized_state(state: Entry) -> dict[str, object]:
    """A parameter's state with the numbers that its codes stand for, in float32.

    Quantized again, they become the same codes, to the last bit.
    """
    scales = {name for name in state if name.removesuffix(SCALES) != name and name.removesuffix(SCALES) in state}
    return {name: _dequantized(state, name) for name in state if name not in scales}


def _dequantized(state: Entry, name: str) -> Tensor:
    stored: Tensor = state[name]
    scales = state.get(name + SCALES)
    if scales is None:
        return stored
    return spread_like(blockwise.dequantize(shard(stored), scales, _is_signed(stored)), stored)


def _is_signed(codes: Tensor) -> bool:
    return codes.dtype == torch.int8


def read(entry: Stored, must_copy: bool = False) -> Tensor:
    """The entry in the dtype it is computed in, within fused math; the stored tensor itself unless a copy is needed."""
    if isinstance(entry, Quantized):
        value: Tensor = torch.ops.subtensors.dequantize_blockwise(entry.codes, entry.scales, _is_signed(entry.codes))
        return value
    stored: Tensor = entry.stored if isinstance(entry, StochasticallyRounded) else entry
    if (wide := arithmetic_dtype(stored.dtype)) != stored.dtype:
        return stored.to(wide)
    return stored.clone() if must_copy else stored


def write(entry: Stored, value: Tensor, found_inf: Tensor | None) -> None:
    """Store the new value of the entry, or leave it after an overflow, within fused math."""
    ops = torch.ops.subtensors
    if isinstance(entry, Quantized):
        # What was read from codes is quantized to the same codes again.
        value = value if found_inf is None else torch.where(found_inf != 0, read(entry), value)
        scales = ops.blockwise_absmax(value)
        entry.codes.copy_(ops.quantize_blockwise(value, scales, _is_signed(entry.codes)))
        entry.scales.copy_(scales)
        return
    stored: Tensor = entry.stored if isinstance(entry, StochasticallyRounded) else entry
    value = value if stored is entry else ops.stochastic_round(value)
    stored.copy_(value if found_inf is None else torch.where(found_inf != 0, stored, value))
