"""Each wrong argument is refused by name, with the value and what was expected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from wrong_values import VALUES, N

import subtensors as st

X = torch.ones(3)


def a_list() -> st.TensorList:
    return st.TensorList([torch.ones(3), torch.ones(2, 2)])


def run() -> Callable[..., object]:
    return st.bucketed(lambda x, mask=None: x.sum(1), {"x": {1: N}})


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


def value(name: str) -> object:
    return VALUES[name]()


CASES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    # Sizes and buckets.
    "a name that is none": (lambda: st.Dim(None), ValueError, "name is an identifier, got None"),
    "a max of text": (lambda: st.Dim("n", max="8"), ValueError, "max of Dim 'n' is an int of at least 1, got '8'"),
    "a min of None": (lambda: st.Dim("n", min=None), ValueError, "min of Dim 'n' is an int of at least 0, got None"),
    "strict of text": (lambda: st.Dim("n", strict="no"), TypeError, "strict of Dim 'n' is True or False, got 'no'"),
    "buckets of a tensor": (
        lambda: st.Dim("n", buckets=torch.tensor(8)),
        TypeError,
        "Sizes takes a list of one or more ints, got a Tensor of shape ()",
    ),
    "sizes of None": (lambda: st.Sizes(None), TypeError, "Sizes takes a list of one or more ints, got None"),
    "the bucket of a fraction": (lambda: N.bucket(1.5), TypeError, "a size of n is an int, got 1.5"),
    "a policy's bucket of a fraction": (lambda: st.Linear(4).bucket(1.5), TypeError, "size is an int, got 1.5"),
    "the bucket of infinity": (lambda: st.Geometric(2).bucket(math.inf), TypeError, "size is an int, got inf"),
    "the bucket of more than a size": (
        lambda: st.Linear(4).bucket(2**64),
        st.SizeError,
        "size is at most 9223372036854",
    ),
    "a limit of text": (lambda: st.Sizes([4]).up_to("9"), TypeError, "limit is an int, got '9'"),
    "buckets without an end": (lambda: st.Linear(1).up_to(2**60), st.SizeError, "more than 1048576 buckets up to"),
    "lengths of None": (
        lambda: st.fit_buckets(None),
        ValueError,
        "one or more lengths, each an int of at least 1, got None",
    ),
    "lengths that differ in depth": (
        lambda: st.fit_buckets([1, [2]]),
        ValueError,
        "each an int of at least 1, got [1, [2]]",
    ),
    "half a graph": (lambda: st.fit_buckets([3], 1.5), TypeError, "max_graphs is an int of at least 1, got 1.5"),
    "a multiple beyond all sizes": (
        lambda: st.fit_buckets([3], multiple_of=2**63),
        ValueError,
        "multiple_of is small enough",
    ),
    "a program that is none": (lambda: st.infer_sizes(3, [X], [{0: N}]), TypeError, "a module as fn, got 3"),
    "an example for a list of them": (lambda: st.infer_sizes(torch.exp, X, [{0: N}]), TypeError, "args are a list of"),
    "dims of a Dim": (lambda: st.infer_sizes(torch.exp, [X], N), TypeError, "dims are a list with an entry for each"),
    "an entry that is a Dim": (
        lambda: st.infer_sizes(torch.exp, [X], [N]),
        TypeError,
        "the dims of argument 0 are {dimension",
    ),
    # PaddedTensor.
    "pad on None": (
        lambda: st.pad(X, None),
        TypeError,
        "dims are {dim: st.Dim(...)}, such as st.pad(x, {1: seq}); got None",
    ),
    "pad on a Dim alone": (lambda: st.pad(X, N), TypeError, "dims say which dim is padded on which st.Dim: {dim: n}"),
    "pad of a nested tensor": (
        lambda: st.pad(value("strided nested"), {0: N}),
        TypeError,
        "a nested one is for st.pad_nested",
    ),
    "pad of a TensorList": (
        lambda: st.pad(a_list(), {0: N}),
        TypeError,
        "a TensorList has no one shape: give it x.tensors",
    ),
    "pad of an empty TensorList": (
        lambda: st.pad(st.TensorList([]), {0: N}),
        TypeError,
        "a TensorList has no one shape",
    ),
    "pad of a list of TensorLists": (lambda: st.pad([a_list()], {0: N}), TypeError, "a TensorList has no one shape"),
    "pad of a sparse tensor": (lambda: st.pad(X.to_sparse(), {0: N}), TypeError, "got one that is sparse_coo"),
    "pad of nothing": (lambda: st.pad([], {0: N}), TypeError, "a list of at least one tensor, got an empty list"),
    "pad with text": (
        lambda: st.pad(X, {0: N}, "0"),
        TypeError,
        "value is the number that padding of torch.float32 holds, got '0'",
    ),
    "pad with a complex number": (lambda: st.pad(X, {0: N}, 1j), TypeError, "padding of torch.float32 holds, got 1j"),
    "a dim of text": (lambda: st.pad(X, {"0": N}), ValueError, "cannot pad dim '0' of a tensor with 1 dims"),
    "pad_nested on an int": (
        lambda: st.pad_nested(value("nested"), 8),
        TypeError,
        "dim is the st.Dim that is padded on, got 8",
    ),
    "pad_masked without a mask": (
        lambda: st.pad_masked(X, None, N),
        TypeError,
        "two plain dense tensors; mask is None",
    ),
    "to_nested of a tensor": (
        lambda: st.to_nested(X),
        TypeError,
        "to_nested takes a PaddedTensor, got a Tensor of shape (3,)",
    ),
    "to_masked of a vector": (lambda: st.to_masked(st.pad(X, {0: N})), ValueError, "at least two dims, got one of 1"),
    "the count of text": (lambda: st.pad(X, {0: N}).count("n"), TypeError, "dim is an int, got 'n'"),
    # TensorList, fused.
    "a list of None": (lambda: st.TensorList(None), TypeError, "got None. An empty list is TensorList([])"),
    "a None in a list": (lambda: st.TensorList([X, None]), TypeError, "[1] is None: leave it out"),
    "a None deep in a list": (lambda: st.TensorList({"a": (None, X)}), TypeError, "['a', 0] is None"),
    "a list that holds itself": (lambda: st.TensorList(value("circle")), ValueError, "a container that holds itself"),
    "a list of a nested tensor": (lambda: st.TensorList([value("strided nested")]), TypeError, "[0] is a nested one"),
    "like of None": (lambda: a_list().like(None), TypeError, "like takes a list of tensors, got None"),
    "like of numbers": (lambda: a_list().like([1, 2]), TypeError, "a list of tensors, one of them is 1"),
    "the structure of a list of Python's": (
        lambda: a_list().same_structure([X]),
        TypeError,
        "takes another TensorList, got [tensor",
    ),
    "an element beyond the last": (lambda: a_list()[2], IndexError, "no element 2 in a TensorList of 2"),
    "the truth of shapes": (lambda: bool(a_list().shape), TypeError, "each of the 2 elements has its own value"),
    "a truth that differs": (
        lambda: bool(torch.equal(a_list(), a_list().like([X, torch.zeros(2, 2)]))),
        TypeError,
        "the 2 elements of a TensorList do not agree",
    ),
    "fused math of a number": (lambda: st.fused(3), TypeError, "got int"),
    "a fused argument that holds itself": (
        lambda: st.fused(lambda p, g: p.add_(1))(a_list(), value("circle")),
        ValueError,
        "is a container that holds itself",
    ),
    "an int of more than 64 bits": (
        lambda: st.fused(lambda p, n: p.mul_(n))(a_list(), 2**64),
        ValueError,
        "ints of 64 bits",
    ),
    "the norm of text": (lambda: st.total_norm("x"), TypeError, "tensors: TensorList takes a pytree of tensors"),
    "a norm of order text": (lambda: st.total_norm([X], "two"), TypeError, "norm_type is a number, got 'two'"),
    "clip to None": (lambda: st.clip_grad_norm_([weight()], None), TypeError, "max_norm is a number, got None"),
    "stochastic rounding to None": (
        lambda: st.stochastic_round_(None, X),
        TypeError,
        "target of stochastic_round_ is a tensor, got None",
    ),
    # ChunkedTensor.
    "chunk of a sparse tensor": (lambda: st.chunk(X.to_sparse()), TypeError, "got one that is sparse_coo"),
    "chunk of a TensorList": (lambda: st.chunk(a_list()), TypeError, "chunk each, [st.chunk(t) for t in x]"),
    "chunk of an empty TensorList": (lambda: st.chunk(st.TensorList([])), TypeError, "a TensorList holds several"),
    "chunks of a list": (lambda: st.chunk(X, chunks=[2]), TypeError, "chunks is a whole number, got [2]"),
    "accumulate of a set": (
        lambda: st.chunk(X, accumulate={1}),
        ValueError,
        'accumulate is "exact" or "fast", got {1}',
    ),
    "compile of text": (lambda: st.chunk(X, compile="yes"), TypeError, "compile is True or False, got 'yes'"),
    # Static tensors, arenas.
    "static of a nested tensor": (lambda: st.static(value("strided nested")), TypeError, "got a nested one"),
    "static of a TensorList": (
        lambda: st.static(a_list()),
        TypeError,
        "takes a strided torch.Tensor; got a TensorList",
    ),
    "an arena on a number": (lambda: st.Arena(0), ValueError, "device of an Arena is a CPU or a CUDA device; got 0"),
    "an arena on no device": (
        lambda: st.Arena("gpu"),
        ValueError,
        "device of an Arena is a CPU or a CUDA device; got 'gpu'",
    ),
    "like a number": (lambda: st.Arena("cpu").empty_like(3), TypeError, "takes a tensor; got int"),
    "of a dtype of text": (
        lambda: st.Arena("cpu").zeros_like(X, dtype="f32"),
        TypeError,
        "dtype is a torch.dtype or None, got 'f32'",
    ),
    "a guard of None": (lambda: st.Arena("cpu").guard(None), TypeError, "guard takes a callable as call, got None"),
    "keep of an array": (
        lambda: st.Arena("cpu").release(keep=np.ones(2)),
        ValueError,
        'keep must be "cpu" or None; got array',
    ),
    # Bucketed programs.
    "dims of a Dim alone": (lambda: st.bucketed(torch.exp, N), TypeError, "dims are given by argument"),
    "on_miss of an array": (
        lambda: st.bucketed(torch.exp, {0: {0: N}}, on_miss=np.ones(2)),
        ValueError,
        "on_miss is 'capture'",
    ),
    "a TensorList that is padded": (
        lambda: run()(a_list()),
        TypeError,
        "padded, so it is a dense tensor; got a TensorList",
    ),
    "an argument that holds itself": (
        lambda: run()(torch.ones(2, 3), value("circle")),
        ValueError,
        "a container that holds itself",
    ),
    "an example without the padded dim": (
        lambda: run().warmup(X),
        ValueError,
        "x is padded in dim 1, and has shape (3,)",
    ),
    "progress of text": (
        lambda: run().warmup(torch.ones(2, 3), progress="no"),
        TypeError,
        "progress is True or False, got 'no'",
    ),
    "refit of a fraction": (lambda: run().refit(1.5), TypeError, "max_graphs is an int of at least 1, got 1.5"),
    # Optimizers.
    "no number of lr": (
        lambda: st.optim.Lion([weight()], lr=None),
        ValueError,
        "Invalid lr: None; expected a number in [0, inf]",
    ),
    "one beta of two": (
        lambda: st.optim.Lion([weight()], betas=0.9),
        ValueError,
        "Invalid betas: 0.9; expected 2 numbers",
    ),
    "lr of three numbers": (
        lambda: st.optim.Lion([weight()], lr=X),
        ValueError,
        "Tensor lr must be 1-element",
    ),
    "max_norm of text": (
        lambda: st.optim.SGD([weight()], max_norm="1"),
        ValueError,
        "Invalid max_norm: '1'; expected a number in None or (0, inf]",
    ),
    "ema of a list": (
        lambda: st.optim.SGD([weight()], ema=[0.9]),
        ValueError,
        "Invalid ema: [0.9]; expected",
    ),
    "an arena of text": (
        lambda: st.optim.SGD([weight()], arena="cpu"),
        ValueError,
        "Invalid arena: 'cpu'; expected a st.Arena",
    ),
    "a graph of text": (
        lambda: st.optim.SGD([weight()], graph="yes"),
        ValueError,
        "Invalid graph: 'yes'; expected True or False",
    ),
    "an eps of text": (
        lambda: st.optim.Shampoo([weight()], eps="x"),
        TypeError,
        "Invalid eps: 'x'; expected a number",
    ),
    "a TensorList among the parameters": (
        lambda: st.optim.SGD([a_list()]),
        TypeError,
        "params are tensors, and one is a TensorList",
    ),
    "packed of text": (
        lambda: st.optim.SGD([weight()]).capture(packed="x"),
        TypeError,
        "packed is True or False, got 'x'",
    ),
    "a group without parameters": (
        lambda: st.optim.SGD([weight()]).add_param_group({"lr": 1}),
        TypeError,
        "param_group is a dict with 'params', got {'lr': 1}",
    ),
    # What a value is.
    "explain of a number": (lambda: st.explain(3), TypeError, "a Dim or a function, got 3"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_named_with_what_was_expected(name: str) -> None:
    call, error, message = CASES[name]
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert type(raised.value) is error


def test_a_comparison_with_one_dtype_is_made_for_each_element() -> None:
    mixed = st.TensorList([torch.ones(2), torch.ones(2, dtype=torch.int64)])
    assert list(mixed.dtype == torch.float32) == [True, False]
    assert list(mixed.dtype != torch.float32) == [False, True]
    assert a_list().dtype == torch.float32
    assert not a_list().is_cuda
    with pytest.raises(TypeError, match="do not agree on this truth value"):
        assert mixed.dtype == torch.float32


def test_a_norm_may_be_of_conjugated_numbers() -> None:
    z = torch.tensor([3.0 + 4.0j])
    assert st.total_norm([z.conj()]).item() == 5.0


def test_what_a_name_in_a_dict_has_as_none_is_kept() -> None:
    found: Tensor = st.TensorList({"weight": X, "bias": None})
    assert found.tree() == {"weight": X, "bias": None}
