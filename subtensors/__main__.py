"""The command line: `python -m subtensors`; two of its commands run programs of a clone that no wheel contains."""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import subtensors

_PROGRAMS = {
    "demo": ("docs/examples", "demo", "plot", "train a small GPT with plain PyTorch and with subtensors, side by side"),
    "bench": ("tests", "benchmarks", "bench", "measure beside the peers, on a GPU"),
}
"""For each command the folder of its program, the program, the extra that installs what it draws with, its summary."""

_DOCTOR = "show versions, GPU and which path runs, self-test each type, and say what to do about what is missing"
_EXPLAIN = "run a script, then say what fell back in it, where and why"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line; None for those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="subtensors",
        description="Tensor subclasses for PyTorch programs.",
        epilog="example: python -m subtensors doctor",
    )
    parser.add_argument("--version", action="version", version=f"subtensors {subtensors.__version__}")
    commands = parser.add_subparsers(metavar="command", dest="command")
    examine = commands.add_parser(
        "doctor", help=_DOCTOR, description=_DOCTOR, epilog="example: python -m subtensors doctor > report.txt"
    )
    explain = commands.add_parser(
        "explain",
        help=_EXPLAIN,
        description=_EXPLAIN,
        epilog="example: python -m subtensors explain train.py --steps 3",
    )
    explain.add_argument("script", help="a Python file")
    # argparse would ask for them, too, where the script is missing.
    explain.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script").required = False
    for name, (*_, summary) in _PROGRAMS.items():
        commands.add_parser(name, help=summary, add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    if options.command in _PROGRAMS:
        return run_program(options.command, rest)
    if rest:
        (examine if options.command == "doctor" else explain).error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "explain":
        from subtensors.command_line.explain_script import explain_script

        return explain_script(options.script, options.arguments)
    from subtensors.command_line.doctor import doctor

    return doctor()


def run_program(command: str, arguments: Sequence[str]) -> int:
    """Run a program of the repository that is not installed with the package.

    Args:
        command: "demo" or "bench".
        arguments: of the program.

    Returns:
        The exit status; 2 if the package was installed without the repository, or without what the program draws with.
    """
    folder, program, extra, _ = _PROGRAMS[command]
    root = Path(__file__).resolve().parents[1]
    if not (root / folder / program).is_dir():
        print(
            f"`subtensors {command}` runs {folder}/{program} of the repository, which an installed wheel does not "
            f"hold: clone the repository, and there run `make {command}`",
            file=sys.stderr,
        )
        return 2
    if lacking := [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]:
        print(
            f"`subtensors {command}` draws with {' and '.join(lacking)}: "
            f'in the clone run pip install ".[{extra}]", or `make {command}`',
            file=sys.stderr,
        )
        return 2
    sys.path.insert(0, str(root / folder))
    before, sys.argv = sys.argv, [program, *arguments]
    sys.modules.pop(f"{program}.__main__", None)  # runpy warns of a module that was imported before it runs
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)  # raises SystemExit with its exit status
    finally:
        sys.argv = before
        sys.path.remove(str(root / folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
