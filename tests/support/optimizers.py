"""The optimizers that sweeps run over: one list of them, with the arguments that tests give them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from optim_oracle import optimizer_info

import subtensors as st

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """An optimizer of `subtensors.optim`, and the arguments that sweeps give it.

    Args:
        name: of the class.
        variants: arguments that change its state or the form of it, where torch has the class, too; sweeps over saved
            states and conversions take them.
        sharded: arguments for steps on sharded parameters.
        state_options: options that add entries to its state, or start them in another way.
        options: what it needs to have state at all.
        is_matrix: whether its math is of full matrices rather than element by element.
    """

    name: str
    variants: tuple[Arguments, ...] = ()
    sharded: tuple[Arguments, ...] = ()
    state_options: Arguments | None = None
    options: Arguments = field(default_factory=dict)
    is_matrix: bool = False

    @property
    def cls(self) -> Any:
        return getattr(st.optim, self.name)


CASES = [
    Case(
        "SGD",
        variants=(
            {"lr": 0.01},
            {"lr": 0.01, "momentum": 0.9, "nesterov": True},
            {"lr": 0.01, "momentum": 0.9, "dampening": 0.5},
        ),
        sharded=({"momentum": 0.9, "nesterov": True},),
        state_options={"momentum": 0.9, "dampening": 0.5},
        options={"momentum": 0.9},
    ),
    Case(
        "Adam",
        variants=(
            {"lr": 0.01, "betas": (0.8, 0.99)},
            {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
            {"lr": 0.01, "capturable": True, "foreach": False},
        ),
        state_options={"amsgrad": True},
    ),
    Case(
        "AdamW",
        variants=({"lr": 0.01, "fused": True}, {"lr": 0.01}),
        sharded=({"weight_decay": 0.1},),
        state_options={"master_weights": True, "ema": 0.9},
    ),
    Case("NAdam", variants=({"lr": 0.01}, {"capturable": True})),
    Case("RAdam", variants=({"lr": 0.01, "betas": (0.9, 0.9)},)),
    Case("Adamax", variants=({"weight_decay": 0.1},)),
    Case("Adadelta", variants=({"lr": 10.0},)),
    Case(
        "Adagrad",
        variants=({"initial_accumulator_value": 0.1, "lr_decay": 0.1}, {"fused": True}),
        sharded=({},),
        state_options={"initial_accumulator_value": 0.5},
    ),
    Case(
        "RMSprop",
        variants=({"lr": 0.01}, {"centered": True, "momentum": 0.9}),
        sharded=({"centered": True},),
    ),
    Case("Rprop", variants=({"lr": 0.1},)),
    Case("ASGD", variants=({"lr": 0.1, "t0": 3.0}, {"capturable": True}), state_options={}),
    Case("AdEMAMix"),
    Case("AdamWScheduleFree", state_options={"master_weights": True}),
    Case("LAMB"),
    Case("Lion", state_options={"ema": 0.9}),
    Case("SignSGD", options={"momentum": 0.5}),
    Case("Adafactor", sharded=({"weight_decay": 0.1},), state_options={}, is_matrix=True),
    Case("Muon", sharded=({"lr": 0.05}, {"lr": 0.05, "ema": 0.5, "max_norm": 0.5}), is_matrix=True),
    Case("SOAP", sharded=({"precondition_frequency": 2},), is_matrix=True),
    Case("Shampoo", sharded=({"momentum": 0.5, "update_freq": 2},), is_matrix=True),
]
"""A new optimizer is an entry here: the sweeps below take it from there."""

ELEMENTWISE = [case.name for case in CASES if not case.is_matrix]
"""The classes whose math is element by element."""

MATRIX_NAMES = [case.name for case in CASES if case.is_matrix]
"""The classes whose math is of full matrices."""

TORCH_NAMES = [name for name in ELEMENTWISE if hasattr(torch.optim, name)]
"""The element by element classes that torch.optim has too."""

OWN_NAMES = [name for name in ELEMENTWISE if not hasattr(torch.optim, name)]
"""The element by element classes that torch.optim doesn't have."""

LOW_BIT = [case.cls for case in CASES if not case.is_matrix and case.cls.low_bit]
"""The classes that can keep state in fewer bits."""

VARIANTS = [(case.name, arguments) for case in CASES for arguments in case.variants]
"""Classes of torch.optim with arguments that change their state or its form."""

SHARDED = [(case.name, arguments) for case in CASES if not case.is_matrix for arguments in case.sharded]
"""Element by element classes with arguments for steps on sharded parameters."""

SHARDED_MATRIX = [(case.name, arguments) for case in CASES if case.is_matrix for arguments in case.sharded]
"""The same of classes whose math is of full matrices."""

WITH_STATE_OPTIONS = {case.name: case.state_options for case in CASES if case.state_options is not None}
"""Classes with options that add state entries, or start them in another way."""

WITH_STATE: dict[str, Arguments] = {case.name: case.options for case in CASES}
"""What each class needs to have state."""

STATE_SHAPES = [(3, 5), (7,), (), (0,)]
"""A matrix, a vector, a number and an empty tensor."""


def supported_arguments(device: str, name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that torch takes there: capturable=True on accelerators only, fused=True where it has a kernel."""
    refused = {"capturable": device == "cpu", "fused": device not in optimizer_info(name).supports_fused_on}
    return {k: v for k, v in kwargs.items() if not refused.get(k)}
