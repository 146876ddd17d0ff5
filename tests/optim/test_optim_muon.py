"""Muon against torch.optim.Muon: the same steps, few launches, the same state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as h
from kernels_on_cpu import kernels_on_cpu
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import subtensors as st
from demo.timing import count_kernels
from subtensors.optim.algorithms.matrix_optimizer import MatrixOptimizer
from subtensors.optim.algorithms.muon import newton_schulz

SHAPES = [(8, 24), (24, 8), (8, 8), (16, 4), (8, 24), (24, 8), (1, 5), (33, 7)]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

Make = Callable[[list[Parameter]], torch.optim.Optimizer]


def values(device: str, dtype: torch.dtype, seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes]


def train(
    make: Make,
    device: str,
    dtype: torch.dtype,
    steps: int = 10,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    growth: float = 1.0,
) -> tuple[list[Parameter], torch.optim.Optimizer]:
    params = [Parameter(v) for v in values(device, dtype, 0, shapes)]
    optimizer = make(params)
    take_steps(optimizer, params, range(steps), growth)
    return params, optimizer


def take_steps(
    optimizer: torch.optim.Optimizer, params: list[Parameter], steps: Sequence[int], growth: float = 1.0
) -> None:
    """Steps whose gradients are each so much longer than those before."""
    shapes = [tuple(p.shape) for p in params]
    for number in steps:
        for p, g in zip(params, values("cpu", torch.bfloat16, number + 1, shapes), strict=True):
            p.grad = growth**number * g.to(p.device, p.dtype)
        optimizer.step()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().cpu().double().reshape(-1) for t in tensors])


def muon_by_the_paper(
    weights: Sequence[Tensor],
    steps: int,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    max_norm: float = math.inf,
    growth: float = 1.0,
) -> list[Tensor]:
    """Jordan et al. 2024 with torch's conventions, in float64 throughout."""
    a, b, c = COEFFICIENTS
    out = [w.double() for w in weights]
    buffers = [torch.zeros_like(w) for w in out]
    for number in range(steps):
        shapes = [tuple(w.shape) for w in out]
        gradients = [growth**number * g.double() for g in values("cpu", torch.bfloat16, number + 1, shapes)]
        share = (max_norm / (flat(gradients).norm() + 1e-6)).clamp(max=1)
        for w, m, g in zip(out, buffers, gradients, strict=True):
            m.mul_(momentum).add_((1 - momentum) * share * g)
            x = momentum * m + (1 - momentum) * share * g if nesterov else m.clone()
            x = x / x.norm().clamp(min=1e-7)
            for _ in range(ns_steps):
                gram = x @ x.mT
                x = a * x + (b * gram + c * gram @ gram) @ x
            rows, columns = w.shape
            ratio = math.sqrt(max(1, rows / columns))
            if adjust_lr_fn == "match_rms_adamw":
                ratio = 0.2 * math.sqrt(max(rows, columns))
            w.mul_(1 - lr * weight_decay).sub_(lr * ratio * x)
    return out


OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.5},
    {"adjust_lr_fn": "original", "ns_steps": 2},
    {"ns_steps": 1},
    {"ns_steps": 0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ten_steps_end_as_near_to_the_paper_as_torchs_do(
    options: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    truth = muon_by_the_paper(values("cpu", dtype, 0), 10, 0.1, **options)
    ours, _ = train(lambda params: st.optim.Muon(params, lr=0.1, **options), device, dtype)
    theirs, _ = train(lambda params: torch.optim.Muon(params, lr=0.1, **options), device, dtype)
    error, allowed = (flat(ours) - flat(truth)).norm(), 1.5 * (flat(theirs) - flat(truth)).norm()
    assert error <= allowed


def test_steps_that_clip_end_as_near_to_the_paper_as_torchs_do_after_clipping(device: str) -> None:
    # Muon's direction does not depend on the length of its momentum, but on how much each gradient has added to it.
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": False}
    max_norm, growth, steps = 30.0, 4.0, 6

    def clipping(params: list[Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.Muon(params, lr=0.1, **options)
        optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(params, max_norm) and None)
        return optimizer

    def ours_of(params: list[Parameter]) -> torch.optim.Optimizer:
        return st.optim.Muon(params, lr=0.1, max_norm=max_norm, **options)

    start = values("cpu", torch.float32, 0)
    unclipped = flat(muon_by_the_paper(start, steps, 0.1, growth=growth, **options))
    truth = flat(muon_by_the_paper(start, steps, 0.1, max_norm=max_norm, growth=growth, **options))
    theirs, _ = train(clipping, device, torch.float32, steps, growth=growth)
    ours, _ = train(ours_of, device, torch.float32, steps, growth=growth)
    assert (flat(ours) - truth).norm() <= 1.5 * (flat(theirs) - truth).norm()
    assert (unclipped - truth).norm() > 5 * (flat(ours) - truth).norm()


def test_the_kernels_of_a_step_do_what_torch_does() -> None:
    truth = muon_by_the_paper(values("cpu", torch.float32, 0), 2, 0.1)
    theirs, _ = train(lambda params: torch.optim.Muon(params, lr=0.1), "cpu", torch.float32, 2)
    with kernels_on_cpu():
        ours, _ = train(lambda params: st.optim.Muon(params, lr=0.1), "cpu", torch.float32, 2)
    # The interpreter cuts off what bfloat16 has no room for, where hardware rounds: twice the error.
    assert (flat(ours) - flat(truth)).norm() <= 2 * 1.5 * (flat(theirs) - flat(truth)).norm()


@given(
    shapes=h.lists(h.tuples(h.integers(1, 9), h.integers(1, 9)), min_size=1, max_size=6),
    workspace=h.sampled_from([1, 40, 2**28]),
)
def test_how_matrices_are_batched_does_not_matter(shapes: list[tuple[int, int]], workspace: int) -> None:
    class Cut(st.optim.Muon):
        WORKSPACE = workspace

    together, _ = train(lambda params: Cut(params, lr=0.1), "cpu", torch.float32, 2, shapes)
    alone = [Parameter(v) for v in values("cpu", torch.float32, 0, shapes)]
    optimizers = [st.optim.Muon([p], lr=0.1) for p in alone]
    for number in range(2):
        for p, g in zip(alone, values("cpu", torch.bfloat16, number + 1, shapes), strict=True):
            p.grad = g.float()
        for optimizer in optimizers:
            optimizer.step()
    difference = (flat(together) - flat(alone)).abs().max()
    assert difference <= 2 * 2 * 0.1 * 3 * 2**-7


class _Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(name in str(func) for name in ("mm", "stack", "cat"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [1, 6])
def test_newton_schulz_is_three_products_an_iteration_and_shape_and_no_copy(layers: int, device: str) -> None:
    if device == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("kernels run on a CPU only where Triton interprets them")
    params = [Parameter(v) for _ in range(layers) for v in values(device, torch.float32, 0, [(4, 12), (12, 4), (4, 4)])]
    optimizer = st.optim.Muon(params)
    with kernels_on_cpu():
        take_steps(optimizer, params, [0])
        with _Products() as products:
            take_steps(optimizer, params, [1])
    assert products.count == 3 * 5 * 3


@pytest.mark.parametrize("shape", [(3, 6, 20), (2, 20, 6), (1, 8, 8)])
def test_newton_schulz_in_float64_converges_to_the_orthogonal_factor(shape: tuple[int, ...]) -> None:
    (x,) = values("cpu", torch.float64, 0, [shape])
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    x = x / torch.linalg.matrix_norm(x)[:, None, None]
    result = newton_schulz(x, (1.875, -1.25, 0.375), steps=60, scale=3.0)
    # A step squares the distance of a singular value from 1, so that what is left is the rounding of the last one.
    rounding = 2 * sum(shape) * torch.finfo(torch.float64).eps
    torch.testing.assert_close(result, 3 * u @ vh, rtol=rounding, atol=rounding)


def test_matrices_in_any_memory_layout_end_alike(device: str) -> None:
    def make(params: list[Parameter]) -> torch.optim.Optimizer:
        return st.optim.Muon(params, lr=0.1)

    rows, _ = train(make, device, torch.float32, 3)
    params = [Parameter(v.mT.contiguous().mT) for v in values(device, torch.float32, 0)]
    take_steps(make(params), params, range(3))
    assert (flat(params) - flat(rows)).abs().max() <= 3 * 0.1 * math.sqrt(6) * 2**-6
    assert all(p.mT.is_contiguous() for p in params)


def test_training_goes_on_with_the_other_package_from_a_saved_state(device: str) -> None:
    for first, second in ((st.optim.Muon, torch.optim.Muon), (torch.optim.Muon, st.optim.Muon)):
        params, optimizer = train(lambda params, cls=first: cls(params, lr=0.1), device, torch.float32, 3)
        saved = optimizer.state_dict()
        assert saved["state"][0].keys() == {"momentum_buffer"}
        other = second(params, lr=7.0)
        other.load_state_dict(saved)
        assert {k: v for k, v in other.param_groups[0].items() if k != "params"} == {
            k: v for k, v in optimizer.param_groups[0].items() if k != "params"
        }
        take_steps(other, params, range(3, 6))
        whole, _ = train(lambda params: torch.optim.Muon(params, lr=0.1), device, torch.float32, 6)
        assert (flat(params) - flat(whole)).norm() <= 0.02 * flat(whole).norm()


def test_a_learning_rate_may_be_a_tensor_and_move(device: str) -> None:
    lr = torch.tensor(0.1, device=device)
    params, optimizer = train(lambda params: st.optim.Muon(params, lr=lr), device, torch.float32, 1)
    lr.fill_(0.0)
    before = flat(params)
    take_steps(optimizer, params, [1])
    assert torch.equal(flat(params), before)


def test_gradients_are_read_and_never_written(device: str) -> None:
    params, _ = train(st.optim.Muon, device, torch.float32, 1)
    for p, g in zip(params, values("cpu", torch.bfloat16, 1), strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad.cpu(), g.float())


def test_parameters_without_a_gradient_are_left_alone() -> None:
    params = [Parameter(v) for v in values("cpu", torch.float32, 0)]
    params[0].grad = torch.ones_like(params[0])
    before = [p.detach().clone() for p in params]
    optimizer = st.optim.Muon(params)
    optimizer.step()
    assert [torch.equal(p, b) for p, b in zip(params, before, strict=True)] == [False] + [True] * (len(params) - 1)
    assert list(optimizer.state) == [params[0]]


def test_masters_keep_what_bfloat16_would_lose(device: str) -> None:
    params = [Parameter(torch.ones(s, dtype=torch.bfloat16, device=device)) for s in SHAPES]
    optimizer = st.optim.Muon(params, lr=1e-4, weight_decay=0.0, master_weights=True)
    take_steps(optimizer, params, range(5))
    for p in params:
        master = optimizer.state[p]["master_param"]
        assert master.dtype == torch.float32
        assert (master != 1).any()
        assert torch.equal(p, master.to(torch.bfloat16))


def test_a_scaled_step_is_the_step_and_an_overflow_changes_nothing(device: str) -> None:
    params, optimizer = train(lambda params: st.optim.Muon(params, lr=0.1), device, torch.float32, 2)
    plain, theirs = train(lambda params: st.optim.Muon(params, lr=0.1), device, torch.float32, 2)
    before = flat([*params, *(optimizer.state[p]["momentum_buffer"] for p in params)])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0, device=device), torch.tensor(1.0, device=device)
    for p in params:
        p.grad = torch.full_like(p, math.inf)
    optimizer.step()
    assert torch.equal(flat([*params, *(optimizer.state[p]["momentum_buffer"] for p in params)]), before)
    optimizer.found_inf.zero_()
    take_steps(theirs, plain, [2])
    for p, q in zip(params, plain, strict=True):
        assert q.grad is not None
        p.grad = 4 * q.grad
    optimizer.step()
    assert torch.equal(flat(params), flat(plain))


@pytest.mark.parametrize(
    "arguments",
    [
        {"lr": -1.0},
        {"momentum": -0.1},
        {"weight_decay": -1.0},
        {"adjust_lr_fn": "other"},
        {"ns_coefficients": (1.0, 2.0)},
        {"ns_steps": 100},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(arguments.values()))).replace("(", r"\(").replace(")", r"\)")):
        st.optim.Muon([Parameter(torch.zeros(2, 2))], **arguments)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(3), "Muon only supports 2D parameters"),
        (torch.zeros(2, 2, 2), "Muon only supports 2D parameters"),
        (torch.zeros(2, 2, dtype=torch.complex64), "Muon takes matrices of real numbers"),
    ],
)
def test_a_parameter_that_is_no_real_matrix_is_refused_where_it_is_given(value: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        st.optim.Muon([Parameter(value)])
    optimizer = st.optim.Muon([Parameter(torch.zeros(2, 2))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [Parameter(value)]})


def test_sparse_gradients_are_refused() -> None:
    p = Parameter(torch.ones(2, 2))
    p.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="dense"):
        st.optim.Muon([p]).step()


def test_a_matrix_optimizer_of_ones_own_has_torchs_matrix_functions_batched() -> None:
    class Whitened(MatrixOptimizer):
        def update(self, p: Any, g: Any, *, lr: float) -> None:
            u, _, vh = torch.linalg.svd(g, full_matrices=False)
            p.sub_(lr * (u @ vh))

    params = [Parameter(v) for v in values("cpu", torch.float32, 0)]
    expected = []
    for p, g in zip(params, values("cpu", torch.float32, 1), strict=True):
        p.grad = g
        u, _, vh = torch.linalg.svd(g, full_matrices=False)
        expected.append(p.detach() - 0.5 * (u @ vh))
    Whitened(params, {"lr": 0.5}).step()
    torch.testing.assert_close([p.detach() for p in params], expected)


@pytest.mark.gpu
def test_a_step_can_be_captured_and_the_learning_rate_stays_dynamic() -> None:
    captured, plain = ([Parameter(v) for v in values("cuda", torch.float32, 0)] for _ in range(2))
    lr = torch.tensor(0.1, device="cuda")
    ours, theirs = st.optim.Muon(captured, lr=lr), st.optim.Muon(plain, lr=lr)
    take_steps(ours, captured, [0, 1])
    take_steps(theirs, plain, [0, 1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for rate in (0.2, 0.3):
        lr.fill_(rate)
        graph.replay()
        theirs.step()
    assert (flat(captured) - flat(plain)).norm() <= 1e-3 * flat(plain).norm()


@pytest.mark.gpu
def test_a_step_launches_as_many_kernels_for_many_matrices_as_for_few() -> None:
    counts = []
    for layers in (2, 8):
        shapes = [(48, 16), (16, 16), (64, 16), (16, 64)] * layers
        params, optimizer = train(st.optim.Muon, "cuda", torch.float32, 2, shapes)
        counts.append(count_kernels(optimizer.step))
        assert params[0].isfinite().all()
    assert counts[0] == counts[1] <= 4 * 5 * 5 + 8


def test_an_instance_of_torchs_is_converted_and_goes_on(device: str) -> None:
    params, theirs = train(lambda params: torch.optim.Muon(params, lr=0.1, nesterov=False), device, torch.float32, 2)
    ours = st.optim.convert(theirs)
    assert isinstance(ours, st.optim.Muon)
    before = flat(params)
    buffer = ours.state[params[0]]["momentum_buffer"].clone()
    assert torch.equal(buffer, theirs.state[params[0]]["momentum_buffer"])
    take_steps(ours, params, [2])
    assert not torch.equal(flat(params), before)


def test_clipping_within_the_step_is_clipping_before_it(device: str) -> None:
    clipped, plain = ([Parameter(v) for v in values(device, torch.float32, 0)] for _ in range(2))
    ours, theirs = st.optim.Muon(clipped, max_norm=0.5), st.optim.Muon(plain)
    for number in range(2):
        for params in (clipped, plain):
            for p, g in zip(params, values("cpu", torch.bfloat16, number + 1), strict=True):
                p.grad = g.to(device, torch.float32)
        torch.nn.utils.clip_grad_norm_(plain, 0.5)
        ours.step()
        theirs.step()
    assert (flat(clipped) - flat(plain)).norm() <= 1e-3 * flat(plain).norm()
