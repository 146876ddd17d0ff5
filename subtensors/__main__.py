"""The command line: `python -m subtensors` runs programs of a clone of the repository that no wheel contains."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

_PROGRAMS = {
    "demo": ("docs/examples", "demo", "train a small GPT with plain PyTorch and with subtensors, side by side"),
    "bench": ("tests", "benchmarks", "measure beside the peers"),
}
"""For each command the folder of its program, the program, and its summary."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line; None for those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="subtensors", description="Tensor subclasses for PyTorch programs.")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for name, (_, _, summary) in _PROGRAMS.items():
        commands.add_parser(name, help=summary, add_help=False)
    options, rest = parser.parse_known_args(arguments)
    return run_program(options.command, rest)


def run_program(command: str, arguments: Sequence[str]) -> int:
    """Run a program of the repository that is not installed with the package.

    Args:
        command: "demo" or "bench".
        arguments: of the program.

    Returns:
        The exit status; 2 if the package was installed without the repository.
    """
    folder, program, _ = _PROGRAMS[command]
    root = Path(__file__).resolve().parents[1]
    if not (root / folder / program).is_dir():
        print(
            f"`subtensors {command}` runs {folder}/{program} of the repository, which an installed wheel does not "
            f"hold: clone the repository, and there run `make {command}`",
            file=sys.stderr,
        )
        return 2
    sys.path.insert(0, str(root / folder))
    before, sys.argv = sys.argv, [program, *arguments]
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)  # raises SystemExit with its exit status
    finally:
        sys.argv = before
        sys.path.remove(str(root / folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
