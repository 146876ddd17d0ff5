"""The command line: `python -m subtensors`, which runs what a clone of the repository has beside the package."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

_BESIDE = {
    "demo": ("docs/examples", "demo", "train a small GPT with plain PyTorch and with subtensors, side by side"),
    "bench": ("tests", "benchmarks", "measure beside the peers"),
}
"""Each command: the folder that its program is in, the program, and what it does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line; the process's own where there are none.

    Returns:
        the exit status.
    """
    parser = argparse.ArgumentParser(prog="subtensors", description="Tensor subclasses for PyTorch programs.")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for name, (_, _, summary) in _BESIDE.items():
        commands.add_parser(name, help=summary, add_help=False)
    options, rest = parser.parse_known_args(arguments)
    return run_beside(options.command, rest)


def run_beside(command: str, arguments: Sequence[str]) -> int:
    """Run a program of the repository's that is not installed with the package.

    Args:
        command: "demo" or "bench".
        arguments: for it.

    Returns:
        its exit status; 2 where the package was installed without the repository.
    """
    folder, program, _ = _BESIDE[command]
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
        runpy.run_module(program, run_name="__main__", alter_sys=True)  # which ends with its exit status
    finally:
        sys.argv = before
        sys.path.remove(str(root / folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
