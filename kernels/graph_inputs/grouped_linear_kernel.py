"""The kernel of `grouped_linear`."""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import tl, triton


@triton.jit
def grouped_linear_kernel(
    x, w0, w1, w2, b0, b1, b2, y0, y1, y2, M, N0, N1, N2, K, STRIDE,
    HAS_BIAS: tl.constexpr, IS_MULTIPLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute a tile of one of three layers; an unused layer has no columns.

    IS_MULTIPLE: whether K is a multiple of INNER.
    """
    tiles = tl.cdiv(M, ROWS)
    # Programs that run at the same time read the same columns of a weight.
    row, column = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    w, b, y, N = w0, b0, y0, N0
    first, second = tl.cdiv(N0, COLUMNS), tl.cdiv(N1, COLUMNS)
    if column >= first + second:
        w, b, y, N = w2, b2, y2, N2
        column -= first + second
    elif column >= first:
        w, b, y, N = w1, b1, y1, N1
        column -= first
    m, n, k = row * ROWS + tl.arange(0, ROWS), column * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INNER)
    x_tile = x + m.to(tl.int64)[:, None] * STRIDE + k[None, :]
    w_tile = w + n.to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    x_inside, w_inside = (m < M)[:, None], (n < N)[:, None]
    for begin in range(0, K, INNER):
        if IS_MULTIPLE:
            left = tl.load(x_tile + begin, mask=x_inside, other=0)
            right = tl.load(w_tile + begin, mask=w_inside, other=0)
        else:
            inside = (k < K - begin)[None, :]
            left = tl.load(x_tile + begin, mask=x_inside & inside, other=0)
            right = tl.load(w_tile + begin, mask=w_inside & inside, other=0)
        total = tl.dot(left, tl.trans(right), total)
    if HAS_BIAS:
        total += tl.load(b + n, mask=n < N, other=0).to(tl.float32)[None, :]
    out = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, total.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
