"""The masked kernels as torch ops: differentiable, opaque to a compiler, with the reference where no kernel runs.

Both read the sizes on the device, so one captured graph or compiled program serves all of them. Second derivatives need
no kernels: a gradient that will be differentiated itself is computed by torch ops, which autograd differentiates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subtensors.kernels.padded import masked_norm as norms
from subtensors.kernels.padded import masked_reduction as reductions
from subtensors.kernels.padded import masked_softmax as softmaxes
from subtensors.kernels.runtime.custom_ops import FLOAT_DTYPES, INTEGER_DTYPES, define_kernel
from subtensors.kernels.runtime.valid_lengths import LENGTHS_SCHEMA, ValidLength, pack_lengths, unpack_lengths


def masked_softmax(
    x: Tensor, dim: int, lengths: Sequence[ValidLength], fill: float = 0.0, is_log: bool = False
) -> Tensor:
    """Softmax over the valid elements along a dimension.

    Args:
        x: floating point, of any shape and strides; its padding has no effect.
        dim: to normalize along.
        lengths: the padded dimensions, `dim` or others.
        fill: the value of the result in padding, and in rows without valid elements.
        is_log: whether to compute the logarithm of the softmax.

    Returns:
        In the shape and dtype of `x`.

    Example:
        >>> x = torch.tensor([[1.0, 1.0, float("nan")], [float("nan")] * 3])
        >>> masked_softmax(x, 1, [ValidLength(1, torch.tensor([2, 0]))])
        tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 0.0000, 0.0000]])
    """
    return torch.ops.subtensors.masked_softmax(x, dim, *pack_lengths(lengths), fill, is_log)  # type: ignore[no-any-return]


def masked_reduction(
    x: Tensor, kind: str, dims: Sequence[int], lengths: Sequence[ValidLength], p: float = 2.0, correction: float = 1.0,
    fill: float = 0.0, for_gradient: bool | None = None,
) -> reductions.Reduced:  # fmt: skip
    """Reduce the valid elements along dimensions.

    Args:
        x: of any shape and strides; integers and bools for sum, prod, amax and amin.
        kind: sum, mean, prod, amax, amin, logsumexp, var or norm.
        dims: to reduce; at least one.
        lengths: the padded dimensions, reduced or kept.
        p: the order of a norm, at least 0.
        correction: the number that a variance subtracts from the count.
        fill: the value of the result where a kept dimension is padded.
        for_gradient: whether a gradient will be computed, which needs some counts; by default, whether autograd tracks
            the call.

    Returns:
        The result without the reduced dimensions, values for its gradient, and the counts of valid elements.

    Raises:
        ValueError: there is no such kind, or the order of the norm is negative.
        TypeError: the dtype is not one that the kind takes.

    Example:
        >>> x = torch.tensor([[1.0, 3.0, float("nan")], [4.0, 5.0, 6.0]])
        >>> masked_reduction(x, "mean", [1], [ValidLength(1, torch.tensor([2, 3]))]).out
        tensor([2., 5.])
    """
    reductions.result_dtype(kind, x.dtype)
    if not dims:
        raise ValueError("a masked reduction takes at least one dimension, got none")
    if kind == "norm" and not p >= 0:
        raise ValueError(f"a masked norm has an order of at least 0, got {p}")
    counted = x.requires_grad and torch.is_grad_enabled() if for_gradient is None else for_gradient
    return reductions.Reduced(
        *torch.ops.subtensors.masked_reduction(x, kind, dims, *pack_lengths(lengths), p, correction, fill, counted)
    )


def masked_norm(
    x: Tensor, normalized: int, weight: Tensor | None, bias: Tensor | None, eps: float, lengths: Sequence[ValidLength],
    fill: float = 0.0, is_rms: bool = False,
) -> norms.Normed:  # fmt: skip
    """Layer norm or rms norm over the valid elements of the last dimensions.

    Args:
        x: floating point.
        normalized: the number of trailing dimensions that are normalized together.
        weight, bias: of the normalized shape, or None.
        eps: added to the variance.
        lengths: the padded dimensions, normalized or not.
        fill: the value of the result in padding.
        is_rms: rms norm in place of layer norm.

    Returns:
        The result in the shape and dtype of `x`, and values for its gradient.

    Example:
        >>> x = torch.tensor([[3.0, 5.0, float("nan")]])
        >>> masked_norm(x, 1, None, None, 0.0, [ValidLength(1, torch.tensor(2))]).y.round()
        tensor([[-1.,  1.,  0.]])
    """
    return norms.Normed(
        *torch.ops.subtensors.masked_norm(x, normalized, weight, bias, eps, *pack_lengths(lengths), fill, is_rms)
    )


def _recomputed_gradients(
    reference: Callable[..., tuple[Tensor, ...]], gradient: Tensor, **inputs: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of a reference's first result for inputs that require grad, differentiable themselves."""
    # Inputs may depend on each other; aliases make the reference's dependence the only one.
    aliases = {name: t if t is None else t.view_as(t) for name, t in inputs.items()}
    asked = {name: t for name, t in aliases.items() if t is not None and t.requires_grad}
    found = torch.autograd.grad(
        reference(**aliases)[0], list(asked.values()), gradient, create_graph=True, materialize_grads=True
    )
    by_name = dict(zip(asked, found, strict=True))
    return [by_name.get(name) for name in inputs]


def _like_second(_: object, x: Tensor, *__: object) -> Tensor:
    return torch.empty_like(x)


define_kernel(
    "masked_softmax", f"Tensor x, int dim, {LENGTHS_SCHEMA}, float fill, bool is_log", "Tensor",
    softmaxes.masked_softmax_forward, softmaxes.masked_softmax_reference, lambda x, *_: torch.empty_like(x),
)  # fmt: skip
define_kernel(
    "masked_softmax_backward", f"Tensor gradient, Tensor y, int dim, {LENGTHS_SCHEMA}, bool is_log", "Tensor",
    softmaxes.masked_softmax_backward, softmaxes.masked_softmax_backward_reference, _like_second,
)  # fmt: skip


def _softmax_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.dim, ctx.dims, sizes, ctx.batch_dims, _, ctx.is_log = inputs
    ctx.save_for_backward(output, *sizes)


def _softmax_gradient(ctx: Any, gradient: Tensor) -> tuple[object, ...]:
    y, *sizes = ctx.saved_tensors
    if torch.is_grad_enabled():
        lengths = unpack_lengths(ctx.dims, sizes, ctx.batch_dims)
        gx = softmaxes.masked_softmax_backward_reference(gradient, y, ctx.dim, lengths, ctx.is_log)
    else:
        gx = torch.ops.subtensors.masked_softmax_backward(
            gradient, y, ctx.dim, ctx.dims, sizes, ctx.batch_dims, ctx.is_log
        )
    return gx, None, None, [None] * len(sizes), None, None, None


torch.library.register_autograd("subtensors::masked_softmax", _softmax_gradient, setup_context=_softmax_context)


def _reduction_fake(x: Tensor, kind: str, dims: list[int], *_: object) -> tuple[Tensor, Tensor, Tensor]:
    reduced = {dim % x.dim() for dim in dims}
    shape = [n for dim, n in enumerate(x.shape) if dim not in reduced]
    dtypes = (reductions.result_dtype(kind, x.dtype), reductions.sum_dtype(x.dtype), torch.int64)
    out, aux, counts = (x.new_empty(shape, dtype=dtype) for dtype in dtypes)
    return out, aux, counts


define_kernel(
    "masked_reduction",
    f"Tensor x, str kind, int[] reduced, {LENGTHS_SCHEMA}, float p, float correction, float fill, bool for_gradient",
    "(Tensor, Tensor, Tensor)",
    reductions.masked_reduction_forward, reductions.masked_reduction_reference, _reduction_fake,
    FLOAT_DTYPES + INTEGER_DTYPES,
)  # fmt: skip
define_kernel(
    "masked_reduction_backward",
    f"Tensor gradient, Tensor x, Tensor out, Tensor aux, Tensor counts, str kind, int[] reduced, {LENGTHS_SCHEMA}, "
    "float p, float correction",
    "Tensor",
    reductions.masked_reduction_backward, reductions.masked_reduction_backward_reference, _like_second,
)  # fmt: skip


def _reduction_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, ctx.kind, ctx.reduced, ctx.dims, sizes, ctx.batch_dims, ctx.p, ctx.correction, *_ = inputs
    # The gradient of a sum or a mean needs only the shape of x.
    ctx.save_for_backward(x, *output, *sizes)
    ctx.mark_non_differentiable(*output[1:])


def _reduction_gradient(ctx: Any, gradient: Tensor, *_: object) -> tuple[object, ...]:
    x, out, aux, counts, *sizes = ctx.saved_tensors
    gx: Tensor | None
    if torch.is_grad_enabled():
        reference = partial(
            reductions.masked_reduction_reference, kind=ctx.kind, dims=ctx.reduced,
            lengths=unpack_lengths(ctx.dims, sizes, ctx.batch_dims), p=ctx.p, correction=ctx.correction,
        )  # fmt: skip
        (gx,) = _recomputed_gradients(reference, gradient, x=x)
    else:
        gx = torch.ops.subtensors.masked_reduction_backward(
            gradient, x, out, aux, counts, ctx.kind, ctx.reduced, ctx.dims, sizes, ctx.batch_dims, ctx.p, ctx.correction
        )
    return gx, None, None, None, [None] * len(sizes), None, None, None, None, None


torch.library.register_autograd("subtensors::masked_reduction", _reduction_gradient, setup_context=_reduction_context)


def _norm_fake(x: Tensor, normalized: int, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    dtype = reductions.sum_dtype(x.dtype)
    mean, scale = (x.new_empty(x.shape[: x.dim() - normalized], dtype=dtype) for _ in range(2))
    return x.new_empty(x.shape), mean, scale


def _norm_backward_fake(
    gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, normalized: int, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    shape = x.shape[x.dim() - normalized :]
    return x.new_empty(x.shape), mean.new_empty(shape), mean.new_empty(shape)


define_kernel(
    "masked_norm",
    f"Tensor x, int normalized, Tensor? weight, Tensor? bias, float eps, {LENGTHS_SCHEMA}, float fill, bool is_rms",
    "(Tensor, Tensor, Tensor)",
    norms.masked_norm_forward, norms.masked_norm_reference, _norm_fake,
)  # fmt: skip
define_kernel(
    "masked_norm_backward",
    "Tensor gradient, Tensor x, Tensor mean, Tensor scale, Tensor? weight, int normalized, "
    f"{LENGTHS_SCHEMA}, bool is_rms",
    "(Tensor, Tensor, Tensor)",
    norms.masked_norm_backward, norms.masked_norm_backward_reference, _norm_backward_fake,
)  # fmt: skip


def _norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, ctx.normalized, weight, bias, ctx.eps, ctx.dims, sizes, ctx.batch_dims, _, ctx.is_rms = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:], *sizes)
    ctx.dtypes = [t if t is None else t.dtype for t in (weight, bias)]
    ctx.mark_non_differentiable(*output[1:])


def _norm_gradient(ctx: Any, gradient: Tensor, *_: object) -> tuple[object, ...]:
    x, weight, bias, mean, scale, *sizes = ctx.saved_tensors
    if torch.is_grad_enabled():
        reference = partial(
            norms.masked_norm_reference, normalized=ctx.normalized, eps=ctx.eps,
            lengths=unpack_lengths(ctx.dims, sizes, ctx.batch_dims), is_rms=ctx.is_rms,
        )  # fmt: skip
        gx, *cast = _recomputed_gradients(reference, gradient, x=x, weight=weight, bias=bias)
        return gx, None, *cast, None, None, [None] * len(sizes), None, None, None
    gx, *parameters = torch.ops.subtensors.masked_norm_backward(
        gradient, x, mean, scale, weight, ctx.normalized, ctx.dims, sizes, ctx.batch_dims, ctx.is_rms
    )
    cast = [None if dtype is None else g.to(dtype) for g, dtype in zip(parameters, ctx.dtypes, strict=True)]
    return gx, None, *cast, None, None, [None] * len(sizes), None, None, None


torch.library.register_autograd("subtensors::masked_norm", _norm_gradient, setup_context=_norm_context)
