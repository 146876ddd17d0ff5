"""The class that the page on writing an optimizer ends in, as a reader copies it from there."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import torch

import subtensors as st

PAGE = Path(__file__).parents[2] / "docs" / "write-your-own-optimizer.md"


def source() -> str:
    """The first class among the page's examples."""
    examples = doctest.DocTestParser().get_examples(PAGE.read_text())
    return next(example.source for example in examples if example.source.startswith("class"))


def own_optimizer() -> Any:
    """What it defines."""
    names: dict[str, Any] = {"torch": torch, "st": st}
    exec(source(), names)
    return names["AdaBelief"]
