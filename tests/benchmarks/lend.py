"""The benchmark of lent memory: an arena with AdamW's state is released and restored, beside plain copies."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.rows import Setting, save
from benchmarks.table import figure
from demo.timing import seconds
from subtensors.static.arena import Arena

_NUMEL = 1 << 24  # of a parameter: 64 MiB in float32
_COPY = 1 << 30


@dataclass(frozen=True)
class LentRow:
    """One sleep of a job that has its optimizer's state in an arena.

    Args:
        sleep: "first", in which the host's memory is made and page-locked, or "next", which finds it.
        state_bytes: of the state.
        release_s: until `release()` returned; the copy to the host, and on the first sleep page-locking, are in it.
        restore_s: until `restore()` returned, with mapping, copying and waking.
        release_gbps: `state_bytes` over `release_s`.
        restore_gbps: `state_bytes` over `restore_s`.
        to_host_gbps: the limit: a plain copy of page-locked memory, in the same process.
        from_host_gbps: likewise.
        restore_percent: `restore_gbps` over `from_host_gbps`.
        freed_bytes: more of the device's memory that was free, by the driver's count, while the arena slept.
        freed_percent: `freed_bytes` over `state_bytes`.
        is_equal: every bit and every address of the state is what it was.
        setting: where it was measured.
    """

    sleep: str
    state_bytes: int
    release_s: float
    restore_s: float
    release_gbps: float
    restore_gbps: float
    to_host_gbps: float
    from_host_gbps: float
    restore_percent: float
    freed_bytes: int
    freed_percent: float
    is_equal: bool
    setting: Setting


def measure_lending(gigabytes: float, device: str, sleeps: int = 3) -> list[LentRow]:
    """Release and restore an arena that holds the state of AdamW.

    Args:
        gigabytes: of state, in units of 1e9 bytes; the parameters and gradients, which stay, are as much again.
        device: "cuda", or "cpu" for a run with tiny sizes that only shows that everything works.
        sleeps: how many.

    Returns:
        A row a sleep.
    """
    from subtensors.optim import AdamW

    tiny = device != "cuda"
    numel = 1 << 10 if tiny else _NUMEL
    count = max(1, round(gigabytes * 1e9 / (8 * numel)))
    to_host, from_host = copy_limits(device, 1 << 16 if tiny else _COPY)
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(numel, device=device)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    arena = Arena(device)
    optimizer = AdamW(params, lr=1e-3, arena=arena, graph=True)  # the graph must outlive each sleep
    optimizer.step()
    state: list[Tensor] = [value for p in params for value in optimizer.state[p].values()]
    size = sum(t.nbytes for t in state)
    rows = []
    for number in range(sleeps):
        before = [(t.data_ptr(), _digest(t)) for t in state]
        if device == "cuda":
            torch.cuda.empty_cache()
        free = _free(device)
        release_s = seconds(arena.release, device)
        freed = _free(device) - free
        restore_s = seconds(arena.restore, device)
        is_equal = [(t.data_ptr(), _digest(t)) for t in state] == before
        optimizer.step()
        rows.append(
            LentRow(
                sleep="next" if number else "first",
                state_bytes=size,
                release_s=release_s,
                restore_s=restore_s,
                release_gbps=size / release_s / 1e9,
                restore_gbps=size / restore_s / 1e9,
                to_host_gbps=to_host,
                from_host_gbps=from_host,
                restore_percent=100 * size / restore_s / 1e9 / from_host,
                freed_bytes=freed,
                freed_percent=100 * freed / size,
                is_equal=is_equal,
                setting=Setting.now(device, tiny),
            )
        )
    return rows


def copy_limits(device: str, size: int, repeats: int = 5) -> tuple[float, float]:
    """GB/s of a plain copy between the device and page-locked memory, to the host and from it; best of some."""
    there = torch.ones(size, dtype=torch.uint8, device=device)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    best = []
    for target, source in ((here, there), (there, here)):
        spans = [seconds(lambda t=target, s=source: t.copy_(s, non_blocking=True), device) for _ in range(repeats)]  # type: ignore[misc]
        best.append(size / min(spans) / 1e9)
    return best[0], best[1]


def _free(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def _digest(t: Tensor) -> int:
    """A number that another bit in the tensor would change."""
    bits = t.reshape(-1).view(torch.int32).to(torch.int64)
    return int((bits * torch.arange(1, 2 * bits.numel(), 2, device=t.device)).sum())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark, and what runs it."""
    parser.add_argument("--gigabytes", type=float, default=20, help="of AdamW state (default: 20)")
    parser.add_argument("--sleeps", type=int, default=3, help="how often it is released and restored (default: 3)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder that lend.json is written to")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    gigabytes = options.gigabytes if options.device == "cuda" else 0.0001
    rows = measure_lending(gigabytes, options.device, options.sleeps)
    Console().print(lent_table(rows))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        save(rows, options.out / "lend.json")
    return 0


COLUMNS: dict[str, Callable[[LentRow], str]] = {
    "sleep": lambda row: row.sleep,
    "state GB": lambda row: figure(row.state_bytes / 1e9),
    "release s": lambda row: figure(row.release_s, 3),
    "restore s": lambda row: figure(row.restore_s, 3),
    "restore GB/s": lambda row: figure(row.restore_gbps, 3),
    "% of copy": lambda row: figure(row.restore_percent, 3),
    "freed %": lambda row: figure(row.freed_percent, 4),
    "equal": lambda row: "yes" if row.is_equal else "NO",
}


def lent_table(rows: list[LentRow]) -> Table:
    """One line a sleep."""
    setting = rows[0].setting
    title = f"{setting.device}, torch {setting.torch}, {setting.date} UTC"
    result = Table(title=title + ("\nTiny sizes: the figures mean nothing." if setting.tiny else ""))
    for name in COLUMNS:
        result.add_column(name, justify="right")
    for row in rows:
        result.add_row(*(cell(row) for cell in COLUMNS.values()))
    return result
