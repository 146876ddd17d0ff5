"""The command line: what it prints, that it fits a terminal, and that what is missing takes one clear line."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import subtensors as st
from benchmarks.__main__ import BENCHMARKS
from subtensors.__main__ import main
from subtensors.command_line.doctor import doctor, installation, missing
from subtensors.command_line.self_test import CHECKS

COMMANDS = ["doctor", "explain", "demo", "bench"]

SCRIPT = """
import sys
import torch, subtensors as st

x = st.pad(torch.randn(4, 77), {1: st.Dim("n", max=512, buckets=64)})
torch.renorm(x, 2, 0, 1.0)
run = st.bucketed(torch.exp, {0: {0: st.Dim("n", max=8, buckets=4)}})
run(torch.ones(3))
print("arguments:", sys.argv[1:])
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_fits_80_columns_and_ends_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"example: python -m subtensors {command}")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_help_of_each_benchmark_fits_80_columns_and_ends_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(["bench", name, "--help"])
    text = capsys.readouterr().out
    assert f"\n\nexample: python -m subtensors bench {name} --" in text
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert all(f"\n    {command} " in shown for command in COMMANDS)


def test_explain_without_a_script_asks_for_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain"])
    assert capsys.readouterr().err.endswith("the following arguments are required: script\n")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"subtensors {st.__version__}\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [["demo", "--device", "cuda"], ["bench", "lend", "--device", "cuda"]])
def test_a_gpu_that_is_not_there_takes_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"--device cuda: torch finds no GPU here; .*doctor.*\n", said.err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_benchmark_without_a_gpu_says_how_to_see_it_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "optim"])
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "this measures a GPU and torch finds none: --tiny --device cpu shows that it runs\n"
    assert len(said.err.rstrip()) <= 80


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_benchmark_of_one_size_is_not_said_to_have_tiny_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "lend"])
    assert "none: --device cpu shows that it runs" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "lend", "--device", "cpu", "--sleeps", "1"])


@pytest.mark.parametrize("arguments", [["bench", "lend", "--tiny"], ["doctor", "--tiny"]])
def test_an_unknown_argument_shows_the_usage_of_its_command(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    said = capsys.readouterr().err
    assert said.startswith(f"usage: subtensors {' '.join(arguments[:-1])} [")
    assert said.endswith(" error: unrecognized arguments: --tiny\n")


def test_rates_are_fitted_from_any_folder_and_a_missing_file_takes_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "fit-plan"])
    assert capsys.readouterr().out.startswith("Rates(")
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "fit-plan", "--rows", "none.json"])
    assert capsys.readouterr().err == "--rows none.json: no such file; `bench chunked` writes one\n"


@pytest.mark.parametrize(("command", "extra"), [("demo", "plot"), ("bench", "bench")])
def test_a_program_that_draws_names_the_extra_that_it_needs(
    command: str, extra: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else found(name))
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert f'draws with rich: in the clone run pip install ".[{extra}]"' in said
    assert said.count("\n") == 1


def test_doctor_reports_versions_and_a_right_result_of_every_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor() == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"subtensors {st.__version__}" in lines[0]
    assert any(f"torch {torch.__version__}" in line for line in lines)
    for name in CHECKS:
        assert any(re.match(rf"  {re.escape(name)} +right +\d+\.\d s  \w", line) for line in lines)
    assert max(map(len, lines)) <= 80


def test_doctor_tells_of_a_wrong_result_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(device: str) -> str:
        torch.testing.assert_close(torch.ones(1), torch.zeros(1))
        return device

    assert doctor({"a type": wrong, "another": lambda device: "here"}) == 1
    shown = capsys.readouterr().out
    assert re.search(r"a type +FAILED .*\n +AssertionError: Tensor-likes are not close!\n  another +right", shown)
    assert "a type failed here: please report it" in " ".join(shown.split())


@pytest.mark.parametrize("name", ["PaddedTensor", "st.fused", "st.optim", "ChunkedTensor", "TensorList"])
def test_a_self_test_sees_a_wrong_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(ours: torch.Tensor, plain: torch.Tensor) -> None:
        torch.testing.assert_close(ours + 1e-3, plain)

    with monkeypatch.context() as patched:
        patched.setattr("subtensors.command_line.self_test._same", other)
        with pytest.raises(AssertionError, match="not close"):
            CHECKS[name]("cpu")


def test_doctor_says_what_to_do_about_each_thing_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subtensors.command_line.doctor.installed", lambda name: None)
    monkeypatch.setattr("subtensors.command_line.doctor.shutil.which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    advice = " ".join(missing())
    for words in (
        "torch 2.10.0 is not tested",
        "pip install triton numpy sympy optree",
        "built without CUDA: on a machine with an NVIDIA GPU, pip install --force-reinstall torch",
        "install gcc",
        "plots: pip install rich matplotlib",
        "For arenas on a GPU: pip install cuda-bindings",
    ):
        assert words in advice
    assert "triton missing" in " ".join(installation())


def test_explain_runs_a_script_and_says_which_line_fell_back(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    # In a process of its own: a fallback is logged once a process.
    command = [sys.executable, "-m", "subtensors", "explain", str(script), "3", "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    shown = done.stdout
    assert "arguments: ['3', '--steps', '4']" in shown
    assert "1 fallback or note\n  train.py:6\n    renorm runs on the unpadded data" in shown
    assert max(map(len, shown.splitlines()[2:])) <= 80


def test_explain_shows_the_runners_of_a_script_and_keeps_the_traceback_of_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("sys.exit(int(sys.argv[1]))", ""))
    assert main(["explain", str(script)]) == 0
    assert "---- run\n  exp bucketed on" in capsys.readouterr().out
    script.write_text(
        "import torch, subtensors as st\n"
        'run = st.bucketed(torch.linalg.slogdet, {0: {2: st.Dim("n", max=8, buckets=4)}})\n'
        "run(torch.ones(2, 3, 3))\n"
    )
    assert main(["explain", str(script)]) == 0
    shown = capsys.readouterr().out
    assert "train.py:3\n    linalg_slogdet runs on the unpadded data" in shown
    assert "host_reads.py" not in shown
    script.write_text("1 / 0")
    assert main(["explain", str(script)]) == 1
    shown = capsys.readouterr()
    assert "ZeroDivisionError" in shown.err
    assert "failed before its end" in shown.out
    assert main(["explain", str(tmp_path / "none.py")]) == 2
    assert "there is no file" in capsys.readouterr().err
