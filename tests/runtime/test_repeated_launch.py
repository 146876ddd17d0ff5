"""Kernels that are launched again, and those that a thread beside compiles."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from subtensors.kernels.padded import masked_norm, masked_norm_kernel, masked_ops
from subtensors.kernels.runtime import async_compile, cached_launcher
from subtensors.kernels.runtime.cached_launcher import CompilePending, RepeatedLaunch, use_reference_while_compiling
from subtensors.kernels.runtime.valid_lengths import ValidLength

ON_GPU = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32, data_ptr=lambda: 64)
"""What a launch asks of a tensor there."""


class PretendKernel:
    """What `triton.jit` makes; notes who compiled it and what was launched."""

    arg_names = ("x", "n", "sizes", "BLOCK")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, str]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.device: torch.device | None = None
        """Which one kernels run on."""
        self.devices: list[torch.device | None] = []
        """Where those ran that were compiled or launched."""

    def warmup(self, *arguments: Any, grid: Any, **constants: Any) -> Any:
        self.compiled.append((arguments[1:], threading.current_thread().name))
        self.devices.append(self.device)
        return {(n, 1, 1): n for n in range(1, 9)}

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Any:
            compiled = self.warmup(*arguments, grid=grid, **constants)
            self.launched.append((*grid, *arguments[1:], *constants.values(), "by Triton"))
            return compiled

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> PretendKernel:
    made = PretendKernel()

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        made.device = device
        yield
        made.device = None

    def launcher(compiled: Any, programs: int) -> Any:
        assert compiled[programs, 1, 1] == programs

        def launch(*arguments: Any, stream: str) -> None:
            made.launched.append((programs, *arguments[1:], stream))
            made.devices.append(made.device)

        return launch

    # Triton takes functions of torch when it starts, which it must not do meanwhile.
    monkeypatch.setattr(async_compile, "_preparations", list)
    monkeypatch.setattr(cached_launcher, "current_stream", lambda index: "stream")
    monkeypatch.setattr(cached_launcher, "launching_on", on)
    monkeypatch.setattr(cached_launcher, "launcher", launcher)
    return made


def test_a_kernel_is_launched_by_triton_once_for_each_kind_of_arguments(kernel: PretendKernel) -> None:
    launch = RepeatedLaunch(kernel)
    for programs, n, sizes in ((2, 5, (3, 5)), (2, 7, (5, 7)), (3, 9, (3, 3)), (2, 16, (3, 5)), (2, 7, (1, 5))):
        launch(programs, [ON_GPU], n, sizes, BLOCK=float("nan"))
    assert [how for *_, how in kernel.launched] == ["by Triton", "stream", "stream", "by Triton", "by Triton"]
    assert [made[0] for made, _ in kernel.compiled] == [5, 16, 7]


def test_a_kernel_is_compiled_and_launched_on_the_device_of_its_tensors(kernel: PretendKernel) -> None:
    for device in (ON_GPU.device, torch.device("cuda", 1)):
        tensor = SimpleNamespace(**{**vars(ON_GPU), "device": device})
        launch = RepeatedLaunch(kernel)
        for _ in range(2):
            launch(2, [tensor], 5, (3, 5), BLOCK=8)
        assert set(kernel.devices) == {device}
        kernel.devices.clear()


def test_a_thread_that_does_not_wait_has_kernels_compiled_beside(kernel: PretendKernel) -> None:
    launch = RepeatedLaunch(kernel, has_reference=True)
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


def test_what_the_compiler_says_of_a_kernel_is_raised_by_who_launches_it(kernel: PretendKernel) -> None:
    def refuse(*arguments: Any, **constants: Any) -> Any:
        raise ValueError("too large")

    kernel.warmup = refuse  # type: ignore[method-assign]
    launch = RepeatedLaunch(kernel, has_reference=True)
    with use_reference_while_compiling(), pytest.raises(CompilePending):
        launch(2, [ON_GPU], 5, (3, 5), BLOCK=8)
    with pytest.raises(ValueError, match="too large"):
        launch(2, [ON_GPU], 5, (3, 5), BLOCK=8)


def test_a_kernel_without_a_reference_is_waited_for(kernel: PretendKernel) -> None:
    launch = RepeatedLaunch(kernel)
    with use_reference_while_compiling():
        launch(2, [ON_GPU], 5, (3, 5), BLOCK=8)
    assert kernel.launched == [(2, 5, (3, 5), 8, "by Triton")]


@pytest.mark.gpu
def test_a_norm_is_its_reference_until_its_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = RepeatedLaunch(masked_norm_kernel.norm_kernel, has_reference=True)
    monkeypatch.setattr(masked_norm, "launch_norm", lambda: launch)
    x = torch.randn(3, 7, 24, device="cuda", dtype=torch.float64)
    w, b = torch.randn(2, 24, device="cuda", dtype=torch.float64)
    extents = [ValidLength(1, torch.tensor(5, device="cuda")), ValidLength(0, torch.tensor([0, 2], device="cuda")[1])]
    with use_reference_while_compiling():
        first = masked_ops.masked_norm(x, 1, w, b, 1e-5, extents)
    assert not launch._launchers
    for _ in range(2):
        torch.testing.assert_close(masked_ops.masked_norm(x, 1, w, b, 1e-5, extents), first)
        torch.testing.assert_close(masked_ops.masked_norm(x[1:], 1, None, b, 1e-5, extents[:1]).y[:, 5:], 0 * x[1:, 5:])
    assert len(launch._launchers) == len(launch._compiled) == 2
