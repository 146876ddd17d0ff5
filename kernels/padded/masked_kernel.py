"""The functions that the masked kernels share: the location of a tile in memory, and its valid elements.

The levels, sizes and slots are those of `masked_layout`.
"""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import libdevice, tl, triton


@triton.jit
def exp(x, FAST: tl.constexpr):
    """e ** x; Triton's own `exp` on float32 has an error in proportion to x, which half precision rounds away."""
    if FAST or x.dtype == tl.float64:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def _index(level, div, mod, HAS_MOD: tl.constexpr):
    """The index of a dimension within its level."""
    at = level // div
    if HAS_MOD:
        at = at % mod
    return at


@triton.jit
def _level(WHICH: tl.constexpr, r1, r0, c1, c0):
    if WHICH == 0:  # noqa: SIM116  (Triton has no dictionaries)
        return r1
    elif WHICH == 1:
        return r0
    elif WHICH == 2:
        return c1
    else:
        return c0


@triton.jit
def _row_sizes(sizes, row, inside):
    """The sizes of a tile's rows, (BM, 1).

    They are loaded as a vector: a column's layout has one thread for each row, and would spread to the tile, so that a
    thread held whole rows of it.
    """
    BM: tl.constexpr = row.shape[0]
    return tl.load(sizes + tl.reshape(row, [BM]), mask=tl.reshape(inside, [BM]), other=0)[:, None]


@triton.jit
def _is_inside(slot, STATICS: tl.constexpr, SLOT: tl.constexpr, r1, r0, c1, c0, R0, C0, COARSE: tl.constexpr):
    sizes, div, mod, batch_div, batch_mod = slot
    at = _level(STATICS[SLOT][0], r1, r0, c1, c0)
    if STATICS[SLOT][1]:
        at = _index(at, div, mod, True)
        scale = 1
    else:
        # at // div < size is the same as at < size * div: one product in place of many quotients.
        scale = div
    if STATICS[SLOT][0] % 2 == 0:
        # The level is a scalar within a tile; as a tile of one element it also works in Triton's interpreter.
        at = at + tl.zeros([1, 1], tl.int32)
    if COARSE:
        # Sixteen neighbours are loaded or skipped together, so that each thread makes one wide load.
        at = at // 16 * 16
    if STATICS[SLOT][2] >= 0:
        row = _index(_level(STATICS[SLOT][2], r1, r0, c1, c0), batch_div, batch_mod, STATICS[SLOT][3])
        # Lanes past the end of a level belong to no row.
        if STATICS[SLOT][2] == 1:
            size = _row_sizes(sizes, row, r0 < R0)
        elif STATICS[SLOT][2] == 3:
            size = tl.load(sizes + row, mask=c0 < C0, other=0)
        else:
            size = tl.load(sizes + row)
    else:
        size = tl.load(sizes)
    return at < size * scale


@triton.jit
def rows_inside(slots, STATICS: tl.constexpr, ROW_SLOTS: tl.constexpr, r1, r0, R0):
    """Return the mask of a tile's valid rows, (BM, 1)."""
    inside = r0 < R0
    for i in tl.static_range(ROW_SLOTS):
        inside &= _is_inside(slots[i], STATICS, i, r1, r0, 0, 0, R0, 1, False)
    return inside


@triton.jit
def columns_inside(slots, STATICS: tl.constexpr, ROW_SLOTS: tl.constexpr, r1, r0, c1, c0, R0, C0, COARSE: tl.constexpr):
    """Return the mask of elements in valid columns, (1 or BM, BN); `COARSE` may include some neighbours."""
    inside = c0 < C0
    for i in tl.static_range(ROW_SLOTS, len(STATICS)):
        inside &= _is_inside(slots[i], STATICS, i, r1, r0, c1, c0, R0, C0, COARSE)
    return inside


@triton.jit
def rows_of(tile, R0, BM: tl.constexpr):
    """Return the outer index of a tile's rows, and their inner ones, (BM, 1)."""
    row_tiles = tl.cdiv(R0, BM)
    return tile // row_tiles, (tile % row_tiles * BM + tl.arange(0, BM))[:, None]


@triton.jit
def elements_inside(slots, STATICS: tl.constexpr, ROW_SLOTS: tl.constexpr, r1, r0, c1, c0, R0, C0, in_rows):
    """Return the masks of a tile's elements to load, some neighbours included, and of the valid ones, (BM, BN)."""
    loaded = in_rows & columns_inside(slots, STATICS, ROW_SLOTS, r1, r0, c1, c0, R0, C0, True)
    valid = in_rows & columns_inside(slots, STATICS, ROW_SLOTS, r1, r0, c1, c0, R0, C0, False)
    return loaded, valid


@triton.jit
def column_bounds(slots, STATICS: tl.constexpr, ROW_SLOTS: tl.constexpr, r1, r0, c1, in_rows, R0, C0):
    """Return the column before which all elements of a tile's rows are valid, and the one from which none is."""
    full_end = tl.min(in_rows.to(tl.int64)) * C0
    valid_end = tl.max(in_rows.to(tl.int64)) * C0
    for i in tl.static_range(ROW_SLOTS, len(STATICS)):
        sizes, div, mod, batch_div, batch_mod = slots[i]
        if STATICS[i][2] == 3 or STATICS[i][0] < 2 or (STATICS[i][0] == 3 and STATICS[i][1]):
            # Valid and padded elements alternate along the columns.
            full_end = full_end * 0
        else:
            if STATICS[i][2] == 1:
                size = _row_sizes(sizes, _index(r0, batch_div, batch_mod, STATICS[i][3]), in_rows)
                max_size = tl.max(size)
                min_size = tl.min(tl.where(in_rows, size, max_size))
            else:
                if STATICS[i][2] == 0:
                    min_size = tl.load(sizes + _index(r1, batch_div, batch_mod, STATICS[i][3]))
                elif STATICS[i][2] == 2:
                    min_size = tl.load(sizes + _index(c1, batch_div, batch_mod, STATICS[i][3]))
                else:
                    min_size = tl.load(sizes)
                max_size = min_size
            if STATICS[i][0] == 3:
                full_end = tl.minimum(full_end, min_size * div)
                valid_end = tl.minimum(valid_end, max_size * div)
            else:
                at = _index(c1, div, mod, STATICS[i][1])
                full_end = full_end * (at < min_size).to(tl.int64)
                valid_end = valid_end * (at < max_size).to(tl.int64)
    return full_end, valid_end
