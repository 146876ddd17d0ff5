"""Masked kernels under test: padded tensors with poison, and an oracle that sees the real elements alone.

The oracle takes each row's real elements out, as a tensor of their own, and runs the plain torch op on them: in float64
for the truth, and in the dtype under test for torch's own error. A kernel's error may be 1.5 times that, plus one
rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as some
from programs import Lowering
from torch import Tensor

from subtensors.kernels.runtime.valid_lengths import ValidLength

POISON = (float("nan"), float("inf"), float("-inf"), 3e38)

Op = Callable[[Tensor], Tensor]


def mask_of(shape: Sequence[int], extents: Sequence[ValidLength]) -> Tensor:
    """Which elements are real, index by index: the definition of extents."""
    sizes = [(e.dim, e.sizes.tolist(), e.batch_dim) for e in extents]
    inside = [
        all(index[dim] < (size[index[batch]] if isinstance(size, list) else size) for dim, size, batch in sizes)
        for index in itertools.product(*map(range, shape))
    ]
    return torch.tensor(inside, dtype=torch.bool).view(tuple(shape))


@dataclass(frozen=True)
class Padded:
    """A tensor with poison where it is padded."""

    x: Tensor
    extents: list[ValidLength]

    @property
    def mask(self) -> Tensor:
        return mask_of(self.x.shape, self.extents).to(self.x.device)

    def on(self, lowering: Lowering) -> Padded:
        """A copy on the lowering's device, of the same strides."""
        device = lowering.device
        return Padded(self.x.to(device), [ValidLength(d, s.to(device), b) for d, s, b in self.extents])

    def like(self, values: Tensor) -> Padded:
        """Other values, of a shape that broadcasts to this one's, with poison where this is padded."""
        return replace(self, x=poisoned(values.expand(self.x.shape).to(self.x.device), self.mask))

    def rows(self, dims: Sequence[int]) -> Iterator[tuple[Tensor, bool]]:
        """Each row along some dimensions: the flat positions of its real elements, and whether the row is real."""
        shape, ndim = self.x.shape, self.x.dim()
        dims = sorted(d % ndim for d in dims)
        order = [d for d in range(ndim) if d not in dims] + dims
        columns = math.prod(shape[d] for d in dims)
        # A row is padding where the extents that do not look at its elements say so.
        kept = [e for e in self.extents if e.dim not in dims and not (e.sizes.dim() and e.batch_dim in dims)]
        positions, mask, real = (
            t.permute(order).reshape(-1, columns)
            for t in (torch.arange(self.x.numel()).view(shape), mask_of(shape, self.extents), mask_of(shape, kept))
        )
        for position, inside, row in zip(positions, mask, real, strict=True):
            yield position[inside], bool(row.all())


def poisoned(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with NaN, inf and huge values, in turn, wherever `mask` is False."""
    if not x.is_floating_point():
        limit = 1 if x.dtype == torch.bool else torch.iinfo(x.dtype).max
        return torch.where(mask, x, torch.full_like(x, limit))
    poison = torch.tensor(POISON, device=x.device).to(x.dtype)
    turns = torch.arange(x.numel(), device=x.device).view(x.shape) % len(POISON)
    out = torch.empty_like(x)
    return out.copy_(torch.where(mask, x, poison[turns]))


def padded(
    shape: Sequence[int], sizes: dict[int, int | tuple[list[int], int]], dtype: torch.dtype = torch.float32,
    order: Sequence[int] | None = None, seed: int = 0,
) -> Padded:  # fmt: skip
    """A tensor of random values.

    Args:
        shape: of the tensor.
        sizes: for each padded dimension its size, or a size a row and the dimension of the rows.
        dtype: of the tensor.
        order: of its dimensions in memory.
        seed: of the values.
    """
    generator = torch.Generator().manual_seed(seed)
    order = list(order or range(len(shape)))
    memory = torch.randn([shape[d] for d in order], generator=generator).mul(2)
    memory = memory.round().to(dtype) if not dtype.is_floating_point else memory.to(dtype)
    x = memory.permute([order.index(d) for d in range(len(shape))])
    extents = [
        ValidLength(d, torch.tensor(n)) if isinstance(n, int) else ValidLength(d, torch.tensor(n[0]), n[1])
        for d, n in sizes.items()
    ]
    return Padded(poisoned(x, mask_of(shape, extents)), extents)


@some.composite
def any_padded(draw: some.DrawFn, dtypes: Sequence[torch.dtype], least: int = 0) -> Padded:
    """A random tensor of one to four dimensions, of which up to three are padded, in any order in memory."""
    shape = draw(some.lists(some.integers(1, 6), min_size=1, max_size=4))
    ndim = len(shape)
    sizes: dict[int, int | tuple[list[int], int]] = {}
    for dim in draw(some.lists(some.integers(0, ndim - 1), unique=True, max_size=3)):
        size = some.integers(min(least, shape[dim]), shape[dim])
        batches = [d for d in range(ndim) if d != dim]
        if batches and draw(some.booleans()):
            batch = draw(some.sampled_from(batches))
            sizes[dim] = [draw(size) for _ in range(shape[batch])], batch
        else:
            sizes[dim] = draw(size)
    order = draw(some.permutations(range(ndim)))
    return padded(shape, sizes, draw(some.sampled_from(dtypes)), order, draw(some.integers(0, 99)))


def assert_exact(actual: Tensor, plain: Tensor, truth: Tensor, terms: Tensor, lowering: Lowering) -> None:
    """The error is at most 1.5 times torch's own, plus one rounding of what is added up.

    Args:
        actual: what a kernel gave.
        plain: what torch gives in the same dtype.
        truth: in float64.
        terms: the size of what was added up, in float64.
        lowering: that the kernel ran by; the interpreter truncates where a GPU rounds to half precision.
    """
    assert actual.dtype == plain.dtype
    assert actual.shape == plain.shape
    actual, truth, terms = actual.cpu(), truth.cpu(), terms.cpu()
    if not plain.is_floating_point():
        assert torch.equal(actual, plain.cpu())
        return
    plain = plain.cpu().double()
    agrees = (
        (actual.double() == truth) | (actual.double() == plain) | (actual.isnan() & (truth.isnan() | plain.isnan()))
    )
    rounding = torch.finfo(actual.dtype).eps * (1 + lowering.slack(actual.dtype))
    errors = [(t - truth).abs().nan_to_num(0, 0, 0) for t in (actual.double(), plain)]
    finite = torch.maximum(terms, truth.abs()).nan_to_num(0, 0, 0)
    allowed = 1.5 * errors[1].max() + rounding * finite.max() if truth.numel() else 0
    wrong = ~agrees & ~((errors[0] <= allowed) & truth.isfinite() & actual.isfinite())
    assert not wrong.any(), f"{actual[wrong]} is not {truth[wrong]}; torch gives {plain[wrong]}, allowed {allowed}"


@dataclass
class Wanted:
    """What an op should give: in float64, and as torch gives it in the dtype under test."""

    plain: Tensor
    truth: Tensor
    terms: Tensor

    def check(self, actual: Tensor, lowering: Lowering) -> None:
        """Raise AssertionError where `actual` is further from the truth than `assert_exact` allows."""
        assert_exact(actual, self.plain, self.truth, self.terms, lowering)


def wanted_rows(p: Padded, dims: Sequence[int], op: Op, fill: float) -> Wanted:
    """What an op from a vector to a vector gives, put back where the vector came from; `fill` in padding."""
    outs = [torch.full(p.x.shape, fill, dtype=d, device=p.x.device) for d in (p.x.dtype, torch.float64, torch.float64)]
    for positions, _ in p.rows(dims):
        real = p.x.reshape(-1)[positions.to(p.x.device)]
        for out, value in zip(outs, (op(real), op(real.double()), real.double().abs() * 0), strict=True):
            out.view(-1)[positions.to(p.x.device)] = value.to(out.dtype)
    return Wanted(*outs)


def wanted_results(
    p: Padded, dims: Sequence[int], op: Op, fill: float, terms: Op | None = None, depth: float = 1
) -> Wanted:
    """What an op from a vector to a number gives, row by row; `fill` for a row of padding.

    Args:
        p: the padded tensor.
        dims: the op's.
        op: over one row's real elements.
        fill: the result of a row that is padding.
        terms: what of the magnitudes of a row its result adds up.
        depth: how many roundings a result goes through.
    """
    plain, truth, sizes = [], [], []
    for positions, is_real in p.rows(dims):
        real = p.x.reshape(-1)[positions.to(p.x.device)]
        value, exact = op(real), op(real.double() if real.is_floating_point() else real)
        plain.append(value if is_real else torch.full_like(value, fill))
        truth.append(exact.double() if is_real else torch.full_like(exact, fill, dtype=torch.float64))
        sizes.append(terms(real.double().abs()) if terms else exact.double().abs() * depth)
    reduced = {d % p.x.dim() for d in dims}
    shape = [n for d, n in enumerate(p.x.shape) if d not in reduced]
    plain_, truth_, sizes_ = (torch.stack(list(ts)).view(shape) for ts in (plain, truth, sizes))
    return Wanted(plain_, truth_, sizes_)


def wanted_gradients(p: Padded, g: Tensor, dims: Sequence[int], op: Op, depth: float = 1) -> Wanted:
    """The gradient of an op over each row's real elements; zero in padding.

    Args:
        p: the padded tensor.
        g: the upstream gradient: of the shape of `p.x` for an op to a vector, one a row for an op to a number.
        dims: the op's.
        op: over one row's real elements.
        depth: how many roundings a gradient goes through.
    """
    outs = [torch.zeros(p.x.shape, dtype=d, device=p.x.device) for d in (p.x.dtype, torch.float64, torch.float64)]
    for number, (positions, is_real) in enumerate(p.rows(dims)):
        where = positions.to(p.x.device)
        if not is_real or not len(positions):
            continue
        for out, dtype in zip(outs, (p.x.dtype, torch.float64), strict=False):
            real = p.x.reshape(-1)[where].to(dtype).requires_grad_()
            result = op(real)
            upstream = g.reshape(-1)[where] if result.dim() else g.reshape(-1)[number]
            (gradient,) = torch.autograd.grad(result, real, upstream.to(result.dtype))
            out.view(-1)[where] = gradient
        upstream = g.reshape(-1)[where] if g.shape == p.x.shape else g.reshape(-1)[number]
        outs[2].view(-1)[where] = torch.maximum(upstream.double().abs().sum(), outs[1].view(-1)[where].abs() * depth)
    return Wanted(*outs)
