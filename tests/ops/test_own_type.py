"""The tensor type of the page on writing one: right on every op of op_db, and by dimension maps alone on most."""

from __future__ import annotations

import doctest
import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from page_examples import run_examples
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map

from subtensors.dispatch.ops.errors import RuleError

PAGE = Path(__file__).parents[2] / "docs" / "write-your-own-type.md"

# What these give is drawn at random, or whatever the memory held; a decomposition is known up to signs.
UNDETERMINED = set(
    """empty_like new_empty empty new_empty_strided empty_strided empty_permuted bernoulli multinomial normal rand_like
    randn_like randint_like uniform cauchy exponential geometric log_normal nn.functional.rrelu nn.functional.dropout
    nn.functional.dropout2d nn.functional.dropout3d nn.functional.alpha_dropout nn.functional.feature_alpha_dropout
    nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d linalg.eig linalg.svd svd
    nn.functional.multi_head_attention_forward linalg.lstsq to_sparse svd_lowrank pca_lowrank
    resize_ resize_as_""".split()
)


@functools.cache
def page() -> dict[str, Any]:
    """The names that the page defines before it uses the type."""
    names: dict[str, Any] = {}
    for example in doctest.DocTestParser().get_examples(PAGE.read_text()):
        if example.source.startswith("index ="):
            break
        exec(example.source, names)
    return names


def positions(n: int) -> Tensor:
    """Positions with repetitions, as many as there are."""
    return torch.arange(n) // 2


# Torch reads the positions from the tensor's memory, which a wrapper hasn't.
READ_FROM_MEMORY = {"tensor_split"}


def plans(tensors: list[Tensor]) -> Iterator[dict[int, int]]:
    """The dim along which each tensor is repeated: one's first or last, with the dims of the others beside it."""
    for t in tensors[:2]:
        for d in {0, t.dim() - 1} if t.dim() else ():
            if t.shape[d] > 1:
                back = d - t.dim()
                for same in (d, back):
                    fits = [u for u in tensors if -u.dim() <= same < u.dim() and u.shape[same] == t.shape[d]]
                    yield {id(u): same % u.dim() for u in fits}
                yield {id(t): d}


def runs(op: OpInfo, samples: int) -> Iterator[tuple[bool, bool]]:
    """Of each sample and plan, whether the result is that of the plain tensors, and whether nothing was expanded."""
    dtype = next((d for d in (torch.float64, torch.int64, torch.bool) if d in op.supported_dtypes("cpu")), None)
    repeated, expanded = page()["Repeated"], page()["expanded"]
    for sample in itertools.islice(op.sample_inputs("cpu", dtype), samples) if dtype else ():
        call = (sample.input, sample.args, sample.kwargs)
        tensors = [t for t in tree_leaves(call) if isinstance(t, Tensor)]
        if any(t.layout != torch.strided for t in tensors):
            continue
        for plan in plans(tensors):
            sizes = {t.shape[plan[id(t)]] for t in tensors if id(t) in plan}
            index, made = positions(sizes.pop()), {}
            for t in tensors:
                if id(t) in plan:
                    rows = t.index_select(plan[id(t)], torch.arange(int(index.max()) + 1))
                    made[id(t)] = repeated(rows, index, plan[id(t)])

            def run(change: Any, op: OpInfo = op, call: Any = call) -> Any:
                given, args, kwargs = tree_map(lambda x: change(x) if isinstance(x, Tensor) else x, call)
                return tree_leaves(op.op(given, *args, **kwargs))

            try:
                wanted = run(lambda t, made=made: made[id(t)].full() if id(t) in made else t.clone())
            except Exception:  # torch refuses this choice of rows
                continue
            expanded.clear()
            try:
                found = run(lambda t, made=made: made.get(id(t), t))
            except RuleError:  # a write, as of an embedding with a max_norm
                continue
            yield all(map(equal, found, wanted)), not expanded


def equal(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor):
        return bool(found == wanted)
    found = found.full() if isinstance(found, page()["Repeated"]) else found
    return found.dtype == wanted.dtype and torch.allclose(found, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)


def sweep(ops: Iterable[OpInfo], samples: int) -> tuple[list[str], int, int]:
    """The ops with a wrong result, and how many ran, and how many of these without an expanded row."""
    wrong, ran, carried = [], 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in ops:
            if op.name in UNDETERMINED | READ_FROM_MEMORY:
                continue
            found = list(runs(op, samples))
            ran += bool(found)
            carried += any(by_maps for _, by_maps in found)
            wrong += [op.formatted_name] if not all(right for right, _ in found) else []
    return wrong, ran, carried


def test_the_examples_of_the_page_are_true() -> None:
    run_examples(PAGE)
    assert len(PAGE.read_text().splitlines()) <= 150


def test_a_type_of_fifty_lines_is_right_on_a_sample_of_op_db() -> None:
    wrong, ran, carried = sweep(op_db[::6], 2)
    assert wrong == []
    assert carried > 50
    assert ran > 70


def test_a_write_without_a_rule_is_refused() -> None:
    x = page()["Repeated"](torch.ones(2, 4), torch.tensor([0, 0, 1]))
    for call in (lambda: x.add_(torch.arange(12.0).view(3, 4)), lambda: x.detach().bernoulli_(0.5)):
        with pytest.raises(RuleError, match="rows that are no longer equal"):
            call()
    assert torch.equal(x.full(), torch.ones(3, 4))


@pytest.mark.slow
def test_a_type_of_fifty_lines_is_right_on_op_db_and_carries_300_ops() -> None:
    wrong, _, carried = sweep(op_db, 6)
    assert wrong == []
    assert carried >= 300
