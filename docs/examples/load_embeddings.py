"""A load on the server of `serve_embeddings`: documents a second and the slowest answers, beside plain and compiled.

    python docs/examples/load_embeddings.py --requests 2000 --clients 64

Each engine has a server of its own on the loopback interface. They get the same texts in rounds, one engine after the
other, in an order that is drawn anew in each round.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import torch
import uvicorn
from fastapi import FastAPI

from demo.text import corpus
from embedding_engines import BucketedEngine, Engine, Limits, PlainEngine, encoder_on
from serve_embeddings import application

ROUNDS = 5


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    Args:
        status: of HTTP.
        embedding: of the text; empty where there is none.
        seconds: from the request to the answer.
    """

    status: int
    embedding: list[float]
    seconds: float


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


async def ask(client: httpx.AsyncClient, text: str) -> Answer:
    """Ask for the embedding of a text."""
    started = time.perf_counter()
    response = await client.post("/embed", json={"text": text})
    embedding = response.json()["embedding"] if response.status_code == 200 else []
    return Answer(response.status_code, embedding, time.perf_counter() - started)


async def load(address: str, texts: Sequence[str], clients: int) -> list[Answer]:
    """Ask for the embeddings of texts.

    Args:
        address: of the server.
        texts: one a request.
        clients: requests that are under way at a time.

    Returns:
        the answers, in the order of the texts.
    """
    turns = asyncio.Semaphore(clients)
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:

        async def one(text: str) -> Answer:
            async with turns:
                return await ask(client, text)

        return list(await asyncio.gather(*(one(text) for text in texts)))


def texts_of(count: int, longest: int, seed: int = 0) -> list[str]:
    """Return definitions of the standard library, cut to a length, in an order drawn by the seed."""
    texts = [text[:longest].decode("ascii", "replace")[:longest] for text in corpus(1 << 20)]
    return random.Random(seed).choices([text for text in texts if len(text.encode()) <= longest], k=count)


def engines(device: str, limits: Limits) -> dict[str, Callable[[], Engine]]:
    """Return what makes each engine, by its name."""
    return {
        "plain": lambda: PlainEngine(encoder_on(device, limits), limits),
        "compiled": lambda: PlainEngine(encoder_on(device, limits), limits, compiled=True),
        "bucketed": lambda: BucketedEngine(encoder_on(device, limits), limits),
    }


def main() -> None:
    """Measure, and print a line an engine."""
    parser = argparse.ArgumentParser(description="Put a load on the embedding server.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=2000, help="of each engine in each round")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--engines", nargs="+", default=["plain", "compiled", "bucketed"])
    options = parser.parse_args()
    limits = Limits(waiting=max(256, options.clients))
    texts = texts_of(options.requests, limits.longest)
    found: dict[str, list[list[Answer]]] = {name: [] for name in options.engines}
    seconds: dict[str, list[float]] = {name: [] for name in options.engines}
    order = random.Random(0)
    with ExitStack() as stack:
        made = engines(options.device, limits)
        servers = {n: stack.enter_context(serving(application(made[n], limits)))[0] for n in options.engines}
        for turn in range(ROUNDS):
            for name in order.sample(options.engines, len(options.engines)):
                started = time.perf_counter()
                found[name].append(asyncio.run(load(servers[name], texts, options.clients)))
                seconds[name].append(time.perf_counter() - started)
                print(f"round {turn + 1} of {ROUNDS}, {name}: {seconds[name][-1]:.1f} s", file=sys.stderr, flush=True)
    for name, rounds in found.items():
        slowest = sorted(answer.seconds for answers in rounds for answer in answers)
        rates = sorted(len(texts) / taken for taken in seconds[name])
        failed = sum(answer.status != 200 for answers in rounds for answer in answers)
        print(
            f"{name:10} {statistics.median(rates):8.0f} documents/s ({rates[0]:.0f} to {rates[-1]:.0f})"
            f", p50 {1e3 * slowest[len(slowest) // 2]:.1f} ms, p99 {1e3 * slowest[int(0.99 * len(slowest))]:.1f} ms"
            f", {failed} without an answer"
        )


if __name__ == "__main__":
    main()
