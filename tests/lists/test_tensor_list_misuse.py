"""A TensorList where one tensor is expected: an error that says what to do."""

import logging
import warnings
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import subtensors as st

SEQUENCE = st.Dim("n", max=8)


def two(**options):
    return st.TensorList([torch.ones(2, 3, **options), torch.ones(4, 3, **options)])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: st.pad(x, {0: SEQUENCE}),
        lambda x: st.chunk(x, rows=2),
        lambda x: st.bucketed(lambda t: t * 2, {0: {0: SEQUENCE}})(x),
        lambda x: checkpoint(lambda t: t * 2, x, use_reentrant=False),
        lambda x: x.dim() - 1,
        lambda x: x.numel() * 2,
    ],
)
def test_a_function_of_one_tensor_says_that_it_was_given_a_list(call):
    with pytest.raises(
        TypeError, match=r"TensorList.*(call it for each element|x\.tensors|for t in x|as plain tensors)"
    ):
        call(two())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("math", [lambda w: w + 1, lambda w: w * w, lambda w: w.exp(), lambda w: w @ w.mT])
def test_each_element_has_a_graph_of_its_own(math, packed):
    w = two(requires_grad=True)
    w = w.pack() if packed else w
    out = math(w)
    out[0].sum().backward()
    out[1].sum().backward()
    for t in w:
        want = t.detach().clone().requires_grad_()
        math(want).sum().backward()
        torch.testing.assert_close(t.grad, want.grad)


def test_none_is_no_pytree_of_tensors():
    with pytest.raises(TypeError, match="got None"):
        st.TensorList(None)


def test_a_list_on_the_meta_device_has_no_memory_to_pack():
    with pytest.raises(ValueError, match=r"meta device.*no memory"):
        two(device="meta").pack()


def test_dir_shows_the_names_of_a_list_and_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {"pack", "tree", "tensors", "like"} <= set(dir(two()))


def test_an_error_of_the_math_comes_without_a_log_of_how_it_runs(caplog):
    def fail(p):
        raise KeyError("mine")

    with caplog.at_level(logging.DEBUG, "subtensors"):
        for x in (two(), two(requires_grad=True)):
            with pytest.raises(KeyError, match="mine"):
                st.fused(fail)(x)
    assert not caplog.records


class Twice(torch.autograd.Function):
    """A function that a user wrote for tensors."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


@pytest.mark.parametrize("read", [lambda x: x + 1, lambda x: x.tensors, list, lambda x: x.sum().backward()])
def test_an_autograd_function_of_a_list_is_refused_rather_than_losing_gradients(read: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(st.RuleError, match=r"Twice.*for each element"):
        read(Twice.apply(st.TensorList([x])))
    with torch.no_grad():
        assert Twice.apply(st.TensorList([x]))[0].tolist() == [2.0, 2.0]


def test_a_hook_of_several_tensors_is_refused_for_a_list() -> None:
    x = st.TensorList([torch.ones(2, requires_grad=True)])
    with pytest.raises(st.RuleError, match=r"register_multi_grad_hook.*tl\.tensors"):
        torch.autograd.graph.register_multi_grad_hook([x], print)
