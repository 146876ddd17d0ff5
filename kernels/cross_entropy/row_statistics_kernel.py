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
def row_statistics_kernel(
    logits, row_stride, targets, vector, soft, soft_stride, class_weight, scales, offsets, masked, row_maxes, sum_exps,
    sum_exp_logits, sum_exp_vectors, argmaxes, target_logits, logit_sums, rows, all_rows, begin, columns, softcap,
    inv_temperature, TARGETS: tl.constexpr, HAS_ENTROPY: tl.constexpr, EXACT_ENTROPY: tl.constexpr,
    HAS_VECTOR: tl.constexpr, HAS_ARGMAX: tl.constexpr, SOFT_TARGETS: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    SCALES_OFFSETS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold columns [begin, begin + columns) into the sums of each row, a program for ROWS rows.

    `targets` and `target_logits` are (TARGETS, all_rows); for soft targets `target_logits` is Q.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    row_max = tl.load(row_maxes + row, mask=valid, other=0.0)
    sum_exp = tl.load(sum_exps + row, mask=valid, other=0.0)
    if HAS_ENTROPY:
        sum_exp_logit = tl.load(sum_exp_logits + row, mask=valid, other=0.0)
    if HAS_VECTOR:
        sum_exp_vector = tl.load(sum_exp_vectors + row, mask=valid, other=0.0)
    if HAS_ARGMAX:
        argmax = tl.load(argmaxes + row, mask=valid, other=0)
    if SOFT_TARGETS:
        target_logit = tl.load(target_logits + row, mask=valid, other=0.0)
    if HAS_SMOOTHING:
        logit_sum = tl.load(logit_sums + row, mask=valid, other=0.0)
    scale_of_row = 1.0
    if HAS_SCALE:
        scale_of_row = tl.load(scales + row, mask=valid, other=0.0)[:, None]
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = valid[:, None] & (k < columns)[None, :]
        place = row[:, None] * row_stride + k[None, :]
        y = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
        u, _ = transformed_logit(y, softcap, inv_temperature, HAS_SOFTCAP)
        z = mapped_logit(
            u, scale_of_row, offsets, masked, (begin + k)[None, :], (k < columns)[None, :],
            HAS_SCALE, HAS_OFFSETS, SCALES_OFFSETS,
        )  # fmt: skip
        z = tl.where(inside, z, float("-inf"))  # a softcap makes the padding finite
        block_max = tl.max(z, 1)
        if HAS_ARGMAX:
            found = (begin + start + tl.argmax(z, 1)).to(tl.int64)
            argmax = tl.where(block_max > row_max, found, argmax)
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
            v = tl.load(vector + begin + k, mask=k < columns, other=0.0).to(tl.float32)[None, :]
            sum_exp_vector = scale * sum_exp_vector + tl.sum(tl.where(inside, e * v, 0.0), 1)
        sum_exp = scale * sum_exp + tl.sum(e, 1)
        row_max = new_max
        if SOFT_TARGETS or HAS_SMOOTHING:
            w = tl.full((1, BLOCK), 1.0, tl.float32)
            if HAS_CLASS_WEIGHT:
                w = tl.load(class_weight + begin + k, mask=k < columns, other=0.0).to(tl.float32)[None, :]
            if HAS_SMOOTHING:
                logit_sum += tl.sum(tl.where(inside, w * z, 0.0), 1)
            if SOFT_TARGETS:
                q = tl.load(soft + row[:, None] * soft_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
                target_logit += tl.sum(tl.where(inside, w * q * z, 0.0), 1)
    for t in tl.static_range(TARGETS):
        # The class may lie in these columns; one that is none, such as the -1 of an ignored row, lies in none.
        target = tl.load(targets + t * all_rows + row, mask=valid, other=-1)
        here = (target >= begin) & (target < begin + columns)
        y = tl.load(logits + row * row_stride + (target - begin), mask=here, other=0.0).to(tl.float32)
        u, _ = transformed_logit(y, softcap, inv_temperature, HAS_SOFTCAP)
        if HAS_SCALE:
            scale_of_row = tl.load(scales + row, mask=valid, other=0.0)
        z = mapped_logit(
            u, scale_of_row, offsets, masked, target, here, HAS_SCALE, HAS_OFFSETS, SCALES_OFFSETS
        )  # fmt: skip
        tl.store(target_logits + t * all_rows + row, z, mask=here)
    tl.store(row_maxes + row, row_max, mask=valid)
    tl.store(sum_exps + row, sum_exp, mask=valid)
    if HAS_ENTROPY:
        tl.store(sum_exp_logits + row, sum_exp_logit, mask=valid)
    if HAS_VECTOR:
        tl.store(sum_exp_vectors + row, sum_exp_vector, mask=valid)
    if HAS_ARGMAX:
        tl.store(argmaxes + row, argmax, mask=valid)
    if SOFT_TARGETS:
        tl.store(target_logits + row, target_logit, mask=valid)
    if HAS_SMOOTHING:
        tl.store(logit_sums + row, logit_sum, mask=valid)


@triton.jit
def row_gradient_kernel(
    logits, row_stride, gradients, gradient_stride, scale_gradients, targets, vector, soft, soft_stride, class_weight,
    scales, offsets, masked, row_maxes, log_sums, of_softmax, of_entropy, of_vector, of_targets, of_smoothing, all_rows,
    begin, columns, softcap, inv_temperature, TARGETS: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    EXACT_ENTROPY: tl.constexpr, HAS_VECTOR: tl.constexpr, SOFT_TARGETS: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    SCALES_OFFSETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of columns [begin, begin + columns), a program a row and BLOCK columns.

    `of_softmax`, `of_entropy`, `of_vector` and `of_smoothing` are a, b, e and g_S of each row; `of_targets` is g_t,
    (TARGETS, all_rows), or g_Q. `scale_gradients`, (rows, programs a row), takes each program's part of d / d r.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < columns
    y = tl.load(logits + row * row_stride + k, mask=inside, other=0.0).to(tl.float32)
    u, slope = transformed_logit(y, softcap, inv_temperature, HAS_SOFTCAP)
    scale = 1.0
    if HAS_SCALE:
        scale = tl.load(scales + row)
    z = mapped_logit(u, scale, offsets, masked, begin + k, inside, HAS_SCALE, HAS_OFFSETS, SCALES_OFFSETS)
    log_p = (z - tl.load(row_maxes + row)) - tl.load(log_sums + row)
    factor = tl.load(of_softmax + row)
    if HAS_ENTROPY:
        # p log p is 0 where p is 0, and its logit may be -inf.
        factor += tl.load(of_entropy + row) * tl.where(log_p == float("-inf"), 0.0, log_p)
    if HAS_VECTOR:
        factor += tl.load(of_vector + row) * tl.load(vector + begin + k, mask=inside, other=0.0).to(tl.float32)
    g = tl.exp(log_p) * factor
    if SOFT_TARGETS or HAS_SMOOTHING:
        w = 1.0
        if HAS_CLASS_WEIGHT:
            w = tl.load(class_weight + begin + k, mask=inside, other=0.0).to(tl.float32)
        if HAS_SMOOTHING:
            g += tl.load(of_smoothing + row) * w
        if SOFT_TARGETS:
            q = tl.load(soft + row * soft_stride + k, mask=inside, other=0.0).to(tl.float32)
            g += tl.load(of_targets + row) * w * q
    for t in tl.static_range(TARGETS):
        target = tl.load(targets + t * all_rows + row)
        g += tl.where(k == target - begin, tl.load(of_targets + t * all_rows + row), 0.0)
    if HAS_OFFSETS:
        g = tl.where(tl.load(masked + begin + k, mask=inside, other=0) != 0, 0.0, g)
    if HAS_SCALE:
        part = tl.sum(tl.where(inside, g * u, 0.0), 0)
        tl.store(scale_gradients + row * tl.num_programs(1) + tl.program_id(1), part)
        g *= scale
    tl.store(gradients + row * gradient_stride + k, (g * slope).to(gradients.dtype.element_ty), mask=inside)
