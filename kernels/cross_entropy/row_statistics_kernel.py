"""Statistics of rows of logits in one read of them, and the gradient of any function of these in one more.

For one row of logits y_k, k < V, transformed as in `softmax_gradient_kernel`:

    u_k = c tanh(y_k / c) / T  (y_k / T without a softcap)
    z_k = r (u_k, or 0 where the class is masked) + o_k    for a scale r of the row and offsets o_k of the classes,
                                                           which are scaled, too, where SCALES_OFFSETS
    m = max_k z_k,   s = sum_k exp(z_k - m)
    L = m + log s,   l_k = (z_k - m) - log s,   p_k = exp(l_k)

    numbers of the row:    L;    l_t for given classes t;    P = sum_k p_k l_k, the negative entropy;
                           E = sum_k p_k v_k for a given vector v;    argmax_k z_k

    for cross entropy:     Q = sum_k w_k q_k z_k for soft targets q and class weights w;    S = sum_k w_k z_k

With upstream gradients g_L, g_t, g_P and g_E, and g_Q and g_S, the gradient of the logits is

    d / d z_k = p_k (a + b l_k + e v_k) + sum_t g_t [k = t] + g_Q w_k q_k + g_S w_k
    d / d y_k = (d / d z_k, or 0 where the class is masked) r du_k / dy_k
    d / d r = sum_k (d / d z_k, or 0 where the class is masked) u_k
    a = g_L - sum_t g_t - g_P P - g_E E,    b = g_P,    e = g_E

`row_statistics_kernel` folds a block of columns into m, s (the online softmax of Milakov and Gimelshein,
https://arxiv.org/abs/1805.02867), q = sum_k exp(z_k - m) (z_k - m) and the other sums of each
row, so that P = q / s - log s; `row_gradient_kernel` writes the gradient of a block of columns, over the logits where
the caller says so. Everything is computed in float32.

The logits of a block lie row by row, or class by class. A program takes ROWS rows and a part of the columns. Where
logits lie row by row, `row_statistics_kernel` has one part, all columns, and `row_gradient_kernel` parts of BLOCK.
Class by class both have as many as `parts_of_columns` says, and each has sums of its own, which `RowSums.complete`
folds together. Rows [rows, row_end) are padding that may be read and written.
"""

from __future__ import annotations

from subtensors.kernels.cross_entropy.softmax_gradient_kernel import shift_of, transformed_logit
from subtensors.kernels.runtime.triton_compat import tl, triton


@triton.jit
def mapped_logit(
    u, scale, offsets, masked, k, inside,
    HAS_SCALE: tl.constexpr, HAS_OFFSETS: tl.constexpr, SCALES_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Return z of classes k."""
    if HAS_SCALE and not SCALES_OFFSETS:
        u = u * scale
    if HAS_OFFSETS:
        is_masked = tl.load(masked + k, mask=inside, other=0) != 0
        u = tl.where(is_masked, 0.0, u) + tl.load(offsets + k, mask=inside, other=0.0)
    if HAS_SCALE and SCALES_OFFSETS:
        u = u * scale
    return u


@triton.jit
def pointers_to(base, row, k, row_stride, column_stride, BY_CLASS: tl.constexpr):
    """Return pointers (ROWS, BLOCK) to columns k of rows; the smaller stride is 1, and the other takes 64 bits."""
    if BY_CLASS:
        return (base + k.to(tl.int64) * column_stride)[None, :] + row[:, None]
    else:
        return (base + row.to(tl.int64) * row_stride)[:, None] + k[None, :]


@triton.jit
def row_statistics_kernel(
    logits, targets, vector, soft, class_weight, scales, offsets, masked, row_maxes, sum_exps, sum_exp_logits,
    sum_exp_vectors, argmaxes, target_logits, logit_sums, row_stride, column_stride, soft_stride, rows, row_end,
    all_rows, begin, columns, columns_of_part, softcap, inv_temperature, TARGETS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, EXACT_ENTROPY: tl.constexpr, HAS_VECTOR: tl.constexpr, HAS_ARGMAX: tl.constexpr,
    SOFT_TARGETS: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_OFFSETS: tl.constexpr, SCALES_OFFSETS: tl.constexpr, BY_CLASS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold columns [begin, begin + columns) into the sums of each row, a program for ROWS rows and a part of them.

    Sums are (parts, all_rows). `targets` and `target_logits` are (TARGETS, all_rows); for soft targets `target_logits`
    is Q, a sum.
    """
    row_blocks = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % row_blocks * ROWS + tl.arange(0, ROWS)
    valid, exists = row < rows, row < row_end
    part = tl.program_id(0) // row_blocks
    first = part * columns_of_part
    last = tl.minimum(first + columns_of_part, columns)
    own = part.to(tl.int64) * all_rows + row
    row_max = tl.load(row_maxes + own, mask=valid, other=0.0)
    sum_exp = tl.load(sum_exps + own, mask=valid, other=0.0)
    if HAS_ENTROPY:
        sum_exp_logit = tl.load(sum_exp_logits + own, mask=valid, other=0.0)
    if HAS_VECTOR:
        sum_exp_vector = tl.load(sum_exp_vectors + own, mask=valid, other=0.0)
    if HAS_ARGMAX:
        argmax = tl.load(argmaxes + own, mask=valid, other=0)
    if SOFT_TARGETS:
        target_logit = tl.load(target_logits + own, mask=valid, other=0.0)
    if HAS_SMOOTHING:
        logit_sum = tl.load(logit_sums + own, mask=valid, other=0.0)
    scale_of_row = 1.0
    if HAS_SCALE:
        scale_of_row = tl.load(scales + row, mask=valid, other=0.0)[:, None]
    for start in range(first, last, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = valid[:, None] & (k < last)[None, :]
        place = pointers_to(logits, row, k, row_stride, column_stride, BY_CLASS)
        y = tl.load(place, mask=exists[:, None] & (k < last)[None, :], other=0.0).to(tl.float32)
        u, _ = transformed_logit(y, softcap, inv_temperature, HAS_SOFTCAP)
        z = mapped_logit(
            u, scale_of_row, offsets, masked, (begin + k)[None, :], (k < last)[None, :],
            HAS_SCALE, HAS_OFFSETS, SCALES_OFFSETS,
        )  # fmt: skip
        z = tl.where(inside, z, float("-inf"))
        block_max = tl.max(z, 1)
        if HAS_ARGMAX:
            found = (begin + start + tl.argmax(z, 1)).to(tl.int64)
            is_first = (block_max > row_max) | ((block_max == row_max) & (found < argmax))  # in any order of blocks
            argmax = tl.where(is_first, found, argmax)
        new_max = tl.maximum(row_max, block_max)
        shift = shift_of(new_max)
        scale = tl.exp(row_max - shift)
        shifted = z - shift[:, None]
        e = tl.exp(shifted)
        if HAS_ENTROPY:
            # Of the earlier columns each z - m moved by the change of m; where there were none the sums are 0.
            moved = tl.where(sum_exp > 0, (row_max - shift) * sum_exp, 0.0)
            counted = inside if EXACT_ENTROPY else e > 0
            sum_exp_logit = scale * (sum_exp_logit + moved) + tl.sum(tl.where(counted, e * shifted, 0.0), 1)
        if HAS_VECTOR:
            v = tl.load(vector + begin + k, mask=k < last, other=0.0).to(tl.float32)[None, :]
            sum_exp_vector = scale * sum_exp_vector + tl.sum(tl.where(inside, e * v, 0.0), 1)
        sum_exp = scale * sum_exp + tl.sum(e, 1)
        row_max = new_max
        if SOFT_TARGETS or HAS_SMOOTHING:
            w = tl.full((1, BLOCK), 1.0, tl.float32)
            if HAS_CLASS_WEIGHT:
                w = tl.load(class_weight + begin + k, mask=k < last, other=0.0).to(tl.float32)[None, :]
            if HAS_SMOOTHING:
                logit_sum += tl.sum(tl.where(inside, w * z, 0.0), 1)
            if SOFT_TARGETS:
                place = pointers_to(soft, row, k, soft_stride, 1, False)
                q = tl.load(place, mask=inside, other=0.0).to(tl.float32)
                target_logit += tl.sum(tl.where(inside, w * q * z, 0.0), 1)
    for t in tl.static_range(TARGETS):
        # The class may lie in these columns; one that is none, such as the -1 of an ignored row, lies in none.
        target = tl.load(targets + t * all_rows + row, mask=valid, other=-1)
        here = (target >= begin + first) & (target < begin + last)
        place = row.to(tl.int64) * row_stride + (target - begin) * column_stride
        y = tl.load(logits + place, mask=here, other=0.0).to(tl.float32)
        u, _ = transformed_logit(y, softcap, inv_temperature, HAS_SOFTCAP)
        if HAS_SCALE:
            scale_of_row = tl.load(scales + row, mask=valid, other=0.0)
        z = mapped_logit(
            u, scale_of_row, offsets, masked, target, here, HAS_SCALE, HAS_OFFSETS, SCALES_OFFSETS
        )  # fmt: skip
        tl.store(target_logits + t * all_rows + row, z, mask=here)
    tl.store(row_maxes + own, row_max, mask=valid)
    tl.store(sum_exps + own, sum_exp, mask=valid)
    if HAS_ENTROPY:
        tl.store(sum_exp_logits + own, sum_exp_logit, mask=valid)
    if HAS_VECTOR:
        tl.store(sum_exp_vectors + own, sum_exp_vector, mask=valid)
    if HAS_ARGMAX:
        tl.store(argmaxes + own, argmax, mask=valid)
    if SOFT_TARGETS:
        tl.store(target_logits + own, target_logit, mask=valid)
    if HAS_SMOOTHING:
        tl.store(logit_sums + own, logit_sum, mask=valid)


@triton.jit
def row_gradient_kernel(
    logits, gradients, scale_gradients, targets, vector, soft, class_weight, scales, offsets, masked, row_maxes,
    log_sums, of_softmax, of_entropy, of_vector, of_targets, of_smoothing, row_stride, column_stride,
    gradient_row_stride, gradient_column_stride, soft_stride, rows, row_end, all_rows, begin, columns, columns_of_part,
    softcap, inv_temperature, TARGETS: tl.constexpr, HAS_ENTROPY: tl.constexpr, EXACT_ENTROPY: tl.constexpr,
    HAS_VECTOR: tl.constexpr, SOFT_TARGETS: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_OFFSETS: tl.constexpr, SCALES_OFFSETS: tl.constexpr,
    BY_CLASS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of columns [begin, begin + columns), a program for ROWS rows and a part of them.

    `of_softmax`, `of_entropy`, `of_vector` and `of_smoothing` are a, b, e and g_S of each row; `of_targets` is g_t,
    (TARGETS, all_rows), or g_Q. `scale_gradients`, (parts, rows), takes each part of d / d r.
    """
    row_blocks = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % row_blocks * ROWS + tl.arange(0, ROWS)
    valid, exists = row < rows, row < row_end
    part = tl.program_id(0) // row_blocks
    first = part * columns_of_part
    last = tl.minimum(first + columns_of_part, columns)
    row_max = tl.load(row_maxes + row, mask=valid, other=0.0)[:, None]
    log_sum = tl.load(log_sums + row, mask=valid, other=0.0)[:, None]
    factor_of_row = tl.load(of_softmax + row, mask=valid, other=0.0)[:, None]
    if HAS_ENTROPY:
        entropy_factor = tl.load(of_entropy + row, mask=valid, other=0.0)[:, None]
    if HAS_VECTOR:
        vector_factor = tl.load(of_vector + row, mask=valid, other=0.0)[:, None]
    if SOFT_TARGETS:
        target_factor = tl.load(of_targets + row, mask=valid, other=0.0)[:, None]
    if HAS_SMOOTHING:
        smoothing_factor = tl.load(of_smoothing + row, mask=valid, other=0.0)[:, None]
    scale = 1.0
    if HAS_SCALE:
        scale = tl.load(scales + row, mask=valid, other=0.0)[:, None]
        scale_gradient = tl.zeros((ROWS,), tl.float32)
    for start in range(first, last, BLOCK):
        k = start + tl.arange(0, BLOCK)
        in_part = (k < last)[None, :]
        inside = exists[:, None] & in_part
        place = pointers_to(logits, row, k, row_stride, column_stride, BY_CLASS)
        y = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        u, slope = transformed_logit(y, softcap, inv_temperature, HAS_SOFTCAP)
        z = mapped_logit(
            u, scale, offsets, masked, (begin + k)[None, :], in_part, HAS_SCALE, HAS_OFFSETS, SCALES_OFFSETS
        )  # fmt: skip
        log_p = (z - row_max) - log_sum
        factor = factor_of_row
        if HAS_ENTROPY:
            # p log p is 0 where p is 0, and its logit may be -inf.
            factor = factor + entropy_factor * tl.where(log_p == float("-inf"), 0.0, log_p)
        if HAS_VECTOR:
            v = tl.load(vector + begin + k, mask=k < last, other=0.0).to(tl.float32)[None, :]
            factor = factor + vector_factor * v
        g = tl.exp(log_p) * factor
        if SOFT_TARGETS or HAS_SMOOTHING:
            w = tl.full((1, BLOCK), 1.0, tl.float32)
            if HAS_CLASS_WEIGHT:
                w = tl.load(class_weight + begin + k, mask=k < last, other=0.0).to(tl.float32)[None, :]
            if HAS_SMOOTHING:
                g += smoothing_factor * w
            if SOFT_TARGETS:
                place = pointers_to(soft, row, k, soft_stride, 1, False)
                q = tl.load(place, mask=inside & valid[:, None], other=0.0).to(tl.float32)
                g += target_factor * w * q
        for t in tl.static_range(TARGETS):
            target = tl.load(targets + t * all_rows + row, mask=valid, other=-1)[:, None] - begin
            of_target = tl.load(of_targets + t * all_rows + row, mask=valid, other=0.0)[:, None]
            g += tl.where(k[None, :] == target, of_target, 0.0)
        if HAS_OFFSETS:
            g = tl.where(tl.load(masked + begin + k, mask=k < last, other=0)[None, :] != 0, 0.0, g)
        if HAS_SCALE:
            scale_gradient += tl.sum(tl.where(inside, g * u, 0.0), 1)
            g *= scale
        place = pointers_to(gradients, row, k, gradient_row_stride, gradient_column_stride, BY_CLASS)
        tl.store(place, (g * slope).to(gradients.dtype.element_ty), mask=inside)
    if HAS_SCALE:
        tl.store(scale_gradients + part.to(tl.int64) * rows + row, scale_gradient, mask=valid)
