"""The oracle of chunked tensors: the same program on plain tensors, in its dtype and in float64.

`check_chunked(program, tensors)` runs a program of named tensors in float64, which is the truth; on plain tensors; and
with some of them chunked. What rounding may do is measured: the plain program runs six times more, every result that
torch rounds moved by up to one rounding. Values and gradients of the chunked run may err by 1.5 times the largest error
of those plain runs, plus one rounding of the largest value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import subtensors as st
from subtensors.chunked.lazy_tensor import LazyTensor
from subtensors.dispatch.ops.op_classes import OpClass, op_class, overload_name
from subtensors.kernels.cross_entropy.logits_block import padded_rows

Program = Callable[..., Any]


def in_dtype(tensors: Mapping[str, Tensor], dtype: torch.dtype, needs: set[str]) -> dict[str, Tensor]:
    """Fresh leaves: floating tensors in a dtype, those named in `needs` requiring gradients."""
    return {
        name: (t.detach().to(dtype) if t.is_floating_point() else t).clone().requires_grad_(name in needs)
        for name, t in tensors.items()
    }


def run(
    program: Program, tensors: Mapping[str, Tensor], chunks: Mapping[str, dict[str, Any]]
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The program's results, and the gradients of a fixed weighted sum of them."""
    torch.manual_seed(0)
    values = {n: st.chunk(t, **chunks[n]) if n in chunks else t for n, t in tensors.items()}
    results = [r for r in optree.tree_leaves(program(**values)) if isinstance(r, Tensor)]
    dense = [r.realize() if isinstance(r, st.ChunkedTensor) else r for r in results]
    flowing = [r for r in dense if r.requires_grad]
    if flowing:
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r) for r in flowing]
        torch.autograd.backward(flowing, weights)
    return [r.detach() for r in dense], {n: t.grad for n, t in tensors.items()}


def error(actual: Tensor, truth: Tensor) -> float:
    """The largest error; places where both are the same infinity or NaN count as exact."""
    a, t = actual.detach().to(torch.float64), truth.detach().to(torch.float64)
    same = (a == t) | (a.isnan() & t.isnan())
    return float(torch.where(same, 0.0, (a - t).abs()).nan_to_num(nan=float("inf")).max()) if t.numel() else 0.0


def largest(truth: Tensor) -> float:
    """The largest finite magnitude."""
    finite = truth.detach().to(torch.float64).abs().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.max()) if finite.numel() else 0.0


def assert_as_exact(
    actual: Any, plain: Sequence[Any], truth: Any, what: str, passes: int = 1, scale: float = 0.0
) -> None:
    """Whether a tensor errs no more than plain torch's may; the first of `plain` is the run without moved roundings."""
    expected = plain[0]
    if expected is None:
        assert actual is None or not actual.any(), f"{what}: plain torch gives no gradient"
        return
    assert actual is not None, f"{what}: no gradient"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.device == expected.device
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual, expected), f"{what} differs"
        return
    rounding = torch.finfo(expected.dtype).eps
    allowed = passes * (1.5 * max(error(p, truth) for p in plain) + rounding * max(largest(truth), scale))
    found = error(actual, truth)
    assert found <= allowed, f"{what}: error {found:.3g}, and {allowed:.3g} is allowed"


def assert_errs_as_plain(found: Sequence[Any], plain: Sequence[Any], truth: Sequence[Any]) -> None:
    """Whether tensors err, all elements together, by 1.5 times what plain torch's do, and a rounding of the truth."""
    for place, (a, p, t) in enumerate(zip(found, plain, truth, strict=True)):
        assert (a.dtype, a.shape) == (p.dtype, p.shape)
        t = t.detach().double()
        mine, theirs = (float((x.detach().double() - t).norm()) for x in (a, p))
        allowed = 1.5 * theirs + torch.finfo(p.dtype).eps * float(t.norm())
        assert mine <= allowed, f"result {place}: error {mine:.3g}, and {allowed:.3g} is allowed"


_ROUNDED = {OpClass.POINTWISE, OpClass.CONTRACTION, OpClass.REDUCTION, OpClass.NORMALISATION, OpClass.SCAN}

_EXACT = frozenset("neg abs relu where clone fill copy amax amin max min any all maximum minimum masked_fill".split())


class Moved(TorchDispatchMode):
    """Moves every result that torch rounds by up to one rounding at random: each element apart, or all together.

    Args:
        seed: of the directions; odd ones move the elements of a result together.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if op_class(func) in _ROUNDED and overload_name(func).split(".")[0].strip("_") not in _EXACT:
            for t in optree.tree_leaves(out):
                if isinstance(t, Tensor) and t.is_floating_point() and t._base is None and t.numel():
                    self.move(t)
        return out

    def move(self, t: Tensor) -> None:
        """Move the values of a tensor in place."""
        if t.device not in self.generators:
            self.generators[t.device] = torch.Generator(t.device).manual_seed(self.seed)
        wide = t.detach().to(torch.float64)
        # Together: errors of one sign add up, as those of a kernel that rounds otherwise may.
        sizes = [1] * t.ndim if self.seed % 2 else t.shape
        noise = torch.rand(sizes, generator=self.generators[t.device], dtype=torch.float64, device=t.device) * 2 - 1
        noise = noise.sign() if self.seed % 2 else noise
        moved = wide + noise * wide * torch.finfo(t.dtype).eps
        with torch.no_grad():
            t.copy_(torch.where(wide.isfinite(), moved, wide))


def check_chunked(
    program: Program,
    tensors: Mapping[str, Tensor],
    chunks: Mapping[str, dict[str, Any]],
    *,
    dtype: torch.dtype = torch.float32,
    needs: set[str] | None = None,
    passes: int = 1,
    scale: float = 0.0,
) -> None:
    """Compare a program's results and gradients, chunked, with those on plain tensors.

    Args:
        program: called with the tensors by name; returns tensors in any nest.
        tensors: values; floating ones are taken to `dtype`.
        chunks: for each name to be chunked, the arguments of `st.chunk`.
        dtype: what both runs compute in.
        needs: names whose gradients are wanted; all floating tensors by default.
        scale: the size of values that may cancel out: one rounding of it is allowed, too.
        passes: how often the region is gone through; each pass rounds gradients that autograd then adds.
    """
    rounded = {n: t.detach().to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    needs = {n for n, t in tensors.items() if t.is_floating_point()} if needs is None else needs
    truth, truth_grads = run(program, in_dtype(rounded, torch.float64, needs), {})
    plain = [run(program, in_dtype(rounded, dtype, needs), {})]
    for seed in range(6):
        with Moved(seed):
            plain.append(run(program, in_dtype(rounded, dtype, needs), {}))
    found, grads = run(program, in_dtype(rounded, dtype, needs), chunks)
    assert len(found) == len(truth)
    for place in range(len(found)):
        assert_as_exact(found[place], [p[0][place] for p in plain], truth[place], f"result {place}", passes, scale)
    for name in tensors:
        assert_as_exact(
            grads[name], [p[1][name] for p in plain], truth_grads[name], f"gradient of {name}", passes, scale
        )


def check_results(
    found: Sequence[Any], program: Callable[[dict[str, Tensor]], Sequence[Any]], tensors: Mapping[str, Tensor]
) -> None:
    """Compare results, gradients among them, with those of a plain program of named tensors.

    Args:
        found: the results in question.
        program: gives the plain ones; called with fresh leaves.
        tensors: values; those that require a gradient do so in every run.
    """
    needs = {n for n, t in tensors.items() if t.requires_grad}
    dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
    truth = program(in_dtype(tensors, torch.float64, needs))
    plain = [program(in_dtype(tensors, dtype, needs))]
    for seed in range(6):
        with Moved(seed):
            plain.append(program(in_dtype(tensors, dtype, needs)))
    assert len(found) == len(truth)
    for place, actual in enumerate(found):
        assert_as_exact(actual, [p[place] for p in plain], truth[place], f"result {place}")


class Allocations(TorchDispatchMode):
    """Notes the size of the largest tensor that an op makes, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _plain((args, kwargs))}
        for t in _plain(out):
            if t.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return out


def _plain(tree: Any) -> list[Tensor]:
    """The tensors with memory of their own."""
    found = [t for t in optree.tree_leaves(tree) if isinstance(t, Tensor) and not isinstance(t, LazyTensor)]
    return [t for t in found if t.device.type != "meta"]


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Watch what ops make, in forward and in backward."""
    with Allocations() as seen:
        yield seen


class Doubled(torch.autograd.Function):
    """Two times a tensor, by a function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def linear_case(rows: int = 12, hidden: int = 6, vocab: int = 20, seed: int = 0) -> dict[str, Tensor]:
    """Hidden states, a head with its bias, and targets."""
    g = torch.Generator().manual_seed(seed)
    return {
        "h": torch.randn(rows, hidden, generator=g),
        "w": torch.randn(vocab, hidden, generator=g),
        "b": torch.randn(vocab, generator=g),
        "target": torch.randint(0, vocab, (rows,), generator=g),
    }


def loss_and_gradients(program: Callable[..., Tensor], t: dict[str, Tensor]) -> list[Any]:
    """What a program gives for named tensors, and the gradients of those that want one."""
    leaves = [x for x in t.values() if x.requires_grad]
    for x in leaves:
        x.grad = None
    loss = program(**t)
    loss.backward()
    return [loss.detach(), *(x.grad for x in leaves)]


def chunking(program: Callable[..., Tensor], **division: Any) -> Callable[..., Tensor]:
    """A program of hidden states `h`, which it makes, and marks as chunked."""

    def chunked(h: Tensor, **others: Tensor) -> Tensor:
        return program(h=st.chunk(torch.sin(h), **division), **others)

    return chunked


def plainly(program: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What `chunking` makes, without chunks."""
    return lambda h, **others: program(h=torch.sin(h), **others)


ROWS, WIDTH, CLASSES = 24, 6, 40


class Products(TorchDispatchMode):
    """Counts products of all rows, the width and all classes, by their multiplications."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplications = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[:2] if packet is torch.ops.aten.mm else args[1:3]
            if not isinstance(a, st.ChunkedTensor) and a.device.type != "meta":
                self.multiplications += a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> float:
        return self.multiplications / (ROWS * WIDTH * CLASSES)


def linear_tensors() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    sizes = {"h": (ROWS, WIDTH), "w": (CLASSES, WIDTH), "v": (CLASSES, WIDTH)}
    leaves = {name: torch.randn(*size, generator=g).requires_grad_() for name, size in sizes.items()}
    return {**leaves, "target": torch.randint(0, CLASSES, (ROWS,), generator=g)}


def class_by_class(logits: Tensor) -> Tensor:
    """The same logits, those of a class adjacent, in memory that is NaN elsewhere."""
    memory = torch.full((logits.shape[1], padded_rows(logits.shape[0])), torch.nan, dtype=logits.dtype)
    found = memory.to(logits.device)[:, : logits.shape[0]].t()
    return found.copy_(logits)
