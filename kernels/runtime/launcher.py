"""Repeated launches of a kernel that Triton has compiled, at little more than the driver's own cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Launch = Callable[..., None]
"""Called with the kernel's arguments and `stream`, the number of one of the current device."""


def launcher(compiled: Any, programs: int) -> Launch:
    """Load a kernel, and return a function that launches `programs` programs of it.

    Triton's own `compiled[grid]` describes each launch for hooks, which profilers add. While there are no hooks, the
    function that it wraps is called directly, without a description. Checked on Triton 3.6; read in 3.7, 3.9.

    Args:
        compiled: what `kernel[grid](...)` and `kernel.warmup(...)` return.
        programs: at least one.
    """
    from subtensors.kernels.runtime.triton_compat import triton

    knobs = triton.knobs
    described = compiled[(programs, 1, 1)]
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(*arguments: Any, stream: int) -> None:
        if _has_hooks(knobs.runtime):
            described(*arguments, stream=stream)
        else:
            run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return launch


def _has_hooks(runtime: Any) -> bool:
    """Return whether Triton has launch hooks to call: each is a chain with a list of `calls`, a function, or None."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
