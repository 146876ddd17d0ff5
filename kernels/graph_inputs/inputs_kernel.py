"""The kernel of `InputLoader`: one launch copies and pads all inputs and writes their true sizes.

Inputs are copied as words of 1 to 8 bytes, whatever their dtype. The first programs of the grid take the first input,
the next ones the second, and so on; each program takes a range of the padded tensor's words, and computes where in the
contiguous source each of them lies. Every number is an argument, so that one compiled kernel serves all buckets of a
program.
"""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import tl, triton


@triton.jit
def _words(address, BYTES: tl.constexpr, INPUT: tl.constexpr):
    """Return an address as a pointer to words of `BYTES[INPUT]` bytes."""
    if BYTES[INPUT] == 8:
        return tl.cast(address, tl.int64).to(tl.pointer_type(tl.int64))
    elif BYTES[INPUT] == 4:
        return tl.cast(address, tl.int64).to(tl.pointer_type(tl.int32))
    elif BYTES[INPUT] == 2:
        return tl.cast(address, tl.int64).to(tl.pointer_type(tl.int16))
    else:
        return tl.cast(address, tl.int64).to(tl.pointer_type(tl.int8))


@triton.jit
def _load(
    source, target, tile, total, shape, scale, sizes,
    DIMS: tl.constexpr, BYTES: tl.constexpr, INPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one tile of one input."""
    index = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_target = index < total
    inside = in_target
    rest = index
    at = tl.zeros([BLOCK], tl.int64)
    step = tl.full([], 1, tl.int64)
    for i in tl.static_range(len(DIMS[INPUT]) - 1):
        along = rest % shape[len(DIMS[INPUT]) - 1 - i]
        rest = rest // shape[len(DIMS[INPUT]) - 1 - i]
        if DIMS[INPUT][len(DIMS[INPUT]) - 1 - i] < 0:
            true = tl.cast(shape[len(DIMS[INPUT]) - 1 - i], tl.int64)
        else:
            true = tl.cast(sizes[DIMS[INPUT][len(DIMS[INPUT]) - 1 - i]], tl.int64)
        inside = inside & (along < true)
        at += along * step
        step = step * true
    at += rest * step
    if DIMS[INPUT][0] >= 0:
        inside = inside & (rest < tl.cast(sizes[DIMS[INPUT][0]], tl.int64) * scale)
    word = tl.load(_words(source, BYTES, INPUT) + at, mask=inside, other=0)
    tl.store(_words(target, BYTES, INPUT) + index, word, mask=in_target)


@triton.jit
def load_inputs_kernel(
    sources, targets, first_programs, totals, shapes, scales, sizes, true_sizes,
    DIMS: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `sources[i]` to `targets[i]`, with zeros as padding, for every i; and `sizes` to `true_sizes`.

    `DIMS[i][d]` is the index in `sizes` of the true size of dim d of input i, -1 for a dim without padding. The true
    size of the outermost dim is multiplied by `scales[i]`, since a static dim inside it may be merged into it.
    """
    program = tl.program_id(0)
    if program == 0:
        for j in tl.static_range(len(sizes)):
            tl.store(tl.cast(true_sizes, tl.int64).to(tl.pointer_type(tl.int64)) + j, tl.cast(sizes[j], tl.int64))
    for i in tl.static_range(len(BYTES)):
        if (program >= first_programs[i]) & (program < first_programs[i + 1]):
            _load(
                sources[i], targets[i], program - first_programs[i], totals[i], shapes[i], scales[i], sizes, DIMS,
                BYTES, i, BLOCK,
            )  # fmt: skip
