"""Run a row of the sweep: plain against bucketed, with graphs as a CPU replays them.

The oracle is the plain model in float64. A result is wrong if its error is more than 1.5 times that of plain torch in
float32, and more than a few units in the last place of its largest number; before that is said plain torch also runs
with its sums in other orders (see `reordered_sums.py`) and with parameters moved by a unit in their last place. Whole
numbers are the same. What every floating result depends on is compared too: the gradients of all parameters, for random
gradients of the results.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from pretend_graphs import pretend
from reordered_sums import orders
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import subtensors as st
from model_sweep.case import ModelCase
from subtensors.bucketed.compare_runs import TOLERATED_UNITS, full_float32
from subtensors.padded import torch_function as padded_calls

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What became of a row.

    Args:
        how: "rule", "true size", "refused" or "wrong".
        why: the reason of the last three.
    """

    how: str
    why: str = ""


class WrongResult(Exception):
    """A result that is not the plain model's; the message names it."""


@contextmanager
def _graphs(device: str = "cpu") -> Iterator[None]:
    """Replay captured programs on the CPU, too, and leave out what models and runners have to say."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch, full_float32():
        warnings.simplefilter("ignore")
        if device == "cpu":
            pretend(patch, trained=True)
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)
            torch.set_num_threads(threads)


def uniform(case: ModelCase, check: bool, device: str = "cpu") -> Outcome:
    """Compare the calls of a row, each with all of its rows of one length.

    Args:
        case: the row.
        check: leave the comparison to the runner, which makes it at the first calls, and is not to find anything.
        device: "cpu" or "cuda".
    """
    with _graphs(device):
        model = case.model().to(device)
        truth = _exact(model)
        plain = copy.deepcopy(model)
        options = {} if check else {"check": False}
        run = st.bucketed(model, case.dims, max_waste=None, **options)
        try:
            for index, sizes in enumerate(case.calls[:4] if check else case.calls):
                arguments = pytree.tree_map_only(Tensor, lambda x: x.to(device), case.arguments(index, sizes))
                try:
                    got = _results(run, model, arguments)
                except Exception as error:
                    raise WrongResult(f"{sizes}: {type(error).__name__}: {error}") from error
                if check:
                    continue
                _compare(got, lambda net, given=arguments: _results(net, net, given), plain, truth, str(sizes))
        except WrongResult as error:
            return Outcome("wrong", str(error))
        stats = run.stats()
        if reasons := [reason for reason in stats.fallbacks if "differ from the program" in reason]:
            return Outcome("wrong", reasons[0])
        # A branch on a size of 1 sends that size alone to the plain program.
        if reasons := [reason for reason in stats.fallbacks if "decides a branch otherwise" not in reason]:
            return Outcome("true size", reasons[0])
        return Outcome("rule") if stats.hits else Outcome("true size", "nothing was replayed")


def ragged(case: ModelCase) -> Outcome:
    """Compare a batch of rows of different lengths with each row alone."""
    with _graphs():
        model = case.model()
        truth = _exact(model)
        rows = [case.arguments(i, sizes, rows=1) for i, sizes in enumerate(case.ragged)]
        if case.counted is None:
            rows = [{name: x for name, x in row.items() if name != "labels"} for row in rows]
        counts = [case.counted(*sizes) if case.counted else 1 for sizes in case.ragged]
        batch = {name: _batched([row[name][0] for row in rows], case.dims.get(name, {})) for name in rows[0]}
        padded_calls.fallbacks.clear()
        try:
            got = _ragged_results(model, batch, len(rows))
        except Exception as error:
            return Outcome("refused", f"{type(error).__name__}: {error}".splitlines()[0])
        try:
            _compare(got, lambda net: _rows_alone(net, rows, counts), model, truth, "ragged")
        except WrongResult as error:
            return Outcome("wrong", str(error))
        return Outcome("true size", str(dict(padded_calls.fallbacks))) if padded_calls.fallbacks else Outcome("rule")


def _exact(model: nn.Module) -> nn.Module:
    """The model in float64, which torch's grouped products don't know, so experts are looped over."""
    exact = copy.deepcopy(model).double()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")
    return exact


def _cast(given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    is_cast = {name: isinstance(x, Tensor) and x.is_floating_point() for name, x in given.items()}
    return {name: x.to(dtype) if is_cast[name] else x for name, x in given.items()}


def _results(run: Callable[..., object], model: nn.Module, given: dict[str, Tensor]) -> Results:
    """All tensors that a call returns, and the gradients of the parameters."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    found = _named(run(**_cast(given, dtype)))
    loss = sum((_weighted(x) for x in found.values() if x.requires_grad), torch.zeros(()))
    return {**{name: x.detach() for name, x in found.items()}, **_gradients(model, loss)}


def _named(out: object) -> Results:
    leaves, _ = pytree.tree_flatten_with_path(out)
    return {pytree.keystr(path): x for path, x in leaves if isinstance(x, Tensor)}


def _weighted(x: Tensor, seed: int = 0) -> Tensor:
    """The sum of a tensor with random weights, the same ones for each dtype."""
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return (x * weight.to(x)).sum()


def _gradients(model: nn.Module, loss: Tensor) -> Results:
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not loss.requires_grad:
        return {}
    for p in learned.values():
        p.grad = None
    loss.backward()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in learned.values()]
    return {"gradients": torch.cat([g.flatten() for g in grads])}


def _batched(rows: list[Tensor], dims: object) -> Tensor:
    if not dims:
        return torch.stack(rows)
    value = float("nan") if rows[0].is_floating_point() else 10**6
    return st.pad(rows, {d - 1: dim for d, dim in dims.items()}, value=value)


def _ragged_results(model: nn.Module, batch: dict[str, Tensor], count: int) -> Results:
    """The results of each row of one padded call, and the gradients."""
    found: Results = {}
    loss = torch.zeros(())
    for name, x in _named(model(**batch)).items():
        if x.dim() == 0:
            found[name] = x
            loss = loss + _weighted(x)
            continue
        rows = x.unpad() if isinstance(x, st.PaddedTensor) else x
        if len(rows) != count:
            continue
        for i, row in enumerate(rows):
            found[f"{name} of row {i}"] = row
            loss = loss + _weighted(row, i) if row.requires_grad else loss
    return {**{name: x.detach() for name, x in found.items()}, **_gradients(model, loss)}


def _rows_alone(net: nn.Module, rows: list[dict[str, Tensor]], counts: list[int]) -> Results:
    dtype = next(p.dtype for p in net.parameters() if p.is_floating_point())
    found: Results = {}
    loss = torch.zeros((), dtype=dtype)
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        for name, x in _named(net(**_cast(row, dtype))).items():
            if x.dim() == 0:
                found[name] = found.get(name, torch.zeros((), dtype=dtype)) + x * count / sum(counts)
            elif x.shape[0] == 1:
                found[f"{name} of row {i}"] = x[0]
                loss = loss + _weighted(x[0], i) if x.requires_grad else loss
    loss = sum((_weighted(x) for x in found.values() if x.dim() == 0 and x.requires_grad), loss)
    return {**{name: x.detach() for name, x in found.items()}, **_gradients(net, loss)}


def _compare(
    got: Results, results: Callable[[nn.Module], Results], plain: nn.Module, truth: nn.Module, where: str
) -> None:
    """Raise an error if a result errs more than plain torch does.

    Raises:
        WrongResult: it does.
    """
    want, exact = results(plain), results(truth)
    if missing := [name for name in want if name not in got or got[name].shape != want[name].shape]:
        raise WrongResult(f"{where}: {missing[0]} is missing or has another shape")
    suspects = [name for name in want if _excess(got[name], [want[name]], exact[name]) > 0]
    if not suspects:
        return
    others = [want]
    for seed, order in enumerate(orders()[1:]):
        with order:
            others += [results(plain), results(_nudged(plain, seed))]
    for name in suspects:
        if excess := _excess(got[name], [other[name] for other in others], exact[name]):
            raise WrongResult(f"{where}: {name} errs by {excess:.2g}")


def _nudged(model: nn.Module, seed: int) -> nn.Module:
    """A model whose parameters are moved by a unit in their last place, as the runner's own comparison does it."""
    nudged = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in nudged.parameters():
            steps = torch.randint(-1, 2, p.shape, generator=generator).to(p.device)
            p.mul_(1 + torch.finfo(p.dtype).eps * steps)
    return nudged


def _excess(got: Tensor, plain: list[Tensor], exact: Tensor) -> float:
    """The relative error of a result, if that is more than plain torch's; else 0."""
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, plain[0]) else 1.0
    is_number = exact.isfinite()
    if not torch.equal(got.isfinite(), plain[0].isfinite()):
        return float("inf")
    got, exact = got.double()[is_number], exact.double()[is_number]
    if not exact.numel():
        return 0.0
    largest = exact.abs().max()
    allowed = max(float((p.double()[is_number] - exact).norm()) for p in plain)
    error = float((got - exact).norm())
    rounding = float(TOLERATED_UNITS * torch.finfo(torch.float32).eps * largest)
    return error / float(largest) if not error <= max(1.5 * allowed, rounding) else 0.0
