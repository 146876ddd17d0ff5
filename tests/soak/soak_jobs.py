"""The jobs of a soak: each goes once round one part of the library, and compares with plain torch in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from reordered_sums import orders
from torch import Tensor, nn
from torch.nn import functional as F

import subtensors as st

FLOATS = (torch.float32, torch.bfloat16)
LENGTHS = st.Dim("length", max=48, buckets=16)

Job = Callable[[], None]
"""One round of a job, whose shapes, dtype and program were drawn when it was made."""


def plain_runs(run: Callable[[], Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return what a program of plain torch gives, in several orders of addition."""
    found = []
    for order in orders():
        with order:
            found.append([x.detach() for x in run()])
    return found


def compare(
    name: str, ours: Sequence[Tensor], plain: Sequence[Sequence[Tensor]], truth: Sequence[Tensor], parts: int = 1
) -> None:
    """Raise AssertionError unless errors are at most 1.5 times plain torch's own, and four roundings for each part.

    Args:
        name: of the job.
        ours: the values that the library gives.
        plain: those of plain torch, in several orders of addition.
        truth: those in float64. What cancels in a small one is as large as the largest of them.
        parts: the number of parts, each rounded, that are added up.
    """
    size = max(float(x.detach().norm()) for x in truth)
    for i, (mine, exact) in enumerate(zip(ours, truth, strict=True)):
        assert mine.shape == exact.shape, f"{name}, value {i}: {tuple(mine.shape)}, and it is {tuple(exact.shape)}"
        error, *usual = (float((x.detach().double() - exact.detach()).norm()) for x in (mine, *(p[i] for p in plain)))
        allowed = 1.5 * max(usual) + 4 * parts * torch.finfo(mine.dtype).eps * size
        assert error <= allowed, f"{name}, value {i}: an error of {error:.3g}, and torch's own is {max(usual):.3g}"


def _gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return the result of a function of tensors, and its gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = function(*leaves)
    return [result, *torch.autograd.grad(result.sum(), leaves)]


STEPS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.softmax(1),
    lambda x: x - x.mean(1, keepdim=True),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x * torch.sigmoid(x),
    lambda x: x.cumsum(1) / 8,
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: x / (1 + x.amax(1, keepdim=True).abs()),
)


def padded(draw: random.Random, device: str) -> Job:
    """A program over a PaddedTensor, with gradients."""
    program, dtype = draw.choices(STEPS, k=3), draw.choice(FLOATS)
    shape = draw.randint(1, 4), draw.randint(1, 48), draw.randint(2, 24)

    def run(x: Tensor) -> Tensor:
        for step in program:
            x = step(x)
        return x

    def job() -> None:
        x = torch.randn(shape, dtype=dtype, device=device)
        ours = _gradients(lambda x: run(st.pad(x, {1: LENGTHS})).unpad(), x)
        compare("padded", ours, plain_runs(lambda: _gradients(run, x)), _gradients(run, x.double()))

    return job


@st.fused
def _decay(p: Tensor, g: Tensor, *, rate: float) -> None:
    p.mul_(1 - rate).sub_(rate * g * g.sigmoid())


def lists(draw: random.Random, device: str) -> Job:
    """Mapped and fused math, and a norm, over a TensorList."""
    shapes = [[draw.randint(1, 40) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 9))]
    dtype, packed = draw.choice(FLOATS), draw.random() < 0.5

    def job() -> None:
        p, g = ([torch.randn(shape, dtype=dtype, device=device) for shape in shapes] for _ in range(2))
        mine = st.TensorList([t.clone() for t in p])
        mine = mine.pack() if packed else mine
        rate = draw.random()
        _decay(mine, st.TensorList(g), rate=rate)
        mine = (mine * 2).tanh()

        def plain(p: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
            decayed = [(a.mul(1 - rate).sub(rate * b * b.sigmoid()) * 2).tanh() for a, b in zip(p, g, strict=True)]
            return [*decayed, torch.nn.utils.get_total_norm(g)]

        exact = plain([t.double() for t in p], [t.double() for t in g])
        compare("lists", [*mine, st.total_norm(g)], plain_runs(lambda: plain(p, g)), exact)

    return job


def chunked(draw: random.Random, device: str) -> Job:
    """A loss over chunks of rows, with gradients."""
    rows, width, classes = draw.randint(2, 64), draw.randint(2, 24), draw.randint(2, 80)
    dtype, chunks = draw.choice(FLOATS), draw.randint(1, 5)

    def loss(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), target)

    def job() -> None:
        h, w = (torch.randn(n, width, dtype=dtype, device=device) for n in (rows, classes))
        target = torch.randint(classes, (rows,), device=device)
        ours = _gradients(lambda h, w: loss(st.chunk(h, chunks=chunks), w, target), h, w)
        plain = plain_runs(lambda: _gradients(lambda h, w: loss(h, w, target), h, w))
        truth = _gradients(lambda h, w: loss(h, w, target), h.double(), w.double())
        compare("chunked", ours, plain, truth, parts=chunks)

    return job


def static(draw: random.Random, device: str) -> Job:
    """Tensors of an arena that is released and restored, and static ones."""
    shapes = [[draw.randint(1, 64), draw.randint(1, 64)] for _ in range(draw.randint(1, 5))]
    arena = st.Arena(device, reserve="1GiB")

    def job() -> None:
        values = [torch.randn(shape, device=device) for shape in shapes]
        kept = [arena.static(t) for t in values]
        addresses = [t.data_ptr() for t in kept]
        arena.release()
        arena.restore()
        assert addresses == [t.data_ptr() for t in kept], "static: an address moved"
        for t, value in zip(kept, values, strict=True):
            assert torch.equal(t, value), "static: a value changed"
            assert torch.equal(st.static(value) + 1, value + 1), "static: a sum is wrong"

    return job


class Model(nn.Module):
    """A small program over texts of any length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu().mean(1))


def bucketed(draw: random.Random, device: str) -> Job:
    """A bucketed program, replayed and trained."""
    width, rows = draw.randint(2, 16), draw.randint(1, 4)
    model = Model(width).to(device)
    exact = Model(width).to(device).double()
    exact.load_state_dict(model.state_dict())
    run = st.bucketed(model, {"x": {1: LENGTHS}})
    lengths = itertools.cycle([draw.randint(1, 48) for _ in range(3)])

    def job() -> None:
        x = torch.randn(rows, next(lengths), width, device=device)
        with torch.no_grad():
            compare("bucketed", [run(x)], plain_runs(lambda: [model(x)]), [exact(x.double())])

        def gradients(program: Callable[..., Tensor], module: nn.Module, x: Tensor) -> Sequence[Tensor]:
            return torch.autograd.grad(program(x).sum(), list(module.parameters()))

        plain = plain_runs(lambda: gradients(model, model, x))
        compare("bucketed gradients", gradients(run, model, x), plain, gradients(exact, exact, x.double()))

    job.pool_bytes = lambda: run.stats().pool_bytes
    return job


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "RMSprop": {"lr": 1e-2},
    "Adagrad": {"lr": 1e-2},
}


def optimizers(draw: random.Random, device: str) -> Job:
    """Steps of a new optimizer, on a GPU captured."""
    name = draw.choice(sorted(OPTIMIZERS))
    shapes = [[draw.randint(1, 30), draw.randint(1, 30)] for _ in range(draw.randint(1, 6))]
    captured = draw.random() < 0.5

    def stepped(cls: Any, start: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], captured: bool) -> Any:
        weights = [nn.Parameter(t.clone()) for t in start]
        opt = cls(weights, **OPTIMIZERS[name])
        if captured:
            opt.capture()
        for each in gradients:
            for w, g in zip(weights, each, strict=True):
                w.grad = g.to(w.dtype)
            opt.step()
        return weights

    def job() -> None:
        start = [torch.randn(shape, device=device) for shape in shapes]
        gradients = [[torch.randn_like(t) for t in start] for _ in range(4)]
        ours = stepped(getattr(st.optim, name), start, gradients, captured)
        plain = plain_runs(lambda: stepped(getattr(torch.optim, name), start, gradients, False))
        truth = stepped(getattr(torch.optim, name), [t.double() for t in start], gradients, False)
        compare(f"optim.{name}", ours, plain, truth)

    return job


KINDS: tuple[Callable[[random.Random, str], Job], ...] = (padded, lists, chunked, static, bucketed, optimizers)


def jobs(seed: int, device: str, variety: int, kinds: Collection[str] = ()) -> list[Job]:
    """Draw jobs of every kind, or of some.

    Args:
        seed: of the draw.
        device: where they run.
        variety: how many of each kind.
        kinds: names of kinds; none: all.

    Raises:
        ValueError: a name is that of no kind.
    """
    draw, known = random.Random(seed), {kind.__name__: kind for kind in KINDS}
    if unknown := [*set(kinds) - set(known)]:
        raise ValueError(f"kinds are {', '.join(known)}; got {', '.join(unknown)}")
    return [known[name](draw, device) for _ in range(variety) for name in known if not kinds or name in kinds]
