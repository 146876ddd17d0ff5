"""What a runner, its statistics, fused functions and captured steps show of themselves, and their names."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch import Tensor

import subtensors as st
from subtensors.bucketed.runner import Bucketed

LENGTHS = [3, 2, 8]


@pytest.fixture
def run() -> Bucketed:
    runner = st.bucketed(torch.nn.Identity(), {0: {0: st.Dim("n", max=8, buckets=4)}})
    for length in LENGTHS:
        runner(torch.ones(length))
    return runner


@st.fused
def decay(p: Tensor, *, rate: float) -> None:
    p.mul_(1 - rate)


def test_a_runner_shows_its_program_its_dims_and_its_counts(run: Bucketed) -> None:
    assert repr(run) == (
        "<st.bucketed Identity on Dim('n', max=8, buckets=Linear(step=4)): "
        "eager: 3 calls, 1 reused, 0 captures, 19% waste, pool 0 B>"
    )


def test_statistics_are_text_in_a_console_and_a_table_in_a_notebook(run: Bucketed) -> None:
    stats = run.stats()
    assert repr(stats) == str(stats)
    page = stats._repr_html_()
    assert page.count("<tr>") == 1 + 2
    assert "<th>reused</th>" in page
    assert "<td>n=8</td><td>(8,)</td><td>1</td><td>0</td>" in page


def test_the_table_speaks_of_replays_where_there_are_graphs_and_of_one_in_the_singular(run: Bucketed) -> None:
    graphs = dataclasses.replace(run.stats(), mode="graphs", captures=1, recaptures=1, fallbacks={"why": 1})
    assert str(graphs).splitlines() == [
        "graphs: 4 calls, 1 replay, 1 capture, 19% waste, pool 0 B",
        "  n=8 [(8,)]: 1 call, 0 replays, 40 B, 0% waste",
        "  n=4 [(4,)]: 2 calls, 1 replay, 24 B, 38% waste",
        "  0 evictions, 1 recapture, 0 recompilations",
        "  1 call fell back: why",
    ]
    assert "<th>replays</th>" in graphs._repr_html_()


def test_text_of_a_reason_is_escaped_in_a_notebook() -> None:
    run = st.bucketed(lambda x: x * int(x.sum().item() > 0), {0: {0: st.Dim("n", max=8, buckets=4)}})
    for length in LENGTHS:
        run(torch.ones(length))
    page = run.stats()._repr_html_()
    assert "3 calls fell back: torch.Tensor.item" in page
    assert page.count("<td>not captured: torch.Tensor.item") == 2
    assert "<lambda>" not in page


def test_a_fused_function_shows_its_signature_and_how_often_it_was_traced() -> None:
    assert "<st.fused decay(p: 'Tensor', *, rate: 'float') -> 'None': traced" in repr(decay)
    assert repr(st.fused(torch.add)) == "<st.fused add(...): traced 0 times>"


def test_a_captured_step_shows_what_it_replays_or_why_it_can_not() -> None:
    w = torch.nn.Parameter(torch.ones(3))
    opt = st.optim.SGD([w], graph=True)
    w.grad = torch.ones(3)
    opt.step()
    assert opt._capture is not None
    assert repr(opt._capture) == "<Capture: captured: no graph on a CPU, 1 eager step>"
    (step,) = opt._capture._steps
    assert repr(step) == (
        "<CapturedStep of 1 tensor on cpu, eager: the parameters are on the CPU, where a step has no graph>"
    )


SUBJECTS = {
    "PaddedTensor": (lambda: st.pad(torch.ones(3), {0: st.Dim("n", max=8)}), ["unpad", "logical_shape", "softmax"]),
    "TensorList": (lambda: st.TensorList([torch.ones(2)]), ["pack", "tensors", "softmax"]),
    "ChunkedTensor": (lambda: st.chunk(torch.ones(4, 2)), ["realize", "explain", "softmax"]),
    "StaticAddressTensor": (lambda: st.static(torch.ones(2)), ["data_ptr", "softmax"]),
    "Arena": (lambda: st.Arena("cpu", reserve="1MiB"), ["release", "restore", "explain"]),
    "runner": (
        lambda: st.bucketed(torch.nn.Linear(2, 2), {0: {0: st.Dim("n", max=8)}}),
        ["stats", "warmup", "plot", "parameters", "weight", "in_features"],
    ),
    "fused function": (lambda: decay, ["explain", "tune"]),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_dir_has_the_names_of_each_type_and_warns_of_nothing(name: str) -> None:
    make, names = SUBJECTS[name]
    subject = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        listed = dir(subject)
    assert set(names) <= set(listed)
    assert all(hasattr(subject, each) for each in names)


def test_dir_of_the_package_has_its_public_names_and_no_modules_that_hold_them() -> None:
    assert [name for name in dir(st) if not name.startswith("__")] == [n for n in st.__all__ if n != "__version__"]


@pytest.mark.parametrize("name", [name for name in st.__all__ if callable(getattr(st, name))])
def test_explain_says_what_each_public_name_is_for(name: str) -> None:
    said = st.explain(getattr(st, name))
    assert said.startswith(f"{getattr(st, name).__name__}(")
    assert said.partition("): ")[2] or "->" in said


def test_explain_describes_dims_policies_statistics_and_reports(run: Bucketed) -> None:
    assert st.explain(st.Dim("n", max=100, buckets=30)) == (
        "Dim('n', max=100, buckets=Linear(step=30)); its buckets are 30, 60, 90, 100"
    )
    assert st.explain(st.Dim("n", max=1000, buckets=1)).endswith("are 1, 2, 3, 4, ..., 1000")
    assert st.explain(st.Dim("n")).endswith("have no end, without a max")
    assert st.explain(st.Linear(4)) == "Linear(step=4)"
    assert st.explain(run.stats()) == str(run.stats())
    assert st.explain(run.check(torch.ones(3))) == "passed: the same as the plain program, at n=3"
    assert st.explain(st.CheckReport({}, "0.5", lines=("a.py:1: x",))) == "differs: 0.5, at no Dim\n  a.py:1: x"
    assert st.explain(st.CheckReport({"n": 3}, not_checked="no graph")) == "not checked at n=3: no graph"
    with pytest.raises(TypeError, match=r"explain takes .*, an optimizer of st.optim, .* got Adam"):
        st.explain(torch.optim.Adam([torch.ones(1)]))


def test_buckets_of_lengths_are_drawn_with_their_waste() -> None:
    figure = st.plot_buckets(torch.tensor([10, 10, 30]), 20)
    axes, waste = figure.axes
    assert figure._repr_png_().startswith(b"\x89PNG")  # notebooks show it without pyplot
    assert axes.get_title() == "3 sizes in 2 buckets, 38% waste"
    assert sorted(line.get_xdata()[0] for line in axes.lines) == [20, 40]
    assert list(waste.lines[0].get_ydata()) == [0.5, 0.25, 0.25]
    assert st.plot_buckets([7, 100], [10]).axes[0].get_title() == "2 sizes in 2 buckets, 3% waste"
    dim = st.Dim("seq", max=40, buckets=20)
    assert st.plot_buckets([10, 10, 30], dim).axes[0].get_title() == axes.get_title()
    assert st.plot_buckets([10], dim).axes[0].get_xlabel() == "true size of seq"
    with pytest.raises(ValueError, match="plot_buckets takes one or more lengths"):
        st.plot_buckets([], 8)
