"""The benchmark of linear + cross entropy runs end to end, and every way computes the same loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.nn.functional as F

from benchmarks.__main__ import main
from benchmarks.chunked import inputs, measure, relative_error, truth
from benchmarks.chunked_rows import LossRow, is_ours, unmatched
from benchmarks.chunked_variants import PEERS, SHAPES, TINY
from benchmarks.rows import load

COMPILES = ("compile", "auto_chunker")
MEASURED = Path(__file__).parents[2] / "docs" / "benchmarks" / "chunked.json"
HERE = [name for name, peer in PEERS.items() if peer.is_here]


def test_a_tiny_run_leaves_rows_a_table_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["chunked", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--shapes", "gpt2"]
    assert main([*options, "--variants", "eager,subtensors"]) == 0
    rows = load(LossRow, tmp_path / "chunked.json")
    names = ["eager", "exact/8", "fast/8", "exact/32", "columns/32", "columns/32+32", "st.chunk exact/8"]
    assert [row.variant for row in rows] == names
    assert all(row.step_ms > 0 and row.setting.tiny for row in rows)
    shown = capsys.readouterr().out
    assert "Tiny sizes: the figures mean nothing." in shown
    assert all(name in shown for name in names)
    assert (tmp_path / "chunked.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    assert main([*options, "--keep", "--variants", "checkpoint,subtensors", "--settings", "fast/8"]) == 0
    kept = load(LossRow, tmp_path / "chunked.json")
    assert [row.variant for row in kept] == [*(name for name in names if name != "fast/8"), "checkpoint", "fast/8"]


@pytest.mark.parametrize("variant", ["subtensors", *(name for name in HERE if name not in COMPILES)])
def test_every_way_computes_the_same_gradients(variant: str, device: str) -> None:
    if device == "cpu" and PEERS.get(variant, PEERS["eager"]).package:
        pytest.skip("it runs on a GPU alone")
    (eager,) = measure("gpt2", ["eager"], tiny=True, device=device)
    for row in measure("gpt2", [variant], tiny=True, device=device):
        assert 0 < row.hidden_error < 3 * eager.hidden_error
        assert 0 < row.weight_error < 5 * eager.weight_error
        if row.variant.startswith(("exact", "columns", "st.chunk exact")):
            assert row.hidden_error <= 1.2 * eager.hidden_error
            assert row.weight_error <= 1.2 * eager.weight_error
        assert (row.peak_mb is None) == (device == "cpu")


def test_the_truth_is_the_plain_program_in_float64() -> None:
    hidden, weight, target = inputs(replace(TINY, tokens=37), "cpu")
    loss, hidden_grad, weight_grad = truth(hidden, weight, target, rows=8)
    x, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    expected = F.cross_entropy(F.linear(x, w), target)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert x.grad is not None
    assert w.grad is not None
    assert relative_error(hidden_grad, x.grad) < 1e-12
    assert relative_error(weight_grad, w.grad) < 1e-12


def test_the_three_shapes_are_those_of_the_models() -> None:
    sizes = {name: (shape.tokens, shape.hidden, shape.vocabulary) for name, shape in SHAPES.items()}
    assert sizes == {"gemma2-2b": (8192, 2304, 256000), "llama3-8b": (4096, 4096, 128256), "gpt2": (16384, 768, 50304)}


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match="unknown shape 'huge'; there are gemma2-2b, llama3-8b, gpt2"):
        main(["chunked", "--device", "cpu", "--shapes", "huge"])
    with pytest.raises(SystemExit, match="unknown variant 'magic'; there are eager, compile"):
        main(["chunked", "--device", "cpu", "--variants", "magic"])


def test_a_peer_that_is_not_installed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "core", replace(PEERS["core"], exists=False))
    monkeypatch.setitem(PEERS, "liger", replace(PEERS["liger"], package="no_such_package"))
    options = ["--tiny", "--device", "cpu", "--shapes", "gpt2", "--out", str(tmp_path)]
    assert main(["chunked", *options, "--variants", "core,liger"]) == 0
    assert not (tmp_path / "chunked.json").exists()


def test_a_peer_is_matched_by_what_is_as_fast_in_no_more_memory_and_left_out_where_it_errs_more() -> None:
    eager = replace(load(LossRow, MEASURED)[0], variant="eager", step_ms=10.0, peak_mb=100.0)
    good, wrong = replace(eager, variant="good", peak_mb=50.0), replace(eager, variant="wrong", hidden_error=1.0)
    small, fast = replace(eager, variant="exact/1", peak_mb=40.0, step_ms=11.0), replace(good, variant="fast/9")
    assert unmatched([eager, good, wrong, small]) == [eager, good]
    assert unmatched([eager, good, wrong, small, fast]) == []


@pytest.mark.parametrize(
    "row",
    [row for row in load(LossRow, MEASURED) if is_ours(row)],
    ids=lambda row: f"{row.shape}-{row.variant}",
)
def test_measured_exact_gradients_err_no_more_than_eager_ones(row: LossRow) -> None:
    (eager,) = (r for r in load(LossRow, MEASURED) if (r.shape, r.variant) == (row.shape, "eager"))
    if "fast" not in row.variant:
        assert row.hidden_error <= 1.2 * eager.hidden_error
        assert row.weight_error <= 1.2 * eager.weight_error
