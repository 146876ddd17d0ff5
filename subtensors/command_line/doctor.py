"""`python -m subtensors doctor`: what is installed, what runs on which path, a self-test, and what to do next."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import platform
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

import subtensors
from subtensors.command_line.self_test import CHECKS, Check
from subtensors.dispatch.torch_internals.requires import NEWEST_TESTED

WIDTH = 80
"""Columns of the report."""

MIN_CAPABILITY = (8, 0)
"""The oldest GPU that Triton's kernels with bfloat16 run on."""

PACKAGES = ("triton", "numpy", "sympy", "optree")
"""Packages that the library needs beside torch."""

OPTIONAL = {
    "rich": "progress bars, tables and plots",
    "matplotlib": "progress bars, tables and plots",
    "cuda-bindings": "arenas on a GPU",
}
"""Packages that are optional, and what each is for."""


def doctor(checks: Mapping[str, Check] = CHECKS) -> int:
    """Print the report.

    Args:
        checks: the self-tests to run, by name.

    Returns:
        The exit status: 1 if a self-test failed, else 0.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with _quiet():
        for line in installation():
            print(line)
        print(f"\nself-test on {device}, against plain torch")
        failed = [name for name, check in checks.items() if not run_check(name, check, device)]
    advice = missing()
    if failed:
        advice.append(f"{', '.join(failed)} failed here: please report it, with this text and the error above.")
    print("\nwhat to do" if advice else "\nnothing to do: all is there")
    for line in advice:
        print(textwrap.fill(line, WIDTH, initial_indent="  - ", subsequent_indent="    "))
    return 1 if failed else 0


def installation() -> Iterator[str]:
    """Yield a line for each group of versions, and for each GPU."""
    newest = ".".join(map(str, NEWEST_TESTED))
    yield f"subtensors {subtensors.__version__}, Python {platform.python_version()}, {platform.system()}"
    yield f"  torch {torch.__version__}, tested from 2.11 to {newest}"
    needed, optional = (", ".join(f"{name} {installed(name) or 'missing'}" for name in x) for x in (PACKAGES, OPTIONAL))
    yield f"  {needed}"
    yield f"  optional: {optional}"
    if not torch.cuda.is_available():
        yield "  GPU: none that torch can use"
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(i)
        capability = f"{properties.major}.{properties.minor}, CUDA {torch.version.cuda}"
        yield f"  GPU {i}: {properties.name}, {properties.total_memory >> 30} GiB, capability {capability}"


def run_check(name: str, check: Check, device: str) -> bool:
    """Run one self-test, and print its result and duration, or its error, in a line.

    >>> run_check("a type", lambda device: f"torch on {device}", "cpu")
      a type         right   0.0 s  torch on cpu
    True
    """
    print(f"  {name:14} ", end="", flush=True)
    start = time.perf_counter()
    torch.manual_seed(0)
    try:
        path = check(device)
    except Exception as error:  # whatever is broken here
        print(f"FAILED {time.perf_counter() - start:4.1f} s")
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        text = f"{type(error).__name__}: {lines[0]}"
        print(textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="    "))
        return False
    print(f"right  {time.perf_counter() - start:4.1f} s  {path}")
    return True


def missing() -> list[str]:
    """Return a sentence for each thing that is missing or too old, which says what to do about it."""
    advice = []
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < (2, 11) or found > NEWEST_TESTED:
        advice.append(f"torch {torch.__version__} is not tested: docs/compatibility.md lists the versions that are.")
    lacking = [name for name in PACKAGES if installed(name) is None and importlib.util.find_spec(name) is None]
    if lacking:
        advice.append(f"{', '.join(lacking)} missing: pip install {' '.join(lacking)}")
    if not torch.cuda.is_available():
        reason = (
            "this torch is built without CUDA: on a machine with an NVIDIA GPU, pip install --force-reinstall torch"
            if torch.version.cuda is None
            else "torch has CUDA but finds no GPU: nvidia-smi says whether the driver does"
        )
        advice.append(f"Without a GPU everything runs through torch, right but not fast; {reason}.")
    elif torch.cuda.get_device_capability() < MIN_CAPABILITY:
        advice.append("This GPU is older than Triton's kernels in bfloat16 support: stay with float32 and float16.")
    if not any(map(shutil.which, ("gcc", "clang", "cc"))):
        advice.append("No C compiler, which Triton and torch.compile need: install gcc.")
    for purpose in dict.fromkeys(OPTIONAL.values()):
        names = [name for name, own in OPTIONAL.items() if own == purpose and installed(name) is None]
        if names:
            advice.append(f"For {purpose}: pip install {' '.join(names)}")
    return advice


def installed(package: str) -> str | None:
    """Return the version of an installed package; None if there is none.

    >>> installed("no-such-package")
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context without the log's lines on stderr, which the report says in its own words."""
    handler = logging.StreamHandler(io.StringIO())
    logger = logging.getLogger("subtensors")
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
        sys.stdout.flush()
