"""Refusing maths that can't be fused, with the line of the user's source that asked for it."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from subtensors.dispatch.errors import RuleError

_INTERNAL = [Path(__file__).parent, Path(torch.__file__).parent, Path(sysconfig.get_path("stdlib"))]


def _is_users(filename: str) -> bool:
    """Is this source file neither torch's, nor Python's, nor the tracer's?"""
    path = Path(filename).resolve()
    in_packages = "site-packages" in path.parts
    internal = any(path.is_relative_to(folder.resolve()) for folder in _INTERNAL[: 2 if in_packages else 3])
    return not internal and not filename.startswith("<frozen")


def source_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The innermost line of the user's own source, as `file:line: text`."""
    own = [f for f in traceback.StackSummary.extract(iter(frames)) if _is_users(f.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else "unknown line"


def refuse(reason: str, advice: str) -> NoReturn:
    """RuleError with the innermost line of the user's own source.

    Args:
        reason: why the maths can't be fused.
        advice: what to do instead.
    """
    frames = list(traceback.walk_stack(sys._getframe(1)))[::-1]
    raise RuleError(f"this maths cannot be fused: {reason}\n  at {source_line(frames)}\n  instead: {advice}")


def refuse_value(how: str) -> NoReturn:
    """RuleError for a value that is asked for on the host."""
    refuse(
        f"it needs the value of a tensor on the host ({how})",
        "keep the decision on the device: torch.where(condition, a, b)",
    )
