"""Repeated launches: through Triton only while there are hooks, from a cache, or compiled in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from subtensors.kernels.graph_inputs.inputs import InputLoader
from subtensors.kernels.padded import masked_norm, masked_norm_kernel, masked_ops
from subtensors.kernels.runtime import async_compile, launcher
from subtensors.kernels.runtime.async_compile import CompilePending, use_reference_while_compiling
from subtensors.kernels.runtime.launcher import CachedLauncher, prepare_launch
from subtensors.kernels.runtime.triton_compat import triton
from subtensors.kernels.runtime.valid_lengths import ValidLength


class PretendCompiled:
    """A substitute for a compiled kernel that records its launches."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments, stream: self.launched.append(("described", *grid, stream, *arguments))

    def run(self, *arguments: Any) -> None:
        self.launched.append(arguments)


def test_a_launch_goes_through_triton_only_while_there_are_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = PretendCompiled()
    launch = prepare_launch(compiled)
    direct = (3, 1, 1, 5, 7, (4, 1, 0), None, None, None, "x", (1, 2))
    described = ("described", 3, 1, 1, 5, "x", (1, 2))
    runtime = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    monkeypatch.setattr(triton.knobs, "runtime", runtime)
    chain = SimpleNamespace(calls=[])
    for hook, expected in ((None, direct), (chain, direct), (print, described)):
        for name in ("launch_enter_hook", "launch_exit_hook"):
            with monkeypatch.context() as patch:
                patch.setattr(runtime, name, hook)
                launch(3, "x", (1, 2), stream=5)
                assert compiled.launched.pop() == expected
    runtime.launch_exit_hook = chain
    chain.calls.append(print)
    launch(3, "x", (1, 2), stream=5)
    assert compiled.launched == [described]
    launch(4, "x", stream=5)
    assert compiled.launched[-1] == ("described", 4, 1, 1, 5, "x")
    chain.calls.clear()
    launch(5, "x", stream=5)
    assert compiled.launched[-1] == (5, 1, 1, 5, 7, (4, 1, 0), None, None, None, "x")


@pytest.mark.gpu
def test_launch_hooks_are_called_for_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    target, sizes = torch.ones(2, 4, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    source = torch.full((2, 3), 5.0, device="cuda")
    load = InputLoader([target], [[-1, 0]], sizes)
    load.run_kernel([source], (3,))
    compiled = load._compiled.result()
    described, calls = [], []
    original = type(compiled).launch_metadata
    monkeypatch.setattr(type(compiled), "launch_metadata", lambda *args: described.append(1) or original(*args))
    for hooks in (0, 1, 0):
        if hooks:
            triton.knobs.runtime.launch_enter_hook.add(calls.append)
        target.fill_(float("nan"))
        try:
            load.run_kernel([source], (3,))
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(calls.append)
        assert target.tolist() == [[5, 5, 5, 0]] * 2
    assert len(described) == 1
    assert [calls[0].get()["name"]] == ["load_inputs_kernel"]
    assert len(calls) == 1


ON_GPU = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32, data_ptr=lambda: 64)
"""The attributes of a tensor that a launch reads."""


class PretendKernel:
    """A substitute for a `triton.jit` function that records its compilations and launches."""

    arg_names = ("x", "n", "sizes", "BLOCK")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, str]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.device: torch.device | None = None
        """The current device."""
        self.devices: list[torch.device | None] = []
        """The current device of each compilation and launch."""

    def warmup(self, *arguments: Any, grid: Any, **constants: Any) -> Any:
        self.compiled.append((arguments[1:], threading.current_thread().name))
        self.devices.append(self.device)
        return {(1, 1, 1): "loaded"}

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Any:
            compiled = self.warmup(*arguments, grid=grid, **constants)
            self.launched.append((*grid, *arguments[1:], *constants.values(), "by Triton"))
            return compiled

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> PretendKernel:
    fake = PretendKernel()

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        fake.device = device
        yield
        fake.device = None

    def fake_prepare_launch(compiled: Any) -> Any:
        def launch(programs: int, *arguments: Any, stream: str) -> None:
            fake.launched.append((programs, *arguments[1:], stream))
            fake.devices.append(fake.device)

        return launch

    # Triton reads functions of torch at its import, which must not see those patched here.
    monkeypatch.setattr(async_compile, "_preparations", list)
    monkeypatch.setattr(launcher, "current_stream", lambda index: "stream")
    monkeypatch.setattr(launcher, "launching_on", on)
    monkeypatch.setattr(launcher, "prepare_launch", fake_prepare_launch)
    return fake


def test_triton_launches_a_kernel_once_for_each_key(kernel: PretendKernel) -> None:
    launch = CachedLauncher(kernel)
    for programs, n, sizes in ((2, 5, (3, 5)), (2, 7, (5, 7)), (3, 9, (3, 3)), (2, 16, (3, 5)), (2, 7, (1, 5))):
        launch(programs, [ON_GPU], n, sizes, BLOCK=float("nan"))
    assert [how for *_, how in kernel.launched] == ["by Triton", "stream", "stream", "by Triton", "by Triton"]
    assert [arguments[0] for arguments, _ in kernel.compiled] == [5, 16, 7]


def test_a_kernel_is_compiled_and_launched_on_the_device_of_its_tensors(kernel: PretendKernel) -> None:
    for device in (ON_GPU.device, torch.device("cuda", 1)):
        tensor = SimpleNamespace(**{**vars(ON_GPU), "device": device})
        launch = CachedLauncher(kernel)
        for _ in range(2):
            launch(2, [tensor], 5, (3, 5), BLOCK=8)
        assert set(kernel.devices) == {device}
        kernel.devices.clear()


def test_kernels_with_a_reference_compile_in_another_thread(kernel: PretendKernel) -> None:
    launch = CachedLauncher(kernel, has_reference=True)
    with use_reference_while_compiling():
        for _ in range(2):
            with pytest.raises(CompilePending):
                launch(2, [ON_GPU], 5, (3, 5), BLOCK=8)
    assert not kernel.launched
    launch(2, [ON_GPU], 7, (3, 5), BLOCK=8)
    launch(4, [ON_GPU], 5, (3, 5), BLOCK=8)
    assert kernel.launched == [(2, 7, (3, 5), 8, "stream"), (4, 5, (3, 5), 8, "stream")]
    assert [name.startswith("subtensors-compiler") for _, name in kernel.compiled] == [True]
    with use_reference_while_compiling():
        launch(2, [ON_GPU], 9, (3, 5), BLOCK=8)
    assert len(kernel.launched) == 3


def test_a_compile_error_is_raised_by_the_next_launch(kernel: PretendKernel) -> None:
    def refuse(*arguments: Any, **constants: Any) -> Any:
        raise ValueError("too large")

    kernel.warmup = refuse  # type: ignore[method-assign]
    launch = CachedLauncher(kernel, has_reference=True)
    with use_reference_while_compiling(), pytest.raises(CompilePending):
        launch(2, [ON_GPU], 5, (3, 5), BLOCK=8)
    with pytest.raises(ValueError, match="too large"):
        launch(2, [ON_GPU], 5, (3, 5), BLOCK=8)


def test_a_kernel_without_a_reference_is_compiled_by_its_launch(kernel: PretendKernel) -> None:
    launch = CachedLauncher(kernel)
    with use_reference_while_compiling():
        launch(2, [ON_GPU], 5, (3, 5), BLOCK=8)
    assert kernel.launched == [(2, 5, (3, 5), 8, "by Triton")]


@pytest.mark.gpu
def test_a_norm_uses_its_reference_until_its_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = CachedLauncher(masked_norm_kernel.norm_kernel, has_reference=True)
    monkeypatch.setattr(masked_norm, "cached_launcher", lambda *_, **__: launch)
    x = torch.randn(3, 7, 24, device="cuda", dtype=torch.float64)
    w, b = torch.randn(2, 24, device="cuda", dtype=torch.float64)
    extents = [ValidLength(1, torch.tensor(5, device="cuda")), ValidLength(0, torch.tensor([0, 2], device="cuda")[1])]
    with use_reference_while_compiling():
        first = masked_ops.masked_norm(x, 1, w, b, 1e-5, extents)
    assert not launch._launches
    for _ in range(2):
        torch.testing.assert_close(masked_ops.masked_norm(x, 1, w, b, 1e-5, extents), first)
        torch.testing.assert_close(masked_ops.masked_norm(x[1:], 1, None, b, 1e-5, extents[:1]).y[:, 5:], 0 * x[1:, 5:])
    assert len(launch._launches) == 2
