"""Rows of a benchmark: each says what was measured, on what, with which versions, and when."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch


def installed(package: str) -> str | None:
    """The version of a package, or None where it is not installed.

    >>> installed("no-such-package")
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Setting:
    """Where a row was measured.

    Args:
        device: its name.
        torch: version.
        triton: version, None where it is not installed.
        date: UTC, to the minute.
        tiny: the sizes were cut down and the figures mean nothing.
    """

    device: str
    torch: str
    triton: str | None
    date: str
    tiny: bool

    @staticmethod
    def now(device: str, tiny: bool) -> Setting:
        """The setting of this process."""
        name = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        return Setting(name, torch.__version__, installed("triton"), date, tiny)


class Measured(Protocol):
    """A row of any benchmark: it says where it was measured."""

    @property
    def setting(self) -> Setting:
        """Where it was measured."""
        ...


R = TypeVar("R", bound=Measured)


@dataclass(frozen=True)
class Row:
    """One optimizer step over one set of parameters, in a process of its own with cold caches.

    Args:
        set: of parameters; "copy" for the device-to-device copy that the others are held against.
        variant: which optimizer.
        tensors: in the set.
        numel: elements in the set.
        first_s: the first step, with everything it imports, makes and compiles.
        second_s: the second step.
        step_ms: device time between the step's first and last kernel, of steps enqueued back to back; median.
        wall_ms: host time of one step up to a synchronized device; median.
        cpu_ms: host time until the step returned; median.
        gbps: the least bytes the step must move, over `step_ms`.
        extra_peak_mb: memory a step takes above what is allocated between steps, MiB; None on a CPU.
        kernels_per_step: None on a CPU.
        setting: where it was measured.
        copy_percent: `gbps` over that of the copy measured in the same run.
        copied_bytes: that one step copies, as `count_copied_bytes` counts them; None on a CPU.
    """

    set: str
    variant: str
    tensors: int
    numel: int
    first_s: float
    second_s: float
    step_ms: float
    wall_ms: float
    cpu_ms: float
    gbps: float
    extra_peak_mb: float | None
    kernels_per_step: int | None
    setting: Setting = field(repr=False)
    copy_percent: float | None = None
    copied_bytes: int | None = None


def to_json(row: Measured) -> str:
    """A row of any benchmark as one line of JSON."""
    return json.dumps(asdict(row))  # type: ignore[call-overload]  # a protocol can't say that it is a dataclass


def from_json(kind: type[R], line: str) -> R:
    """The row that `to_json` wrote.

    >>> row = Row("s", "v", 1, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None, None, Setting("d", "2", None, "today", True))
    >>> from_json(Row, to_json(row)) == row
    True
    """
    return _made(kind, json.loads(line))


def save(rows: Sequence[Measured], path: Path) -> None:
    """Write rows as a JSON list, one row a line."""
    path.write_text("[\n" + ",\n".join(map(to_json, rows)) + "\n]\n")


def load(kind: type[R], path: Path) -> list[R]:
    """The rows of one kind that `save` wrote."""
    return [_made(kind, values) for values in json.loads(path.read_text())]


def _made(kind: type[R], values: dict[str, Any]) -> R:
    return kind(**{**values, "setting": Setting(**values["setting"])})
