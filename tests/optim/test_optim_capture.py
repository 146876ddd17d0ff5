"""A captured step equals the eager step, with dynamic numbers."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_pairs import OPTIMIZERS, Pair
from optimizers import ELEMENTWISE, MATRIX_NAMES
from static_inputs import copies_of, count_static
from torch import nn

import subtensors as st
from subtensors.dispatch.fused.bound_call import cpu_kernels

pytestmark = pytest.mark.usefixtures("kernels")

# Triton's interpreter computes with numpy, which speaks of infinities.
OVERFLOWING = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_step_is_the_eager_step(device: str, name: str) -> None:
    pair = Pair(device, OPTIMIZERS[name])
    for _ in range(5):
        pair.step()
    pair.assert_equal()
    assert pair.capture.stats() == {"recordings": 1, "replays": 5, "eager_steps": 0}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_optimizer_is_captured_with_its_defaults(device: str, name: str) -> None:
    pair = Pair(device, getattr(st.optim, name))
    for step in range(4):
        for opt in pair.both:
            opt.param_groups[0]["lr"] *= 0.9
        pair.step(without=(1,) if step == 2 else ())
    pair.assert_equal()
    assert pair.capture.stats() == {"recordings": 2, "replays": 4, "eager_steps": 0}
    assert all(isinstance(t, st.StaticAddressTensor) for state in pair.captured.state.values() for t in state.values())


@OVERFLOWING
@pytest.mark.parametrize("name", MATRIX_NAMES)
def test_state_of_matrix_optimizers_that_were_asked_for_replays_is_static_too(device: str, name: str) -> None:
    trained = []
    for graph in (False, True):
        params = [nn.Parameter(torch.eye(4, device=device)), nn.Parameter(torch.ones(8, 2, device=device))]
        opt = getattr(st.optim, name)(params, graph=graph)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(device)
            opt.step()
        assert {isinstance(t, st.StaticAddressTensor) for s in opt.state.values() for t in s.values()} == {graph}
        trained.append(params)
    for p, q in zip(*trained, strict=True):
        torch.testing.assert_close(p, q)


def test_a_matrix_optimizer_says_why_it_is_not_captured(device: str) -> None:
    class Whitened(st.optim.MatrixOptimizer):
        def update(self, p: Any, g: Any, *, lr: float) -> None:
            u, _, vh = torch.linalg.svd(g, full_matrices=False)
            p.sub_(lr * (u @ vh))

    w = nn.Parameter(torch.ones(2, 2, device=device))
    opt = Whitened([w], {"lr": 0.1}, graph=True)
    w.grad = torch.eye(2, device=device)
    opt.step()
    assert "ran eagerly: a step of Whitened is more than fused calls (1)" in st.explain(opt)


MATRIX = {
    "Muon": lambda params, **o: st.optim.Muon(params, weight_decay=0.1, **o),
    "Adafactor": lambda params, **o: st.optim.Adafactor(params, weight_decay=0.1, **o),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MATRIX)
def test_matrix_math_is_captured_with_dynamic_numbers_while_gradients_stay(device: str, name: str) -> None:
    shapes = [(64, 32), (32, 64), (64, 32)]
    params = [[nn.Parameter(torch.ones(s, device="cuda") / 8) for s in shapes] for _ in range(2)]
    eager, captured = (MATRIX[name](p) for p in params)
    capture = captured.capture(packed=True)
    for step in range(6):
        for p, q in zip(*params, strict=True):
            p.grad = torch.randn_like(p)
            q.grad.copy_(p.grad)  # type: ignore[union-attr]
        for opt in (eager, captured):
            opt.param_groups[0]["lr"] = 0.1 / (step + 1)
            opt.step()
    for p, q in zip(*params, strict=True):
        torch.testing.assert_close(p, q)
    assert capture.stats() == {"recordings": 1, "replays": 6, "eager_steps": 0}


@pytest.mark.gpu
def test_a_graph_that_serves_one_step_each_time_is_given_up_after_a_few(device: str) -> None:
    params = [[nn.Parameter(torch.ones(64, 32, device="cuda") / 8)] for _ in range(2)]
    eager, captured = (MATRIX["Muon"](p) for p in params)
    capture = captured.capture()
    kept = []
    for _ in range(8):
        for p, q in zip(*params, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
            kept.append(q.grad)
        eager.step()
        captured.step()
    torch.testing.assert_close(*(p[0] for p in params))
    assert capture.reasons["a gradient moved whose address is a constant of this optimizer's graph"] >= 3
    assert capture.recordings <= 4
    assert capture.eager_steps >= 4


OPTIONS: dict[str, dict[str, Any]] = {
    "clipping": {"max_norm": 0.5},
    "averaged weights": {"ema": 0.9},
    "two passes": {"accumulate": 2},
    "8-bit state": {"state_dtype": "int8"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_options_of_every_optimizer_are_captured(device: str, options: dict[str, Any]) -> None:
    pair = Pair(device, st.optim.AdamW, **options)
    large = torch.randn(5000, generator=pair.generator).to(device)  # enough for its state to be of 8 bits
    for params, opt in zip(pair.params, pair.both, strict=True):
        params.append(nn.Parameter(large.clone()))
        opt.add_param_group({"params": [params[-1]]})
    for _ in range(4):
        pair.step()
    pair.assert_equal()
    assert pair.capture.stats()["eager_steps"] == 0
    assert pair.capture.recordings == 1


def test_the_compiler_knows_that_the_state_of_a_captured_optimizer_is_static(device: str) -> None:
    pair = Pair(device)
    pair.step()
    eager, captured = (opt.state[p[0]]["exp_avg"] for opt, p in zip(pair.both, pair.params, strict=True))
    assert count_static(lambda m: m * 2, eager) == (1, 0)
    assert count_static(lambda m: m * 2, captured) == (1, 1)
    assert not vars(pair.captured.state_dict()["state"][0]["exp_avg"])


@pytest.mark.gpu
def test_a_graph_of_compiled_code_copies_nothing_of_packed_parameters_and_their_state(device: str) -> None:
    params = [nn.Parameter(torch.randn(64, 64, device="cuda")) for _ in range(3)]
    opt = st.optim.AdamW(params, lr=0.1)
    opt.capture(packed=True)
    for p in params:
        p.grad = torch.randn_like(p)
    opt.step()
    averages = [opt.state[p]["exp_avg"] for p in params]
    read = torch.compile(lambda state: torch.stack([t.sum() for t in state]), mode="reduce-overhead")
    multiply = torch.compile(lambda a, b: a @ b, mode="reduce-overhead")
    with torch.no_grad():
        assert copies_of(lambda: read(averages)) == 0
        assert copies_of(lambda: multiply(*params[:2])) == 0


def test_learning_rate_betas_and_weight_decay_stay_dynamic_under_a_schedule(device: str) -> None:
    pair = Pair(device)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=12) for opt in pair.both]
    seen = set()
    for step in range(10):
        for opt in pair.both:
            opt.param_groups[0]["weight_decay"] = 0.01 * (1 + step)
        pair.step()
        seen.add(pair.captured.param_groups[0]["betas"])
        for schedule in schedules:
            schedule.step()
    pair.assert_equal()
    assert len(seen) == 10
    assert pair.capture.recordings == 1, pair.capture.explain()


@pytest.mark.parametrize("where", ["number", "host", "device"])
def test_a_learning_rate_that_changes_in_place_is_read_by_the_replay(device: str, where: str) -> None:
    pair = Pair(device)
    for opt in pair.both:
        lr = torch.tensor(0.1, device="cpu" if where == "host" else device)
        opt.param_groups[0]["lr"] = 0.1 if where == "number" else lr
    for step in range(4):
        pair.step()
        for opt in pair.both:
            if where == "number":
                opt.param_groups[0]["lr"] = 0.1 / (step + 2)
            else:
                opt.param_groups[0]["lr"].fill_(0.1 / (step + 2))
    pair.assert_equal()
    assert pair.capture.recordings == 1, pair.capture.explain()


def test_a_weight_decay_of_zero_is_another_step_and_minus_zero_another_number(device: str) -> None:
    pair = Pair(device)
    for decay in (0.1, 0.2, 0.0, 0.0, 0.1):
        for opt in pair.both:
            opt.param_groups[0]["weight_decay"] = decay
        pair.step()
    pair.assert_equal()
    assert pair.capture.reasons == {"an option changed that decides the math": 1}
    for lr in (0.0, -0.0, 0.0):
        for opt in pair.both:
            opt.param_groups[0]["lr"] = lr
        pair.step()
    pair.assert_equal()


def test_two_groups_keep_their_own_numbers(device: str) -> None:
    pair = Pair(device)
    pair.params = [[nn.Parameter(torch.ones(7, device=device)) for _ in range(4)] for _ in range(2)]
    pair.eager, pair.captured = (
        st.optim.AdamW([{"params": p[:2], "lr": 0.1}, {"params": p[2:], "lr": 0.2, "weight_decay": 0}])
        for p in pair.params
    )
    pair.capture = pair.captured.capture()
    for step in range(4):
        for opt in pair.both:
            opt.param_groups[1]["lr"] = 0.3 / (step + 1)
        pair.step()
    pair.assert_equal()
    assert pair.capture.recordings == 1, pair.capture.explain()


@OVERFLOWING
def test_the_scale_and_the_overflow_flag_of_each_step_are_obeyed(device: str) -> None:
    pair = Pair(device)
    for scale, overflow in [(2.0, 0.0), (4.0, 1.0), (8.0, 0.0)]:
        for opt in pair.both:
            opt.grad_scale = torch.tensor(scale, device=device)  # type: ignore[attr-defined]
            opt.found_inf = torch.tensor(overflow, device=device)  # type: ignore[attr-defined]
        pair.step(scale=scale)
    pair.assert_equal()
    assert pair.captured.state[pair.params[1][0]]["step"] == 2
    for opt in pair.both:
        del opt.grad_scale, opt.found_inf  # type: ignore[attr-defined]
    pair.step()
    pair.assert_equal()
    assert pair.capture.reasons == {"a loss scale was added or removed": 1}


@OVERFLOWING
def test_a_gradient_scaler_skips_the_step_that_overflows(device: str) -> None:
    pair = Pair(device)
    scalers = [torch.amp.GradScaler(device, init_scale=4.0) for _ in range(2)]
    for factor in (1.0, float("inf"), 1.0):
        for params, opt, scaler in zip(pair.params, pair.both, scalers, strict=True):
            opt.zero_grad()
            loss = torch.stack([(p * p).sum() for p in params]).sum() * factor
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    pair.assert_equal()
    assert pair.captured.state[pair.params[1][0]]["step"] == 2
    assert pair.capture.replays == 3


def test_a_closure_is_evaluated_once_a_step_and_its_loss_returned(device: str) -> None:
    w = nn.Parameter(torch.ones(3, device=device))
    opt = st.optim.SGD([w], lr=0.5, graph=True)
    losses = []
    for _ in range(3):

        def closure() -> float:
            opt.zero_grad()
            loss = (w * w).sum()
            loss.backward()
            return float(loss.detach())

        losses.append(opt.step(closure))
    assert losses == [3.0, 0.0, 0.0]


def test_hooks_run_around_a_replayed_step(device: str) -> None:
    w = nn.Parameter(torch.ones(3, device=device))
    opt = st.optim.SGD([w], lr=1.0, graph=True)
    seen: list[float] = []
    opt.register_step_pre_hook(lambda *_: seen.append(w[0].item()))
    opt.register_step_post_hook(lambda *_: seen.append(w[0].item()))
    w.grad = torch.ones_like(w)
    opt.step()
    opt.step()
    assert seen == [1.0, 0.0, 0.0, -1.0]


def test_autograd_notices_that_a_replay_wrote_what_it_saved(device: str) -> None:
    w = nn.Parameter(torch.ones(3, device=device))
    opt = st.optim.SGD([w], lr=1.0, graph=True)
    loss = (w * w).sum()
    w.grad = torch.ones_like(w)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_loading_state_recaptures_the_step(device: str) -> None:
    pair = Pair(device)
    pair.step()
    saved = copy.deepcopy(pair.eager.state_dict())
    pair.step()
    for opt in pair.both:
        opt.load_state_dict(saved)
    pair.step()
    pair.assert_equal()
    assert pair.capture.reasons == {"state was added or replaced": 1}


def test_the_saved_state_of_a_captured_optimizer_is_that_of_an_eager_one(device: str) -> None:
    pair = Pair(device)
    for _ in range(2):
        pair.step()
    eager, captured = (opt.state_dict() for opt in pair.both)
    assert eager["param_groups"] == captured["param_groups"]
    buffer = io.BytesIO()
    torch.save(captured, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    for key, state in eager["state"].items():
        assert all(torch.equal(state[name], loaded["state"][key][name]) for name in state)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_a_copy_captures_steps_of_its_own_parameters(
    device: str, copied: Callable[[st.optim.Optimizer], st.optim.Optimizer]
) -> None:
    pair = Pair(device)
    pair.step()
    other = copied(pair.captured)
    before = [p.detach().clone() for p in pair.params[1]]
    params = other.param_groups[0]["params"]
    for p, mine in zip(params, pair.params[1], strict=True):
        p.grad = torch.ones_like(p)
        mine.grad = torch.ones_like(p)
    other.step()
    assert "1 recording, 1 replay" in st.explain(other)
    assert all(torch.equal(p, b) for p, b in zip(pair.params[1], before, strict=True))
    pair.captured.step()
    assert all(torch.equal(p, q) for p, q in zip(params, pair.params[1], strict=True))


def test_without_a_gpu_steps_run_eagerly_and_explain_says_so(device: str, caplog: pytest.LogCaptureFixture) -> None:
    if device != "cpu":
        pytest.skip("for the CPU")
    token = cpu_kernels.set(False)
    try:
        pair = Pair("cpu")
        with caplog.at_level(logging.INFO, logger="subtensors.optim"):
            for _ in range(3):
                pair.step()
    finally:
        cpu_kernels.reset(token)
    pair.assert_equal()
    assert "the parameters are on the CPU, where a step has no graph (3)" in st.explain(pair.captured)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("count", "packed", "says"), [(17, False, True), (17, True, False), (16, False, False)])
def test_explain_says_where_a_step_looks_at_each_of_many_tensors(
    device: str, count: int, packed: bool, says: bool
) -> None:
    params = [nn.Parameter(torch.ones(3, device=device)) for _ in range(count)]
    opt = st.optim.SGD(params, lr=0.1)
    opt.capture(packed=packed)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert ("each step reads where all of them and their gradients are; packed=True" in st.explain(opt)) == says


def test_an_optimizer_without_capture_says_that_steps_run_eagerly(device: str) -> None:
    opt = st.optim.SGD([nn.Parameter(torch.ones(3, device=device))], lr=1.0)
    assert st.explain(opt) == "SGD of 1 parameter, steps run eagerly"
