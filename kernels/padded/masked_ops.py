"""The masked kernels as torch ops: differentiable, opaque to a compiler, with the reference where no kernel runs.

Both read the sizes on the device, so one captured graph or compiled program serves all of them. Second derivatives need
no kernels: the gradient of an op is written in torch ops (`differentiable`), which autograd differentiates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

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


_SAVED = object()
"""The placeholder of a tensor that autograd saves."""


def differentiable(op: str, formula: Callable[..., tuple[Tensor, ...]]) -> None:
    """Register the gradient of an op as that of a formula in torch ops.

    Args:
        op: the op's name.
        formula: takes the arguments of the op and returns its results.
    """

    def context(ctx: Any, inputs: tuple[object, ...], output: object) -> None:
        listed = [x if _is_list(x) else [x] for x in inputs]
        ctx.save_for_backward(*(t for x in listed for t in x if isinstance(t, Tensor)))
        ctx.inputs = [_SAVED if isinstance(x, Tensor) else [_SAVED] * len(x) if _is_list(x) else x for x in inputs]

    def gradient(ctx: Any, *gradients: Tensor) -> tuple[object, ...]:
        with torch.enable_grad():
            # Saved tensors may depend on each other; aliases make the formula's dependence the only one.
            aliases = (t.view_as(t) for t in ctx.saved_tensors)
            inputs = [_restored(x, aliases) for x in ctx.inputs]
            outs = formula(*inputs)
        inputs_with_grad = {i: x for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad}
        pairs = [(out, g) for out, g in zip(outs, gradients, strict=True) if out.requires_grad]
        found = torch.autograd.grad(
            [out for out, _ in pairs],
            list(inputs_with_grad.values()),
            [g for _, g in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        by_place = dict(zip(inputs_with_grad, found, strict=True))
        return tuple([None] * len(x) if _is_list(x) else by_place.get(i) for i, x in enumerate(inputs))

    torch.library.register_autograd(f"subtensors::{op}", gradient, setup_context=context)


def _is_list(x: object) -> TypeGuard[Sequence[Tensor | None]]:
    """Return whether an argument is a list of tensors."""
    return isinstance(x, (list, tuple)) and all(t is None or isinstance(t, Tensor) for t in x)


def _restored(x: object, saved: Iterator[Tensor]) -> object:
    """Return an argument with its saved tensors in place of the placeholders."""
    return [next(saved) for _ in x] if isinstance(x, list) and _SAVED in x else next(saved) if x is _SAVED else x


def softmax_gradient(
    gradient: Tensor, y: Tensor, dim: int, d: list[int], s: list[Tensor], b: list[int], is_log: bool
) -> tuple[Tensor]:
    """Return the input gradient of a softmax from its result `y`, through which it depends on the input."""
    return (softmaxes.masked_softmax_backward_reference(gradient, y, dim, unpack_lengths(d, s, b), is_log),)


def reduction_gradient(
    gradient: Tensor, x: Tensor, out: Tensor, aux: Tensor, counts: Tensor, kind: str, dims: list[int],
    d: list[int], s: list[Tensor], b: list[int], p: float, correction: float,
) -> tuple[Tensor]:  # fmt: skip
    """Return the input gradient of a reduction, recomputed from `x` so that it is differentiable in `x`."""
    x = _requiring_grad(x)
    recomputed = reductions.masked_reduction_reference(x, kind, dims, unpack_lengths(d, s, b), p, correction).out
    (gx,) = torch.autograd.grad(recomputed, [x], gradient, create_graph=True)
    return (gx,)


def norm_gradient(
    gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, normalized: int, eps: float,
    d: list[int], s: list[Tensor], b: list[int], is_rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of a norm's input, weight and bias; without a weight, those for a weight of ones."""
    shape = x.shape[x.dim() - normalized :]
    x = _requiring_grad(x)
    factor, shift = (
        _requiring_grad(mean.new_ones(shape) if weight is None else weight),
        _requiring_grad(mean.new_zeros(shape)),
    )
    y = norms.masked_norm_reference(x, normalized, factor, shift, eps, unpack_lengths(d, s, b), 0.0, is_rms).y
    gx, *rest = torch.autograd.grad(y, [x, factor, shift], gradient, create_graph=True)
    weight_gradient, bias_gradient = (g.to(mean.dtype) for g in rest)
    return gx, weight_gradient, bias_gradient


def _requiring_grad(t: Tensor) -> Tensor:
    """Return a tensor that requires grad: this one if it does, otherwise a detached alias of it."""
    return t if t.requires_grad else t.detach().requires_grad_()


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
    gx = torch.ops.subtensors.masked_softmax_backward(gradient, y, ctx.dim, ctx.dims, sizes, ctx.batch_dims, ctx.is_log)
    return gx, None, None, [None] * len(sizes), None, None, None


torch.library.register_autograd("subtensors::masked_softmax", _softmax_gradient, setup_context=_softmax_context)
differentiable("masked_softmax_backward", softmax_gradient)


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
    gx = torch.ops.subtensors.masked_reduction_backward(
        gradient, x, out, aux, counts, ctx.kind, ctx.reduced, ctx.dims, sizes, ctx.batch_dims, ctx.p, ctx.correction
    )
    return gx, None, None, None, [None] * len(sizes), None, None, None, None, None


torch.library.register_autograd("subtensors::masked_reduction", _reduction_gradient, setup_context=_reduction_context)
differentiable("masked_reduction_backward", reduction_gradient)


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
    "Tensor gradient, Tensor x, Tensor mean, Tensor scale, Tensor? weight, int normalized, float eps, "
    f"{LENGTHS_SCHEMA}, bool is_rms",
    "(Tensor, Tensor, Tensor)",
    norms.masked_norm_backward, norms.masked_norm_backward_reference, _norm_backward_fake,
)  # fmt: skip


def _norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, ctx.normalized, weight, bias, ctx.eps, ctx.dims, sizes, ctx.batch_dims, _, ctx.is_rms = inputs
    ctx.save_for_backward(x, weight, *output[1:], *sizes)
    ctx.dtypes = [t if t is None else t.dtype for t in (weight, bias)]
    ctx.mark_non_differentiable(*output[1:])


def _norm_gradient(ctx: Any, gradient: Tensor, *_: object) -> tuple[object, ...]:
    x, weight, mean, scale, *sizes = ctx.saved_tensors
    gx, *parameters = torch.ops.subtensors.masked_norm_backward(
        gradient, x, mean, scale, weight, ctx.normalized, ctx.eps, ctx.dims, sizes, ctx.batch_dims, ctx.is_rms
    )
    cast = [None if dtype is None else g.to(dtype) for g, dtype in zip(parameters, ctx.dtypes, strict=True)]
    return gx, None, *cast, None, None, [None] * len(sizes), None, None, None


torch.library.register_autograd("subtensors::masked_norm", _norm_gradient, setup_context=_norm_context)
differentiable("masked_norm_backward", norm_gradient)
