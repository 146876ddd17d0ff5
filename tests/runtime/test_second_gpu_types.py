"""Padded, chunked and static values and bucketed programs on a GPU that is not the current one."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from second_gpu import HERE, NEEDS_TWO, THERE, assert_alike, assert_near, only_there
from torch import Tensor, nn

import subtensors as st

pytestmark = NEEDS_TWO

SEQ = st.Dim("seq", max=32, buckets=8)


def rows(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, n, 16, device=THERE, dtype=dtype, requires_grad=True)


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
        cotangent = torch.randn_like(expected)
        gradients = [torch.autograd.grad(y, [source, weight], cotangent) for y in (found, expected)]
        assert_near([found, *gradients[0]], [expected, *gradients[1]])
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
    """A sum over positions, in which unmasked padding would show."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())
        self.to(THERE, torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layers(x)
        return h * h.softmax(1) + h.mean(1, keepdim=True)


LENGTHS = (5, 3, 12, 8, 12, 4, 9, 5)


@pytest.mark.filterwarnings("ignore")  # warnings of torch's compiler
@pytest.mark.parametrize("compiles", [False, True])
def test_a_bucketed_program_runs_where_its_tensors_are(compiles: bool, launched: list[int]) -> None:
    net = Net()
    run = st.bucketed(net, {"x": {1: SEQ}}, compile=compiles)
    with torch.no_grad():
        for n in LENGTHS:
            x = rows(n, torch.float64)
            assert_near([run(x)], [net(x)])
        run.release()
        assert_near([run(x)], [net(x)])
    assert run.stats().hits
    assert not run.stats().fallbacks
    assert only_there(launched)


@pytest.mark.parametrize("clears", [False, True], ids=["added up", "one by one"])
def test_a_bucketed_program_is_trained_where_its_tensors_are(clears: bool, launched: list[int]) -> None:
    ours, theirs = Net(), Net()
    run = st.bucketed(ours, {"x": {1: SEQ}})
    for n in LENGTHS:
        x = rows(n, torch.float64)
        found = []
        for model, net in ((run, ours), (theirs, theirs)):
            if clears:
                net.zero_grad()
            x.grad = None
            model(x).square().mean().backward()
            found.append([x.grad, *[p.grad for p in net.parameters()]])
        assert_near(*found)
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
    assert_near(*found)
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
        torch.testing.assert_close(a, e, rtol=0.05, atol=0.05)  # sums of numbers that bfloat16 keeps to 8 bits
    assert 0 not in launched


def test_numbers_of_chunks_are_drawn_from_the_generator_of_their_gpu() -> None:
    hidden, head = torch.randn(150, 16, device=THERE), torch.randn(300, 16, device=THERE)
    dropped = F.dropout(F.linear(st.chunk(hidden, rows=7), head), 0.5)
    before = [torch.cuda.get_rng_state(place) for place in (HERE, THERE)]
    zeros = dropped.realize() == 0
    assert all(torch.cuda.get_rng_state(place).equal(at) for place, at in zip((HERE, THERE), before, strict=True))
    assert (dropped.realize() == 0).equal(zeros)
    assert 0.4 < zeros.float().mean() < 0.6


def test_an_arena_releases_and_restores_memory_of_its_own_gpu() -> None:
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


def test_work_on_another_gpu_creates_no_context_on_the_current_one() -> None:
    # In a process of its own: here the current GPU was used before.
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
