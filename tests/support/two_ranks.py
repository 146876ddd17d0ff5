"""A function in two processes of a gloo group, or in more."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from process_end import end_of_process

Found = TypeVar("Found")


def on_two_ranks(function: Callable[[Path], Found], folder: Path, ranks: int = 2) -> list[Found]:
    """Call a function of a module in each of two processes, and return what each call returned.

    Args:
        function: given the folder.
        folder: an empty one, which all share.
        ranks: how many processes, if not two.
    """
    mp.start_processes(_process, (function, folder, ranks), nprocs=ranks, start_method="spawn")
    return [pickle.loads(Path(folder, f"rank{rank}").read_bytes()) for rank in range(ranks)]


def _process(rank: int, function: Callable[[Path], object], folder: Path, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    Path(folder, f"rank{rank}").write_bytes(pickle.dumps(function(folder)))
    end_of_process()
