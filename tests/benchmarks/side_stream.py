"""A stream beside the current one, for what is run before it is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_side_stream(stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """What is run meanwhile goes to another stream, after the current one's work and before what comes next there.

    Args:
        stream: which; a new one by default.
    """
    current, side = torch.cuda.current_stream(), torch.cuda.Stream() if stream is None else stream
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)
