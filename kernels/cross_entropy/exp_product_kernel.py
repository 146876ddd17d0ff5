"""A Gluon kernel for Hopper GPUs: exponentials of a product, and their sums a row, in the epilogue of that product.

A persistent program takes tiles of 256 x 128. Two warp groups of 128 x 128 share the tile's rows of W; the second is a
step behind, so that one multiplies while the other computes exponentials. Two further warps load, through rings of
blocks of 64 columns of K.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Their names since Triton 3.7 and before: read in 3.6, 3.9.
async_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
async_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)


@gluon.jit
def place_of(tile, tiles_m, tiles_n, group):
    """Return the row and the column of a tile: `group` rows of tiles are taken by columns, to meet in the L2."""
    in_group = group * tiles_n
    first = tile // in_group * group
    height = gl.minimum(tiles_m - first, group)
    rest = tile % in_group
    return first + rest % height, rest // height


@gluon.jit
def load_upper_and_weight(
    hidden, weight, upper, rows_of_weight, upper_full, upper_free, weight_full, weight_free, tiles_m, tiles_n, group,
    programs, steps, UPPER: gl.constexpr, WEIGHT: gl.constexpr,
):  # fmt: skip
    """Load the tiles' rows of W, and the upper 128 rows of X."""
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, programs):
        tile_m, tile_n = place_of(tile, tiles_m, tiles_n, group)
        for k in range(steps):
            at = step % WEIGHT
            mbarrier.wait(weight_free.index(at), ((step // WEIGHT) & 1) ^ 1)
            mbarrier.expect(weight_full.index(at), weight.block_type.nbytes)
            async_load(weight, [tile_n * 128, k * 64], weight_full.index(at), rows_of_weight.index(at))
            at = step % UPPER
            mbarrier.wait(upper_free.index(at), ((step // UPPER) & 1) ^ 1)
            mbarrier.expect(upper_full.index(at), hidden.block_type.nbytes)
            async_load(hidden, [tile_m * 256, k * 64], upper_full.index(at), upper.index(at))
            step += 1


@gluon.jit
def load_lower(
    hidden, lower, lower_full, lower_free, tiles_m, tiles_n, group, programs, steps, LOWER: gl.constexpr
):  # fmt: skip
    """Load the lower 128 rows of X."""
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, programs):
        tile_m, _ = place_of(tile, tiles_m, tiles_n, group)
        for k in range(steps):
            at = step % LOWER
            mbarrier.wait(lower_free.index(at), ((step // LOWER) & 1) ^ 1)
            mbarrier.expect(lower_full.index(at), hidden.block_type.nbytes)
            async_load(hidden, [tile_m * 256 + 128, k * 64], lower_full.index(at), lower.index(at))
            step += 1


@gluon.jit
def multiply(
    exponentials, hidden, weight, staged, hidden_full, hidden_free, weight_full, weight_free, turn, shifts, sums, rows,
    tiles_m, tiles_n, group, programs, steps, scale, HALF: gl.constexpr, HIDDEN: gl.constexpr, WEIGHT: gl.constexpr,
):  # fmt: skip
    """Compute a half of each tile; the lower one begins when the upper one has a step behind it."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    step = 0
    turns = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, programs):
        tile_m, tile_n = place_of(tile, tiles_m, tiles_n, group)
        row = tile_m * 256 + HALF * 128 + gl.arange(0, 128, gl.SliceLayout(1, layout))
        shift = gl.load(shifts + row, mask=row < rows, other=0.0)
        if HALF == 1:
            mbarrier.wait(turn, turns & 1)
        product = gl.zeros((128, 128), gl.float32, layout)
        for k in range(steps):
            at_hidden = step % HIDDEN
            at_weight = step % WEIGHT
            mbarrier.wait(hidden_full.index(at_hidden), (step // HIDDEN) & 1)
            mbarrier.wait(weight_full.index(at_weight), (step // WEIGHT) & 1)
            product = warpgroup_mma(
                hidden.index(at_hidden), weight.index(at_weight).permute((1, 0)), product, is_async=True
            )
            product = warpgroup_mma_wait(num_outstanding=1, deps=(product,))
            before = gl.maximum(step - 1, 0)
            mbarrier.arrive(hidden_free.index(before % HIDDEN), count=1, pred=k > 0)
            mbarrier.arrive(weight_free.index(before % WEIGHT), count=1, pred=k > 0)
            if HALF == 0:
                mbarrier.arrive(turn, count=1, pred=k == 1)
            step += 1
        product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
        mbarrier.arrive(hidden_free.index((step - 1) % HIDDEN), count=1)
        mbarrier.arrive(weight_free.index((step - 1) % WEIGHT), count=1)
        found = gl.exp2(product * scale - shift[:, None])
        total = gl.sum(found, 1)
        left, right = found.to(gl.bfloat16).reshape((128, 2, 64)).permute((0, 2, 1)).split()
        tma.store_wait(0)
        staged.store(left)
        fence_async_shared()
        async_store(exponentials, [tile_m * 256 + HALF * 128, tile_n * 128], staged)
        gl.store(sums + tile_n.to(gl.int64) * rows + row, total, mask=row < rows)
        tma.store_wait(0)
        staged.store(right)
        fence_async_shared()
        async_store(exponentials, [tile_m * 256 + HALF * 128, tile_n * 128 + 64], staged)
        turns += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "group", "programs"])
def exp_product_kernel(
    shifts, sums, hidden, weight, exponentials, rows, columns, tiles_m, tiles_n, group, programs, scale,
    HIDDEN: gl.constexpr, WEIGHT: gl.constexpr,
):  # fmt: skip
    """Compute E = exp2(scale X W^T - shifts), (rows, V), and the sums of each row over 128 columns, (V / 128, rows).

    Args:
        shifts: (rows,) float32.
        sums: (V / 128, rows) float32.
        hidden, weight, exponentials: descriptors of bfloat16 matrices with blocks of (128, 64).
        rows, columns: of X.
        tiles_m, tiles_n: of the result.
        group: rows of tiles that are taken together.
        programs: that are launched.
        scale: of the product.
        HIDDEN, WEIGHT: blocks in the rings.
    """
    tile: gl.constexpr = hidden.layout
    upper = gl.allocate_shared_memory(gl.bfloat16, [HIDDEN, 128, 64], tile)
    lower = gl.allocate_shared_memory(gl.bfloat16, [HIDDEN, 128, 64], tile)
    of_weight = gl.allocate_shared_memory(gl.bfloat16, [WEIGHT, 128, 64], tile)
    upper_staged = gl.allocate_shared_memory(gl.bfloat16, [128, 64], tile)
    lower_staged = gl.allocate_shared_memory(gl.bfloat16, [128, 64], tile)
    upper_full = gl.allocate_shared_memory(gl.int64, [HIDDEN, 1], mbarrier.MBarrierLayout())
    upper_free = gl.allocate_shared_memory(gl.int64, [HIDDEN, 1], mbarrier.MBarrierLayout())
    lower_full = gl.allocate_shared_memory(gl.int64, [HIDDEN, 1], mbarrier.MBarrierLayout())
    lower_free = gl.allocate_shared_memory(gl.int64, [HIDDEN, 1], mbarrier.MBarrierLayout())
    weight_full = gl.allocate_shared_memory(gl.int64, [WEIGHT, 1], mbarrier.MBarrierLayout())
    weight_free = gl.allocate_shared_memory(gl.int64, [WEIGHT, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(HIDDEN):
        mbarrier.init(upper_full.index(i), count=1)
        mbarrier.init(upper_free.index(i), count=1)
        mbarrier.init(lower_full.index(i), count=1)
        mbarrier.init(lower_free.index(i), count=1)
    for i in gl.static_range(WEIGHT):
        mbarrier.init(weight_full.index(i), count=1)
        mbarrier.init(weight_free.index(i), count=2)
    mbarrier.init(turn, count=1)
    steps = gl.cdiv(columns, 64)
    gl.warp_specialize([
        (multiply, (exponentials, upper, of_weight, upper_staged, upper_full, upper_free, weight_full, weight_free,
                    turn, shifts, sums, rows, tiles_m, tiles_n, group, programs, steps, scale, 0, HIDDEN, WEIGHT)),
        (multiply, (exponentials, lower, of_weight, lower_staged, lower_full, lower_free, weight_full, weight_free,
                    turn, shifts, sums, rows, tiles_m, tiles_n, group, programs, steps, scale, 1, HIDDEN, WEIGHT)),
        (load_upper_and_weight, (hidden, weight, upper, of_weight, upper_full, upper_free, weight_full, weight_free,
                                 tiles_m, tiles_n, group, programs, steps, HIDDEN, WEIGHT)),
        (load_lower, (hidden, lower, lower_full, lower_free, tiles_m, tiles_n, group, programs, steps, HIDDEN)),
    ], [4, 1, 1], [232, 24, 24])  # fmt: skip
