"""An index of any origin names the elements that it names in the unpadded program, for any op that takes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

import subtensors as st

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")

SEQ = st.Dim("seq", max=16, buckets=[8, 16])
BATCH = st.Dim("batch", max=6, buckets=[6])

Layout: TypeAlias = Callable[[Tensor], Tensor]
Producer: TypeAlias = Callable[[Tensor], Tensor]
Consumer: TypeAlias = Callable[[Tensor, Tensor], Tensor]

LAYOUTS: dict[str, Layout] = {
    "a padded dim": lambda x: x[0],
    "rows in one dim": lambda x: x.reshape(-1, 3),
    "rows in one dim, positions first": lambda x: x.transpose(0, 1).reshape(-1, 3),
    "features outside of positions": lambda x: x.permute(2, 1, 0).flatten(0, 1),
    "unpadded": lambda x: x.permute(0, 2, 1).flatten(0, 1)[..., :3].contiguous(),
    "all but the first position": lambda x: x[:, 1:].reshape(-1, 3),
    "all in one dim": lambda x: x.transpose(1, 2).reshape(-1, 1),
    "sorted": lambda x: x.reshape(-1, 3).sort(0).values,
    "a sum": lambda x: (x.transpose(0, 1).reshape(-1, 3) + 1).view(-1, x.shape[0], 3).transpose(0, 1).reshape(-1, 3),
}
"""Ways to (positions, features), of (rows, seq, 3)."""

PRODUCERS: dict[str, Producer] = {
    "nonzero": lambda h: (h[:, 0] > 0).nonzero()[:, 0],
    "nonzero as a tuple": lambda h: (h > 0).nonzero(as_tuple=True)[0],
    "nonzero_static": lambda h: (h[:, 0] == h[:, 0]).nonzero_static(size=2)[:, 0],
    "argwhere": lambda h: torch.argwhere(h > 0)[:, 0],
    "where": lambda h: torch.where(h[:, 0] > 0)[0],
    "topk": lambda h: h[:, 0].topk(2).indices,
    "topk of each feature": lambda h: h.topk(2, 0).indices[:, -1],
    "sort": lambda h: h.sort(0, descending=True).indices[:, 0],
    "argsort": lambda h: h[:, 0].argsort(),
    "argsort, stable": lambda h: torch.argsort(h[:, 0], stable=True),
    "argmax": lambda h: h.argmax(0),
    "argmin of all": lambda h: h[:, 0].argmin()[None],
    "max": lambda h: h.max(0).indices,
    "min": lambda h: h.min(0, keepdim=True).indices[0],
    "median": lambda h: h.median(0).indices,
    "nanmedian": lambda h: h.nanmedian(0).indices,
    "mode": lambda h: h.mode(0).indices,
    "kthvalue": lambda h: h.kthvalue(2, 0).indices,
    "cummax": lambda h: h.cummax(0).indices[:, 0],
    "searchsorted": lambda h: torch.searchsorted(h[:, 0].sort().values, h[:2, 0].contiguous()),
    "bucketize": lambda h: torch.bucketize(h[:2, 0].contiguous(), h[:, 0].sort().values),
    "searchsorted of integers": lambda h: torch.searchsorted(
        h[:, 0].detach().long().sort().values, h[:2, 0].long().contiguous()
    ),
    "unique": lambda h: h[:, 0].unique(return_inverse=True)[1],
    "repeat_interleave": lambda h: torch.repeat_interleave((h[:, 0] > 0).long() * 2),
    "max_pool1d": lambda h: F.max_pool1d(h.T, 2, return_indices=True)[1][0],
    "a mask's argmax": lambda h: (h > 0).int().argmax(0),
    "from elsewhere": lambda h: torch.tensor([1, 0, 2, 1], device=h.device),
    "one number": lambda h: torch.tensor([2], device=h.device),
}
"""Positions of the first dim, (any number,), found in (positions, features) or given."""


def _written(h: Tensor, i: Tensor, value: float | Tensor) -> Tensor:
    h = h.clone()
    h[i] = value
    return h


def _columns(h: Tensor, i: Tensor) -> Tensor:
    return i[:, None].expand(-1, h.shape[1])


def _in_place(h: Tensor, i: Tensor) -> Tensor:
    h = h * 1
    h.index_add_(0, i, h.detach()[i])
    return h


CONSUMERS: dict[str, Consumer] = {
    "index_select": lambda h, i: h.index_select(0, i),
    "index_select of 32 bits": lambda h, i: h.index_select(0, i.int()),
    "x[i]": lambda h, i: h[i],
    "x[i, 0]": lambda h, i: h[i, 0],
    "x[-1 - i]": lambda h, i: h[-1 - i],
    "x[i[0]]": lambda h, i: h[i[:1]][0] if i.numel() else h.sum(),
    "x.T[:, i]": lambda h, i: h.T[:, i],
    "x[i, None]": lambda h, i: h[i, None] * 2,
    "two indices": lambda h, i: h[i[:, None], torch.tensor([0, -1], device=h.device)],
    "gather": lambda h, i: h.gather(0, _columns(h, i)),
    "gather along the last dim": lambda h, i: h.T.gather(1, i[None]),
    "take": lambda h, i: h.take(i),
    "take from the end": lambda h, i: torch.take(h[:, 0], -1 - i),
    "take_along_dim": lambda h, i: torch.take_along_dim(h, i[:, None], 0),
    "take_along_dim from the end": lambda h, i: torch.take_along_dim(h, -1 - i[:, None], 0),
    "take_along_dim of all": lambda h, i: torch.take_along_dim(h, i),
    "embedding": lambda h, i: F.embedding(i, h),
    "one_hot": lambda h, i: F.one_hot(i, 80) * h.sum(),
    "scatter a number": lambda h, i: h.scatter(0, _columns(h, i), 2.0),
    "scatter": lambda h, i: h.scatter(0, _columns(h, i), h[i] * 2),
    "scatter_add": lambda h, i: torch.zeros_like(h).scatter_add(0, _columns(h, i), h[i] * 2),
    "scatter_add along the last dim": lambda h, i: h.T.scatter_add(1, i[None], h[i, 0][None]),
    "scatter_reduce": lambda h, i: h.scatter_reduce(0, _columns(h, i), h[i] * 2, "sum"),
    "the largest by scatter_reduce": lambda h, i: h.scatter_reduce(0, _columns(h, i), h.detach()[i] * 2, "amax"),
    "index_add": lambda h, i: h.index_add(0, i, h[i], alpha=2),
    "index_add_": _in_place,
    "index_copy": lambda h, i: h.index_copy(0, i, h[i] * 2),
    "index_fill": lambda h, i: h.index_fill(0, i, 2.0),
    "index_fill from the end": lambda h, i: h.index_fill(0, -1 - i, 2.0),
    "index_reduce": lambda h, i: h.detach().index_reduce(0, i, h.detach()[i], "mean") * h.sum(),
    "index_put": lambda h, i: h.index_put((i,), h[i] * 2),
    "index_put from the end": lambda h, i: h.index_put((-1 - i,), h[-1 - i] * 2),
    "index_put that adds": lambda h, i: h.index_put((i,), h[i] * 2, accumulate=True),
    "x[i] = number": lambda h, i: _written(h, i, 3.0),
    "x[i] = values": lambda h, i: _written(h, i, h[i] * 2),
    "x[i] = a row": lambda h, i: _written(h, i, h[0] * 2),
    "put": lambda h, i: h.put(i, h.take(i) * 2),
    "a mask of them": lambda h, i: h * torch.zeros_like(h[:, 0]).index_fill(0, i, 1.0)[:, None],
}
"""What reads or writes `h` (positions, features) at `i` (any number,)."""


def _check(layout: str, producer: str, consumer: str, rows: int, n: int, both: bool, device: str) -> None:
    values = torch.randperm(rows * n * 3, generator=torch.Generator().manual_seed(n)).to(device).double() - rows * n
    plain = values.view(rows, n, 3).requires_grad_()
    padded = values.clone().view(rows, n, 3).requires_grad_()
    x = st.pad(padded, {1: SEQ} | ({0: BATCH} if both else {}), value=float("nan"))

    def program(x: Tensor) -> Tensor:
        h = LAYOUTS[layout](x)
        return CONSUMERS[consumer](h, PRODUCERS[producer](h.detach()))

    want, got = program(plain), program(x)
    _compare(got.unpad() if isinstance(got, st.PaddedTensor) else got, want, padded, plain)


def _compare(got: Tensor, want: Tensor, padded: Tensor, plain: Tensor) -> None:
    torch.testing.assert_close(got, want)
    if want.numel():
        weight = torch.arange(1.0, want.numel() + 1, dtype=want.dtype, device=want.device).view(want.shape)
        (want * weight).sum().backward()
        (got * weight).sum().backward()
        torch.testing.assert_close(padded.grad, plain.grad)


@given(
    some.sampled_from(sorted(LAYOUTS)),
    some.sampled_from(sorted(PRODUCERS)),
    some.sampled_from(sorted(CONSUMERS)),
    some.integers(1, 4),
    some.integers(4, 9),
    some.booleans(),
)
def test_an_index_names_the_elements_that_it_names_without_padding(
    device: str, layout: str, producer: str, consumer: str, rows: int, n: int, both: bool
) -> None:
    _check(layout, producer, consumer, rows, n, both, device)


@given(
    some.sampled_from(sorted(PRODUCERS)),
    some.sampled_from(sorted(CONSUMERS)),
    some.lists(some.integers(2, 9), min_size=2, max_size=3),
)
def test_the_rows_of_a_ragged_batch_in_one_dim_are_indexed_as_their_concatenation_or_refused(
    device: str, producer: str, consumer: str, lengths: list[int]
) -> None:
    values = torch.randperm(sum(lengths) * 3).to(device).double().view(-1, 3) - sum(lengths)
    plain, leaf = values.clone().requires_grad_(), values.clone().requires_grad_()
    x = st.pad(list(leaf.split(lengths)), {0: SEQ}, value=float("nan"))
    want = CONSUMERS[consumer](plain, PRODUCERS[producer](plain.detach()))
    try:
        h = x.reshape(-1, 3)
        got = CONSUMERS[consumer](h, PRODUCERS[producer](h.detach()))
    except st.RuleError:
        return
    if isinstance(got, st.PaddedTensor):
        # Its rows lie in one dim again.
        d = next(d for d, size in enumerate(got.shape) if size == h.shape[0])
        rows = got.unflatten(d, x.shape[:2]).movedim(d, 0).unpad()
        got = torch.cat([row.movedim(d, 0) for row in rows]).movedim(0, d)
    _compare(got, want, leaf, plain)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("both", [False, True], ids=["seq", "seq and batch"])
def test_every_producer_agrees_with_every_consumer(device: str, layout: str, both: bool) -> None:
    for producer, consumer in itertools.product(PRODUCERS, CONSUMERS):
        _check(layout, producer, consumer, rows=2, n=5, both=both, device=device)


@pytest.mark.parametrize("position", [-7, 6])
def test_a_position_out_of_range_of_a_flattened_dim_is_an_error(position: int) -> None:
    h = st.pad(torch.ones(2, 3, 4), {1: SEQ}).reshape(-1, 4)
    i = torch.tensor([position])
    for use in (
        lambda: h[i],
        lambda: h.index_select(0, i),
        lambda: h.index_fill(0, i, 1.0),
        lambda: h.index_add(0, i, torch.ones(1, 4)),
        lambda: h.index_put((i,), torch.ones(1, 4)),
        lambda: h.take(i * 4),
        lambda: h.gather(0, i[:, None]),
    ):
        with pytest.raises((IndexError, RuntimeError)):
            use()


def test_a_negative_position_before_the_true_start_is_an_error() -> None:
    x = st.pad(torch.ones(3), {0: SEQ})
    with pytest.raises(IndexError):
        x[torch.tensor([-4])]
    with pytest.raises((IndexError, RuntimeError)):
        x.index_fill(0, torch.tensor([-4]), 1.0)


def test_a_negative_position_of_an_unpadded_dim_is_written_beside_a_padded_one() -> None:
    x = st.pad(torch.zeros(3, 5), {1: SEQ})
    x[torch.tensor([-1])] = 1.0
    assert x.sum(1).tolist() == [0, 0, 5]


def test_values_in_other_dims_than_their_positions_are_never_written_in_the_wrong_order() -> None:
    plain = torch.arange(10.0).view(2, 5)
    x = st.pad(plain, {1: SEQ})
    h, positions_first = x.reshape(-1).clone(), x.t().reshape(-1)
    h[h.argsort()] = positions_first
    assert h.unpad().tolist() == plain.t().reshape(-1).tolist()


def test_an_index_of_other_rows_than_the_tensor_reads_the_rows_that_it_names() -> None:
    plain = torch.arange(30.0).view(2, 5, 3)
    index = torch.randint(0, 3, (7, 2), generator=torch.Generator().manual_seed(0))
    h = st.pad(plain, {1: SEQ}).reshape(-1, 3)
    assert torch.equal(h.gather(1, index), plain.reshape(-1, 3).gather(1, index))
    written = h.scatter(1, index, 0.0)
    assert torch.equal(written.unpad(), plain.reshape(-1, 3).scatter(1, index, 0.0))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 2**63 - 1, -(2**63), True, False])
def test_elements_that_equal_the_padding_of_a_flattened_dim_sort_before_it(value: float, descending: bool) -> None:
    t = torch.tensor([[value, not value, value], [not value, value, not value]], dtype=torch.tensor(value).dtype)
    x = st.pad(t, {1: st.Dim("n", max=8, buckets=[4])}, value=1)
    found = x.flatten().sort(stable=True, descending=descending)
    expected = t.flatten().sort(stable=True, descending=descending)
    torch.testing.assert_close(found.values.unpad(), expected.values, equal_nan=True)
    assert torch.equal(found.indices.unpad(), expected.indices)
