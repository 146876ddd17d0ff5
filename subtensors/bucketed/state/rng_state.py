"""Snapshots of random generators: torch's on some devices, and those that Python code draws from on the host."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subtensors.dispatch.graphs import capture

_CPU = torch.device("cpu")


class RandomPlaces:
    """A snapshot of random generators: the CPU's, those of some GPUs, Python's and NumPy's own.

    Args:
        devices: the devices; the CPU is always included.

    Example:
        >>> places = RandomPlaces()
        >>> _ = random.random()
        >>> places.has_host_drawn()
        True
        >>> places.go_back()
        >>> places.has_host_drawn()
        False
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        others = {device for device in devices if device.type == "cuda"}
        self._places = {device: capture.rng_state(device) for device in (_CPU, *others)}
        self._host = _host_places()

    def has_host_drawn(self) -> bool:
        """Return whether random numbers were drawn on the host since the snapshot; no replay draws those."""
        return _host_places() != self._host or not _are_equal(capture.rng_state(_CPU), self._places[_CPU])

    def go_back(self) -> None:
        """Restore all generators to the snapshot."""
        for device, place in self._places.items():
            capture.set_rng_state(device, place)
        of_python, (name, numbers, *rest) = self._host
        random.setstate(of_python)
        np.random.set_state((name, np.frombuffer(numbers, dtype=np.uint32), *rest))


def _host_places() -> tuple[Any, Any]:
    name, numbers, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (name, np.asarray(numbers).tobytes(), *rest)


def _are_equal(now: Tensor, before: Tensor) -> bool:
    # As bytes: a comparison of tensors would be an op that a capture, or a mode around it, sees.
    return bool(now.numpy().tobytes() == before.numpy().tobytes())
