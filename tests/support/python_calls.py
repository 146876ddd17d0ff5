"""How much Python a call runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from subtensors.kernels.runtime.gc_pause import gc_paused


def python_calls(function: Callable[[], object]) -> int:
    """Return how many Python functions `function()` calls, itself included, without those of garbage collections."""
    count = 0

    def note(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    # A collection in between would run other tests' finalizers.
    with gc_paused():
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)
    return count
