"""Tile sizes by measurement: the fastest for one program on one kind of device, kept on disk.

Elementwise kernels are bound by memory, so one tiling is good for nearly all of them (`Tiling()`); a program with many
live values, narrow dtypes or another GPU may gain a few percent from another one. A choice is made on request only,
because measuring compiles every candidate, and it is kept for later processes on a device of the same kind: as a JSON
file, named by a hash of the program, the compiler and the device.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import statistics
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from subtensors.kernels.fused.blockwise import SIZE, block_count
from subtensors.kernels.fused.launch import Grid, KernelSet, Tiling, bits
from subtensors.kernels.fused.program import Instruction, Parameter, Program, Shape
from subtensors.kernels.runtime.graph_lifetime import to_device

logger = logging.getLogger("subtensors.tuning")

CANDIDATES = tuple(
    Tiling(block, warps)
    for block, warps in ((256, 1), (256, 2), (512, 2), (512, 4), (1024, 2), (1024, 4), (1024, 8), (2048, 8))
)
"""The candidates that `tune` compares; each thread gets 2 to 16 elements."""

MAX_SCRATCH_BYTES = 2**30
"""Scratch memory of a measurement: enough that caches do not matter."""

MIN_CACHES = 4
"""Scratch memory is at least this many times the L2 cache; with less, nothing is measured."""

ROUNDS, LAUNCHES = 7, 10
"""Timings of each candidate, and launches a timing."""

_chosen: dict[str, Tiling] = {}
"""Key -> the tiling that this process has measured or read."""


def tuned_tiling(program: Program, device: torch.device) -> Tiling:
    """Return the tiling of a program's sweeps: the one measured earlier on this kind of device, or the default.

    With `SUBTENSORS_TUNE=1` in the environment, a program that was never measured is measured now.

    Example:
        >>> tuned_tiling(Program("nothing", (), ()), torch.device("cpu"))
        Tiling(block=512, warps=2)
    """
    if not _is_gpu(device):
        return Tiling()
    known = _known(program, device)
    if known is None and os.environ.get("SUBTENSORS_TUNE") == "1":
        return tune(program, device)
    return known or default_tiling(program)


def default_tiling(program: Program) -> Tiling:
    """Return the tiling of a program that was not measured: one warp per block, where it has numbers per block.

    A block's scale is then found within one warp, which waits for no other.
    """
    has_blocks = any(p.shape is Shape.PER_BLOCK for p in program.parameters)
    return Tiling(SIZE, 1) if has_blocks else Tiling()


def _known(program: Program, device: torch.device) -> Tiling | None:
    key = tuning_key(program, device)
    known = _chosen.get(key) or read_choice(tiling_file(key))
    return known and _chosen.setdefault(key, known)


def tune(program: Program, device: torch.device, candidates: Sequence[Tiling] = CANDIDATES) -> Tiling:
    """Measure every candidate on scratch tensors, and keep the fastest for this and later processes.

    Without a GPU to measure on, or while a CUDA graph is being captured, nothing happens but a line in the log.

    Returns:
        The fastest; without a measurement the current tiling: an earlier choice or the default.

    Example:
        >>> tune(Program("nothing", (), ()), torch.device("cpu"))
        Tiling(block=512, warps=2)
    """
    reason = _why_not_measurable(program, device)
    times: dict[Tiling, float] = {}
    if not reason:
        try:
            times = measure(program, device, candidates)
        except torch.OutOfMemoryError:
            reason = "not enough free device memory"
    if reason:
        current = (_known(program, device) if _is_gpu(device) else None) or default_tiling(program)
        logger.info("%s: tile sizes not measured, %s stays: %s", program.name, current, reason)
        return current
    best = min(times, key=times.__getitem__)
    key = tuning_key(program, device)
    _chosen[key] = best
    write_choice(tiling_file(key), tiling_row(program, device, best, times))
    compared = ", ".join(f"{t.block}/{t.warps} {seconds * 1e3:.3f} ms" for t, seconds in times.items())
    logger.info("%s: %s is the fastest on %s (%s)", program.name, best, device_kind(device), compared)
    return best


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _why_not_measurable(program: Program, device: torch.device) -> str:
    """Return the reason why nothing can be measured; empty when measuring is possible."""
    if not _is_gpu(device):
        return f"{device} is no CUDA device"
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    if not _element_bytes(program):
        return "it has no sweep over elements"
    if _budget(device) < MIN_CACHES * torch.cuda.get_device_properties(device).L2_cache_size:
        return "not enough free device memory"
    return ""


def measure(program: Program, device: torch.device, candidates: Sequence[Tiling]) -> dict[Tiling, float]:
    """Measure the time of one run of the program with each tiling.

    The candidates take turns, so that a drifting clock slows all of them down alike.

    Returns:
        Seconds, the median of several timings of many launches each.
    """
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        launches = _launches(program, device, candidates)
        for launch in launches:
            launch()
        rounds = [[seconds(launch) for launch in launches] for _ in range(ROUNDS)]
    return dict(zip(candidates, map(statistics.median, zip(*rounds, strict=True)), strict=True))


def seconds(launch: Callable[[], None]) -> float:
    """Device time of one of many launches back to back, on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(LAUNCHES):
        launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / LAUNCHES


def _launches(program: Program, device: torch.device, candidates: Sequence[Tiling]) -> list[Callable[[], None]]:
    """For each tiling a function that runs the program once; all of them share one set of scratch tensors."""
    count = _budget(device) // _element_bytes(program)
    # Four large tensors and one of odd size, whose last tile is masked.
    sizes = [*[count // 5] * 4, count // 5 | 1]
    # A generator of its own: tuning must not change the user's random numbers.
    generator = torch.Generator(device).manual_seed(0)
    columns = [[] if p.on_host else _values(p, sizes, generator) for p in program.parameters]
    hosts = [p for p in program.parameters if p.on_host]
    kinds = [*program.scalars, *(float if p.dtype.is_floating_point else int for p in hosts)]
    scalars = to_device(np.asarray([*bits([0.5 if k is float else 1 for k in kinds], kinds), 0]), device)
    seed = torch.zeros((), dtype=torch.int64, device=device)
    grids = [Grid(KernelSet(program, tiling), sizes, device) for tiling in candidates]
    pointers = [[t.data_ptr() for t in column] or [0] * len(sizes) for column in columns]
    tables = [grid.table(pointers) for grid in grids]
    outputs = [
        torch.empty(grids[0].arena if v.shape is Shape.PER_ELEMENT else len(sizes), dtype=v.dtype, device=device)
        for v in map(program.value, program.outputs)
    ]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0

    def launch(grid: Grid, table: Tensor, _columns: list[list[Tensor]]) -> None:
        grid.launch(table.data_ptr(), scalars.data_ptr(), seed.data_ptr(), outputs, stream, stream)

    # The partial keeps the columns alive, since the tables hold only their addresses.
    return [functools.partial(launch, grid, table, columns) for grid, table in zip(grids, tables, strict=True)]


def _values(parameter: Parameter, sizes: Sequence[int], generator: torch.Generator) -> list[Tensor]:
    """A tensor for each size, of numbers in [0, 1) or small positive integers."""

    def values(size: int) -> Tensor:
        empty = torch.empty(size, dtype=parameter.dtype, device=generator.device)
        if parameter.dtype.is_floating_point:
            return empty.uniform_(generator=generator)
        return empty.random_(*((0, 2) if parameter.dtype == torch.bool else (1, 8)), generator=generator)

    if parameter.shape is Shape.PER_ELEMENT:
        return [values(size) for size in sizes]
    if parameter.shape is Shape.PER_BLOCK:
        return [values(block_count(size)) for size in sizes]
    return list(values(len(sizes)).unbind())


def _element_bytes(program: Program) -> int:
    """Bytes of one element of every tensor that the program takes or returns."""
    values: list[Parameter | Instruction] = [*program.parameters, *map(program.value, program.outputs)]
    return sum(v.dtype.itemsize for v in values if v.shape is Shape.PER_ELEMENT)


def _budget(device: torch.device) -> int:
    """Bytes of scratch memory: at most half of what is free."""
    free = torch.cuda.mem_get_info(device)[0]
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(MAX_SCRATCH_BYTES, (free + unused) // 2)


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


def read_choice(path: Path | None) -> Tiling | None:
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


def write_choice(path: Path | None, row: dict[str, object]) -> None:
    """Write a choice to disk in one step, so that processes that tune at the same time neither mix nor lose choices."""
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
