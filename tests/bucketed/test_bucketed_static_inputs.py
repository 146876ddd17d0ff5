"""Inputs are loaded into static memory with their padding and true sizes, by kernel and by reference alike."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn

import subtensors as st
from subtensors.kernels.graph_inputs import inputs
from subtensors.kernels.graph_inputs.inputs import InputLoader, load_inputs_reference
from subtensors.kernels.runtime.async_compile import CompiledKernel

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


@some.composite
def loads(draw: some.DrawFn) -> tuple[list[tuple[list[int], list[int], torch.dtype]], list[int], list[int]]:
    """Inputs as (static sizes, which true size a dim has, dtype), with buckets and true sizes."""
    buckets = draw(some.lists(some.integers(1, 40), min_size=1, max_size=3))
    sizes = [draw(some.integers(0, bucket)) for bucket in buckets]
    inputs = []
    for _ in range(draw(some.integers(1, 3))):
        which = draw(some.lists(some.integers(-1, len(buckets) - 1), max_size=4))
        inputs.append(([draw(some.integers(1, 5)) for _ in which], which, draw(some.sampled_from(DTYPES))))
    return inputs, buckets, sizes


def filled(shape: list[int], dtype: torch.dtype) -> Tensor:
    return (torch.arange(1, math.prod(shape) + 1) % 120).to(dtype).reshape(shape)


@given(loads(), some.booleans())
def test_static_inputs_hold_the_sources_and_zeros(
    device: str, case: tuple[list[tuple[list[int], list[int], torch.dtype]], list[int], list[int]], transposed: bool
) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton compiles where there is a GPU")
    inputs, buckets, sizes = case
    sources, targets = [], []
    for static, which, dtype in inputs:
        true = [sizes[k] if k >= 0 else n for n, k in zip(static, which, strict=True)]
        source = filled(true, dtype).to(device)
        # Memory in another order, at an odd address.
        source = source.mT.contiguous().mT if transposed and source.dim() > 1 else source
        if transposed and source.dim() == 1 and len(source):
            source = torch.cat([source[:1], source])[1:]
        sources.append(source)
        bucket = [buckets[k] if k >= 0 else n for n, k in zip(static, which, strict=True)]
        targets.append(torch.ones(bucket, dtype=dtype, device=device))
    true_sizes = torch.full((len(sizes),), -1, dtype=torch.int64, device=device)
    expected = [torch.ones_like(t) for t in targets]
    wanted_sizes = torch.empty_like(true_sizes)
    load_inputs_reference(sources, expected, sizes, wanted_sizes)
    loader = InputLoader(targets, [which for _, which, _ in inputs], true_sizes)
    loader.run_kernel(sources, tuple(sizes))
    assert true_sizes.tolist() == sizes == wanted_sizes.tolist()
    for target, wanted in zip(targets, expected, strict=True):
        assert torch.equal(target, wanted)


def test_conjugates_and_negatives_are_loaded_as_resolved_values(device: str) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton compiles where there is a GPU")
    x = torch.randn(3, dtype=torch.complex64, device=device)
    sources = [x, x.conj(), x.conj().imag, x[:2].conj()]
    targets = [torch.ones(4, dtype=source.dtype, device=device) for source in sources]
    sizes = torch.zeros(2, dtype=torch.int64, device=device)
    InputLoader(targets, [[0], [0], [0], [1]], sizes).run_kernel(sources, (3, 2))
    for source, target in zip(sources, targets, strict=True):
        assert target.tolist() == [*source.tolist(), *[0] * (4 - len(source))]


def test_a_static_input_that_is_not_contiguous_is_refused(device: str) -> None:
    target, sizes = torch.zeros(2, 3, device=device).t(), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="static inputs are contiguous"):
        InputLoader([target], [[-1, -1]], sizes)


def test_inputs_are_loaded_where_their_kernel_can_not_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its compilation runs in another thread, where a capture of any thread may refuse it."""
    failed: Future[CompiledKernel] = Future()
    failed.set_exception(RuntimeError("operation not permitted when stream is capturing"))
    monkeypatch.setattr(inputs, "compile_async", lambda compile: failed)
    target, sizes = torch.ones(4), torch.zeros(1, dtype=torch.int64)
    loader = InputLoader([target], [[0]], sizes)
    loader._compiled = inputs._compiled.__wrapped__(loader._constants, target.device, 1)
    for n in (3, 2):
        loader([torch.full((n,), 5.0)], (n,))
        assert (target.tolist(), sizes.tolist()) == ([5.0] * n + [0.0] * (4 - n), [n])
    assert "operation not permitted" in caplog.text


@pytest.mark.gpu
def test_one_compiled_kernel_serves_every_bucket() -> None:
    from subtensors.kernels.graph_inputs import inputs

    sizes = torch.zeros(1, dtype=torch.int64, device="cuda")
    inputs._compiled.cache_clear()
    for bucket in (1, 16, 33):
        target = torch.ones(2, bucket, device="cuda", dtype=torch.float16)
        load = InputLoader([target], [[-1, 0]], sizes)
        for n in (1, bucket, 1):
            source = torch.randn(2, n, device="cuda").half()
            load([source], (n,))
            assert torch.equal(target[:, :n], source)
            assert not target[:, n:].any()
            load._compiled.result()  # the next one is by the kernel
        assert load._launch is not None
    assert inputs._compiled.cache_info().misses == 1


@pytest.mark.gpu
@torch.no_grad()
def test_a_call_is_one_kernel_for_its_inputs_a_graph_and_a_copy_of_each_result() -> None:
    pytest.importorskip("cuda.bindings")
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    seq = st.Dim("seq", max=32, buckets=8)

    def program(x: Tensor, y: Tensor, z: Tensor, w: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
        return x.softmax(0) * w + y, z.cumsum(0) + fixed

    run = st.bucketed(program, {name: {0: seq} for name in "xyz"})
    fixed = st.static(torch.ones(3, device="cuda"))
    for n in (5, 6, 7, 8):
        given = [torch.randn(n, 3, device="cuda") for _ in "xyz"]
        for wanted, found in zip(program(*given, weight, fixed), run(*given, weight, fixed), strict=True):
            torch.testing.assert_close(found, wanted)
        for bucket in run.captured_buckets():
            bucket._load._compiled.result()  # from the next call on inputs are loaded by the kernel
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run(*given, weight, fixed)
        torch.cuda.synchronize()
    names = Counter(event.name for event in seen.events())
    # By torch's ops each input would be a copy of its own, and a fill where it is padded.
    assert names["aten::copy_"] == names["aten::clone"] == 2, names
    assert not any(name.startswith(("aten::zero", "aten::mul", "aten::cumsum", "aten::_softmax")) for name in names)
