"""A function in several processes, a GPU each, and what the first of them returns."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

P = ParamSpec("P")
Found = TypeVar("Found")


def on_ranks(function: Callable[P, Found], processes: int, device: str, *args: P.args, **kwargs: P.kwargs) -> Found:
    """Call a function of a module in each process of a group; return what the first process's call returned.

    Args:
        function: the function.
        processes: how many.
        device: "cuda", a GPU each and NCCL between them; else "cpu".
        args, kwargs: the function's arguments.

    Raises:
        SystemExit: there are fewer GPUs than processes.
    """
    if device == "cuda" and torch.cuda.device_count() < processes:
        raise SystemExit(f"{processes} processes need a GPU each; there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        given = pickle.dumps((function, args, kwargs)), processes, device, folder
        spawn(_process, given, nprocs=processes)  # type: ignore[no-untyped-call]  # torch's has no types
        found: Found = pickle.loads(Path(folder, "found").read_bytes())
    return found


def _process(rank: int, call: bytes, processes: int, device: str, folder: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend, rendezvous = "nccl" if device == "cuda" else "gloo", f"file://{folder}/rendezvous"
    dist.init_process_group(
        backend, init_method=rendezvous, rank=rank, world_size=processes, timeout=timedelta(seconds=300)
    )
    function, args, kwargs = pickle.loads(call)
    found = function(*args, **kwargs)
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
