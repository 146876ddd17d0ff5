"""How a process of a distributed test ends."""

from __future__ import annotations

import gc
import os
import sys

import torch.distributed as dist


def end_of_process() -> None:
    """End this process as one that did what it should; a failure raises before it comes here.

    Threads of gloo may outlive the process group, and abort an interpreter that is finalized meanwhile
    (https://github.com/pytorch/pytorch/pull/179291).
    """
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
