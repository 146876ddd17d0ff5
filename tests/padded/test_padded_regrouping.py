"""Reshapes that cut through a padded dim, sorts of a flattened one, and products of groups of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import subtensors as st
from subtensors.padded.fallback import fallbacks

SEQ = st.Dim("seq", max=16, buckets=[8, 16])


def relative_shift(x: Tensor) -> Tensor:
    """Row i of (n, 2n) moved by n - i positions, as XLNet's."""
    n = x.shape[1]
    wide = torch.cat([x, x], 2)[..., : 2 * n]
    shifted = wide.reshape(x.shape[0], 2 * n, n)[:, 1:].reshape(x.shape[0], n, 2 * n - 1)
    return shifted[..., :n]


def product_with_rows(x: Tensor) -> Tensor:
    """The product of the rows of two sequences, flattened, with the same rows, concatenated."""
    return x.reshape(-1, 4).t() @ torch.cat([x[0], x[1]])


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "a relative shift": lambda x: relative_shift(x @ x.transpose(1, 2)),
    "rows of two": lambda x: torch.cat([x, x], 1).reshape(2, -1, 2, 4),
    "chunks of padded rows": lambda x: torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4)).reshape(2, -1, 4, 4),
    "a sorted flattened dim": lambda x: x.reshape(-1).sort().values,
    "the order of a flattened dim": lambda x: x.reshape(-1, 4)[x[..., 0].reshape(-1).sort()[1]],
    "a product along a flattened dim": product_with_rows,
    "a histogram": lambda x: torch.histc(x.detach().reshape(-1), bins=4, min=-1, max=1) * x.sum(),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("n", [1, 5, 7, 8])
def test_elements_and_gradients_are_those_of_the_unpadded_tensor(name: str, n: int) -> None:
    program = PROGRAMS[name]
    x = torch.randn(2, n, 4, dtype=torch.float64, requires_grad=True)
    expected = program(x)
    weight = torch.randn(expected.shape, dtype=x.dtype)
    (gradient,) = torch.autograd.grad((expected * weight).sum(), x)
    found = program(st.pad(x, {1: SEQ}))
    found = found.unpad() if isinstance(found, st.PaddedTensor) else found
    torch.testing.assert_close(found, expected)
    (own,) = torch.autograd.grad((found * weight).sum(), x)
    torch.testing.assert_close(own, gradient)


def test_a_product_along_a_flattened_dim_runs_by_its_rule() -> None:
    fallbacks.clear()
    product_with_rows(st.pad(torch.randn(2, 5, 4), {1: SEQ}))
    assert not fallbacks


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no products of groups")
def test_products_of_groups_of_rows_read_no_padding() -> None:
    x = torch.randn(2, 6, 16, requires_grad=True)
    experts = torch.randn(3, 16, 8, requires_grad=True)
    ends = torch.tensor([4, 4, 12], dtype=torch.int32)

    def program(x: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x.reshape(-1, 16), experts, offs=ends)

    expected = program(x)
    weight = torch.randn(expected.shape)
    gradients = torch.autograd.grad((expected * weight).sum(), (x, experts))
    found = program(st.pad(x, {1: SEQ}, value=float("nan"))).unpad()
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad((found * weight).sum(), (x, experts)), gradients)
