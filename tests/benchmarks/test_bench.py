"""The optimizer benchmark runs end to end, and its bookkeeping is right."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from benchmarks import static, sweep
from benchmarks.__main__ import add_benchmarks, main
from benchmarks.lend import LentRow
from benchmarks.optim import is_measured, measure
from benchmarks.other_optimizers import OTHERS
from benchmarks.plot import bars
from benchmarks.processes import CACHES, MeasurementFailed, run_cold
from benchmarks.rows import Row, Setting, installed, load, save
from benchmarks.sets import FIRST_STEP_SETS, MAIN_SETS, SETS, least_traffic, parameters
from benchmarks.static import VARIANTS as STATIC_VARIANTS
from benchmarks.variants import VARIANTS, as_graph
from demo.timing import Span, count_aten_calls, count_copied_bytes, count_kernels, time_call

PNG = b"\x89PNG\r\n\x1a\n"


def pairs(rows: list[Row]) -> list[tuple[str, str]]:
    return [(row.set, row.variant) for row in rows]


@pytest.fixture(params=["in this process", pytest.param("in cold processes", marks=pytest.mark.slow)])
def measuring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are measured in this process, which spares the imports of six others; and as for real."""

    def run_warm(module: str, arguments: Sequence[str], timeout_s: float = 900) -> str:
        parser = argparse.ArgumentParser()
        add_benchmarks(parser)
        options = parser.parse_args(arguments)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert options.run(options) == 0
        return printed.getvalue().splitlines()[-1]

    if request.param == "in this process":
        for benchmark in (static, sweep):
            monkeypatch.setattr(benchmark, "run_cold", run_warm)


def test_the_bars_of_a_set_have_no_gap_where_a_variant_was_not_measured() -> None:
    measured = {"a": ["x", "y", "z"], "b": ["x", "z"]}
    setting = Setting("d", "2", None, "today", True)
    rows = [
        Row(name, variant, 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, None, None, setting)
        for name, variants in measured.items()
        for variant in variants
    ]
    axes = Figure().subplots()
    bars(axes, rows, lambda row: row.wall_ms)
    edges = sorted((x.get_x(), x.get_x() + x.get_width()) for x in axes.patches if isinstance(x, Rectangle))
    gaps = [right[0] - left[1] for left, right in pairwise(edges)]
    assert [gap > 1e-6 for gap in gaps] == [False, False, True, False]


@pytest.mark.usefixtures("measuring")
def test_a_tiny_run_leaves_rows_a_table_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["optim", "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*options, "--sets", "tiny1000,first10", "--variants", "fused,subtensors"]) == 0

    rows = load(Row, tmp_path / "optim.json")
    measured = [("copy", "copy"), ("tiny1000", "fused"), ("tiny1000", "subtensors"), ("first10", "subtensors")]
    assert pairs(rows) == measured
    for row in rows[1:]:
        assert min(row.first_s, row.second_s, row.step_ms, row.wall_ms, row.cpu_ms, row.gbps) > 0
        assert row.copy_percent == pytest.approx(100 * row.gbps / rows[0].gbps)
        assert row.setting.tiny
        assert row.setting.torch == torch.__version__
    shown = capsys.readouterr().out
    assert "Tiny sizes: the figures mean nothing." in shown
    assert all(f"{name} {variant}" in " ".join(shown.split()) for name, variant in measured)
    assert (tmp_path / "optim.png").read_bytes().startswith(PNG)

    assert main([*options, "--keep", "--sets", "tiny1000", "--variants", "foreach"]) == 0
    kept = load(Row, tmp_path / "optim.json")
    assert pairs(kept) == [*measured[1:], ("copy", "copy"), ("tiny1000", "foreach")]
    assert kept[:3] == rows[1:]


@pytest.mark.parametrize(
    "variant", [name for name, variant in VARIANTS.items() if not (variant.needs_gpu or variant.compiles_per_tensor)]
)
def test_every_variant_takes_the_same_adam_step(variant: str) -> None:
    def stepped(dtype: torch.dtype | None, step: str) -> list[Tensor]:
        tensors = parameters("mixed", tiny=True, device="cpu")
        if dtype is not None:
            gradients = [tensor.grad for tensor in tensors]
            tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = None if gradient is None else gradient.to(dtype)
        VARIANTS[step].make(tensors)()
        return [tensor.detach() for tensor in tensors]

    start = [tensor.detach() for tensor in parameters("mixed", tiny=True, device="cpu")]
    truth, plain, ours = stepped(torch.float64, "foreach"), stepped(None, "foreach"), stepped(None, variant)
    for old, true, theirs, mine in zip(start, truth, plain, ours, strict=True):
        assert not torch.equal(mine, old)
        rounding = torch.finfo(mine.dtype).eps * true.abs().max()
        assert (mine - true).abs().max() <= 1.5 * (theirs - true).abs().max() + rounding


@pytest.mark.parametrize("name", [name for name, v in (VARIANTS | STATIC_VARIANTS).items() if not v.needs_gpu])
def test_every_variant_without_a_graph_can_be_made_on_a_cpu(name: str) -> None:
    assert callable((VARIANTS | STATIC_VARIANTS)[name].make(parameters("llama1b", tiny=True, device="cpu")))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_measured_on_a_gpu(variant: str) -> None:
    row = measure("mixed", variant, tiny=True, device="cuda")
    assert row.kernels_per_step is not None
    assert row.kernels_per_step > 0
    assert row.extra_peak_mb is not None
    assert row.gbps > 0


@pytest.mark.gpu
def test_kernels_are_counted_and_copies_are_not() -> None:
    a, b = torch.ones(100, device="cuda"), torch.ones(100, device="cuda")
    (a + b) * b
    assert count_kernels(lambda: (a + b) * b) == 2
    assert count_kernels(lambda: a.to("cpu")) == 0


def test_the_least_traffic_of_adam_is_28_bytes_a_float32_parameter() -> None:
    numel = sum(torch.Size(shape).numel() for shape, _ in SETS["llama1b"])
    assert len(SETS["llama1b"]) == 146
    assert numel == 1_235_814_400
    assert least_traffic("llama1b", tiny=False, master_weights=True) == 28 * numel


def test_a_master_copy_doubles_the_least_traffic_of_bfloat16() -> None:
    numel = {
        dtype: sum(torch.Size(shape).numel() for shape, other in SETS["mixed"] if other == dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    without, with_master = (least_traffic("mixed", tiny=False, master_weights=master) for master in (False, True))
    assert without == 28 * numel[torch.float32] + 14 * numel[torch.bfloat16]
    assert with_master == 28 * (numel[torch.float32] + numel[torch.bfloat16])


def test_compiling_a_thousand_tensors_waits_for_slow_and_small_sets_do_not() -> None:
    compiled = {
        slow: [name for name in MAIN_SETS if is_measured(name, "compile", slow, "cuda")] for slow in (False, True)
    }
    assert compiled == {False: ["llama1b"], True: MAIN_SETS}


def test_first_steps_are_measured_for_subtensors_only() -> None:
    assert {v for v in VARIANTS for name in FIRST_STEP_SETS if is_measured(name, v, True, "cuda")} == {"subtensors"}
    assert [len(SETS[name]) for name in FIRST_STEP_SETS] == [10, 100, 1000, 2000]


def test_an_unknown_set_or_variant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match="unknown set 'huge'; there are tiny1000, mid1000"):
        main(["optim", "--device", "cpu", "--sets", "tiny1000,huge"])
    with pytest.raises(SystemExit, match="unknown variant 'magic'; there are foreach, fused"):
        main(["optim", "--device", "cpu", "--variants", "magic"])


def test_a_measuring_process_that_fails_or_hangs_is_reported() -> None:
    with pytest.raises(MeasurementFailed, match="No module named no_such_module"):
        run_cold("no_such_module", [])
    with pytest.raises(MeasurementFailed, match=r"not done after 0\.1 s"):
        run_cold("timeit", ["-n", "1", "-r", "1", "import time; time.sleep(20)"], timeout_s=0.1)


def test_each_measuring_process_starts_with_empty_caches_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe_environment.py").write_text("import json, os; print(json.dumps(dict(os.environ)))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    first, second = (json.loads(run_cold("probe_environment", [])) for _ in range(2))
    folders = {environment[name] for environment in (first, second) for name in CACHES}
    assert len(folders) == 2 * len(CACHES)
    assert not any(Path(folder).exists() for folder in folders)
    assert first["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] == "1"


def test_rows_survive_the_file(tmp_path: Path) -> None:
    setting = Setting("a device", "2.13.0", None, "2026-01-01 00:00", tiny=False)
    rows = [Row("s", v, 2, 8, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, None, 1, setting, 97.5) for v in ("a", "b")]
    save(rows, tmp_path / "rows.json")
    assert load(Row, tmp_path / "rows.json") == rows


def test_a_call_is_timed_after_its_warm_up() -> None:
    calls: list[int] = []
    times = time_call(lambda: calls.append(1), "cpu", repeats=4, warm_up=3)
    assert len(calls) == 3 + 4 + 4
    assert min(times.device_ms, times.wall_ms, times.enqueue_ms) > 0


def test_a_span_on_the_cpu_covers_its_body() -> None:
    with Span("cpu") as outer, Span("cpu") as inner:
        sum(range(1000))
    assert outer.ms() >= inner.ms() > 0


def test_a_foreach_call_counts_once() -> None:
    tensors = [torch.ones(2) for _ in range(5)]
    assert count_aten_calls(lambda: torch._foreach_add_(tensors, 1.0)) == 1
    assert count_aten_calls(lambda: [tensor.add_(1.0) for tensor in tensors]) == 5


@pytest.mark.usefixtures("measuring")
def test_the_static_benchmark_runs_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["static", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--sets", "llama1b"]
    assert main([*options, "--variants", "captured-packed,fused-graph"]) == 0
    assert [row.sleep for row in load(LentRow, tmp_path / "lend.json")] == ["first", "next", "next"]
    rows = load(Row, tmp_path / "static.json")
    assert [(row.set, row.variant) for row in rows] == [
        ("copy", "copy"),
        ("llama1b", "captured-packed"),
    ]
    assert "copied B" not in capsys.readouterr().out  # no such figures on a CPU


@pytest.mark.parametrize(
    "variant", ["eager", "captured", pytest.param("reduce-overhead-packed", marks=pytest.mark.slow)]
)
def test_static_variants_take_the_same_adam_step(variant: str) -> None:
    def stepped(make: Callable[[list[Tensor]], Callable[[], object]]) -> list[Tensor]:
        tensors = parameters("llama1b", tiny=True, device="cpu")
        make(tensors)()
        return [tensor.detach() for tensor in tensors]

    start = [tensor.detach() for tensor in parameters("llama1b", tiny=True, device="cpu")]
    ours, theirs = stepped(STATIC_VARIANTS[variant].make), stepped(VARIANTS["foreach"].make)
    for old, mine, other in zip(start, ours, theirs, strict=True):
        assert not torch.equal(mine, old)
        torch.testing.assert_close(mine, other)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # of torch's own, where it compiles
@pytest.mark.parametrize("variant", STATIC_VARIANTS)
def test_every_static_variant_is_measured_on_a_gpu(variant: str) -> None:
    row = measure("llama1b", variant, tiny=True, device="cuda", variants=STATIC_VARIANTS)
    assert row.gbps > 0
    if variant.startswith("captured"):
        assert row.copied_bytes == 0
        assert row.kernels_per_step is not None
        assert row.kernels_per_step < 10


@pytest.mark.gpu
def test_copied_bytes_are_counted_also_in_a_graph() -> None:
    a, b = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
    replay = as_graph(lambda: a.copy_(b))
    assert count_copied_bytes(replay) == 4000
    assert count_copied_bytes(lambda: a.add_(b)) == 0


def test_the_pointwise_optimizers_are_measured_against_their_own_bytes(tmp_path: Path) -> None:
    options = ["pointwise", "--tiny", "--device", "cpu", "--set", "tiny1000", "--out", str(tmp_path)]
    assert main([*options, "--names", "SGD,Lion", "--peers"]) == 0
    rows = load(Row, tmp_path / "pointwise.json")
    assert [row.variant for row in rows] == ["copy", "SGD", "torch SGD foreach", "torch SGD fused", "Lion"]
    assert all(row.copy_percent == pytest.approx(100 * row.gbps / rows[0].gbps) for row in rows[1:])
    # Parameter, gradient and one state entry: read, read, read; written, written.
    assert all(row.gbps * row.step_ms * 1e6 == pytest.approx(20 * row.numel) for row in rows[1:])


@pytest.fixture
def _no_group_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the process group that a variant over sharded parameters begins."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_no_group_after")
@pytest.mark.parametrize("variant", [name for name, variant in OTHERS.items() if variant.package is None])
def test_every_other_optimizer_takes_a_step_on_its_set(variant: str) -> None:
    (set_name,) = OTHERS[variant].sets or ()
    assert is_measured(set_name, variant, slow=False, device="cpu")
    assert not is_measured("tiny1000", variant, slow=False, device="cpu")
    tensors = parameters(set_name, tiny=True, device="cpu")
    before = [tensor.detach().clone() for tensor in tensors]
    OTHERS[variant].make(tensors)()
    moved = [not torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True)]
    assert all(moved)


@pytest.mark.usefixtures("_no_group_after")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("sgd-subtensors", "sgd-foreach"),
        ("adamw-subtensors", "adamw-fused"),
        ("adamw-clipped-subtensors", "adamw-clipped-fused"),
        ("adamw-sharded-subtensors", "adamw-sharded-foreach"),
        ("muon-subtensors", "muon-torch"),
        ("shampoo-subtensors", "shampoo-loop"),
    ],
)
def test_other_optimizers_take_the_step_of_their_peers(ours: str, theirs: str) -> None:
    def stepped(variant: str) -> Tensor:
        tensors = parameters((OTHERS[variant].sets or ())[0], tiny=True, device="cpu")
        OTHERS[variant].make(tensors)()
        return torch.cat([tensor.detach().flatten() for tensor in tensors])

    torch.testing.assert_close(stepped(ours), stepped(theirs), rtol=1e-4, atol=1e-4)


def test_the_least_bytes_of_another_optimizer_are_its_own() -> None:
    row = measure("llama1b", "adamw-int8-subtensors", tiny=True, device="cpu")
    assert row.gbps == pytest.approx(row.numel * (16 + 4 * 4 / 256) / row.step_ms / 1e6)


def test_peers_that_are_not_installed_are_left_out() -> None:
    with_package = [name for name, variant in OTHERS.items() if variant.package is not None]
    assert with_package
    for name in with_package:
        is_there = installed(OTHERS[name].package or "") is not None
        (set_name,) = OTHERS[name].sets or ()
        assert is_measured(set_name, name, slow=False, device="cuda") == is_there


def test_every_figure_is_drawn_from_the_rows_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rows_of in (Path(__file__).parents[2] / "docs" / "benchmarks").glob("*.json"):
        (tmp_path / rows_of.name).write_bytes(rows_of.read_bytes())
    assert main(["figures", "--out", str(tmp_path)]) == 0
    drawn = [f"{name}.png" for name in ("optim", "chunked", "long_rows", "padded_ops", "static", "bucketed")]
    assert capsys.readouterr().out.split() == [str(tmp_path / name) for name in drawn]
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in drawn)


def test_a_folder_without_rows_has_no_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["figures", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path} has no rows to draw: figures are made of optim.json, ")
    assert said.count("\n") == 1
