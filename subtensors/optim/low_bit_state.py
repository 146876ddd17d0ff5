"""State kept in fewer bits than it is computed in: 8-bit codes with a scale a block, or bfloat16.

An optimizer names in `low_bit` the state entries that bear it. In a group with `state_dtype="int8"` such an entry is a
tensor of codes beside one of scales, `<entry>_absmax` (`kernels.fused.blockwise` has the two codes); with
`state_dtype=torch.bfloat16` it is rounded stochastically, so that what is below half a step is not lost but taken now
and then. Either way the step reads, computes in float32 and writes within its one kernel. Where a parameter is spread
over processes, codes are spread as it is, and blocks and scales are those of the shard that is here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import RuleError
from subtensors.kernels.fused import blockwise
from subtensors.optim.dtensor import shard, spread_like

SCALES = "_absmax"
"""The suffix that turns the name of an entry of codes into the name of its scales."""

MIN_QUANTIZED_NUMEL = 4096
"""Elements below which a tensor's state is not quantized: little would be saved, and norms and biases are delicate."""


class Quantized(NamedTuple):
    """An entry of codes, as a step is given it: tensors, or the lists of a batch."""

    codes: Any
    scales: Any


class StochasticallyRounded(NamedTuple):
    """An entry that is rounded to bfloat16 stochastically, as a step is given it."""

    stored: Any


def check_state_dtype(name: str, state_dtype: Any, low_bit: Mapping[str, bool]) -> None:
    """Refuse a `state_dtype` that no state can be kept in.

    Args:
        name: the optimizer's.
        state_dtype: the option of a group.
        low_bit: the entries of the optimizer that bear it.

    Raises:
        ValueError: another value than None, "int8" and torch.bfloat16, or an optimizer without such entries.
    """
    if state_dtype not in (None, "int8", torch.bfloat16):
        raise ValueError(f"Invalid state_dtype: {state_dtype!r}; expected 'int8', torch.bfloat16 or None")
    if state_dtype is not None and not low_bit:
        raise ValueError(f"state_dtype={state_dtype!r}: {name} keeps its state as it is; expected None")


def check_sharded_forms(forms: Collection[torch.dtype | None], sees_shards: bool, is_repeated: bool) -> None:
    """Refuse forms that the state of a sharded parameter can't have.

    Args:
        forms: of its entries.
        sees_shards: whether the step runs on each shard alone.
        is_repeated: whether several processes hold the same shard.

    Raises:
        RuleError: blocks of a step that needs whole tensors, or random bits that would differ between processes.
    """
    if any(forms) and not sees_shards:
        raise RuleError(
            "state_dtype: this step needs whole tensors, and a parameter is spread over processes (a DTensor); "
            "expected None"
        )
    if torch.bfloat16 in forms and is_repeated:
        raise RuleError(
            "state_dtype=torch.bfloat16 rounds by random bits, and processes that repeat a shard (a DTensor) would "
            "draw others; expected 'int8' or None"
        )


def form_of(entry: str, p: Tensor, group: Mapping[str, Any], low_bit: Mapping[str, bool]) -> torch.dtype | None:
    """The dtype that a state entry of this parameter is stored in.

    Args:
        entry: its name.
        p: the parameter.
        group: its group.
        low_bit: for each entry that may be kept in fewer bits, whether it is signed.

    Returns:
        int8 or uint8 for codes, bfloat16, or None for the dtype it is computed in.
    """
    state_dtype = group.get("state_dtype")
    if state_dtype is None or entry not in low_bit or p.is_complex():
        return None
    if state_dtype == "int8":
        return (torch.int8 if low_bit[entry] else torch.uint8) if p.numel() >= MIN_QUANTIZED_NUMEL else None
    return torch.bfloat16


def forms_of(
    entries: tuple[str, ...], p: Tensor, group: Mapping[str, Any], low_bit: Mapping[str, bool]
) -> tuple[torch.dtype | None, ...]:
    """`form_of` of each of these entries."""
    if group.get("state_dtype") is None:
        return (None,) * len(entries)
    return tuple([form_of(entry, p, group, low_bit) for entry in entries])


def keep(state: Any, entry: str, form: torch.dtype | None) -> None:
    """Bring an entry of a parameter's state into the form that it is to be kept in."""
    is_quantized = entry + SCALES in state
    wants_codes = form in (torch.int8, torch.uint8)
    if is_quantized != wants_codes:
        value = _restored(state, entry)
        state.pop(entry + SCALES, None)
        state[entry] = value
        if wants_codes:
            scales = blockwise.absmax(shard(value))
            state[entry] = spread_like(blockwise.quantize(shard(value), scales, form == torch.int8), value)
            state[entry + SCALES] = scales
    if form == torch.bfloat16 and state[entry].dtype != form:
        state[entry] = state[entry].to(form)


def restored(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state without codes: the numbers they stand for, in float32.

    They are given the same codes again, to the last bit.
    """
    scales = {name for name in state if name.removesuffix(SCALES) != name and name.removesuffix(SCALES) in state}
    return {name: _restored(state, name) for name in state if name not in scales}


def _restored(state: Mapping[str, Any], entry: str) -> Any:
    stored, scales = state[entry], state.get(entry + SCALES)
    if scales is None:
        return stored
    return spread_like(blockwise.dequantize(shard(stored), scales, _is_signed(stored)), stored)


def _is_signed(codes: Tensor) -> bool:
    return codes.dtype == torch.int8


def read(entry: Quantized | StochasticallyRounded) -> Tensor:
    """The entry in float32, within fused math."""
    if isinstance(entry, StochasticallyRounded):
        value: Tensor = entry.stored.float()
        return value
    read: Tensor = torch.ops.subtensors.dequantize_blockwise(entry.codes, entry.scales, _is_signed(entry.codes))
    return read


def write(entry: Quantized | StochasticallyRounded, value: Tensor, found_inf: Tensor | None) -> None:
    """Store what the math made of the entry, or leave it after an overflow, within fused math."""
    ops = torch.ops.subtensors
    if isinstance(entry, StochasticallyRounded):
        rounded = ops.stochastic_round(value)
        entry.stored.copy_(rounded if found_inf is None else torch.where(found_inf != 0, entry.stored, rounded))
        return
    if found_inf is not None:
        # What codes stand for is given the same codes again.
        value = torch.where(found_inf != 0, read(entry), value)
    scales = ops.blockwise_absmax(value)
    entry.codes.copy_(ops.quantize_blockwise(value, scales, _is_signed(entry.codes)))
    entry.scales.copy_(scales)
