"""Code generation: a segment of a program as a Triton kernel over pointer tables (laid out in `segment_writer`)."""

from __future__ import annotations

import functools
import itertools
import linecache
import re
from dataclasses import dataclass
from typing import Any

from subtensors.kernels.fused.program import Program, Shape
from subtensors.kernels.fused.segment_writer import ARGUMENTS, SegmentWriter, function_source
from subtensors.kernels.fused.segments import Segment
from subtensors.kernels.fused.tile_writer import TileWriter
from subtensors.kernels.runtime.launcher import JitKernel


@dataclass(frozen=True)
class Kernel:
    """A compiled-on-first-use Triton kernel and the segment it runs."""

    segment: Segment
    run: JitKernel
    source: str
    name: str
    block: int
    """Elements a tile, or tensors a program."""


def write_kernel(program: Program, segment: Segment, name: str, block: int) -> Kernel:
    """The Triton kernel of one segment."""
    writer = TileWriter if segment.shape is Shape.PER_ELEMENT else LaneWriter
    source = renumbered(writer(program, segment, name).source())
    has_codes = any(program.parameters[p].shape is Shape.PER_BLOCK for p in segment.memory.values())
    return Kernel(segment, _compile(source, name, has_codes), source, name, block)


def renumbered(source: str) -> str:
    """The source with its values numbered as they appear: the same math is the same text in every program.

    >>> renumbered("v7 = a + b; v9 = v7 * v7")
    'v0 = a + b; v1 = v0 * v0'
    """
    numbers: dict[str, int] = {}
    return re.sub(r"\bv(\d+)\b", lambda value: f"v{numbers.setdefault(value[1], len(numbers))}", source)


_serial = itertools.count()


@functools.lru_cache(maxsize=256)
def _compile(source: str, name: str, has_codes: bool) -> JitKernel:
    from subtensors.kernels.fused import blockwise_kernel
    from subtensors.kernels.runtime import tile_math_kernel

    # Programs of several dtypes have segments in common, which Triton then compiles once.
    # Triton asks `inspect` for a function's source, and `inspect` asks `linecache`.
    filename = f"<subtensors {name} {next(_serial)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    names: dict[str, Any] = vars(tile_math_kernel) | vars(blockwise_kernel) | {"__name__": __name__}
    if has_codes:
        # The last bit of a quotient does not matter beside 8-bit codes.
        names |= {"sqrt": blockwise_kernel.approximate_sqrt, "div": blockwise_kernel.approximate_div}
    exec(compile(source, filename, "exec"), names)
    kernel: JitKernel = names[name]
    return kernel


class LaneWriter(SegmentWriter):
    """A tensor segment: one lane a tensor."""

    MASK = ", mask=inside, other=0"

    def is_tile(self, index: int) -> bool:
        """Return True: a program holds one number per lane of every value."""
        return True

    def source(self) -> str:
        """The kernel."""
        body = [
            "tile = tl.program_id(0)",
            "lane = tl.arange(0, BLOCK)",
            "tensor = tile * BLOCK + lane",
            "inside = tensor < N",
            f"size = tl.load(table + tensor{self.MASK})",
            "seed = tl.load(seed_pointer)",
            "which = 0",
            *self.steps(),
        ]
        for parameter, value in self.segment.stores.items():
            text = self.in_memory(value, self.program.parameters[parameter].dtype)
            body.append(f"tl.store({self.pointer(parameter)}, {text}, mask=inside)")
        for number, value in self.segment.outputs.items():
            text = self.in_memory(value, self.value(value).dtype)
            body.append(f"tl.store(out{number} + tensor, {text}, mask=inside)")
        for slot, value in self.segment.keeps.items():
            body.append(f"tl.store(slots + {slot} * N + tensor, to_bits(v{value}), mask=inside)")
        return function_source(self.name, f"{ARGUMENTS}{self.outputs}", body, kernel=True)
