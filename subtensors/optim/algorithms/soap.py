"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from subtensors.fused.fuse import fused
from subtensors.lists.tensor_list import TensorList
from subtensors.optim.algorithms.matrix_optimizer import MatrixOptimizer, by_shape
from subtensors.optim.algorithms.shampoo import (
    SIDES,
    accumulate_moment,
    as_matrices,
    as_shaped,
    descend,
    host_count,
    parts_by_count,
    select,
    sides_of,
    square,
    widened,
)
from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Params
from subtensors.optim.options import Options


class SOAP(MatrixOptimizer):
    """SOAP: the second moment of Adam is kept in a basis that turns slowly with the gradients.

        g' = Q_L^T g Q_R                                the gradient in the basis
        m <- beta1 m + (1 - beta1) g                    m' = Q_L^T m Q_R
        v <- beta2 v + (1 - beta2) g'^2
        d = Q_L (m' / (sqrt(v) + eps)) Q_R^T            times sqrt(1 - beta2^t) / (1 - beta1^t)
        p <- p - lr d, then p <- p - lr weight_decay p
        L <- b L + (1 - b) g g^T, R alike               b: shampoo_beta
        Q_L, Q_R <- one power iteration of L, R         every `precondition_frequency` steps

    A parameter's first step only starts L and R, and takes Q from their eigenvectors: no gradient is used in a basis
    that was made from it. A power iteration is QR(L Q), after the columns of Q and v were ordered by their eigenvalues.
    Matrix products, QR and eigendecompositions are batched by shape. Parameters of three or more dimensions are seen as
    matrices of shape[0] rows; a side longer than `max_precond_dim`, and every vector, keeps its own basis, where this
    is Adam.

    Args:
        betas: the decay rates of the two averages.
        shampoo_beta: the decay rate of L and R; -1 for the second of `betas`.
        weight_decay: decoupled.
        precondition_frequency: steps from one power iteration to the next.
        max_precond_dim: the longest side with a basis of its own.
        correct_bias: multiply d by the factor beside it.

    Raises:
        ValueError: a value is out of range, or a parameter is complex.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.zeros(2, 2))
        >>> opt = st.optim.SOAP([w], lr=0.5, weight_decay=0.0)
        >>> for _ in range(2):
        ...     w.grad = torch.tensor([[3.0, 0.0], [0.0, -1.0]])
        ...     opt.step()
        >>> w.detach().diag()
        tensor([-0.5000,  0.5000])

    Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (2024), Algorithm 3; the first step, the
    order of columns and the defaults are those of its authors' code.
    """

    _accepted = Accepted(shampoo_beta="-1 or [0, 1)", precondition_frequency="[1, inf]", max_precond_dim="[0, inf]")
    optional = ("weight_decay",)
    state = {
        "step": host_count,
        "exp_avg": torch.zeros_like,
        "exp_avg_sq": lambda p: torch.zeros_like(p, memory_format=torch.contiguous_format),
        "left": lambda p: square(p, "left"),
        "right": lambda p: square(p, "right"),
        "left_basis": lambda p: square(p, "left"),
        "right_basis": lambda p: square(p, "right"),
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = -1,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
        correct_bias: bool = True,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def applies_to(self, entry: str, p: Tensor, group: dict[str, Any]) -> bool:
        """Moments and bases of the sides that have them."""
        side = entry.removesuffix("_basis")
        return side not in SIDES or side in sides_of(p, group["max_precond_dim"])

    def update(
        self,
        p,
        g,
        step,
        exp_avg,
        exp_avg_sq,
        left,
        right,
        left_basis,
        right_basis,
        *,
        lr,
        betas,
        shampoo_beta,
        eps,
        weight_decay,
        precondition_frequency,
        correct_bias,
    ):
        """The math of the class, for all parameters with the same sides."""
        moments = [(s, x) for s, x in zip(SIDES, (left, right), strict=True) if x is not None]
        bases = [x for x in (left_basis, right_basis) if x is not None]
        sides = [side for side, _ in moments]
        beta = betas[1] if shampoo_beta == -1 else shampoo_beta
        gradient: Any = widened(p, g, None)
        for count, indices in parts_by_count(step).items():
            t = count - 1
            weights, own, basis = select(p, indices), select(gradient, indices), [select(x, indices) for x in bases]
            squares = select(exp_avg_sq, indices)
            if t:
                factor = ((1 - betas[1] ** t) ** 0.5 / (1 - betas[0] ** t)) if correct_bias else 1.0
                average: Any = _average(select(exp_avg, indices), own, betas[0])
                g_rotated, m_rotated = _rotate([own, average], basis, sides)
                v = as_matrices(squares) if sides else squares
                direction: Any = _adam(g_rotated, m_rotated, v, betas[1], eps, factor)
                (direction,) = _rotate([direction], basis, sides, is_back=True)
                descend(weights, as_shaped(direction, weights), lr, weight_decay)
            for side, moment in moments:
                accumulate_moment(select(moment, indices), side, as_matrices(own), beta, 1 - beta)
            if t == 0 or t % precondition_frequency == 0:
                for (side, moment), q in zip(moments, basis, strict=True):
                    _update_basis(side, select(moment, indices), q, squares, is_first=t == 0)


def _update_basis(side: str, moment: Any, basis: Any, squares: Any, is_first: bool) -> None:
    """Take one power iteration of a side towards the eigenvectors of its moment, and reorder the squares with it."""
    if is_first:
        basis.copy_(by_shape(eigenvectors, moment))
        return
    rotated, order = by_shape(power_iteration, moment, basis)
    basis.copy_(rotated)
    dim = 1 + SIDES.index(side)
    ordered = by_shape(lambda v, i: v.gather(dim, i.unsqueeze(3 - dim).expand_as(v)), as_matrices(squares), order)
    squares.copy_(as_shaped(ordered, squares))


def eigenvectors(moment: Tensor) -> Tensor:
    """The eigenvectors of a stack of symmetric matrices, those of the largest eigenvalues first.

    Args:
        moment: (n, size, size).

    Returns:
        (n, size, size), an eigenvector a column.

    Example:
        >>> eigenvectors(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])).abs().round()
        tensor([[[0., 1.],
                 [1., 0.]]])
    """
    vectors: Tensor = torch.linalg.eigh(moment)[1]
    return vectors.flip(-1)


def power_iteration(moment: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """One step towards the eigenvectors of a stack of symmetric matrices.

    Args:
        moment: (n, size, size).
        basis: (n, size, size), orthogonal.

    Returns:
        The next basis, and (n, size) int64: which columns of the last one its columns came from, by falling eigenvalue.

    Example:
        >>> moment = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
        >>> basis, order = power_iteration(moment, torch.eye(2)[None])
        >>> basis.abs().round(), order
        (tensor([[[0., 1.],
                 [1., 0.]]]), tensor([[1, 0]]))
    """
    image = moment @ basis
    order = (basis * image).sum(-2).argsort(-1, descending=True)
    image = image.gather(-1, order[:, None, :].expand_as(image))
    return torch.linalg.qr(image)[0], order


def _rotate(
    lists: list[TensorList], bases: list[TensorList], sides: list[str], is_back: bool = False
) -> list[TensorList]:
    """Q_L^T x Q_R of each list; back, Q_L x Q_R^T."""
    if not sides:
        return lists

    def run(*stacks: Tensor) -> tuple[Tensor, ...]:
        results = []
        for x in stacks[: len(lists)]:
            for q, side in zip(stacks[len(lists) :], sides, strict=True):
                q = q if is_back else q.mT
                x = q @ x if side == "left" else x @ q.mT
            results.append(x)
        return tuple(results)

    results = by_shape(run, *[as_matrices(x) for x in lists], *bases)
    return [results] if len(lists) == 1 else list(results)


@fused
def _average(m: Tensor, g: Tensor, beta1: float) -> Tensor:
    """Update the average, and return it in the dtype of the math."""
    wide = m.to(g.dtype).lerp(g, 1 - beta1)
    m.copy_(wide)
    return wide


@fused
def _adam(g: Tensor, m: Tensor, v: Tensor, beta2: float, eps: float, factor: float) -> Tensor:
    wide = beta2 * v.to(g.dtype) + (1 - beta2) * g * g
    v.copy_(wide)
    return factor * m / (wide.sqrt() + eps)
