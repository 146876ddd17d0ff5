"""Newton-Schulz iteration: the nearest orthogonal matrix, by matrix products alone."""

from __future__ import annotations

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]


def newton_schulz(x: Tensor, coefficients: Coefficients, steps: int, scale: float = 1.0) -> Tensor:
    """Bring every singular value of a batch of matrices near 1, and keep its singular vectors.

        A = X X^T                                       X^T X for tall matrices, so that A is the smaller one
        X <- a X + (b A + c A^2) X                      X (b A + c A^2) for tall ones

    A step maps each singular value s to a s + b s^3 + c s^5. A batch takes three products a step, however many matrices
    it has.

    Args:
        x: (batch, rows, columns), of Frobenius norms of at most 1; may be overwritten.
        coefficients: a, b and c.
        steps: how many.
        scale: a factor of the result.

    Returns:
        Like `x`; its memory where that saves some.

    Example:
        >>> x = torch.tensor([[[0.6, 0.0], [0.0, -0.8]]])
        >>> newton_schulz(x, (1.5, -0.5, 0.0), steps=10).round()
        tensor([[[ 1.,  0.],
                 [ 0., -1.]]])

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Bernstein & Newhouse, "Old
    Optimizer, New Norm" (2024).
    """
    a, b, c = coefficients
    is_tall = x.size(-2) > x.size(-1)
    start = x
    for step in range(steps):
        is_last = step == steps - 1
        gram = x.mT @ x if is_tall else x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        del gram
        factors = (x, polynomial) if is_tall else (polynomial, x)
        # The factor of the result costs nothing as a part of the last product.
        factor = scale if is_last else 1.0
        out = start if is_last and x is not start else None
        x = torch.baddbmm(x, *factors, beta=a * factor, alpha=factor, out=out)  # type: ignore[call-overload]
    return x if steps else x * scale
