"""Padding, by kernel and by reference, and unpadding are each other's inverse, with each other's gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from device_waits import waits_are_errors
from hypothesis import given
from hypothesis import strategies as some
from masked_oracle import mask_of
from programs import LOWERINGS, Lowering, interpreted
from torch import Tensor

import subtensors as st
from demo.timing import count_kernels
from subtensors.kernels.padded import padding
from subtensors.kernels.padded.padding_ops import pad_list, pad_to, pad_values, unpad_to, unpad_values
from subtensors.kernels.runtime.valid_lengths import ValidLength

each_lowering = pytest.mark.parametrize("lowering", LOWERINGS)
each_on_cpu = pytest.mark.parametrize(
    "lowering",
    [
        pytest.param(Lowering.TORCH, id="torch"),
        pytest.param(Lowering.INTERPRETER, id="interpreter", marks=interpreted),
    ],
)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def values(count: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(1, count + 1) % 120).to(dtype)


def check_dense(dense: Tensor, shape: Sequence[int], value: float, lowering: Lowering) -> None:
    dense = dense.to(lowering.device)
    pad = padding.pad_reference if lowering is Lowering.TORCH else padding.pad_dense
    padded = pad(dense, shape, value)
    expected = torch.full(shape, value, dtype=dense.dtype)
    expected[tuple(map(slice, dense.shape))] = dense.cpu()
    assert padded.is_contiguous()
    assert torch.equal(padded.cpu(), expected)
    back = unpad_to(padded, dense.shape)
    assert back.is_contiguous()
    assert torch.equal(back, dense)
    assert torch.equal(unpad_to(padded.t().contiguous().t() if padded.dim() == 2 else padded, dense.shape), dense)


@each_on_cpu
@given(
    some.lists(some.tuples(some.integers(0, 5), some.integers(0, 3)), max_size=4),
    some.sampled_from(DTYPES),
    some.randoms(use_true_random=False),
)
def test_any_tensor_is_padded_to_any_larger_shape_and_comes_back(
    lowering: Lowering, sizes: list[tuple[int, int]], dtype: torch.dtype, random: object
) -> None:
    size = [n for n, _ in sizes]
    order = list(range(len(size)))
    random.shuffle(order)  # type: ignore[attr-defined]
    dense = (
        values(math.prod(size), dtype)
        .view([size[d] for d in order])
        .permute([order.index(d) for d in range(len(size))])
    )
    check_dense(dense, [n + more for n, more in sizes], 1, lowering)


@each_lowering
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_is_padded_in_every_dtype(dtype: torch.dtype, lowering: Lowering) -> None:
    for size, shape in [
        ((3, 40), (5, 64)),
        ((2, 7, 3), (2, 9, 3)),
        ((4, 3, 2, 5), (4, 8, 3, 5)),
        ((9,), (9,)),
        ((), ()),
    ]:
        check_dense(values(math.prod(size), dtype).view(size), shape, 0, lowering)
        check_dense(values(math.prod(size), dtype).view(size), shape, 1, lowering)


@each_lowering
def test_the_padding_may_be_infinity_or_nan(lowering: Lowering) -> None:
    pad = padding.pad_reference if lowering is Lowering.TORCH else padding.pad_dense
    x = torch.ones(2, device=lowering.device)
    assert pad(x, [4], -math.inf).tolist() == [1, 1, -math.inf, -math.inf]
    assert pad(x, [3], math.nan)[2].isnan()


@pytest.mark.parametrize(("size", "shape"), [((3,), (2,)), ((3, 2), (4,)), ((2, 5), (3, 4))])
def test_a_shape_that_cannot_hold_the_tensor_raises(size: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be padded to"):
        pad_to(torch.zeros(size), shape)
    with pytest.raises(ValueError, match="has no part of size"):
        unpad_to(torch.zeros(shape), size)


def check_ragged(shape: Sequence[int], sizes: dict[int, list[int]], dtype: torch.dtype, lowering: Lowering) -> None:
    extents = [ValidLength(d, torch.tensor(n, device=lowering.device)) for d, n in sizes.items()]
    row_sizes = [[sizes[d][b] if d in sizes else shape[d] for d in range(1, len(shape))] for b in range(shape[0])]
    rows, start = [], 0
    for size in row_sizes:
        rows.append((values(start + math.prod(size), dtype)[start:]).view(size).to(lowering.device))
        start += math.prod(size)
    expected = torch.full(shape, 1, dtype=dtype)
    for b, row in enumerate(rows):
        expected[(b, *map(slice, row.shape))] = row.cpu()
    flat = torch.cat([row.reshape(-1) for row in rows])
    pad = padding.pad_rows_reference if lowering is Lowering.TORCH else padding.pad_rows
    # Rows are read where they are, strided ones as copies.
    for given_rows in (rows, [torch.stack([row, row], -1)[..., 0] for row in rows]):
        padded = pad(given_rows, shape, extents, 1)
        assert torch.equal(padded.cpu(), expected)
    assert torch.equal(pad_values(flat, shape, extents, 1), padded)
    back = unpad_values(padded, extents, len(flat))
    assert torch.equal(padded.cpu()[mask_of(shape, [ValidLength(d, s.cpu(), b) for d, s, b in extents])], flat.cpu())
    assert torch.equal(back, flat)


@each_lowering
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_ragged_batch_is_padded_and_comes_back(dtype: torch.dtype, lowering: Lowering) -> None:
    check_ragged((3, 70), {1: [70, 0, 33]}, dtype, lowering)
    check_ragged((3, 6, 5), {1: [3, 6, 1]}, dtype, lowering)
    check_ragged((3, 6, 5), {1: [3, 6, 1], 2: [5, 0, 2]}, dtype, lowering)
    check_ragged((2, 3, 6, 2), {2: [6, 1]}, dtype, lowering)


@each_lowering
def test_a_ragged_batch_of_many_rows_is_padded(lowering: Lowering) -> None:
    lengths = [(7 * i) % 5 for i in range(542)]
    check_ragged((len(lengths), 4), {1: lengths}, torch.float32, lowering)
    check_ragged((len(lengths), 2, 4), {2: lengths}, torch.float32, lowering)


@each_on_cpu
@given(some.lists(some.integers(1, 5), min_size=2, max_size=4), some.data())
def test_any_ragged_batch_is_padded_and_comes_back(lowering: Lowering, shape: list[int], data: some.DataObject) -> None:
    dims = data.draw(some.lists(some.integers(1, len(shape) - 1), min_size=1, unique=True))
    sizes = {d: data.draw(some.lists(some.integers(0, shape[d]), min_size=shape[0], max_size=shape[0])) for d in dims}
    check_ragged(shape, sizes, torch.float32, lowering)


def test_each_is_the_gradient_of_the_other(device: str) -> None:
    extents = [ValidLength(d, torch.tensor(n, device=device)) for d, n in ((1, [1, 3, 0]), (2, [2, 2, 1]))]
    shape = (3, 4, 2)

    def leaf(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64, device=device, requires_grad=True)

    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda t: pad_to(t, (4, 5), 1) ** 2, leaf(3, 2))
        assert check(lambda t: unpad_to(t, (2, 1)) ** 2, leaf(3, 2))
        assert check(lambda t: pad_values(t, shape, extents) ** 2, leaf(8))
        assert check(lambda t: unpad_values(t, extents, 8) ** 2, leaf(*shape))
    rows = [leaf(1, 2), leaf(3, 2), leaf(0, 1)]
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *rows: pad_list(list(rows), shape, extents) ** 2, rows)


def test_values_beyond_the_valid_ones_have_no_effect(device: str) -> None:
    values = torch.arange(1.0, 6, device=device, requires_grad=True)
    padded = pad_values(values, (2, 3), [ValidLength(1, torch.tensor([1, 2], device=device))], -1)
    assert padded.tolist() == [[1, -1, -1], [2, 3, -1]]
    padded.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 1, 1, 0, 0]


def test_the_padding_of_a_gradient_is_dropped(device: str) -> None:
    dense = torch.ones(2, device=device, requires_grad=True)
    pad_to(dense, (4,)).backward(torch.tensor([1.0, 2.0, math.nan, math.inf], device=device))
    assert dense.grad is not None
    assert dense.grad.tolist() == [1, 2]


def test_the_ops_pass_torch_opcheck() -> None:
    lengths = torch.tensor([1, 2])
    x = torch.randn(2, 3, requires_grad=True)
    rows = [torch.randn(1, requires_grad=True), torch.randn(2)]
    ops = torch.ops.subtensors
    torch.library.opcheck(ops.pad_to, (x, [4, 4], 1.0))
    torch.library.opcheck(ops.pad_list, (rows, [2, 3], [1], [lengths], [0], 0))


def test_one_compilation_of_unpadding_serves_every_length(device: str) -> None:
    shape = (2, 4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def padded_again(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        extents = [ValidLength(1, lengths)]
        values = unpad_values(x, extents, 5)
        return unpad_to(x, (1, 3)), pad_values(values * 2, shape, extents, -1)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([4, 1], [2, 3], [1, 4]):
            x = torch.randn(shape, device=device, requires_grad=True)
            start, padded = padded_again(x, torch.tensor(lengths, device=device))
            valid = torch.arange(4, device=device) < torch.tensor(lengths, device=device)[:, None]
            assert torch.equal(start, x[:1, :3])
            assert torch.equal(padded, torch.where(valid, 2 * x, -1))
            padded.backward(torch.where(valid, 1, math.nan))
            assert x.grad is not None
            assert torch.equal(x.grad, 2.0 * valid)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_padding_and_unpadding_with_lengths_on_the_device_do_not_wait_for_it() -> None:
    x = torch.randn(2, 4, device="cuda", requires_grad=True)
    extents = [ValidLength(1, torch.tensor([1, 4], device="cuda"))]

    def run() -> None:
        pad_values(unpad_values(x, extents, 5), (2, 4), extents).sum().backward()

    run()
    with waits_are_errors():
        run()


@pytest.mark.gpu
def test_a_captured_batch_is_padded_again_at_each_replay() -> None:
    rows = [torch.ones(n, device="cuda") for n in (3, 5)]
    extents = [ValidLength(1, torch.tensor([3, 5], device="cuda"))]
    pad_list(rows, (2, 8), extents)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        padded = pad_list(rows, (2, 8), extents)
    for row in rows:
        row.fill_(2)
    graph.replay()
    assert padded.sum(1).tolist() == [6, 10]
    # A length that has become another is read anew.
    extents[0].sizes.copy_(torch.tensor([2, 5]))
    graph.replay()
    assert padded.sum(1).tolist() == [4, 10]


@pytest.mark.gpu
def test_padding_and_unpadding_are_few_kernels_and_gradients_of_padding_are_views() -> None:
    seq = st.Dim("seq", max=8, buckets=[8])
    rows = [torch.randn(n, 2, device="cuda", requires_grad=True) for n in (3, 5)]
    whole = torch.randn(2, 5, device="cuda", requires_grad=True)
    jagged = torch.nested.as_nested_tensor([row.detach() for row in rows], layout=torch.jagged)
    one, batch = st.pad(whole, {1: seq}), st.pad(rows, {0: seq})
    ones, batch_ones = (torch.ones_like(x.detach()) for x in (one, batch))
    calls = {
        "a tensor": lambda: st.pad(whole, {1: seq}),
        "a ragged batch": lambda: st.pad(rows, {0: seq}),
        "its gradient": lambda: torch.autograd.grad(one, whole, ones, retain_graph=True),
        "the gradient of a batch": lambda: torch.autograd.grad(batch, rows, batch_ones, retain_graph=True),
        "a jagged batch": lambda: st.pad_nested(jagged, seq),
        "a jagged batch again": lambda: st.to_nested(batch),
    }
    for call in calls.values():
        call()
    kernels = {name: count_kernels(call) for name, call in calls.items()}
    # A jagged batch is copied into filled memory.
    assert kernels == {name: 0 if "gradient" in name else 1 for name in calls} | {"a jagged batch": 2}
    # The valid part of a tensor, and rows of a batch, are views.
    assert count_kernels(lambda: (one.unpad(), batch.unpad())) == 0
