"""Cells that other processes run: two ranks of a process group, or a fresh process."""

from __future__ import annotations

import pickle
import tempfile
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from process_end import end_of_process

from composition.attempts import Comparison, compared
from composition.table import ROWS, Column, Meaningless


@cache
def ran_elsewhere(name: str, device: str) -> dict[Column, list[Comparison]]:
    """Run all cells of a row in its processes, and return what each process found."""
    ranks = ROWS[name].ranks
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_process, (name, device, folder), nprocs=ranks, start_method="spawn")
        found = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(ranks)]
    return {column: [of[column] for of in found] for column in found[0]}


def _process(rank: int, name: str, device: str, folder: str) -> None:
    torch.set_num_threads(1)
    row = ROWS[name]
    if device == "cuda":
        torch.cuda.set_device(rank)
    if row.ranks > 1:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=row.ranks,
            timeout=timedelta(seconds=30),
        )
    columns = [column for column, cell in row.cells.items() if not isinstance(cell.expected, Meaningless)]
    found = {column: compared(row, column, device) for column in columns}
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    if row.ranks > 1:
        end_of_process()
