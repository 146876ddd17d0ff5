"""A compiled kernel is launched past what Triton does for hooks, unless there is one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from subtensors.kernels.graph_inputs.inputs import Walk
from subtensors.kernels.runtime.launcher import launcher
from subtensors.kernels.runtime.triton_compat import triton


class PretendCompiled:
    """What Triton makes of a kernel; notes how it is launched."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments, stream: self.launched.append(("described", *grid, stream, *arguments))

    def run(self, *arguments: Any) -> None:
        self.launched.append(arguments)


def test_a_launch_is_described_where_something_hooks_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = PretendCompiled()
    launch = launcher(compiled, 3)
    plainly = (3, 1, 1, 5, 7, (4, 1, 0), None, None, None, "x", (1, 2))
    described = ("described", 3, 1, 1, 5, "x", (1, 2))
    runtime = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    monkeypatch.setattr(triton.knobs, "runtime", runtime)
    chain = SimpleNamespace(calls=[])
    for hook, expected in ((None, plainly), (chain, plainly), (print, described)):
        for name in ("launch_enter_hook", "launch_exit_hook"):
            with monkeypatch.context() as patch:
                patch.setattr(runtime, name, hook)
                launch("x", (1, 2), stream=5)
                assert compiled.launched.pop() == expected
    runtime.launch_exit_hook = chain
    chain.calls.append(print)
    launch("x", (1, 2), stream=5)
    assert compiled.launched == [described]


@pytest.mark.gpu
def test_hooks_are_told_of_each_launch_and_nobody_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    target, sizes = torch.ones(2, 4, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    source = torch.full((2, 3), 5.0, device="cuda")
    walk = Walk([target], [[-1, 0]], sizes)
    walk([source], (3,))
    compiled = walk._kernel.result()
    described, told = [], []
    original = type(compiled).launch_metadata
    monkeypatch.setattr(type(compiled), "launch_metadata", lambda *args: described.append(1) or original(*args))
    for hooks in (0, 1, 0):
        if hooks:
            triton.knobs.runtime.launch_enter_hook.add(told.append)
        target.fill_(float("nan"))
        try:
            walk([source], (3,))
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(told.append)
        assert target.tolist() == [[5, 5, 5, 0]] * 2
    assert len(described) == 1
    assert [told[0].get()["name"]] == ["load_inputs_kernel"]
    assert len(told) == 1
