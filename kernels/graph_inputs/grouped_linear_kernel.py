"""The kernel of `products`."""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import tl, triton


@triton.jit
def products_kernel(
    x, w0, w1, w2, b0, b1, b2, y0, y1, y2, M, N0, N1, N2, K, STRIDE,
    HAS_BIAS: tl.constexpr, IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One tile of one of up to three products; one that there is not has no columns.

    IS_WHOLE tells that the inner dimension is a multiple of INNER.
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
    of_x = x + m.to(tl.int64)[:, None] * STRIDE + k[None, :]
    of_w = w + n.to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_left, of_right = (m < M)[:, None], (n < N)[:, None]
    for begin in range(0, K, INNER):
        if IS_WHOLE:
            left = tl.load(of_x + begin, mask=of_left, other=0)
            right = tl.load(of_w + begin, mask=of_right, other=0)
        else:
            inside = (k < K - begin)[None, :]
            left = tl.load(of_x + begin, mask=of_left & inside, other=0)
            right = tl.load(of_w + begin, mask=of_right & inside, other=0)
        total = tl.dot(left, tl.trans(right), total)
    if HAS_BIAS:
        total += tl.load(b + n, mask=n < N, other=0).to(tl.float32)[None, :]
    out = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, total.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
