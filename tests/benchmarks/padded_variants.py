"""The ops of the padded benchmark, and how each variant computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subtensors.kernels.padded.masked_ops import masked_norm, masked_reduction, masked_softmax
from subtensors.kernels.runtime.valid_lengths import ValidLength, valid_mask
from subtensors.padded.padding import pad
from subtensors.sizes.dims import Dim

EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """One op on one bucket.

    Args:
        op: softmax, layer norm, rms norm, or the kind of a reduction.
        shape: of the bucket, bfloat16.
        tiny: the shape where speed is of no interest.
        ragged: the dimensions with one length a row.
        dims: the dimensions that the op goes along.
    """

    op: str
    shape: tuple[int, ...]
    tiny: tuple[int, ...]
    ragged: tuple[int, ...]
    dims: tuple[int, ...]


_TEXT, _TINY_TEXT = (32, 2048, 1024), (3, 8, 4)

CASES: dict[str, Case] = {
    "softmax of scores": Case("softmax", (16, 16, 512, 512), (2, 2, 8, 8), (2, 3), (3,)),
    "softmax over length": Case("softmax", _TEXT, _TINY_TEXT, (1,), (1,)),
    "layer norm": Case("layer norm", _TEXT, _TINY_TEXT, (1,), (2,)),
    "rms norm": Case("rms norm", _TEXT, _TINY_TEXT, (1,), (2,)),
    "mean over length": Case("mean", _TEXT, _TINY_TEXT, (1,), (1,)),
    "amax over length": Case("amax", _TEXT, _TINY_TEXT, (1,), (1,)),
    "var over length": Case("var", _TEXT, _TINY_TEXT, (1,), (1,)),
    "logsumexp over length": Case("logsumexp", _TEXT, _TINY_TEXT, (1,), (1,)),
    "norm over length": Case("norm", _TEXT, _TINY_TEXT, (1,), (1,)),
    "mean of all": Case("mean", _TEXT, _TINY_TEXT, (1,), (0, 1, 2)),
}


class Problem:
    """What the variants of a case compute on: the same values for each."""

    def __init__(self, case: Case, shape: Sequence[int], lengths: Sequence[int], trains: bool, device: str) -> None:
        self.case, self.shape, self.trains = case, tuple(shape), trains
        generator = torch.Generator(device).manual_seed(0)
        self.x = torch.randn(self.shape, generator=generator, device=device, dtype=torch.bfloat16)
        sizes = torch.tensor(lengths, device=device)
        self.extents = [ValidLength(dim, sizes) for dim in case.ragged]
        self.mask = valid_mask(self.shape, self.extents, self.x.device).expand(self.shape)
        self.lengths = sizes
        size = shape[case.dims[0] :] if case.op.endswith("norm") and case.op != "norm" else ()
        self.weight, self.bias = (torch.randn(tuple(size), device=device, dtype=torch.bfloat16) for _ in range(2))
        for tensor in (self.x, self.weight, self.bias):
            tensor.requires_grad_(trains)

    @property
    def parameters(self) -> list[Tensor]:
        """The weights of a norm; of nothing else."""
        return {"layer norm": [self.weight, self.bias], "rms norm": [self.weight]}.get(self.case.op, [])

    def plain(self, x: Tensor) -> Tensor:
        """The op as torch has it, on any tensor."""
        dims = list(self.case.dims)
        if self.case.op == "softmax":
            return x.softmax(dims[0])
        if self.case.op == "layer norm":
            return F.layer_norm(x, list(self.weight.shape), self.weight, self.bias, EPS)
        if self.case.op == "rms norm":
            return F.rms_norm(x, list(self.weight.shape), self.weight, EPS)
        if self.case.op == "norm":
            return torch.linalg.vector_norm(x, dim=dims)  # type: ignore[no-any-return]
        if len(dims) == x.dim():
            return getattr(x, self.case.op)()  # type: ignore[no-any-return]
        return getattr(x, self.case.op)(dims)  # type: ignore[no-any-return]

    def run(self, op: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
        """The call to time: the op, and in training its gradients for an upstream gradient of ones."""
        if not self.trains:
            return lambda: op(x)
        ones = torch.ones_like(op(x).detach())

        def step() -> object:
            return torch.autograd.grad(op(x), [x, *self.parameters], ones)

        return step


def _dense(problem: Problem) -> Callable[[], object]:
    return problem.run(problem.plain, problem.x)


def by_kernels(problem: Problem, x: Tensor) -> Tensor:
    """The op of a problem by the kernels of this project."""
    case = problem.case
    if case.op == "softmax":
        return masked_softmax(x, case.dims[0], problem.extents)
    if case.op in ("layer norm", "rms norm"):
        is_rms = case.op == "rms norm"
        bias = None if is_rms else problem.bias
        return masked_norm(x, 1, problem.weight, bias, EPS, problem.extents, is_rms=is_rms).y
    return masked_reduction(x, case.op, case.dims, problem.extents).out


def by_hand(problem: Problem, x: Tensor) -> Tensor:
    """The op of a problem as one writes it with a mask."""
    op, dims, mask = problem.case.op, list(problem.case.dims), problem.mask
    if op == "softmax":
        # Where nothing is real all is -inf, and NaN without the second fill.
        return x.masked_fill(~mask, float("-inf")).softmax(dims[0]).masked_fill(~mask, 0)
    if op in ("layer norm", "rms norm"):
        return problem.plain(x.masked_fill(~mask, 0)).masked_fill(~mask, 0)
    count = mask.sum(dims)
    if op == "mean":
        return (x.masked_fill(~mask, 0).sum(dims) / count).to(x.dtype)
    if op == "amax":
        return x.masked_fill(~mask, float("-inf")).amax(dims)
    if op == "logsumexp":
        return x.masked_fill(~mask, float("-inf")).logsumexp(dims)
    if op == "norm":
        return torch.linalg.vector_norm(x.masked_fill(~mask, 0), dim=dims)  # type: ignore[no-any-return]
    value = x.float()
    mean = value.masked_fill(~mask, 0).sum(dims, keepdim=True) / count.view(mean_shape(problem))
    return ((value - mean).masked_fill(~mask, 0).square().sum(dims) / (count - 1)).to(x.dtype)


def mean_shape(problem: Problem) -> list[int]:
    """The shape of a result with its reduced dimensions kept."""
    return [1 if d in problem.case.dims else n for d, n in enumerate(problem.shape)]


def _masked(problem: Problem) -> Callable[[], object]:
    return problem.run(lambda x: by_hand(problem, x), problem.x)


def _compiled(problem: Problem) -> Callable[[], object]:
    torch.compiler.reset()  # one problem is no recompilation of another
    return problem.run(torch.compile(lambda x: by_hand(problem, x), fullgraph=True), problem.x)


def _torch_masked(problem: Problem) -> Callable[[], object]:
    case = problem.case
    functions: dict[str, Any] = {
        "softmax": lambda x: torch.masked.softmax(x, case.dims[0], mask=problem.mask),
        "norm": lambda x: torch.masked.norm(x, 2.0, case.dims, mask=problem.mask),
    }
    if case.op in ("layer norm", "rms norm"):
        raise NotImplementedError(f"torch.masked has no {case.op}")
    reduce = getattr(torch.masked, case.op)
    return problem.run(functions.get(case.op, lambda x: reduce(x, case.dims, mask=problem.mask)), problem.x)


def _nested(problem: Problem) -> Callable[[], object]:
    if len(problem.case.ragged) > 1:
        raise NotImplementedError("a jagged tensor has one ragged dimension")
    rows = [row[:n].detach() for row, n in zip(problem.x, problem.lengths.tolist(), strict=True)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=problem.trains)
    return problem.run(problem.plain, nested)


def _subtensors(problem: Problem) -> Callable[[], object]:
    return problem.run(lambda x: by_kernels(problem, x), problem.x)


def _padded_tensor(problem: Problem) -> Callable[[], object]:
    """The op called on a PaddedTensor as a program calls it; `_subtensors` is the kernel alone."""
    longest = problem.shape[problem.case.ragged[0]]
    dim = Dim("length", max=longest, buckets=[longest])
    rows = []
    for row, length in zip(problem.x.detach(), problem.lengths.tolist(), strict=True):
        for d in problem.case.ragged:
            row = row.narrow(d - 1, 0, length)
        rows.append(row)
    x = pad(rows, {d - 1: dim for d in problem.case.ragged})
    return problem.run(problem.plain, x.requires_grad_(problem.trains))


VARIANTS: dict[str, Callable[[Problem], Callable[[], object]]] = {
    "dense": _dense,
    "subtensors": _subtensors,
    "PaddedTensor": _padded_tensor,
    "masked by hand": _masked,
    "the same compiled": _compiled,
    "torch.masked": _torch_masked,
    "torch.nested": _nested,
}
