"""One process a measurement, with every compile cache cold."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "SUBTENSORS_CACHE_DIR")


class MeasurementFailed(RuntimeError):
    """A measuring process ended badly; the message is the end of what it wrote to stderr."""


def run_cold(module: str, arguments: Sequence[str], timeout_s: float = 900) -> str:
    """Run `python -m module arguments` with empty caches.

    Args:
        module: to run.
        arguments: of its command line.
        timeout_s: after which it is ended.

    Returns:
        the last line it printed.

    Raises:
        MeasurementFailed: it ended with another status than 0, or not in time.

    >>> run_cold("platform", [])
    '...'
    """
    with tempfile.TemporaryDirectory(prefix="subtensors-bench-") as folder:
        cold = {name: os.path.join(folder, name) for name in CACHES}
        environment = {**os.environ, **cold, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        command = [sys.executable, "-m", module, *arguments]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise MeasurementFailed(f"not done after {timeout_s:g} s") from None
    if done.returncode != 0:
        raise MeasurementFailed(done.stderr[-2000:])
    return done.stdout.splitlines()[-1]
