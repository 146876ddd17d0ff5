"""A load on the server of `serve_embeddings`: documents a second and the slowest answers, beside plain and compiled.

    python docs/examples/load_embeddings.py --requests 2000 --clients 64

Each engine has a server in a process of its own, on the loopback interface, and clients are in others. They get the
same texts in rounds, one engine after the other, in an order that is drawn anew in each round.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import httpx
import torch
import uvicorn

from demo.text import corpus
from embedding_engines import BucketedEngine, Encoder, Engine, Limits, PlainEngine, encoder_on
from serve_embeddings import application

ROUNDS = 5
PROCESSES = 4
"""The number of processes of clients: a single one can't ask as fast as a server answers."""

SPAWN = multiprocessing.get_context("spawn")

ENGINES: dict[str, Callable[[Encoder, Limits], Engine]] = {
    "plain": PlainEngine,
    "compiled": partial(PlainEngine, compiled=True),
    "bucketed": BucketedEngine,
}


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


def serve(name: str, device: str, limits: Limits, listening: socket.socket) -> None:
    """Serve by the engine of a name on a socket that listens, until a signal to end."""
    app = application(lambda: ENGINES[name](encoder_on(device, limits), limits), limits)
    uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=30)).run([listening])


@contextmanager
def serving(name: str, device: str, limits: Limits) -> Iterator[str]:
    """Serve by the engine of a name in a process of its own, on a free port; yield its address, warm or not yet."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        process = SPAWN.Process(target=serve, args=(name, device, limits, listening))
        process.start()
    try:
        yield address
    finally:
        process.terminate()
        process.join()


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


def run_load(address: str, texts: Sequence[str], clients: int) -> list[Answer]:
    """Run `load` to its end in this process."""
    return asyncio.run(load(address, texts, clients))


def texts_of(count: int, longest: int, seed: int = 0) -> list[str]:
    """Return definitions of the standard library, cut to a length, in an order drawn by the seed."""
    texts = [text[:longest].decode("ascii", "replace")[:longest] for text in corpus(1 << 20)]
    return random.Random(seed).choices([text for text in texts if len(text.encode()) <= longest], k=count)


def main() -> None:
    """Measure, and print a line an engine."""
    parser = argparse.ArgumentParser(description="Put a load on the embedding server.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=2000, help="of each engine in each round")
    parser.add_argument("--clients", type=int, default=64, help="requests that are under way at a time")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    options = parser.parse_args()
    limits = Limits(waiting=max(256, options.clients))
    texts = texts_of(options.requests, limits.longest)
    found: dict[str, list[list[Answer]]] = {name: [] for name in options.engines}
    seconds: dict[str, list[float]] = {name: [] for name in options.engines}
    order = random.Random(0)
    shares = [len(range(i, options.clients, PROCESSES)) for i in range(min(PROCESSES, options.clients))]
    with ExitStack() as stack:
        servers = {n: stack.enter_context(serving(n, options.device, limits)) for n in options.engines}
        for address in servers.values():
            httpx.get(f"{address}/health", timeout=600).raise_for_status()  # which waits until it is warm
        pool = stack.enter_context(ProcessPoolExecutor(PROCESSES, SPAWN))
        for turn in range(-1, ROUNDS):  # the first round starts connections and processes, and does not count
            for name in order.sample(options.engines, len(options.engines)):
                started = time.perf_counter()
                parts = [(servers[name], texts[i :: len(shares)], share) for i, share in enumerate(shares)]
                answers = [a for part in pool.map(run_load, *zip(*parts, strict=True)) for a in part]
                taken = time.perf_counter() - started
                if turn >= 0:
                    found[name].append(answers)
                    seconds[name].append(taken)
                print(f"round {turn + 1} of {ROUNDS}, {name}: {taken:.1f} s", file=sys.stderr, flush=True)
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
