"""Numbers of the host on a device, without waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from subtensors.kernels.runtime import graph_lifetime


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """A copy of `array` on `device`, without waiting for it.

    While a graph is being captured the copy becomes part of it and reads the host memory again at each
    replay, so that memory is kept as long as the graph lives.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host
    pinned = host.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        graph_lifetime.keep_with_graph(pinned)
    else:
        graph_lifetime.let_go()
    return pinned.to(device, non_blocking=True)
