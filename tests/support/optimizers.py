"""The optimizers that sweeps run over: one list of names, and the arguments that tests give them."""

from __future__ import annotations

from typing import Any

from optim_oracle import optimizer_info

import subtensors as st

TORCH_NAMES = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD"]
"""The element by element classes that torch.optim has too."""

OWN_NAMES = ["AdEMAMix", "AdamWScheduleFree", "LAMB", "Lion", "SignSGD"]
"""The element by element classes that torch.optim doesn't have."""

MATRIX_NAMES = ["Adafactor", "Muon", "SOAP", "Shampoo"]
"""The classes whose math is of full matrices."""

ELEMENTWISE = [*TORCH_NAMES, *OWN_NAMES]

LOW_BIT: list[Any] = [cls for name in ELEMENTWISE if (cls := getattr(st.optim, name)).low_bit]
"""The classes that can keep state in fewer bits."""

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.01}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}),
    ("Adam", {"lr": 0.01, "betas": (0.8, 0.99)}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "capturable": True, "foreach": False}),
    ("AdamW", {"lr": 0.01, "fused": True}),
    ("AdamW", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01}),
    ("NAdam", {"capturable": True}),
    ("RAdam", {"lr": 0.01, "betas": (0.9, 0.9)}),
    ("Adamax", {"weight_decay": 0.1}),
    ("Adadelta", {"lr": 10.0}),
    ("Adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    ("Adagrad", {"fused": True}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Rprop", {"lr": 0.1}),
    ("ASGD", {"lr": 0.1, "t0": 3.0}),
    ("ASGD", {"capturable": True}),
]
"""Classes of torch.optim with arguments that change their state or its form."""

WITH_STATE_OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True},
    "AdamW": {"master_weights": True, "ema": 0.9},
    "SGD": {"momentum": 0.9, "dampening": 0.5},
    "Lion": {"ema": 0.9},
    "ASGD": {},
    "Adagrad": {"initial_accumulator_value": 0.5},
    "AdamWScheduleFree": {"master_weights": True},
    "Adafactor": {},
}
"""Classes with options that add state entries, or start them in another way."""

STATE_SHAPES = [(3, 5), (7,), (), (0,)]
"""A matrix, a vector, a number and an empty tensor."""


def supported_arguments(device: str, name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that torch takes there: capturable=True on accelerators only, fused=True where it has a kernel."""
    refused = {"capturable": device == "cpu", "fused": device not in optimizer_info(name).supports_fused_on}
    return {k: v for k, v in kwargs.items() if not refused.get(k)}
