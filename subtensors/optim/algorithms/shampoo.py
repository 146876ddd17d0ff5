"""Shampoo: gradients whitened by the roots of second moments of their rows and columns.

A parameter of two or more dimensions is seen as the matrix (shape[0], the rest); one of fewer has no sides. A side is
left out where it is longer than the group's `max_size`: its second moments would be a matrix of that many rows. SOAP
shares the functions for sides, second moments and step counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from subtensors.fused.fuse import fused
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype
from subtensors.lists.tensor_list import TensorList
from subtensors.optim.algorithms.matrix_optimizer import MatrixOptimizer, by_shape
from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Params
from subtensors.optim.options import Options

SIDES = ("left", "right")


def matrix_shape(p: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter of two or more dimensions."""
    return p.shape[0], p.numel() // max(p.shape[0], 1)


def sides_of(p: Tensor, max_size: float) -> tuple[str, ...]:
    """The sides of a parameter that are preconditioned.

    Example:
        >>> sides_of(torch.empty(10, 4, 5), max_size=12), sides_of(torch.empty(10), max_size=12)
        (('left',), ())
    """
    if p.dim() < 2:
        return ()
    return tuple(side for side, size in zip(SIDES, matrix_shape(p), strict=True) if 0 < size <= max_size)


def square(p: Tensor, side: str) -> Tensor:
    """Zeros for a matrix over one side of a parameter, in the dtype that its state is computed in."""
    size = matrix_shape(p)[SIDES.index(side)]
    return torch.zeros(size, size, device=p.device, dtype=arithmetic_dtype(p.dtype))


def host_count(p: Tensor) -> Tensor:
    """A count of steps on the CPU, where the host reads it to decide what a step does."""
    return torch.zeros((), dtype=torch.float32, device="cpu")


def parts_by_count(step: TensorList) -> dict[int, list[int]]:
    """Count one more step for each parameter, and return the parameters' indices by their count."""
    parts: dict[int, list[int]] = {}
    for i, count in enumerate(step.tensors):
        parts.setdefault(int(count.add_(1)), []).append(i)
    return parts


def select(x: Any, indices: Sequence[int]) -> Any:
    """The elements of a list at these indices; the list itself if they are all."""
    if x is None or len(indices) == len(x):
        return x
    return TensorList([x.tensors[i] for i in indices])


def as_matrices(x: Any) -> Any:
    """Each element seen as a matrix."""
    return x.like([t if t.dim() == 2 else t.reshape(matrix_shape(t)) for t in x.tensors])


def as_shaped(x: Any, like: TensorList) -> Any:
    """Matrices in the shapes of the parameters they came from."""
    return x.like([t.reshape(p.shape) for t, p in zip(x.tensors, like.tensors, strict=True)])


@fused
def widened(p: Tensor, g: Tensor, weight_decay: float | None) -> Tensor:
    """The gradient in the dtype that state is computed in, with the L2 penalty where there is one."""
    wide = arithmetic_dtype(p.dtype)
    g = g.to(wide)
    return g.clone() if weight_decay is None else g + weight_decay * p.to(wide)


@fused
def accumulate(total: Tensor, more: Tensor, beta: float, share: float) -> None:
    """total <- beta total + share more."""
    total.copy_(beta * total + share * more)


def accumulate_moment(moment: Any, side: str, matrices: Any, beta: float, share: float) -> None:
    """moment <- beta moment + share X X^T over rows, or X^T X over columns."""
    # The product has no name, so that it is freed after the call: it is as large as the state.
    accumulate(moment, by_shape(lambda x: x @ x.mT if side == "left" else x.mT @ x, matrices), beta, share)


@fused
def descend(p: Tensor, direction: Tensor, lr: float, decay: float | None) -> None:
    """p <- p - lr direction, then p <- p - lr decay p."""
    w = p.to(arithmetic_dtype(p.dtype))
    w = w - lr * direction.to(w.dtype)
    p.copy_(w if decay is None else w * (1 - lr * decay))


class Shampoo(MatrixOptimizer):
    """Shampoo, with k preconditioned sides of a parameter.

        g <- g + weight_decay p
        L <- L + g g^T, R <- R + g^T g                  with beta2 < 1: L <- beta2 L + (1 - beta2) g g^T, R alike
        d <- (L + eps I)^(-1/2k) g (R + eps I)^(-1/2k)
        d <- d |g| / |d|                                with grafting="sgd"
        m <- momentum m + d
        p <- p - lr m                                   without a momentum p <- p - lr d

    The roots are computed every `update_freq` steps, the first of them included, from eigendecompositions that are
    batched by shape; the other steps use the last ones. Parameters of three or more dimensions are seen as matrices of
    shape[0] rows. Those with no side to precondition (vectors, numbers, and matrices longer than `max_size` both ways)
    have a diagonal: D <- D + g^2, d <- g / sqrt(D + eps).

    Args:
        momentum: 0 keeps no buffer.
        eps: as in the math.
        beta2: 1 sums second moments, as the paper does; less averages them.
        update_freq: steps from one computation of the roots to the next.
        max_size: the longest side that is preconditioned.
        grafting: None, or "sgd" for steps as long as the gradient, tensor by tensor.

    Raises:
        ValueError: a value is out of range, or a parameter is complex.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.zeros(2, 2))
        >>> opt = st.optim.Shampoo([w], lr=0.5, eps=1e-12)
        >>> w.grad = torch.tensor([[3.0, 0.0], [0.0, -0.1]])
        >>> opt.step()
        >>> w.detach().diag()
        tensor([-0.5000,  0.5000])

    Source: Gupta et al., "Shampoo: Preconditioned Stochastic Tensor Optimization" (2018), Algorithm 1, with the
    exponent of its Algorithm 2; Anil et al., "Scalable Second Order Optimization for Deep Learning" (2021) for
    grafting.
    """

    _accepted = Accepted(
        eps="(0, inf]", beta2="(0, 1]", update_freq="[1, inf]", max_size="[0, inf]", grafting="None or 'sgd'"
    )
    optional = ("weight_decay",)
    state = {
        "step": host_count,
        "left": lambda p: square(p, "left"),
        "right": lambda p: square(p, "right"),
        "left_root": lambda p: square(p, "left"),
        "right_root": lambda p: square(p, "right"),
        "square_sum": torch.zeros_like,
        "momentum_buffer": torch.zeros_like,
    }
    _optional_state = {"momentum_buffer": "momentum"}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        eps: float = 1e-4,
        beta2: float = 1.0,
        update_freq: int = 1,
        max_size: int = 8192,
        grafting: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def applies_to(self, entry: str, p: Tensor, group: dict[str, Any]) -> bool:
        """Moments and roots of the sides that are preconditioned; a diagonal where none is."""
        sides = sides_of(p, group["max_size"])
        if entry == "square_sum":
            return not sides
        return entry in ("step", "momentum_buffer") or entry.removesuffix("_root") in sides

    def update(
        self,
        p,
        g,
        step,
        left,
        right,
        left_root,
        right_root,
        square_sum,
        momentum_buffer,
        *,
        lr,
        momentum,
        weight_decay,
        eps,
        beta2,
        update_freq,
        grafting,
    ):
        """The math of the class, for all parameters with the same sides."""
        share = 1.0 if beta2 == 1 else 1 - beta2
        gradient: Any = widened(p, g, weight_decay)
        counts = parts_by_count(step)
        direction: Any
        if square_sum is not None:
            direction = _diagonal(gradient, square_sum, beta2, share, eps)
        else:
            due = [i for count, indices in counts.items() if (count - 1) % update_freq == 0 for i in indices]
            direction = matrices = as_matrices(gradient)
            all_sides = zip(SIDES, (left, right), (left_root, right_root), strict=True)
            sides = [
                (side, moment, root) for side, moment, root in all_sides if moment is not None and root is not None
            ]
            for side, moment, root in sides:
                accumulate_moment(moment, side, matrices, beta2, share)
                if due:
                    exponent = -1 / (2 * len(sides))
                    select(root, due).copy_(
                        by_shape(lambda a, e=exponent: matrix_power(a, e, eps), select(moment, due))
                    )
                direction = by_shape(_PRODUCTS[side], direction, root)
            direction = as_shaped(direction, p)
        if grafting is not None:
            direction = _grafted(direction, gradient)
        if momentum_buffer is not None:
            accumulate(momentum_buffer, direction, momentum, 1.0)
            direction = momentum_buffer
        descend(p, direction, lr, None)


def matrix_power(a: Tensor, exponent: float, eps: float) -> Tensor:
    """(A + eps I)^exponent of a stack of symmetric matrices without negative eigenvalues.

    Args:
        a: (n, size, size).
        exponent: any number.
        eps: more than 0; what rounding has made negative counts as 0.

    Returns:
        Like `a`.

    Example:
        >>> matrix_power(torch.tensor([[[4.0, 0.0], [0.0, 16.0]]]), -0.5, 1e-12).diagonal(dim1=1, dim2=2)
        tensor([[0.5000, 0.2500]])
    """
    values, vectors = torch.linalg.eigh(a)
    power: Tensor = (vectors * (values.clamp(min=0) + eps).pow(exponent).unsqueeze(-2)) @ vectors.mT
    return power


_PRODUCTS = {"left": lambda x, root: root @ x, "right": lambda x, root: x @ root}


@fused
def _diagonal(g: Tensor, square_sum: Tensor, beta2: float, share: float, eps: float) -> Tensor:
    total = beta2 * square_sum.to(g.dtype) + share * g * g
    square_sum.copy_(total)
    return g / (total + eps).sqrt()


@fused
def _grafted(direction: Tensor, g: Tensor) -> Tensor:
    """The direction, scaled to the norm of the gradient; zero if it is zero."""
    length = direction.norm()
    return direction * torch.where(length > 0, g.norm() / length, 0)
