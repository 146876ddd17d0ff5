"""Dynamic scalars of captured launches: what is set reaches the device with the next upload."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
import torch

from subtensors.dispatch.graphs.dynamic_scalars import DynamicScalars, Recordable, WordBuffer, current_scalars

CPU = torch.device("cpu")


class Launch(Recordable):
    """A launch that reads the first two numbers of its call, and perhaps a tensor on the host."""

    def __init__(self, hosts: Sequence[int] = ()) -> None:
        self.scalars = [lambda n: n[0], lambda n: n[1] * 2]
        self.hosts = hosts
        self.kinds = [float, int, *[float] * len(hosts)]


def as_float(word: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", word))[0])


def read(memory: torch.Tensor, count: int = 2) -> list[int]:
    """The first words of some memory."""
    return [int(n) for n in memory[:count]]


def test_a_launch_reads_the_numbers_of_its_source_after_an_upload() -> None:
    scalars = DynamicScalars()
    memory = {}
    for source in ("a", "b"):
        scalars.source = source
        memory[source] = scalars.allocate(Launch(), [0.5, 3], [], CPU)
    scalars.upload()
    scalars.set("b", [-0.0, 4], [])
    assert as_float(read(memory["b"])[0]) == 0.5
    scalars.upload()
    assert [as_float(n) for n in read(memory["a"])[:1]] == [0.5]
    first, second = read(memory["b"])
    assert (str(as_float(first)), second) == ("-0.0", 8)
    scalars.set("b", [0.0, 4], [])  # which Python finds equal to -0.0
    scalars.upload()
    assert str(as_float(read(memory["b"])[0])) == "0.0"


def test_a_launch_without_tensors_on_the_host_ignores_those_of_its_source() -> None:
    scalars = DynamicScalars()
    plain, host = scalars.allocate(Launch(), [1.0, 1], [], CPU), scalars.allocate(Launch([0]), [1.0, 1], [7.0], CPU)
    scalars.set(None, [2.0, 1], [8.0])
    scalars.upload()
    assert [as_float(read(at)[0]) for at in (plain, host)] == [2.0, 2.0]
    assert as_float(read(host, 3)[2]) == 8.0


def test_many_launches_have_words_of_their_own() -> None:
    scalars = DynamicScalars()
    memory = [scalars.allocate(Launch(), [float(i), i], [], CPU) for i in range(400)]
    scalars.upload()
    assert len(scalars._buffers) > 1
    assert [as_float(read(at)[0]) for at in memory] == [float(i) for i in range(400)]
    assert all(b.matches_device() for b in scalars._buffers)


@pytest.mark.parametrize("offset", [0, 3, 6])
def test_a_buffer_uploads_what_changed(offset: int) -> None:
    buffer = WordBuffer(8, CPU)
    buffer.upload()
    assert buffer.matches_device()
    buffer.write(offset, [100, 101])
    assert not buffer.matches_device()
    buffer.upload()
    assert buffer.matches_device()


def test_scalars_are_current_within_their_context() -> None:
    scalars = DynamicScalars()
    assert current_scalars() is None
    with scalars.active():
        assert current_scalars() is scalars
    assert current_scalars() is None
