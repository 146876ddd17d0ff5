"""Inferred sizes are those on which the program runs: every size in range is tried on real tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn

import subtensors as st

N, M = (st.Dim(name, max=26) for name in "nm")


def runs(program: Callable[..., Any], *args: Tensor) -> bool:
    try:
        with torch.no_grad():
            program(*args)
    except Exception:  # a program may raise anything at sizes that it does not accept
        return False
    return True


def check_one(program: Callable[[Tensor], Any], *shape: int | st.Dim, dim: st.Dim = N) -> Any:
    """Check the inferred classes of a program of one tensor with one varying dim against running it."""
    assert dim.max is not None
    place = shape.index(dim)
    sizes = [dim.max if isinstance(n, st.Dim) else n for n in shape]
    found = st.infer_sizes(program, [torch.zeros(sizes)], [{place: dim}])
    assert found.is_complete
    for size in range(dim.min, dim.max + 1):
        sizes[place] = size
        accepted = runs(program, torch.zeros(sizes))
        assert (size in found) == accepted, size
        (own,) = [c for c in found.classes if size in c.sizes]
        assert (own.refusal is None) == accepted
        assert own.condition.subs(dim.symbol, size) == sympy.true
        assert own.example[dim.name] <= size
        assert found.condition.subs(dim.symbol, size) == (sympy.true if accepted else sympy.false)
    return found


def branches(x: Tensor) -> Tensor:
    n = x.shape[0]
    if n % 2 == 0:
        return x.view(2, -1)
    return x.view(3, -1) if n > 10 else x * 2


ONE: dict[str, tuple[Callable[[Tensor], Any], tuple[int | st.Dim, ...]]] = {
    "anything": (torch.relu, (N,)),
    "a multiple": (lambda x: x.view(-1, 8), (N,)),
    "a multiple of another dimension": (lambda x: x.reshape(4, -1), (6, N)),
    "at least": (lambda x: F.conv1d(x, torch.ones(1, 3, 5), stride=2), (1, 3, N)),
    "at most": (lambda x: x + torch.ones(20)[: x.shape[0]], (N,)),
    "one of two": (lambda x: x + torch.ones(7), (N,)),
    "exactly": (lambda x: x @ torch.ones(7, 2), (3, N)),
    "even": (lambda x: x[::2] + x[1::2], (N,)),
    "by branches": (branches, (N,)),
    "a square": (lambda x: x.view(int(x.shape[0] ** 0.5 + 0.5), -1), (N,)),
    "none": (lambda x: x.view(-1, 5, 2), (N, 3)),
    "pooled twice": (lambda x: F.max_pool1d(F.max_pool1d(x, 3, 2), 3, 2), (1, 1, N)),
    "split": (lambda x: [t * 2 for t in x.split([4, 6])], (N,)),
}


@pytest.mark.parametrize("name", [name for name in ONE if name != "a square"])
def test_a_size_is_accepted_where_the_program_runs(name: str) -> None:
    program, shape = ONE[name]
    check_one(program, *shape)


def cached(x: Tensor, known: dict[str, int] = {"5": 3, "6": 4}) -> Tensor:  # noqa: B006
    return x.view(known.get(str(x.shape[0]), 2), -1)


def refused_by_text(x: Tensor) -> Tensor:
    if f"{x.shape[0]}".endswith("5"):
        raise ValueError("it ends in 5")
    return x


def refused_with_text(x: Tensor) -> Tensor:
    if x.shape[0] % 3:
        raise ValueError(
            f"{x.shape[0]} is no multiple of 3",
        )
    return x


OF_STRIDES: dict[str, tuple[Callable[[Tensor], Any], tuple[int | st.Dim, ...]]] = {
    "a view of a transposed tensor": (lambda x: x.t().view(-1), (2, N)),
    "a view of columns": (lambda x: x[:, 1:].view(-1), (2, N)),
    "a view of a half": (lambda x: x[..., : x.shape[-1] // 2].view(-1), (2, 1, 3, N)),
    "a view of every other row": (lambda x: x[::2].view(-1), (N, 2)),
    "a view of an expanded row": (lambda x: x.expand(3, -1).view(-1), (N,)),
    "a view of a diagonal": (lambda x: x.view(4, -1).diagonal().view(2, -1), (N,)),
    "a view of a real part": (lambda x: torch.view_as_complex(x.t().contiguous()).real.view(-1), (2, N)),
}


@pytest.mark.parametrize("name", OF_STRIDES)
def test_a_view_is_accepted_where_strides_allow_it(name: str) -> None:
    program, shape = OF_STRIDES[name]
    sizes, place = [26 if n is N else n for n in shape], shape.index(N)
    found = st.infer_sizes(program, [torch.zeros(sizes)], [{place: N}])
    tried = {n: torch.zeros([*sizes[:place], n, *sizes[place + 1 :]]) for n in range(27)}
    assert {n for n in tried if n in found} == {n for n, x in tried.items() if runs(program, x)}
    assert found.is_complete


def refused_by_text_in_the_same_line(x: Tensor) -> Tensor:
    return x if "7" in str(x.shape[0]) else torch.zeros(-1)


def refused_by_a_function_of_text(x: Tensor) -> Tensor:
    return x * _known(str(x.shape[0]))


def _known(text: str) -> int:
    return {"5": 3, "6": 4}[text]


def refused_by_a_table_of_text(x: Tensor) -> Tensor:
    return x * {"5": 3, "6": 4}[str(x.shape[0])]


BY_TEXT = [cached, refused_by_text, refused_by_text_in_the_same_line]
BY_TEXT += [refused_by_a_function_of_text, refused_by_a_table_of_text]


@pytest.mark.parametrize("program", BY_TEXT)
def test_the_text_of_a_size_is_read_as_that_of_the_number(program: Callable[[Tensor], Tensor]) -> None:
    check_one(program, N)


def test_the_text_of_a_size_in_an_error_is_no_branch() -> None:
    found = check_one(refused_with_text, N)
    assert len(found.classes) <= 3


def test_more_sizes_that_are_read_as_text_than_are_tried_are_reported_as_incomplete() -> None:
    found = st.infer_sizes(cached, [torch.zeros(4)], [{0: st.Dim("n", max=200)}])
    assert not found.is_complete


def test_sets_express_divisibility_bounds_and_equalities() -> None:
    multiples = check_one(*_program("a multiple"))
    assert multiples.sizes == sympy.Range(0, 32, 8)
    assert multiples.condition == sympy.Eq(sympy.Mod(N.symbol, 8), 0)
    assert check_one(*_program("at least")).sizes == sympy.Range(5, 27)
    assert check_one(*_program("exactly")).sizes == sympy.FiniteSet(7)
    assert check_one(*_program("one of two")).sizes == sympy.FiniteSet(1, 7)
    assert check_one(*_program("anything")).sizes == sympy.Range(0, 27)
    nothing = st.infer_sizes(lambda x: x @ torch.ones(7, 2), [torch.zeros(3, 8)], [{1: st.Dim("n", max=26, min=8)}])
    assert nothing.sizes == sympy.S.EmptySet


def _program(name: str) -> tuple[Any, ...]:
    program, shape = ONE[name]
    return program, *shape


STEPS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x[2:],
    lambda x: x[::2],
    lambda x: x[:-1],
    lambda x: torch.cat([x, x]),
    lambda x: x.view(2, -1)[0],
    lambda x: x.view(-1, 3).sum(1),
    lambda x: x * 2 if x.shape[0] > 5 else x.repeat(3),
    lambda x: F.avg_pool1d(x[None], 2)[0],
    lambda x: x + torch.ones(4) if x.shape[0] == 4 else x,
]


@settings(max_examples=8)
@given(some.lists(some.sampled_from(STEPS), min_size=1, max_size=3))
def test_random_programs_accept_the_sizes_that_they_run_on(steps: list[Callable[[Tensor], Tensor]]) -> None:
    def program(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    check_one(program, N)


def test_a_quotient_of_a_difference_is_exact() -> None:
    found = check_one(lambda x: x[2:].view(-1, 3).sum(1).view(2, -1), N)
    assert found.sizes == sympy.Union(sympy.Range(0, 3), sympy.Range(8, 32, 6))


SMALL = st.Dim("n", max=6), st.Dim("m", max=6)
TWO: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "equal": (torch.matmul, (3, SMALL[0]), (SMALL[1], 2)),
    "broadcast": (torch.add, (SMALL[0],), (SMALL[1],)),
    "a product": (lambda x, y: x.view(-1) + y.reshape(-1)[:1], (SMALL[0], 2), (SMALL[1],)),
    "one more": (lambda x, y: x + y[1:], (SMALL[0],), (SMALL[1],)),
    "independent": (lambda x, y: x.sum() + y.view(-1, 2).sum(), (SMALL[0],), (SMALL[1],)),
}


@pytest.mark.parametrize("name", TWO)
def test_pairs_of_sizes_are_accepted_where_the_program_runs(name: str) -> None:
    program, *shapes = TWO[name]
    places = [{i: n for i, n in enumerate(shape) if isinstance(n, st.Dim)} for shape in shapes]
    tensors = [torch.zeros([2 if isinstance(n, st.Dim) else n for n in shape]) for shape in shapes]
    found = st.infer_sizes(program, tensors, places)
    assert found.is_complete
    for pair in itertools.product(range(7), range(7)):
        sizes = dict(zip(SMALL, pair, strict=True))
        args = [torch.zeros([sizes[n] if isinstance(n, st.Dim) else n for n in shape]) for shape in shapes]
        assert (pair in found) == runs(program, *args), pair


def test_two_dims_that_must_be_equal_have_an_equality_as_condition() -> None:
    found = st.infer_sizes(torch.matmul, [torch.zeros(3, 4), torch.zeros(4, 2)], [{1: "n"}, {0: "m"}])
    n, m = (dim.symbol for dim in found.dims)
    assert found.condition in (sympy.Eq(n, m), sympy.Eq(m, n))
    assert (7, 7) in found
    assert (7, 8) not in found
    # A shared Dim is one size.
    seq = st.Dim("seq", max=9)
    assert st.infer_sizes(
        torch.matmul, [torch.zeros(3, 4), torch.zeros(4, 2)], [{1: seq}, {0: seq}]
    ).sizes == sympy.Range(10)


class Classifier(nn.Module):
    """Patches of 4 tokens, at most 16 positions, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.zeros(16, 8))
        self.norm, self.attention = nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embedding(ids).unflatten(1, (-1, 4)).mean(2)
        x = x + self.positions[: x.shape[1]]
        x = self.attention(x, x, x)[0]
        return self.norm(x.transpose(1, 2)).sum(2)


def test_sizes_of_a_module_are_inferred_without_changing_it() -> None:
    model = Classifier().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = st.infer_sizes(model, [torch.zeros(2, 8, dtype=torch.long)], {"ids": {1: st.Dim("seq", max=80, min=1)}})
    assert found.sizes == sympy.Range(4, 68, 4)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    seq = found.dim("seq", buckets=st.Geometric(2, start=6))
    assert seq.buckets == (8, 12, 24, 48, 64)
    for bucket in seq.buckets:
        model(torch.zeros(2, bucket, dtype=torch.long))


@given(some.integers(1, 9), some.integers(1, 26), some.integers(1, 12))
@settings(max_examples=10)
def test_every_bucket_of_a_dim_made_from_accepted_sizes_is_accepted(factor: int, largest: int, step: int) -> None:
    found = st.infer_sizes(lambda x: x.view(-1, factor), [torch.zeros(factor)], [{0: N}])
    try:
        dim = found.dim("n", max=largest, buckets=step)
    except st.SizeError:
        assert largest < factor
        return
    assert all(bucket % factor == 0 for bucket in dim.buckets)
    assert dim.max == largest - largest % factor


def test_a_program_that_branches_on_each_size_is_reported_as_incomplete() -> None:
    found = st.infer_sizes(lambda x: x * int(x.shape[0]), [torch.zeros(3)], [{0: "n"}])
    assert not found.is_complete
    assert len(found.classes) == 65
    assert found.classes[-1].example == {"n": 64}
    assert "some sizes left out" in repr(found)


def test_wrong_arguments_raise() -> None:
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="at least one varying dimension"):
        st.infer_sizes(torch.relu, [x], [None])
    with pytest.raises(st.SizeError, match=r"argument 0 of shape \(3,\) has no dimension 1"):
        st.infer_sizes(torch.relu, [x], [{1: "n"}])
    with pytest.raises(st.SizeError, match="argument 1 has varying dimensions but is no tensor: int"):
        st.infer_sizes(torch.add, [x, 3], [{0: "n"}, {0: "m"}])
    with pytest.raises(st.SizeError, match="2 arguments take 2 entries of dims, one each; got 1"):
        st.infer_sizes(torch.add, [x, x], [{0: "n"}])
    with pytest.raises(st.SizeError, match="there is no argument 'y'; the arguments given are x"):
        st.infer_sizes(lambda x: x, [x], {"y": {0: "n"}})
    with pytest.raises(st.SizeError, match="two Dims are named 'n'"):
        st.infer_sizes(torch.add, [x, x], [{0: N}, {0: st.Dim("n", max=3)}])
    found = st.infer_sizes(torch.relu, [x], [{0: N}])
    with pytest.raises(KeyError, match="no Dim is named 'm'; there are n"):
        found.dim("m")
