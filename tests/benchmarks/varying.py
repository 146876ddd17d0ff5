"""The benchmark of whole jobs over varying lengths: models of transformers beside every way to run them.

Each way has a process of its own, whose compile caches are cold. All get ready side by side; then each takes its first
100 batches and 100 further ones alone, those that compile a few at a time; then all are visited in rounds of random
order, one at a time, while the others wait for their turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.options import add_shared_options
from benchmarks.processes import CACHES
from benchmarks.rows import Setting, installed, load, save
from benchmarks.varying_cases import CASES, LENGTHS
from benchmarks.varying_rows import JobRow, of_visits, page, table
from benchmarks.varying_session import LIMITS, Session
from benchmarks.varying_variants import VARIANTS

MARK = "@@ "
"""How a line begins that answers what a process was asked."""


class Failed(RuntimeError):
    """A way could not be measured; the message says why, in a line."""


class Worker:
    """A process that measures one way when it is told to.

    Args:
        arguments: of the command line, after the benchmark's name.
        folder: for its compile caches.
    """

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        cold = {name: str(folder / name) for name in CACHES}
        environment = {**os.environ, **cold, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        folder.mkdir(parents=True)
        self.errors = folder / "stderr"
        with self.errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks", "varying", *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment,
            )  # fmt: skip
        self.answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.answers.put(line.removeprefix(MARK))
        self.answers.put(None)

    def ask(self, what: str) -> None:
        """Tell it what to do next."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()

    def answer(self, deadline: float) -> dict[str, Any]:
        """Return what it found.

        Raises:
            Failed: it ended, or does not answer before the deadline, on `time.monotonic`.
        """
        try:
            line = self.answers.get(timeout=max(deadline - time.monotonic(), 0.1))
        except queue.Empty:
            raise Failed("not done in the time that there was") from None
        if line is None:
            lines = [each.strip() for each in self.errors.read_text().splitlines() if each.strip()]
            named = [each for each in lines if re.match(r"[\w.]*(Error|Exception)\b", each)]
            raise Failed((named or lines or [f"ended with status {self.process.wait()}"])[-1][:200])
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


class Here:
    """The same in this process, for tiny sizes.

    Args:
        session: what is asked.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.found = session, dict[str, Any]()

    def ask(self, what: str) -> None:
        """Do it."""
        self.found = self.session.do(what)

    def answer(self, deadline: float) -> dict[str, Any]:
        """Return what it found."""
        return self.found

    def end(self) -> None:
        """Do nothing."""


def serve(options: argparse.Namespace) -> int:
    """Answer on stdout what is asked on stdin, until that ends."""
    session = _session(options, options.row)
    for line in sys.stdin:
        print(MARK + json.dumps(session.do(line.strip())), flush=True)
    return 0


def _session(options: argparse.Namespace, variant: str) -> Session:
    lengths = options.lengths or CASES[options.case].lengths
    steps = 4 if options.tiny else options.steps
    batch = 3 if options.tiny else options.batch
    return Session(options.case, variant, lengths, options.tiny, options.device, batch, steps)


class Table:
    """The ways to do a case, as they are measured.

    Args:
        options: of the command line.
        variants: those that can do it.
        report: told what happens.
    """

    def __init__(self, options: argparse.Namespace, variants: Sequence[str], report: Callable[[str], object]) -> None:
        self.options, self.report = options, report
        self.end = time.monotonic() + options.seconds
        self.found: dict[str, dict[str, Any]] = {variant: {} for variant in variants}
        self.visits: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
        self.reasons: dict[str, str] = {}
        self.workers: dict[str, Worker | Here] = {}

    def measure(self, folder: Path) -> None:
        """Measure all; caches and errors of processes are in a folder."""
        try:
            for number, variant in enumerate(self.found):
                self.workers[variant] = self._worker(variant, folder / str(number))
            self._all(list(self.workers), "ready", self.end)
            alone = [variant for variant in self._left() if not VARIANTS[variant].compiles]
            for variant in random.sample(alone, len(alone)):
                self._all([variant], "first", self.end)
            compiling = [variant for variant in self._left() if VARIANTS[variant].compiles]
            random.shuffle(compiling)
            for start in range(0, len(compiling), self.options.beside):
                self._all(compiling[start : start + self.options.beside], "first", self.end - self.options.rounds * 5)
            for turn in range(self.options.rounds):
                if turn > 1 and time.monotonic() > self.end:
                    break
                for variant in random.sample(self._left(), len(self._left())):
                    self._all([variant], "visit", float("inf"))
            for variant in self._left():
                self._all([variant], "end", float("inf"))
        finally:
            for worker in self.workers.values():
                worker.end()

    def _worker(self, variant: str, folder: Path) -> Worker | Here:
        options = self.options
        if options.tiny and not options.processes:
            return Here(_session(options, variant))
        arguments = ["--case", options.case, "--device", options.device, "--row", variant, *["--tiny"] * options.tiny]
        arguments += ["--batch", str(options.batch), "--steps", str(options.steps)]
        return Worker([*arguments, *(["--lengths", options.lengths] if options.lengths else [])], folder)

    def _left(self) -> list[str]:
        return [variant for variant in self.workers if variant not in self.reasons]

    def _all(self, variants: Sequence[str], what: str, deadline: float) -> None:
        """Ask several at once."""
        started = time.monotonic()
        for variant in variants:
            self.workers[variant].ask(what)
        for variant in variants:
            try:
                answer = self.workers[variant].answer(min(deadline, time.monotonic() + self.options.limit))
            except Failed as error:
                self.reasons[variant] = str(error)
                worker = self.workers[variant]
                worker.end()
                if isinstance(worker, Worker):
                    self.options.out.mkdir(parents=True, exist_ok=True)
                    shutil.copy(worker.errors, self.options.out / f"varying-{self.options.case}-{variant}.log")
                self.report(f"{variant}: {error}")
                continue
            if what == "visit":
                self.visits[variant].append(answer)
                continue
            self.found[variant] |= answer
            if what == "first":
                self.found[variant]["beside"] = len(variants) - 1
                self._judge(variant, answer["difference"])
                self.report(f"{variant:24} first {answer['first_s']:.3g} s, then {answer['second_s']:.3g} s")
        self.report(f"{what}: {time.monotonic() - started:.0f} s") if what == "ready" else None

    def _judge(self, variant: str, difference: float) -> None:
        limit = LIMITS[CASES[self.options.case].trains]
        if not difference <= limit:
            self.reasons[variant] = f"its results differ from eager's by {difference:.3g}, and {limit:.3g} is allowed"
            self.workers[variant].end()

    def rows(self) -> list[JobRow]:
        """Return what was measured, in the order of the variants."""
        options, found = self.options, []
        setting = Setting.now(options.device, options.tiny)
        for variant, values in self.found.items():
            reason = self.reasons.get(variant, "")
            figures: dict[str, Any] = {}
            if not reason:
                visits = self.visits[variant]
                walls = [wall for visit in visits for wall in visit["walls_ms"]]
                steps, speeds = ([visit[name] for visit in visits] for name in ("step_ms", "per_s"))
                figures = values | of_visits(steps, speeds, walls)
            lengths = options.lengths or CASES[options.case].lengths
            found.append(JobRow(options.case, lengths, variant, reason, installed("transformers"), setting, **figures))
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument(
        "--case", choices=CASES, metavar="CASE", default="train-text", help="of %(choices)s (%(default)s)"
    )
    parser.add_argument("--variants", default=";".join(VARIANTS), help="separated by semicolons (%(default)s)")
    parser.add_argument("--lengths", choices=LENGTHS, metavar="NAME", help="of %(choices)s; the case's own by default")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of the first pass (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="visits of each variant (%(default)s)")
    parser.add_argument("--seconds", type=float, default=150, help="after which no further round begins (%(default)s)")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a first pass may take (%(default)s)")
    parser.add_argument("--beside", type=int, default=4, help="ways that compile at the same time (%(default)s)")
    add_shared_options(parser, "a small model, in this process")
    parser.add_argument("--processes", action="store_true", help="tiny ways in processes, those that compile as well")
    parser.add_argument("--keep", action="store_true", help="keep rows already in --out that this run does not measure")
    parser.add_argument("--page", type=Path, help="print the rows of this file as tables of a page, measuring nothing")
    parser.add_argument("--row", metavar="VARIANT", help="measure one way here, told on stdin what to do")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status, 1 where a way could not be measured."""
    if options.row:
        return serve(options)
    if options.page:
        print(page(load(JobRow, options.page)))
        return 0
    case = CASES[options.case]
    chosen = options.variants.split(";")
    if unknown := [name for name in chosen if name not in VARIANTS]:
        raise SystemExit(f"unknown variants {unknown}; there are {';'.join(VARIANTS)}")
    if options.tiny and not options.processes:
        chosen = [name for name in chosen if not VARIANTS[name].compiles]
    chosen = [name for name in chosen if VARIANTS[name].fits(case, options.device)]
    console = Console()
    measured = Table(
        options, [name for name in chosen if not VARIANTS[name].reason(case, options.device)], console.print
    )
    with tempfile.TemporaryDirectory(prefix="subtensors-bench-") as folder:
        measured.measure(Path(folder))
    for name in chosen:
        if reason := VARIANTS[name].reason(case, options.device):
            measured.found[name], measured.reasons[name] = {}, reason
    rows = sorted(measured.rows(), key=lambda row: chosen.index(row.variant))
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.out / "varying.json"
    earlier = load(JobRow, data) if options.keep and data.exists() else []
    mine = {(row.case, row.lengths, row.variant) for row in rows}
    save([row for row in earlier if (row.case, row.lengths, row.variant) not in mine] + rows, data)
    console.print(table(rows))
    return int(any(name in measured.reasons for name in measured.workers))
