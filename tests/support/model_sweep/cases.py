"""The table of the sweep, a module a family."""

from __future__ import annotations

from model_sweep import decoders, encoder_decoders, encoders, experts, speech, state_space, vision
from model_sweep.case import ModelCase

FAMILIES = (encoders, decoders, encoder_decoders, experts, state_space, speech, vision)

CASES: dict[str, ModelCase] = {case.name: case for family in FAMILIES for case in family.CASES}
"""All rows by name."""
