"""Values of every type on a GPU that is not the current one, and lists, fused maths and optimizers over two of them."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subtensors as st
from subtensors.kernels.triton_or_none import triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU at most"),
]

SHAPES = [(7,), (3, 5), (), (65, 33), (0,), (2000,)]
HERE, THERE = "cuda:0", "cuda:1"


def values(*places: str, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(places[i % len(places)]) for i, s in enumerate(SHAPES)]


def assert_alike(actual: Any, expected: list[Tensor]) -> None:
    assert [t.device for t in actual] == [t.device for t in expected]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.detach(), e.detach())


@pytest.fixture
def launched() -> Iterator[list[int]]:
    """Which device was the current one at each launch of Triton's, which launches there.

    Where devices have been let read each other's memory, as by a copy from one to the other, a kernel on the wrong one
    may well give the right values.
    """
    devices: list[int] = []

    def note(_: object) -> None:
        devices.append(torch.cuda.current_device())

    triton.knobs.runtime.launch_enter_hook.add(note)
    yield devices
    triton.knobs.runtime.launch_enter_hook.remove(note)


def only_there(launched: list[int]) -> bool:
    """Were kernels launched there, and nowhere else, and is the current device what it was?"""
    return set(launched) == {torch.device(THERE).index} and torch.cuda.current_device() == 0


@st.fused
def normalised(p: Tensor, g: Tensor, *, lr: float) -> Tensor:
    p.sub_(lr * g / (g.norm() + 1))
    return p.sum()


@pytest.mark.parametrize("places", [(THERE,), (HERE, THERE)], ids=["the other one", "both"])
@pytest.mark.parametrize("current", [0, 1])
def test_fused_maths_runs_where_its_tensors_are(places: tuple[str, ...], current: int) -> None:
    p, g = values(*places), values(*places, seed=1)
    expected = [t.clone() for t in p]
    sums = [normalised.function(t, d, lr=0.1) for t, d in zip(expected, g, strict=True)]
    with torch.cuda.device(current):
        for stream in (None, torch.cuda.Stream(THERE)):
            ours = [t.clone() for t in p]
            torch.cuda.synchronize(THERE)
            with torch.cuda.stream(stream):
                totals = normalised(st.TensorList(ours), st.TensorList(g), lr=0.1)
            torch.cuda.synchronize(THERE)
            assert torch.cuda.current_device() == current
            assert_alike(ours, expected)
            assert_alike(totals, sums)


def test_a_list_over_both_is_packed_on_each_and_maps() -> None:
    x, y = values(HERE, THERE), values(HERE, THERE, seed=1)
    packed, other = st.TensorList([t.clone() for t in x]).pack(), st.TensorList(y)
    assert sorted(str(flat.device) for flat in packed.flats) == [HERE, THERE]
    assert_alike(packed * 2 + other, [a * 2 + b for a, b in zip(x, y, strict=True)])
    assert_alike(packed.add_(other).exp(), [(a + b).exp() for a, b in zip(x, y, strict=True)])
    assert_alike(other.to(THERE), [t.to(THERE) for t in y])


def test_a_norm_over_both_is_torchs_and_clips_as_torchs_does() -> None:
    ours, theirs = ([nn.Parameter(v) for v in values(HERE, THERE)] for _ in range(2))
    for params in (ours, theirs):
        for p, g in zip(params, values(HERE, THERE, seed=1), strict=True):
            p.grad = g
    expected = nn.utils.clip_grad_norm_(theirs, 0.5)
    actual = st.clip_grad_norm_(ours, 0.5)
    assert actual.device == expected.device
    torch.testing.assert_close(actual, expected)
    assert_alike([p.grad for p in ours], [p.grad for p in theirs])


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_is_captured_on_a_gpu_that_is_not_the_current_one(packed: bool, launched: list[int]) -> None:
    ours, theirs = ([nn.Parameter(v) for v in values(THERE)] for _ in range(2))
    optimizer, eager = (st.optim.AdamW(params, lr=0.1, max_norm=0.5) for params in (ours, theirs))
    capture = optimizer.capture(packed=packed)
    for number in range(6):
        for params in (ours, theirs):
            for p, g in zip(params, values(THERE, seed=number + 1), strict=True):
                p.grad = g
        for stepped in (optimizer, eager):
            stepped.param_groups[0]["lr"] = 0.1 / (number + 1)
            stepped.step()
    assert only_there(launched)
    assert capture.replays
    assert_alike(ours, list(theirs))


MIXED = {
    "AdamW, clipped": lambda params: st.optim.AdamW(params, lr=0.1, max_norm=0.5),
    "SGD with masters and averages": lambda params: st.optim.SGD(params, lr=0.1, master_weights=True, ema=0.9),
    "Adafactor": lambda params: st.optim.Adafactor(params, lr=0.1),
    "Muon": lambda params: st.optim.Muon([p for p in params if p.ndim == 2], lr=0.1),
}


@pytest.mark.parametrize("name", MIXED)
def test_parameters_of_several_dtypes_are_updated_as_on_the_current_gpu(name: str, launched: list[int]) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    ended = []
    for place in (THERE, HERE):
        params = [nn.Parameter(v.to(dtypes[i % 2])) for i, v in enumerate(values(place))]
        optimizer = MIXED[name](params)
        for number in range(3):
            for p, g in zip(params, values(place, seed=number + 1), strict=True):
                p.grad = g.to(p.dtype)
            optimizer.step()
        if place == THERE:
            assert only_there(launched)
        ended.append([p.detach().to(HERE) for p in params])
    assert_alike(*ended)


def test_a_scaler_skips_the_step_on_both_where_one_overflows() -> None:
    params = [nn.Parameter(v) for v in values(HERE, THERE)]
    optimizer = st.optim.AdamW(params, lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale(torch.ones((), device=HERE))
    for overflows in (False, True):
        before = copy.deepcopy([p.detach() for p in params])
        for p, g in zip(params, values(HERE, THERE, seed=1), strict=True):
            p.grad = 4 * g
        if overflows:
            params[1].grad[0, 0] = torch.inf  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(p, b) for p, b in zip(params, before, strict=True) if p.numel()]
        assert moved == [not overflows] * len(moved)


def test_gradients_flow_through_a_list_over_both() -> None:
    x, y = ([v.requires_grad_() for v in values(HERE, THERE)] for _ in range(2))
    total = sum(t.to(HERE).sum() for t in (st.TensorList(x).pow(3) * 2))
    total.backward()  # type: ignore[union-attr]
    sum((2 * t.pow(3)).to(HERE).sum() for t in y).backward()  # type: ignore[union-attr]
    assert_alike([t.grad for t in x], [t.grad for t in y])  # type: ignore[misc]


SEQ = st.Dim("seq", max=32, buckets=8)


def rows(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, n, 16, device=THERE, dtype=dtype, requires_grad=dtype.is_floating_point)


PADDED = {
    "a softmax": lambda x, w: torch.softmax(x * w, 1),
    "a sum": lambda x, w: (x * w).sum(1),
    "a variance": lambda x, w: (x * w).var(1),
    "a maximum": lambda x, w: (x * w).amax((0, 1)),
    "a norm": lambda x, w: F.layer_norm(x, (16,), w, w),
    "a product": lambda x, w: (x * w).transpose(1, 2) @ x,
    "attention": lambda x, w: F.scaled_dot_product_attention(x * w, x, x),
}


@pytest.mark.parametrize("name", PADDED)
def test_ops_of_padded_tensors_run_where_they_are(name: str, launched: list[int]) -> None:
    program, weight = PADDED[name], torch.randn(16, device=THERE, requires_grad=True)
    for n in (5, 7):
        source = rows(n)
        expected = program(source, weight)
        found = program(st.pad(source, {1: SEQ}, value=torch.nan), weight)
        found = found.unpad() if isinstance(found, st.PaddedTensor) else found
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        cotangent = torch.randn_like(expected)
        ours, theirs = (torch.autograd.grad(y, [source, weight], cotangent) for y in (found, expected))
        for a, e in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
    assert only_there(launched)


def test_a_ragged_batch_is_padded_where_its_rows_are(launched: list[int]) -> None:
    parts = [torch.randn(n, 3, device=THERE) for n in (4, 7, 2)]
    for x in (st.pad(parts, {0: SEQ}), st.pad_nested(torch.nested.as_nested_tensor(parts, layout=torch.jagged), SEQ)):
        assert_alike(x.unpad(), parts)
        torch.testing.assert_close(x.mean(1), torch.stack([p.mean(0) for p in parts]))
    assert only_there(launched)


def test_plain_rows_are_padded_and_cut_where_they_are(launched: list[int]) -> None:
    for x in (torch.randn(5, 3, device=THERE), torch.arange(6, device=THERE), torch.ones(3, 2, device=THERE).bool()):
        padded = st.pad(x, {0: SEQ})
        assert padded.unpad().equal(x)
        assert padded.dense[len(x) :].eq(0).all()
    assert only_there(launched)


class Net(nn.Module):
    """Positions meet, so that padding would show."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())
        self.to(THERE)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layers(x)
        return h * h.softmax(1) + h.mean(1, keepdim=True)


LENGTHS = (5, 3, 12, 8, 12, 4, 9, 5)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_bucketed_program_runs_where_its_tensors_are(compiles: bool, launched: list[int]) -> None:
    net = Net()
    run = st.bucketed(net, {"x": {1: SEQ}}, compile=compiles)
    with torch.no_grad():
        for n in LENGTHS:
            x = rows(n)
            torch.testing.assert_close(run(x), net(x), rtol=1e-4, atol=1e-4)
        run.release()
        torch.testing.assert_close(run(x), net(x), rtol=1e-4, atol=1e-4)
    assert run.stats().hits
    assert not run.stats().fallbacks
    assert only_there(launched)


@pytest.mark.parametrize("clears", [False, True], ids=["added up", "one by one"])
def test_a_bucketed_program_is_trained_where_its_tensors_are(clears: bool, launched: list[int]) -> None:
    ours, theirs = Net(), Net()
    run = st.bucketed(ours, {"x": {1: SEQ}})
    for n in LENGTHS:
        x = rows(n)
        given = []
        for model, net in ((run, ours), (theirs, theirs)):
            if clears:
                net.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            given.append(x.grad)
            x.grad = None
        torch.testing.assert_close(given[0], given[1], rtol=1e-4, atol=1e-4)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
    assert run.stats().hits
    assert not run.stats().fallbacks
    assert only_there(launched)


CHUNKED = {
    "a mean": {},
    "a sum, smoothed": {"reduction": "sum", "label_smoothing": 0.1},
    "a loss a row": {"reduction": "none"},
    "class weights": {"weight": 0.5},
}


@pytest.mark.parametrize("accumulate", ["exact", "fast"])
@pytest.mark.parametrize("name", CHUNKED)
def test_a_chunked_loss_is_computed_where_its_tensors_are(name: str, accumulate: str, launched: list[int]) -> None:
    options: dict[str, Any] = dict(CHUNKED[name])
    if "weight" in options:
        options["weight"] = torch.full((300,), options["weight"], device=THERE)
    hidden, head = torch.randn(40, 16, device=THERE), torch.randn(300, 16, device=THERE)
    target = torch.randint(0, 300, (40,), device=THERE)
    target[3] = -100
    found = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        rows = st.chunk(h, chunks=4, accumulate=accumulate) if chunked else h
        loss = F.cross_entropy(F.linear(rows, w), target, **options)
        (3 * loss.sum()).backward()
        found.append([loss, h.grad, w.grad])
    for a, e in zip(*found, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
    assert 0 not in launched


def test_a_chunked_loss_of_half_precision_is_computed_where_its_tensors_are(launched: list[int]) -> None:
    hidden, head = (torch.randn(n, 16, device=THERE, dtype=torch.bfloat16) for n in (40, 300))
    target = torch.rand(40, 300, device=THERE, dtype=torch.bfloat16).softmax(1)
    found = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        loss = F.cross_entropy(F.linear(st.chunk(h, chunks=4) if chunked else h, w), target)
        loss.backward()
        found.append([loss, h.grad, w.grad])
    for a, e in zip(*found, strict=True):
        torch.testing.assert_close(a, e, rtol=0.05, atol=0.05)
    assert 0 not in launched


def test_numbers_of_chunks_are_drawn_from_the_generator_of_their_gpu() -> None:
    hidden, head = torch.randn(150, 16, device=THERE), torch.randn(300, 16, device=THERE)
    dropped = F.dropout(F.linear(st.chunk(hidden, rows=7), head), 0.5)
    before = [torch.cuda.get_rng_state(place) for place in (HERE, THERE)]
    zeros = dropped.realize() == 0
    assert all(torch.cuda.get_rng_state(place).equal(at) for place, at in zip((HERE, THERE), before, strict=True))
    assert (dropped.realize() == 0).equal(zeros)
    assert 0.4 < zeros.float().mean() < 0.6


def test_an_arena_lends_its_memory_and_serves_pools_where_it_is() -> None:
    arena = st.Arena(THERE, reserve="1GiB")
    kept, filled = arena.static(torch.arange(5000.0, device=THERE)), arena.zeros(7)
    assert {kept.device, filled.device} == {torch.device(THERE)}
    addresses = kept.data_ptr(), filled.data_ptr()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(THERE)
    with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        filled.add_(1)
    arena.release(keep="cpu")
    arena.restore()
    graph.replay()
    assert (kept.data_ptr(), filled.data_ptr()) == addresses
    assert kept.cpu().equal(torch.arange(5000.0))
    assert filled.tolist() == [1.0] * 7

    pool = arena.pool()
    with torch.cuda.use_mem_pool(pool, THERE):
        within = torch.ones(1000, device=THERE)
    assert arena.address <= within.data_ptr() < arena.address + arena.reserved
    assert within.sum().item() == 1000
    del within
    assert torch.cuda.current_device() == 0


def test_static_tensors_stay_where_they_are() -> None:
    t = torch.randn(7, 3, device=THERE)
    s = st.static(t)
    at = s.data_ptr()
    assert s.device == t.device
    assert s.mul_(2).cpu().equal(2 * t.cpu())
    assert copy.deepcopy(s).device == t.device
    assert s.to(HERE).device == torch.device(HERE)
    assert s.data_ptr() == at


ALONE = """
import torch, torch.nn.functional as F
from torch import nn
import subtensors as st

THERE, seq = torch.device("cuda", 1), st.Dim("seq", max=16, buckets=8)

def is_alone(what):
    torch.cuda.synchronize(THERE)
    assert not torch._C._cuda_hasPrimaryContext(0), f"{what} made a context on the current device"

x, w = torch.randn(2, 5, 8, device=THERE, requires_grad=True), torch.randn(8, device=THERE)
st.pad(x, {1: seq}).softmax(1).mul(w).sum().backward()
is_alone("padded tensors")

def steps(optimizer, params):
    for number in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()

params = [nn.Parameter(torch.ones(s, device=THERE)) for s in [(3,), (), (4, 5)]]
steps(st.optim.AdamW(params, max_norm=1.0), params)
is_alone("an optimizer")
optimizer = st.optim.AdamW(params, max_norm=1.0)
optimizer.capture()
steps(optimizer, params)
is_alone("a captured optimizer")

head = torch.randn(30, 8, device=THERE, requires_grad=True)
rows = st.chunk(x.flatten(0, 1), chunks=2)
F.cross_entropy(F.linear(rows, head), torch.zeros(10, dtype=torch.long, device=THERE)).backward()
is_alone("a chunked loss")

net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(THERE)
run = st.bucketed(net, {"input": {1: seq}})
for _ in range(2):
    with torch.no_grad():
        run(x.detach())
is_alone("a bucketed program")
for _ in range(3):
    run(x).sum().backward()
is_alone("a bucketed program that is trained")

arena = st.Arena(THERE, reserve="1GiB")
kept = arena.zeros(3)
arena.release(keep="cpu")
arena.restore()
assert kept.sum() == 0
is_alone("an arena")
"""


def test_what_is_on_another_gpu_leaves_the_current_one_alone() -> None:
    # Of its own: here the current one was used before.
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
