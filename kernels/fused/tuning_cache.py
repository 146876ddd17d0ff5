"""Choices of tile sizes on disk: a JSON file each, named by a hash of the program, the compiler and the device.

A file is renamed into place in one step, so that processes that tune at the same time neither mix nor lose choices.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import uuid
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from subtensors.kernels.fused.launch import Tiling
from subtensors.kernels.fused.program import Program

logger = logging.getLogger("subtensors.tuning")


def cache_folder() -> Path:
    """Return the cache folder: `$SUBTENSORS_CACHE_DIR`, or `subtensors` in the user's cache folder.

    Raises:
        RuntimeError: the user has no home folder.
    """
    if chosen := os.environ.get("SUBTENSORS_CACHE_DIR"):
        return Path(chosen)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore relative paths.
    return (base if base.is_absolute() else Path.home() / ".cache") / "subtensors"


def tuning_key(program: Program, device: torch.device) -> str:
    """A hash of everything that a choice depends on: the program without its name, the compiler, the kind of device."""
    text = "\n".join([str(replace(program, name="")), _compiler_version(), device_kind(device)])
    return hashlib.sha256(text.encode()).hexdigest()


def _compiler_version() -> str:
    from subtensors.kernels.runtime.triton_compat import triton

    version: str = triton.__version__
    return version


def device_kind(device: torch.device) -> str:
    """The name and the compute capability of a GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} ({major}.{minor})"


def tiling_file(key: str) -> Path | None:
    """The file of a choice; None when there is no folder to keep it in."""
    try:
        return cache_folder() / f"tiling-{key}.json"
    except RuntimeError as error:
        _warn_once(f"tile sizes are not kept: {error}")
        return None


def tiling_row(program: Program, device: torch.device, best: Tiling, times: dict[Tiling, float]) -> dict[str, object]:
    """Return the content of a cache file: the choice, the candidates, the date, and the device and versions."""
    return {
        "block": best.block,
        "warps": best.warps,
        "candidates": [{**asdict(tiling), "seconds": time} for tiling, time in times.items()],
        "device": device_kind(device),
        "triton": _compiler_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "program": str(program),
    }


def read(path: Path | None) -> Tiling | None:
    """The choice in a file; None when the file is missing or unusable."""
    if path is None:
        return None
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        tiling = Tiling(row["block"], row["warps"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _warn_once(f"{path} is ignored: {type(error).__name__}: {error}")
        return None
    if not (_is_power_of_two(tiling.block, 2**16) and _is_power_of_two(tiling.warps, 32)):
        _warn_once(f"{path} is ignored: {tiling} is no tiling")
        return None
    return tiling


def _is_power_of_two(number: object, limit: int) -> bool:
    return type(number) is int and 0 < number <= limit and number & (number - 1) == 0


def write(path: Path | None, row: dict[str, object]) -> None:
    """Write a choice to disk atomically."""
    if path is None:
        return
    # A name that no other process uses, even on another host that shares the folder.
    draft = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(json.dumps(row, indent=1), encoding="utf-8")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        _warn_once(f"tile sizes are not kept in {path.parent}: {error.strerror}")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
