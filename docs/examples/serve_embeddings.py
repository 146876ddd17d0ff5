"""A server of text embeddings: an encoder behind FastAPI, with batches that form while the device is busy.

    pip install ".[serve]"
    python docs/examples/serve_embeddings.py --port 8000
    curl -X POST localhost:8000/embed -H 'content-type: application/json' -d '{"text": "hello"}'

Texts that wait are taken together: those of one bucket of lengths, up to a batch. They are a ragged PaddedTensor, so
the encoder needs no mask, and each shape of a batch (a power of two by a bucket of lengths) is one CUDA graph, captured
before the first request.

A text that is too long gets 413, one that comes while too many wait 503, and a signal to end lets those in, and only
those, have their answers. `/metrics` has what `stats()` of the runner says, for Prometheus.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from pydantic import BaseModel, Field
from torch import Tensor

from embedding_engines import BucketedEngine, Engine, Limits, encoder_on


class OverloadedError(Exception):
    """Too many texts wait, or the server ends."""


@dataclass
class Waiting:
    """A text that waits for its embedding."""

    text: Tensor
    since: float
    result: asyncio.Future[list[float]]


class Batcher:
    """Texts that wait, by bucket of lengths, and the task that hands them to an engine in batches.

    A batch has the texts of the bucket whose first text waits longest. Rows that its size has beyond these are for
    texts of shorter buckets.

    Args:
        engine: called in a thread of its own.
        limits: how many wait, and for how long.
        registry: of the metrics.
    """

    def __init__(self, engine: Engine, limits: Limits, registry: CollectorRegistry) -> None:
        self.engine, self.limits = engine, limits
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self.buckets = [deque[Waiting]() for _ in range(-(-limits.longest // limits.bucket))]
        self.is_closing = False
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.rows = Histogram("batch_texts", "texts of a batch", buckets=[1, 2, 4, 8, 16, 32], registry=registry)
        waits = Gauge("waiting_texts", "texts that wait for a batch", registry=registry)
        waits.set_function(self.count)

    def count(self) -> int:
        """Return how many texts wait."""
        return sum(map(len, self.buckets))

    async def start(self) -> None:
        """Warm the engine up, and begin."""
        await self.in_thread(self.engine.warmup)
        self._task = asyncio.create_task(self._serve())

    async def submit(self, text: Tensor) -> list[float]:
        """Return the embedding of a text, (length,) int64.

        Raises:
            OverloadedError: too many texts wait, or the server ends.
        """
        if self.is_closing or self.count() >= self.limits.waiting:
            raise OverloadedError
        waiting = Waiting(text, time.monotonic(), asyncio.get_running_loop().create_future())
        self.buckets[(len(text) - 1) // self.limits.bucket].append(waiting)
        self._arrived.set()
        return await waiting.result

    async def close(self) -> None:
        """Take no more texts, answer those that wait, and release the engine."""
        self.is_closing = True
        self._arrived.set()
        if self._task is not None:
            await self._task
        await self.in_thread(self.engine.release)
        self.thread.shutdown()

    async def in_thread(self, call: Callable[[], object]) -> object:
        """Call in the engine's thread, which is the only one that uses the device."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, call)

    async def _serve(self) -> None:
        while self.count() or not self.is_closing:
            if not self.count():
                self._arrived.clear()
                await self._arrived.wait()
                continue
            if self.count() < self.limits.batch and not self.is_closing:
                await asyncio.sleep(self.limits.wait_ms / 1e3)
            batch = self._take()
            self.rows.observe(len(batch))
            texts = [waiting.text for waiting in batch]
            try:
                found = await asyncio.get_running_loop().run_in_executor(self.thread, self.engine.embed, texts)
                answers = list(zip(batch, found, strict=True))
            except Exception as error:  # each of the batch raises it; the server goes on
                for waiting in batch:
                    if not waiting.result.done():
                        waiting.result.set_exception(error)
                continue
            for waiting, embedding in answers:
                if not waiting.result.done():  # it is, where the client has gone
                    waiting.result.set_result(embedding)

    def _take(self) -> list[Waiting]:
        """Remove the texts of the next batch."""
        first = min((i for i, bucket in enumerate(self.buckets) if bucket), key=lambda i: self.buckets[i][0].since)
        batch: list[Waiting] = []
        for bucket in reversed(self.buckets[: first + 1]):
            rows = self.limits.batch if bucket is self.buckets[first] else 1 << (len(batch) - 1).bit_length()
            while bucket and len(batch) < rows:
                batch.append(bucket.popleft())
        return batch


class Text(BaseModel):
    """The body of a request."""

    text: str = Field(min_length=1)


def application(make_engine: Callable[[], Engine], limits: Limits) -> FastAPI:
    """Return the server's application.

    Args:
        make_engine: called when the server begins.
        limits: what it takes.
    """
    registry = CollectorRegistry()
    requests = Counter("requests", "requests for an embedding, by status", ["status"], registry=registry)
    seconds = Histogram("request_seconds", "from a text that is taken to its embedding", registry=registry)
    batcher = Batcher(make_engine(), limits, registry)
    longest_body = 6 * limits.longest + 1024  # JSON may write a byte as \u0000

    class EngineCollector:
        """The engine's metrics, for the registry."""

        def collect(self) -> Iterable[Metric]:
            return batcher.engine.metrics()

    registry.register(EngineCollector())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await batcher.start()
        yield
        await batcher.close()

    app = FastAPI(title="embeddings", lifespan=lifespan)
    app.state.batcher = batcher

    @app.middleware("http")
    async def bounded(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        """Refuse a body that no text can need before it is read, and count the answers."""
        length = request.headers.get("content-length", "")
        status = 500
        try:
            if request.method != "POST" or (length.isdecimal() and int(length) <= longest_body):
                response = await answer(request)
            else:
                said = f"a body says its content-length, of {longest_body} at most"
                response = Response(said, status_code=413 if length.isdecimal() else 411)
            status = response.status_code
        finally:
            if request.url.path == "/embed":
                requests.labels(str(status)).inc()
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        """Refuse a body that is no text, without the body: half a surrogate pair can't be sent back."""
        return Response('a body is {"text": ...}, with a text that is not empty', status_code=422)

    @app.post("/embed")
    async def embed(body: Text) -> dict[str, list[float]]:
        """Return the embedding of a text."""
        encoded = body.text.encode()
        if len(encoded) > limits.longest:
            raise HTTPException(413, f"a text has {limits.longest} bytes at most, and this one has {len(encoded)}")
        began = time.monotonic()
        try:
            found = await batcher.submit(torch.frombuffer(bytearray(encoded), dtype=torch.uint8).long())
        except OverloadedError:
            raise HTTPException(503, "too many texts wait", headers={"Retry-After": "1"}) from None
        seconds.observe(time.monotonic() - began)
        return {"embedding": found}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return all metrics in the text format of Prometheus; read between two batches."""
        text = await batcher.in_thread(lambda: generate_latest(registry))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Say that the server is up, and takes texts."""
        if batcher.is_closing:
            raise HTTPException(503, "the server ends")
        return {"status": "ok"}

    return app


def main() -> None:
    """Serve until a signal to end."""
    parser = argparse.ArgumentParser(description="Serve embeddings of texts.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--longest", type=int, default=Limits.longest, help="bytes of the longest text")
    parser.add_argument("--batch", type=int, default=Limits.batch, help="texts of the largest batch, a power of two")
    options = parser.parse_args()
    limits = Limits(longest=options.longest, batch=options.batch)
    app = application(lambda: BucketedEngine(encoder_on(options.device, limits), limits), limits)
    uvicorn.run(app, host=options.host, port=options.port, timeout_graceful_shutdown=30, log_level="warning")


if __name__ == "__main__":
    main()
