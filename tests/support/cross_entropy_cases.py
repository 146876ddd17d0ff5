"""Cases of a linear layer with cross entropy, their plain program, and the tolerance that results are held to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as some
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy, RowLoss
from subtensors.kernels.cross_entropy.linear_cross_entropy import linear_cross_entropy
from subtensors.kernels.cross_entropy.logits_block import LossAndGradients


@dataclass(frozen=True)
class Case:
    """The arguments of one call."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    options: CrossEntropy

    def to(self, device: str, dtype: torch.dtype) -> Case:
        """The same on a device, what is floating point in another dtype; class weights keep theirs."""
        moved = [
            None if t is None else t.to(device, dtype if t.is_floating_point() else t.dtype)
            for t in (self.hidden, self.weight, self.target, self.bias)
        ]
        weight = self.options.class_weight
        options = replace(self.options, class_weight=None if weight is None else weight.to(device))
        return Case(*moved, options)  # type: ignore[arg-type]

    def ours(self, **keywords: Any) -> LossAndGradients:
        return linear_cross_entropy(self.hidden, self.weight, self.target, self.bias, options=self.options, **keywords)


def plain(case: Case, upstream: Tensor | None = None, wide_logits: bool = True) -> LossAndGradients:
    """The program that a user would write: every logit in memory, in float32 after the linear layer."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (case.hidden, case.weight, case.bias)]
    hidden, weight, bias = leaves
    assert hidden is not None
    assert weight is not None
    logits, options = F.linear(hidden, weight, bias), case.options
    if logits.dtype != torch.float64 and wide_logits:
        logits = logits.float()
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    logits = logits / options.temperature
    target = case.target.to(logits.dtype) if case.target.is_floating_point() else case.target
    class_weight = None if options.class_weight is None else options.class_weight.to(logits.dtype)
    loss = F.cross_entropy(
        logits,
        target,
        class_weight,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )
    if options.z_loss:
        penalty = options.z_loss * logits.logsumexp(1).square()
        valid = torch.ones_like(penalty, dtype=torch.bool) if target.dim() == 2 else target != options.ignore_index
        if options.reduction == "none":
            loss = loss + torch.where(valid, penalty, 0.0)
        else:
            loss = loss + (penalty[valid].mean() if options.reduction == "mean" else penalty[valid].sum())
    loss.backward(torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype))
    return LossAndGradients(loss.detach(), hidden.grad, weight.grad, None if bias is None else bias.grad)


def check(actual: LossAndGradients, case: Case, upstream: Tensor | None = None) -> None:
    """No error is larger than 1.5 times that of the plain program, plus one rounding of the largest value.

    Where terms cancel, the plain program may be lucky: what float32 may round off any sum of the gradient's terms,
    without regard to their signs, is allowed too.
    """
    exact = case.to(str(case.hidden.device), torch.float64)
    truth, usual = plain(exact, upstream), plain(case, upstream)
    exact = replace(exact, hidden=exact.hidden.detach())
    logits = F.linear(exact.hidden, exact.weight, exact.bias)
    size = terms_without_signs(exact, upstream, logits)
    roundings = 2 * torch.finfo(torch.float32).eps * (1 + float(logits.abs().max()))
    unsigned = (truth.loss.abs(), size @ exact.weight.abs(), size.t() @ exact.hidden.abs(), size.sum(0))
    for name, mine, theirs, true, terms in zip(LossAndGradients._fields, actual, usual, truth, unsigned, strict=True):
        if mine is None or theirs is None or true is None or not true.numel():
            continue
        assert mine.shape == true.shape, name
        usual_error, error = (float((t.double() - true).abs().max()) for t in (theirs, mine))
        rounding = torch.finfo(mine.dtype).eps * float(true.abs().max()) + roundings * float(terms.max())
        assert error <= 1.5 * usual_error + rounding, (name, error, usual_error, rounding)


def terms_without_signs(case: Case, upstream: Tensor | None, logits: Tensor) -> Tensor:
    """What each element of the gradient of the logits is a difference of, added up."""
    row_loss = RowLoss(case.options, case.target, logits.shape[1], torch.float64)
    f = row_loss.gradient_factors(upstream)
    z = logits if case.options.softcap is None else case.options.softcap * torch.tanh(logits / case.options.softcap)
    z = z / case.options.temperature
    weight = 1.0 if row_loss.class_weight is None else row_loss.class_weight
    if row_loss.soft is not None:
        targets = weight * row_loss.soft
    else:
        assert row_loss.class_targets is not None
        targets = (
            row_loss.class_targets.class_indices[:, None] == torch.arange(logits.shape[1], device=logits.device)
        ).double()
    grad_softmax = f.grad_softmax.abs() + row_loss.has_z_loss * f.grad_z_loss.abs() * z.logsumexp(1).abs()
    size = grad_softmax[:, None] * z.softmax(1) + f.grad_target.abs()[:, None] * targets
    size = size + row_loss.has_smoothing * f.grad_smoothing.abs()[:, None] * weight
    return size / case.options.temperature


@some.composite
def cases(draw: Any) -> Case:
    """Small problems with every mix of options."""
    count, width, classes = draw(some.integers(1, 12)), draw(some.integers(1, 14)), draw(some.integers(2, 40))
    generator = torch.Generator().manual_seed(draw(some.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    smoothing = draw(some.sampled_from([0.0, 0.1, 1.0]))
    ignore = -100
    if draw(some.booleans()):
        target = normal(count, classes).softmax(1)
    else:
        target = torch.randint(classes, (count,), generator=generator)
        ignore = draw(some.sampled_from([-100, 0]))
        target[torch.rand(count, generator=generator) < draw(some.sampled_from([0.0, 0.4]))] = ignore
    options = CrossEntropy(
        ignore_index=ignore,
        class_weight=torch.rand(classes, generator=generator) + 0.1 if draw(some.booleans()) else None,
        label_smoothing=smoothing,
        z_loss=draw(some.sampled_from([0.0, 0.1])),
        softcap=draw(some.sampled_from([None, 3.0])),
        temperature=draw(some.sampled_from([1.0, 0.7])),
        reduction=draw(some.sampled_from(["mean", "sum", "none"])),
    )
    bias = normal(classes) if draw(some.booleans()) else None
    return Case(normal(count, width), normal(classes, width), target, bias, options)


def example(count: int = 12, width: int = 5, classes: int = 23, **options: Any) -> Case:
    generator = torch.Generator().manual_seed(count * classes)
    target = torch.randint(classes, (count,), generator=generator)
    target[::5] = -100
    hidden, weight = (torch.randn(n, width, generator=generator) for n in (count, classes))
    return Case(hidden, weight, target, torch.randn(classes, generator=generator), CrossEntropy(**options))


class Sizes(TorchDispatchMode):
    """What each aten call makes, and what it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, Tensor):
                self.largest = max(self.largest, made.untyped_storage().nbytes())
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.products.append(tuple(result.shape))
        return result
