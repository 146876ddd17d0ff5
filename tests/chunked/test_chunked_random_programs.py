"""Random programs: ops of all kinds, one after the other, on a tensor chunked along any dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from chunked_programs import check_chunked
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

Op = Callable[[Tensor, int, Tensor], Any]


def along(op: Callable[..., Any], **options: Any) -> Op:
    """An op along one of the dims."""
    return lambda x, n, w: op(x, dim=n % x.ndim, **options) if x.ndim else x


def where_it_fits(op: Op, needs: int = 1) -> Op:
    """An op for tensors of so many dims; nothing for others."""
    return lambda x, n, w: op(x, n, w) if x.ndim >= needs else x


def multiplied(x: Tensor, n: int, w: Tensor) -> Tensor:
    return x @ w[: x.shape[-1], : n % 4 + 1] if x.shape[-1] <= len(w) else x


def in_place(x: Tensor, n: int, w: Tensor) -> Tensor:
    y = x.sin()
    y.select(n % y.ndim, 0).mul_(2.0)
    y.transpose(0, -1)[0].add_(1.0)
    return y


def merged(x: Tensor, n: int, w: Tensor) -> Tensor:
    first = n % (x.ndim - 1)
    return x.flatten(first, first + 1)


def parted(x: Tensor, n: int, w: Tensor) -> Tensor:
    dim = n % x.ndim
    return x.unflatten(dim, (2, -1)) if x.shape[dim] % 2 == 0 and x.ndim < 5 else x


def picked(x: Tensor, n: int, w: Tensor) -> Tensor:
    dim = n % x.ndim
    return x.index_select(dim, torch.tensor([x.shape[dim] - 1, 0, 0]))


def taken(x: Tensor, n: int, w: Tensor) -> Tensor:
    dim = n % x.ndim
    return x.gather(dim, torch.zeros_like(x, dtype=torch.int64).narrow(dim, 0, 1))


def chosen(x: Tensor, n: int, w: Tensor) -> Tensor:
    mask = w.flatten()[: len(x)] > -0.5
    mask[0] = True
    return x[mask]


def gated(x: Tensor, n: int, w: Tensor) -> Tensor:
    return F.glu(x, n % x.ndim) if x.shape[n % x.ndim] % 2 == 0 else x


def placed(x: Tensor, n: int, w: Tensor) -> Tensor:
    y = x * 1
    y[..., torch.tensor([0, -1])] = w[0, 0]
    return y


def put(x: Tensor, n: int, w: Tensor) -> Tensor:
    rows = torch.tensor([len(x) - 1, 0, -1])
    classes = torch.tensor([0, x.shape[1] - 1, 0])
    y = x * 1
    y[rows, classes] += w[0, 0] * n
    return y.index_put((rows[:2],), w[1, 1], accumulate=True)


def one_by_one(x: Tensor, n: int, w: Tensor) -> Tensor:
    y = x * 1 if n % 2 else x
    rows = [row * k + row.mean() for k, row in enumerate(y)]
    y.mul_(0.5) if n % 2 else None
    return torch.stack(rows) + y


OPS: dict[str, Op] = {
    "sin": lambda x, n, w: x.sin(),
    "scaled": lambda x, n, w: x * w[0, 0] + n,
    "masked": lambda x, n, w: torch.where(x > 0, x, x.detach() * 0.5),
    "widened": where_it_fits(lambda x, n, w: x.unsqueeze(n % (x.ndim + 1)) if x.ndim < 5 else x),
    "squeezed": lambda x, n, w: x.squeeze(),
    "turned": where_it_fits(lambda x, n, w: x.transpose(0, n % x.ndim)),
    "moved": where_it_fits(lambda x, n, w: x.movedim(-1, 0)),
    "merged": where_it_fits(merged, 2),
    "parted": where_it_fits(parted),
    "flipped": where_it_fits(lambda x, n, w: x.flip(n % x.ndim)),
    "begun": where_it_fits(lambda x, n, w: x.narrow(n % x.ndim, 0, (x.shape[n % x.ndim] + 1) // 2)),
    "ended": where_it_fits(
        lambda x, n, w: x.narrow(n % x.ndim, x.shape[n % x.ndim] // 2, -(-x.shape[n % x.ndim] // 2))
    ),
    "selected": where_it_fits(lambda x, n, w: x.select(n % x.ndim, x.shape[n % x.ndim] - 1)),
    "halves": where_it_fits(lambda x, n, w: torch.cat([x * 2, x.cos()], dim=n % x.ndim)),
    "stacked": lambda x, n, w: torch.stack([x, x.cos()], dim=n % (x.ndim + 1)) if x.ndim < 4 else x,
    "softmax": along(torch.softmax),
    "log_softmax": along(torch.log_softmax),
    "cumsum": along(torch.cumsum),
    "sum": along(torch.sum),
    "mean": along(torch.mean, keepdim=True),
    "centred": where_it_fits(lambda x, n, w: x - x.mean(n % x.ndim, keepdim=True)),
    "largest": along(torch.amax),
    "norm": along(torch.linalg.vector_norm, keepdim=True),
    "logsumexp": along(torch.logsumexp),
    "best": where_it_fits(lambda x, n, w: x.max(n % x.ndim).values),
    "sorted": where_it_fits(lambda x, n, w: x.sort(n % x.ndim).values),
    "multiplied": where_it_fits(multiplied, 2),
    "squared": where_it_fits(lambda x, n, w: x @ x.mT, 2),
    "normalised": where_it_fits(lambda x, n, w: F.layer_norm(x, x.shape[-1:])),
    "in_place": where_it_fits(in_place, 2),
    "picked": where_it_fits(picked),
    "taken": where_it_fits(taken),
    "chosen": where_it_fits(chosen),
    "gated": where_it_fits(gated),
    "placed": where_it_fits(placed),
    "put": where_it_fits(put, 2),
    "one by one": where_it_fits(one_by_one, 2),
    "first": where_it_fits(lambda x, n, w: x[n % len(x)], 2),
    "last": where_it_fits(lambda x, n, w: x[:, -1] - x[:, 0].mean(), 2),
    "crossed": where_it_fits(lambda x, n, w: x.diagonal(0, 0, -1), 2),
    "repeated": lambda x, n, w: x.expand(2, *x.shape) if x.ndim < 4 else x,
    "ranked": where_it_fits(lambda x, n, w: x * x.argmax(n % x.ndim, keepdim=True)),
}

steps = some.lists(some.tuples(some.sampled_from(sorted(OPS)), some.integers(0, 11)), min_size=1, max_size=6)
shapes = some.lists(some.integers(1, 6), min_size=1, max_size=3)
divisions = some.sampled_from([{"rows": 1}, {"rows": 2}, {"rows": 4}, {"chunks": 2}])


def program(names: Sequence[tuple[str, int]]) -> Callable[..., Any]:
    def run(x: Tensor, w: Tensor) -> Any:
        kept = []
        for name, n in names:
            x = OPS[name](x, n, w)
            kept.append(x)
        return x, kept[len(kept) // 2].sum()

    return run


@settings(max_examples=3 * settings().max_examples)
@given(steps, shapes, some.integers(0, 2), divisions, some.sampled_from([{"x"}, {"x", "w"}, {"w"}]))
def test_a_random_program_on_a_chunked_tensor_equals_the_plain_one(
    names: list[tuple[str, int]], shape: list[int], dim: int, division: dict[str, Any], needs: set[str]
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    values = {"x": torch.randn(shape, generator=generator), "w": torch.randn(64, 8, generator=generator)}
    chunks = {"x": {"dim": dim % len(shape), **division}}
    # Each of up to six reductions of the rows may be a pass of its own.
    check_chunked(program(names), values, chunks, needs=needs, passes=4, scale=1.0, dtype=torch.float64)
