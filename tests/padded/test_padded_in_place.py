"""Writes to padded tensors, in place, through views and by `out=`: known padding keeps its contents."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import subtensors as st

SEQ = st.Dim("seq", max=24, buckets=st.Linear(8))
NAN = float("nan")


def test_a_plain_tensor_cannot_take_padded_values_in_place() -> None:
    with pytest.raises(RuntimeError):
        torch.zeros(8).add_(st.pad(torch.ones(5), {0: SEQ}))


def test_an_op_in_place_preserves_padding_only_if_its_contents_are_known() -> None:
    known, unknown = st.pad(torch.ones(3), {0: SEQ}, value=2.0), st.pad(torch.ones(3), {0: SEQ})
    unknown = unknown + 1
    for x in (known, unknown):
        before, kept = x.dense.data_ptr(), x.dense[3:].clone()
        view = x[None]
        x.mul_(3).add_(x)
        assert x.dense.data_ptr() == before
        assert x.unpad().tolist() == view.unpad()[0].tolist() == [6.0 * (1 + (x is unknown))] * 3
        assert torch.equal(x.dense[3:], kept) == (x is known)
    assert known.prod().item() == 6.0**3


@pytest.mark.parametrize("records", [False, True], ids=["", "with gradients"])
@pytest.mark.parametrize("lengths", [(5, 5), (5, 3)], ids=["one size", "ragged"])
def test_a_sum_of_scores_gets_the_sizes_of_all_that_is_added(lengths: tuple[int, ...], records: bool) -> None:
    # Relative positions, as models make them of a size, are a plain table of the bucket's size.
    def scores(x: Any) -> Any:
        n = x.shape[-2]
        at = (torch.arange(n)[:, None] - torch.arange(n)).clamp(-1, 1) + 1
        total = 0
        total += (x @ x.new_ones(4, 3)).gather(-1, at.expand(*x.shape[:-1], n))
        seen = total.sum(-2)
        total += (x @ x.new_ones(4, 3)).gather(-1, at.expand(*x.shape[:-1], n)).transpose(-1, -2)
        return total, seen.shape, total.softmax(-1) @ x

    rows = [torch.randn(n, 4, dtype=torch.float64, requires_grad=records) for n in lengths]
    with torch.set_grad_enabled(records):
        padded = st.pad(rows, {0: SEQ}) if len({*lengths}) > 1 else st.pad(torch.stack(rows), {1: SEQ})
        total, _, mixed = scores(padded)
        for row, a, b in zip(rows, total.unpad(), mixed.unpad(), strict=True):
            expected = scores(row)
            torch.testing.assert_close((a, b), (expected[0], expected[2]))
            if records:
                found, want = (torch.autograd.grad(x.sin().sum(), row, retain_graph=True)[0] for x in (b, expected[2]))
                torch.testing.assert_close(found, want)


def test_a_view_keeps_its_sizes_in_place() -> None:
    x = st.pad([torch.ones(5, 8), torch.ones(3, 8)], {0: SEQ})
    with pytest.raises(st.RuleError, match="keeps its true sizes"):
        x[:, :].add_(st.pad([torch.ones(5), torch.ones(3)], {0: SEQ})[:, None])


def test_a_write_to_a_view_changes_its_base() -> None:
    x = st.pad(torch.zeros(2, 5), {1: SEQ}, value=7)
    x[:, :-1].fill_(1)
    assert x.unpad().tolist() == [[1, 1, 1, 1, 0]] * 2
    assert x.dense[:, 5:].eq(7).all()
    x[:, -1].fill_(2)
    x[:, -3:-1].mul_(3)
    assert x.unpad().tolist() == [[1, 1, 3, 3, 2]] * 2
    assert x.dense[:, 5:].eq(7).all()


def test_copy_writes_values_and_preserves_padding() -> None:
    x = st.pad(torch.zeros(2, 5), {1: SEQ}, value=7)
    source = st.pad(torch.ones(2, 5), {1: SEQ}, value=NAN)
    for copied in (lambda: x.copy_(source), lambda: x.zero_().copy_(other=source)):
        assert copied() is x
        assert x.unpad().eq(1).all()
        assert x.dense[:, 5:].eq(7).all()


def test_a_call_may_write_to_an_out_argument() -> None:
    x, out = st.pad(torch.ones(5), {0: SEQ}), st.pad(torch.zeros(5), {0: SEQ}, value=7)
    assert torch.add(x, 1, out=out) is out
    assert out.unpad().tolist() == [2.0] * 5
    assert out.dense[5:].eq(7).all()


@pytest.mark.parametrize("take", [lambda y: y[:], lambda y: y.view(y.shape), lambda y: y.transpose(0, 1).mT])
def test_a_view_that_a_call_wrote_to_keeps_the_call_that_took_it(take: Callable[[Any], Any], device: str) -> None:
    t = torch.randn(2, 5, device=device)
    factor = torch.full((), 3.0, device=device, requires_grad=True)

    def program(x: Any) -> Any:
        y = x * 1
        view = take(y)
        torch.add(y, 1, out=view)
        y.mul_(factor)
        return torch.stack([view, y])

    torch.testing.assert_close(program(st.pad(t, {1: SEQ})).unpad(), program(t))


@pytest.mark.parametrize(
    "take", [lambda y, z: torch.broadcast_tensors(y, z)[1], lambda y, z: torch.meshgrid([y[0], z[0]], indexing="ij")[1]]
)
def test_a_view_of_one_of_several_arguments_sees_the_writes_to_that_one(take: Callable[[Any, Any], Any]) -> None:
    t = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)

    def program(x: Any) -> Any:
        y, z = x * 1, x[:1] * 1
        view = take(y, z)
        z.mul_(x[0].sum())
        return view * 1

    actual, expected = program(st.pad(t, {1: SEQ})).unpad(), program(t)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(out.square().sum(), t)[0] for out in (actual, expected)]
    torch.testing.assert_close(gradients[0], gradients[1])


def view_then_write_base(take: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        y = x * 1
        view = take(y)
        y.mul_(2)
        return view * 1

    return program


def write_view(take: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        y = x * 1
        take(y).mul_(2).add_(1)
        return y

    return program


def augmented_assignments(x: Any) -> Any:
    y = x * 1
    y[:, 1:] += x[:, :-1]
    y[..., 0] *= 2
    return y


def writes_to_both(x: Any) -> Any:
    y = x * 1
    view = y[:, -2:]
    part = view[..., 1:]
    view.add_(1)
    y[:, 0] = 3.0
    part.mul_(2)
    return torch.cat([view, y], 1)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda y: y[:, 1:],
    "slice from the true end": lambda y: y[:, -2:],
    "slice of a slice": lambda y: y[:, :-1][..., 0],
    "transpose": lambda y: y.transpose(1, 2),
    "reshape": lambda y: y.view(y.shape[0], -1, 3, 1),
    "feature": lambda y: y.select(2, 1),
}
WRITES = {
    **{f"base of a {name}": view_then_write_base(take) for name, take in VIEWS.items()},
    **{f"through a {name}": write_view(take) for name, take in VIEWS.items()},
    "scattered": lambda x: torch.slice_scatter(torch.select_scatter(x, x[:, 0] * 2, 1, -1), x[..., :2], 2, 1),
    "augmented assignments": augmented_assignments,
    "writes to both": writes_to_both,
}


@pytest.mark.parametrize("records", [True, False], ids=["with gradients", "without"])
@pytest.mark.parametrize("lengths", [(5, 5), (5, 3, 8)], ids=["one size", "ragged"])
@pytest.mark.parametrize("name", WRITES)
def test_a_view_and_its_base_see_each_others_writes(
    name: str, lengths: tuple[int, ...], records: bool, device: str
) -> None:
    program = WRITES[name]
    rows = [torch.randn(n, 3, dtype=torch.float64, device=device, requires_grad=records) for n in lengths]
    x = st.pad(torch.stack(rows), {1: SEQ}, value=NAN) if lengths == (5, 5) else st.pad(rows, {0: SEQ}, value=NAN)
    actual = list(program(x).unpad())
    expected = [program(row[None])[0] for row in rows]
    torch.testing.assert_close(actual, expected)
    if records:
        gradients, expected_gradients = (
            torch.autograd.grad(torch.stack([(t**2).sum() for t in outs]).sum(), rows) for outs in (actual, expected)
        )
        torch.testing.assert_close(gradients, expected_gradients)


def test_a_view_and_its_base_share_every_write_in_compiled_code() -> None:
    compiled = torch.compile(writes_to_both, fullgraph=True, backend="aot_eager")
    for i, n in enumerate((5, 8, 3)):
        t = torch.randn(2, n, 3, dtype=torch.float64)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            torch.testing.assert_close(compiled(st.pad(t, {1: SEQ}, value=NAN)).unpad(), writes_to_both(t))


def test_a_view_that_had_to_be_copied_does_not_keep_its_base_alive() -> None:
    rows = [torch.randn(5, 3), torch.randn(3, 3)]
    base = st.pad(rows, {0: SEQ}, value=NAN) * 2
    last, reference = base[:, -1:], weakref.ref(base)
    del base
    gc.collect()
    assert reference() is None
    last.add_(1)
    assert all(a.equal(row[-1:] * 2 + 1) for a, row in zip(last.unpad(), rows, strict=True))


def test_a_recorded_write_raises_while_a_plain_view_is_alive() -> None:
    y = st.pad(torch.ones(2, 5, requires_grad=True), {1: SEQ}) * 1
    last = y[:, -1]
    with pytest.raises(st.RuleError, match="a plain view of this PaddedTensor is in use"):
        y.mul_(2)
    del last
    assert y.mul_(2).unpad().eq(2).all()


A, B = st.Dim("a", max=64, buckets=8), st.Dim("b", max=64, buckets=4)
CHAINED_WRITES: dict[str, Callable[[Tensor], object]] = {
    "a slice of a flattened dim": lambda x: x.view(-1, 3)[3:5].fill_(2.0),
    "the end of a flattened dim": lambda x: x.view(-1, 3)[-4:].mul_(2.0),
    "a slice of all elements": lambda x: x.view(-1)[5:].mul_(2.0),
    "a position of a flattened dim": lambda x: x.view(-1, 3)[9].fill_(2.0),
    "a position from its end": lambda x: x.flatten(0, 1)[-8].add_(1.0),
    "a slice of a slice from the end": lambda x: x[:, -4:][:, 1:3].zero_(),
    "a slice of a flattened slice": lambda x: x.flatten(0, 1)[2:][4:9].neg_(),
    "a column of the last rows": lambda x: x[-3:].transpose(0, 1)[1].add_(1.0),
}


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", CHAINED_WRITES)
def test_a_write_through_a_view_that_nothing_else_holds_reaches_the_base(name: str, enabled: bool) -> None:
    if enabled and "position" in name:
        pytest.skip("a view without padded dims is a plain tensor, in which autograd refuses the write")
    source = torch.randn(5, 7, 3, dtype=torch.float64)
    cotangent, found = torch.randn_like(source), []
    for padded in (False, True):
        leaf = source.clone().requires_grad_(enabled)
        with torch.set_grad_enabled(enabled):
            x = (st.pad(leaf, {0: A, 1: B}, value=float("nan")) if padded else leaf) * 1
            CHAINED_WRITES[name](x)
            out = x.unpad() if isinstance(x, st.PaddedTensor) else x
        found.append(out.detach())
        if enabled:
            out.backward(cotangent)
            found.append(leaf.grad)
    half = len(found) // 2
    torch.testing.assert_close(found[half:], found[:half])


def test_a_view_of_a_view_that_nothing_else_holds_sees_writes_to_the_base() -> None:
    source = torch.randn(5, 7, 3, dtype=torch.float64)
    x = st.pad(source, {0: A, 1: B}).clone()
    part = x.view(-1, 3)[3:9]
    x.mul_(3)
    torch.testing.assert_close(part.unpad(), source.view(-1, 3)[3:9] * 3)


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_view_is_taken_again_with_the_sizes_that_it_was_taken_with(repeats: int) -> None:
    source = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    x = st.pad(source, {1: B}) * 1
    for _ in range(repeats):
        sizes, order = [2, x.shape[1], 2, 2], [2, 0, 1]
        view, turned = x.view(sizes), x.permute(order)
    sizes[2:], order[:] = [4, 1], [0, 1, 2]
    x.mul_(2)
    torch.testing.assert_close((view + 0).unpad(), (source * 2).view(2, 7, 2, 2))
    torch.testing.assert_close((turned + 0).unpad(), (source * 2).permute(2, 0, 1))
