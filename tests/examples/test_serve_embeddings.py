"""The example that serves embeddings, over loopback: no answer is lost or crossed, and too much is refused."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import string
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

httpx = pytest.importorskip("httpx", reason='the server needs pip install ".[serve]"')
for name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(name, reason='the server needs pip install ".[serve]"')

import uvicorn  # noqa: E402
from fastapi import FastAPI  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

import load_embeddings  # noqa: E402
from embedding_engines import BucketedEngine, Encoder, Limits, PlainEngine  # noqa: E402
from load_embeddings import load, texts_of  # noqa: E402
from serve_embeddings import application  # noqa: E402

ROOT = Path(__file__).parents[2]
LIMITS = Limits(longest=64, bucket=16, batch=4, waiting=64, wait_ms=1.0)
TOLERANCE = 1e-5


def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder(LIMITS.longest, width=32, layers=1).eval()


def as_tokens(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()))


@torch.no_grad()
def alone(texts: list[str]) -> torch.Tensor:
    """The embedding of each text by itself, in float64."""
    model = encoder().double()
    return torch.cat([model(as_tokens(text)[None]) for text in texts])


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Different texts of all lengths."""
    draw = random.Random(seed)
    return ["".join(draw.choices(string.printable, k=draw.randint(4, LIMITS.longest))) for _ in range(count)]


class Gate(BucketedEngine):
    """An engine whose batches wait until the gate is open."""

    def __init__(self) -> None:
        super().__init__(encoder(), LIMITS)
        self.opened, self.entered = threading.Event(), threading.Event()
        self.batches: list[int] = []
        self.fails = self.loses_one = self.is_released = False

    def warmup(self) -> None:
        pass

    def embed(self, texts: list[torch.Tensor]) -> list[list[float]]:
        self.batches.append(len(texts))
        self.entered.set()
        assert self.opened.wait(60)
        if self.fails:
            raise RuntimeError("the device is lost")
        return super().embed(texts)[self.loses_one :]

    def release(self) -> None:
        super().release()
        self.is_released = True


@contextmanager
def serving(app: FastAPI) -> Iterator[tuple[str, uvicorn.Server]]:
    """Serve an application on a free port of the loopback interface, in a thread; yield its address and the server."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=30))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", server
        finally:
            server.should_exit = True
            thread.join()


def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


class Loop:
    """Coroutines that run in a thread of their own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def background() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, BucketedEngine]]:
    engine = BucketedEngine(encoder(), LIMITS)
    with serving(application(lambda: engine, LIMITS)) as (address, _):
        yield address, engine


def own_answers(answers: list[Any], texts: list[str]) -> None:
    """Check that each text has its own embedding, which is no other text's."""
    assert [answer.status for answer in answers] == [200] * len(texts)
    found, truth = torch.tensor([answer.embedding for answer in answers], dtype=torch.float64), alone(texts)
    assert float((found - truth).abs().max()) < TOLERANCE
    apart = torch.cdist(truth, truth) + 2 * torch.eye(len(texts))
    assert float(apart.min()) > 10 * TOLERANCE


@pytest.mark.parametrize("make", [BucketedEngine, PlainEngine])
def test_an_engine_embeds_each_text_of_a_batch_as_it_does_alone(make: Any) -> None:
    engine = make(encoder(), LIMITS)
    for count in (1, 3, 4):
        texts = random_texts(count, seed=count)
        found = torch.tensor(engine.embed([as_tokens(text) for text in texts]), dtype=torch.float64)
        assert float((found - alone(texts)).abs().max()) < TOLERANCE


def test_a_load_loses_and_crosses_no_answer_and_captures_nothing_new(server: tuple[str, BucketedEngine]) -> None:
    address, engine = server
    stats = engine.run.stats()
    calls, hits = stats.calls, stats.hits
    assert len(stats.buckets) == 3 * 4  # 1, 2 and 4 texts, of 16, 32, 48 and 64 bytes
    texts = random_texts(200)
    own_answers(asyncio.run(load(address, texts, clients=24)), texts)
    stats = engine.run.stats()
    assert len(stats.buckets) == 3 * 4
    assert stats.fallbacks == {}
    assert 0 < stats.calls - calls == stats.hits - hits
    assert stats.calls - calls < len(texts)  # texts that waited shared batches


def test_real_texts_come_from_the_standard_library() -> None:
    texts = texts_of(50, LIMITS.longest)
    assert len(set(texts)) > 20
    assert all(0 < len(text.encode()) <= LIMITS.longest for text in texts)


def test_a_load_on_servers_in_their_own_processes_says_what_each_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_embeddings, "ROUNDS", 1)
    monkeypatch.setattr(load_embeddings, "PROCESSES", 1)
    monkeypatch.setattr(sys, "argv", "load --device cpu --requests 6 --clients 2 --engines plain".split())
    load_embeddings.main()
    assert re.fullmatch(r"plain .*documents/s .*, 0 without an answer\n", capsys.readouterr().out)


def test_an_overload_is_refused_at_once_and_those_who_wait_are_answered(gate: Gate, background: Loop) -> None:
    limits = Limits(longest=LIMITS.longest, bucket=LIMITS.bucket, batch=LIMITS.batch, waiting=5, wait_ms=0.0)
    app = application(lambda: gate, limits)
    texts = random_texts(6)
    with serving(app) as (address, _):
        first = background.start(load(address, texts[:1], clients=1))
        until(gate.entered.is_set)
        others = background.start(load(address, texts[1:], clients=5))
        until(lambda: app.state.batcher.count() == 5)
        refused = [httpx.post(f"{address}/embed", json={"text": "one more"}) for _ in range(3)]
        assert [response.status_code for response in refused] == [503] * 3
        assert all(int(response.headers["retry-after"]) > 0 for response in refused)
        gate.opened.set()
        own_answers(first.result(60) + others.result(60), texts)
        assert f"request_seconds_count {len(texts)}.0" in httpx.get(f"{address}/metrics").text
    assert max(gate.batches) <= limits.batch


def test_oversized_and_empty_input_is_refused_by_its_bytes(server: tuple[str, BucketedEngine]) -> None:
    address, engine = server
    calls = engine.run.stats().calls

    def status(**request: Any) -> int:
        return int(httpx.post(f"{address}/embed", **request).status_code)

    assert status(json={"text": "a" * (LIMITS.longest + 1)}) == 413
    assert status(json={"text": "\u00fc" * (LIMITS.longest // 2 + 1)}) == 413
    assert status(content=b"x" * 100_000) == 413
    assert status(content=iter([b'{"text": ', b'"a"}'])) == 411
    assert status(json={"text": ""}) == 422
    assert status(json={"words": "a"}) == 422
    assert status(content=b'{"text": "\\ud800"}', headers={"content-type": "application/json"}) == 422
    assert engine.run.stats().calls == calls
    assert status(json={"text": "\u00fc" * (LIMITS.longest // 2)}) == 200
    assert status(json={"text": "\x00" * LIMITS.longest}) == 200


def test_metrics_are_those_of_the_runner_and_of_the_requests(server: tuple[str, BucketedEngine]) -> None:
    address, engine = server
    values: dict[str, float] = {}

    def read() -> dict[str, float]:
        families = text_string_to_metric_families(httpx.get(f"{address}/metrics").text)
        return {f"{s.name}{s.labels or ''}": s.value for family in families for s in family.samples}

    before = read()
    assert httpx.post(f"{address}/embed", json={"text": "hello"}).status_code == 200
    assert httpx.post(f"{address}/embed", json={"text": "a" * 1000}).status_code == 413
    assert httpx.post(f"{address}/embed", json={"text": ""}).status_code == 422
    assert httpx.post(f"{address}/elsewhere", content=b"x" * 100_000).status_code == 413
    values = read()
    for outcome in ("200", "413", "422"):
        name = f"requests_total{ ({'status': outcome}) }"
        assert values[name] == before.get(name, 0) + 1
    stats = engine.run.stats()
    assert values["bucketed_calls_total"] == stats.calls == before["bucketed_calls_total"] + 1
    assert values["bucketed_replays_total"] == stats.hits
    assert values["bucketed_fallbacks_total"] == 0
    assert values["bucketed_waste_ratio"] == stats.waste
    assert values["waiting_texts"] == 0
    assert values["request_seconds_count"] == before["request_seconds_count"] + 1
    of_buckets = [value for name, value in values.items() if name.startswith("bucketed_bucket_calls_total")]
    assert len(of_buckets) == len(stats.buckets)
    assert sum(of_buckets) == stats.calls


@pytest.mark.parametrize("fault", ["fails", "loses_one"])
def test_an_engine_that_fails_fails_its_batch_and_serves_the_next(fault: str, gate: Gate) -> None:
    gate.opened.set()
    with serving(application(lambda: gate, LIMITS)) as (address, _):
        setattr(gate, fault, True)
        assert httpx.post(f"{address}/embed", json={"text": "hello"}).status_code == 500
        setattr(gate, fault, False)
        texts = random_texts(3)
        own_answers(asyncio.run(load(address, texts, clients=3)), texts)


def test_a_client_that_goes_leaves_the_others_their_answers(gate: Gate, background: Loop) -> None:
    app = application(lambda: gate, LIMITS)
    texts = random_texts(6)
    with serving(app) as (address, _):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/embed", json={"text": "gone"}, timeout=0.2)
        others = background.start(load(address, texts, clients=6))
        until(lambda: app.state.batcher.count() + sum(gate.batches) >= 7)
        gate.opened.set()
        own_answers(others.result(60), texts)


def test_an_end_answers_what_waits_takes_no_more_and_releases_the_graphs(gate: Gate, background: Loop) -> None:
    app = application(lambda: gate, LIMITS)
    texts = random_texts(7)
    with serving(app) as (address, server):
        answers = background.start(load(address, texts, clients=7))
        until(lambda: app.state.batcher.count() + sum(gate.batches) == 7)
        server.should_exit = True
        until(lambda: not listens(address))
        gate.opened.set()
        own_answers(answers.result(60), texts)
    assert gate.is_released
    assert app.state.batcher.count() == 0
    with pytest.raises(RuntimeError, match="after shutdown"):
        app.state.batcher.thread.submit(print)


def listens(address: str) -> bool:
    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as connection:
        return connection.connect_ex((host, int(port))) == 0


def test_a_process_that_is_told_to_end_does() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = ROOT / "docs" / "examples" / "serve_embeddings.py"
    options = ["--port", str(port), "--longest", "64", "--batch", "1", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(script), *options]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: process.poll() is not None or listens(f"http://127.0.0.1:{port}"))
            found = httpx.post(f"http://127.0.0.1:{port}/embed", json={"text": "hello"}, timeout=60)
            assert len(found.json()["embedding"]) == 64
            assert httpx.get(f"http://127.0.0.1:{port}/health").json() == {"status": "ok"}
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode in (0, -signal.SIGTERM)  # uvicorn raises the signal again when it is done
    assert "Traceback" not in errors


def test_limits_that_no_batch_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match="batch is a power of two, got 12"):
        Limits(batch=12)
