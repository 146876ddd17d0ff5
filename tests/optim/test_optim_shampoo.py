"""Shampoo and SOAP against their papers, written out for one parameter, and invariance to batching."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import subtensors as st
from subtensors.optim.algorithms.shampoo import matrix_power, matrix_shape, sides_of

SHAPES = [(5, 5), (3, 7), (7, 3), (5, 5), (4, 2, 3), (3, 2, 2, 2), (6,), (), (5, 40), (1, 4)]
STEPS = 7
Rule = Callable[[Tensor, Sequence[Tensor]], Tensor]


def gradients(shapes: Sequence[tuple[int, ...]], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def start(device: str, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Parameter]:
    return [Parameter(g.to(device, dtype)) for g in gradients(shapes, -1)]


def take_steps(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: range) -> None:
    for number in steps:
        for p, g in zip(params, gradients([tuple(p.shape) for p in params], number), strict=True):
            p.grad = g.to(p.device, p.dtype)
        optimizer.step()


def by_the_paper(
    rule: Rule, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Where each parameter stands after all steps."""
    weights = [p.detach() for p in start("cpu", dtype, shapes)]
    columns = zip(*[gradients(shapes, number) for number in range(STEPS)], strict=True)
    return [rule(w, [g.to(dtype) for g in own]) for w, own in zip(weights, columns, strict=True)]


def root(a: Tensor, exponent: float, eps: float) -> Tensor:
    values, vectors = torch.linalg.eigh(a)
    return vectors @ torch.diag((values.clamp(min=0) + eps) ** exponent) @ vectors.T


def shampoo(
    lr: float = 0.1,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    eps: float = 1e-4,
    beta2: float = 1.0,
    update_freq: int = 1,
    max_size: int = 8192,
    grafting: str | None = None,
) -> Rule:
    """Gupta et al. 2018, with the options of the class."""

    def rule(w: Tensor, own: Sequence[Tensor]) -> Tensor:
        w = w.clone()
        shape = matrix_shape(w) if w.dim() > 1 else (w.numel(), 1)
        sides = sides_of(w, max_size)
        moments = {side: w.new_zeros(size, size) for side, size in zip(("left", "right"), shape, strict=True)}
        roots: dict[str, Tensor] = {}
        total, buffer = torch.zeros_like(w), torch.zeros_like(w)
        share = 1.0 if beta2 == 1 else 1 - beta2
        for number, g in enumerate(own):
            g = g + weight_decay * w
            matrix = g.reshape(shape)
            if not sides:
                total = beta2 * total + share * g * g
                d = g / (total + eps).sqrt()
            else:
                d = matrix
                for side in sides:
                    product = matrix @ matrix.T if side == "left" else matrix.T @ matrix
                    moments[side] = beta2 * moments[side] + share * product
                    if number % update_freq == 0:
                        roots[side] = root(moments[side], -1 / (2 * len(sides)), eps)
                    d = roots[side] @ d if side == "left" else d @ roots[side]
                d = d.reshape(w.shape)
            if grafting == "sgd":
                d = d * g.norm() / d.norm()
            buffer = momentum * buffer + d
            w -= lr * (buffer if momentum else d)
        return w

    return rule


def soap(
    lr: float = 3e-3,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float = -1,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
    correct_bias: bool = True,
    begin: dict[str, Tensor] | None = None,
) -> Rule:
    """Vyas et al. 2024, Algorithm 3, with the first step and the order of columns of its authors' code.

    It goes on from `begin`, the state of a parameter, where there is one.
    """
    beta = betas[1] if shampoo_beta == -1 else shampoo_beta

    def rule(w: Tensor, own: Sequence[Tensor]) -> Tensor:
        shape = matrix_shape(w) if w.dim() > 1 else (w.numel(), 1)
        sides = sides_of(w, max_precond_dim)
        x = w.reshape(shape).clone()
        moments = {side: w.new_zeros(size, size) for side, size in zip(("left", "right"), shape, strict=True)}
        q = {side: torch.eye(len(moment), dtype=w.dtype) for side, moment in moments.items()}
        m, v = torch.zeros_like(x), torch.zeros_like(x)
        first = 0
        if begin:
            m, v = (begin[name].reshape(shape) for name in ("exp_avg", "exp_avg_sq"))
            moments, q = ({side: begin[side + end] for side in sides} for end in ("", "_basis"))
            first = int(begin["step"])
        for t, g in enumerate(own, start=first):
            g = g.reshape(shape)
            if t:
                turned = q["left"].T @ g @ q["right"]
                m = betas[0] * m + (1 - betas[0]) * g
                v = betas[1] * v + (1 - betas[1]) * turned**2
                d = q["left"] @ ((q["left"].T @ m @ q["right"]) / (v.sqrt() + eps)) @ q["right"].T
                if correct_bias:
                    d = d * math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t)
                x = x - lr * d
                x = x - lr * weight_decay * x
            for side in sides:
                product = g @ g.T if side == "left" else g.T @ g
                moments[side] = beta * moments[side] + (1 - beta) * product
                if t == 0:
                    q[side] = torch.linalg.eigh(moments[side])[1].flip(1)
                elif t % precondition_frequency == 0:
                    estimate = torch.diag(q[side].T @ moments[side] @ q[side])
                    order = torch.argsort(estimate, descending=True)
                    v = v[order] if side == "left" else v[:, order]
                    q[side] = torch.linalg.qr(moments[side] @ q[side][:, order])[0]
        return x.reshape(w.shape)

    return rule


SHAMPOO: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"update_freq": 3, "grafting": "sgd"},
    {"beta2": 0.9, "eps": 1e-2, "max_size": 5},
]
SOAPS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "precondition_frequency": 2, "shampoo_beta": 0.8, "weight_decay": 0.0},
    {"lr": 0.1, "precondition_frequency": 1, "correct_bias": False, "betas": (0.9, 0.99)},
]


@pytest.mark.parametrize("options", SHAMPOO, ids=str)
def test_shampoo_follows_its_paper(options: dict[str, Any], device: str) -> None:
    params = start(device, torch.float64)
    take_steps(st.optim.Shampoo(params, **options), params, range(STEPS))
    torch.testing.assert_close([p.detach().cpu() for p in params], by_the_paper(shampoo(**options)))


# A moment has a unique basis (but for signs, which cancel) where its rank is full. One gradient fills the moment of the
# shorter side alone: in the other's null space, eigenvectors and all that follows are what roundings make of them.
@pytest.mark.parametrize(
    ("shapes", "max_precond_dim"),
    [([(5, 5), (3, 3), (5, 5), (6,), ()], 10000), ([(3, 7), (7, 3), (4, 2, 3), (3, 2, 2, 2), (5, 40), (6,)], 5)],
    ids=["square", "shorter sides"],
)
@pytest.mark.parametrize("options", SOAPS, ids=str)
def test_soap_follows_its_paper(
    options: dict[str, Any], shapes: list[tuple[int, ...]], max_precond_dim: int, device: str
) -> None:
    options = {**options, "max_precond_dim": max_precond_dim}
    params = start(device, torch.float64, shapes)
    take_steps(st.optim.SOAP(params, **options), params, range(STEPS))
    torch.testing.assert_close([p.detach().cpu() for p in params], by_the_paper(soap(**options), shapes))


@pytest.mark.parametrize("options", SOAPS, ids=str)
def test_soap_of_any_matrices_follows_its_paper_once_their_moments_are_full(
    options: dict[str, Any], device: str
) -> None:
    shapes = [(3, 7), (7, 3), (4, 2, 3), (3, 2, 2, 2), (1, 4), (1, 4)]
    filled, end = 8, 8 + STEPS
    params = start(device, torch.float64, shapes)
    optimizer = st.optim.SOAP(params, **options)
    take_steps(optimizer, params, range(filled))
    weights = [p.detach().cpu().clone() for p in params]
    states = [{name: t.cpu().clone() for name, t in optimizer.state[p].items()} for p in params]
    take_steps(optimizer, params, range(filled, end))
    columns = zip(*[gradients(shapes, number) for number in range(filled, end)], strict=True)
    expected = [soap(**options, begin=s)(w, own) for s, w, own in zip(states, weights, columns, strict=True)]
    torch.testing.assert_close([p.detach().cpu() for p in params], expected)
    for state in states:
        for side in ("left", "right"):
            basis = state.get(side + "_basis", torch.eye(1).double())
            torch.testing.assert_close(basis.mT @ basis, torch.eye(len(basis)).double())


@pytest.mark.parametrize("options", SHAMPOO, ids=str)
def test_shampoo_in_float32_is_as_near_to_the_truth_as_the_paper_in_float32(
    options: dict[str, Any], device: str
) -> None:
    truth, theirs = (by_the_paper(shampoo(**options), dtype=dtype) for dtype in (torch.float64, torch.float32))
    params = start(device, torch.float32)
    take_steps(st.optim.Shampoo(params, **options), params, range(STEPS))

    def error(values: Sequence[Tensor]) -> float:
        pairs = zip(values, truth, strict=True)
        return math.sqrt(sum(float((a.detach().cpu().double() - b).square().sum()) for a, b in pairs))

    rounding = torch.finfo(torch.float32).eps * math.sqrt(sum(float(t.square().sum()) for t in truth))
    assert error(params) <= 1.5 * error(theirs) + rounding


@pytest.mark.parametrize("cls", [st.optim.Shampoo, st.optim.SOAP], ids=lambda cls: cls.__name__)
def test_a_small_network_learns(cls: Any, device: str) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    ).to(device)
    optimizer = cls(net.parameters(), lr=0.05)
    x = torch.randn(64, 1, 6, 6, device=device)
    y = x.flatten(1)[:, :4].sum(1, keepdim=True)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.4 * losses[0]


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("cls", "options", "factorization"),
    [
        (st.optim.Shampoo, {"update_freq": 1}, "_linalg_eigh"),
        (st.optim.SOAP, {"precondition_frequency": 1}, "linalg_qr"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_matrix_math_is_one_call_a_shape_however_many_matrices(
    cls: Any, options: dict[str, Any], factorization: str
) -> None:
    counts = []
    for layers in (1, 4):
        params = start("cpu", torch.float32, [(4, 6), (6, 6)] * layers)
        optimizer = cls(params, **options)
        take_steps(optimizer, params, range(2))
        with _Calls() as calls:
            take_steps(optimizer, params, range(2, 3))
        counts.append([calls.names.count(name) for name in (factorization, "bmm")])
    assert counts[0] == counts[1]
    # Rows of 4 and of 6, columns of 6.
    assert counts[0][0] == 3
    assert counts[0][1] > 0


def test_roots_are_those_of_the_last_update(device: str) -> None:
    params = start(device, torch.float64, [(4, 4)])
    optimizer = st.optim.Shampoo(params, update_freq=3)
    take_steps(optimizer, params, range(1))
    first = optimizer.state[params[0]]["left_root"].clone()
    take_steps(optimizer, params, range(1, 3))
    assert torch.equal(optimizer.state[params[0]]["left_root"], first)
    take_steps(optimizer, params, range(3, 4))
    assert not torch.equal(optimizer.state[params[0]]["left_root"], first)


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_the_power_of_a_matrix_undoes_itself(eps: float, device: str) -> None:
    x = torch.stack(gradients([(6, 6)] * 3, 0)).to(device)
    a = x @ x.mT
    inverse_root = matrix_power(a, -0.25, eps)
    one = torch.eye(6, device=device, dtype=a.dtype).expand(3, 6, 6)
    regular = a + eps * one
    product = inverse_root @ inverse_root @ inverse_root @ inverse_root @ regular
    # An eigenvalue errs by a rounding of the largest one, whose share of the smallest is the condition.
    bound = 6 * torch.finfo(a.dtype).eps * float(torch.linalg.cond(regular).max())
    torch.testing.assert_close(product, one, rtol=0, atol=bound)


@pytest.mark.parametrize("cls", [st.optim.Shampoo, st.optim.SOAP], ids=lambda cls: cls.__name__)
def test_parameters_that_are_added_late_start_with_fresh_state(cls: Any) -> None:
    params = start("cpu", torch.float64, [(4, 4), (4, 4), (3,), (3,)])
    together = cls(params, lr=0.1)
    late = params[1::2]
    for number in range(4):
        for p, g in zip(params, gradients([(4, 4), (4, 4), (3,), (3,)], number), strict=True):
            p.grad = None if number < 2 and any(p is q for q in late) else g
        together.step()
    expected = start("cpu", torch.float64, [(4, 4), (4, 4), (3,), (3,)])
    alone = [cls([p], lr=0.1) for p in expected]
    for number in range(4):
        for i, (p, g) in enumerate(zip(expected, gradients([(4, 4), (4, 4), (3,), (3,)], number), strict=True)):
            if number >= 2 or i % 2 == 0:
                p.grad = g
                alone[i].step()
    torch.testing.assert_close([p.detach() for p in params], [p.detach() for p in expected])


@pytest.mark.parametrize("cls", [st.optim.Shampoo, st.optim.SOAP], ids=lambda cls: cls.__name__)
def test_training_goes_on_from_a_saved_state(cls: Any, device: str) -> None:
    whole, cut = start(device, torch.float64), start(device, torch.float64)
    take_steps(cls(whole, lr=0.1), whole, range(6))
    first = cls(cut, lr=0.1)
    take_steps(first, cut, range(3))
    second = cls(cut, lr=7.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    take_steps(second, cut, range(3, 6))
    torch.testing.assert_close([p.detach() for p in cut], [p.detach() for p in whole])


@pytest.mark.parametrize("cls", [st.optim.Shampoo, st.optim.SOAP], ids=lambda cls: cls.__name__)
def test_an_overflow_leaves_parameters_and_moments_as_they_were(cls: Any, device: str) -> None:
    params = start(device, torch.float32)
    optimizer = cls(params, lr=0.1)
    take_steps(optimizer, params, range(3))

    def values() -> list[Tensor]:
        kept = [t for p in params for name, t in optimizer.state[p].items() if name != "step"]
        return [t.detach().clone() for t in (*params, *kept)]

    before = values()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0, device=device), torch.tensor(1.0, device=device)
    for p in params:
        p.grad = torch.full_like(p, math.inf)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(values(), before, strict=True))


@pytest.mark.parametrize("cls", [st.optim.Shampoo, st.optim.SOAP], ids=lambda cls: cls.__name__)
def test_maximizing_goes_the_other_way(cls: Any) -> None:
    down, up = start("cpu", torch.float64), start("cpu", torch.float64)
    take_steps(cls(down, lr=0.1, weight_decay=0.0), down, range(3))
    take_steps(cls(up, lr=0.1, weight_decay=0.0, maximize=True), up, range(3))
    for d, u, s in zip(down, up, start("cpu", torch.float64), strict=True):
        torch.testing.assert_close(u - s, s - d)


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (st.optim.Shampoo, {"lr": -1.0}),
        (st.optim.Shampoo, {"eps": 0.0}),
        (st.optim.Shampoo, {"beta2": 0.0}),
        (st.optim.Shampoo, {"update_freq": 0}),
        (st.optim.Shampoo, {"grafting": "adam"}),
        (st.optim.SOAP, {"betas": (0.9, 1.0)}),
        (st.optim.SOAP, {"shampoo_beta": 1.5}),
        (st.optim.SOAP, {"precondition_frequency": 0}),
        (st.optim.SOAP, {"weight_decay": -1.0}),
    ],
)
def test_values_out_of_range_are_refused_by_name(cls: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        cls([Parameter(torch.zeros(2, 2))], **arguments)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="matrices of real numbers"):
        st.optim.SOAP([Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
