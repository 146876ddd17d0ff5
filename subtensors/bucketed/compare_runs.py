"""Comparison of two runs of a program, with rounding told apart from wrong numbers.

Two right programs differ by rounding: sums over padded rows are added in another order. A few units in the last place
of a tensor's largest value are always tolerated. Beyond that, what rounding may do to this program is measured: runs of
the plain program whose parameters, arguments and cotangents are moved by up to a unit in the last place differ from it
as much as rounding makes them, and so does one without TF32, which a kernel for another shape may use or not. The unit
is that of the coarsest dtype that the program computes in, as bfloat16 under its own autocast; that of gradients and
of what is written, too, since sums of many products that cancel lose more than their own dtype says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from subtensors.bucketed.call_key import flatten_result_objects
from subtensors.dispatch.graphs.released_tensors import ReleasedTensor
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.true_sizes import TrueSizes, rows_symbol
from subtensors.dispatch.sizes.dim_factors import static
from subtensors.padded.padded_tensor import PaddedTensor, make_padded

TOLERATED_UNITS = 16
"""The difference that is always tolerated, in units in the last place of the largest value."""

NOISE_FACTOR = 8
"""The difference that is tolerated, as a multiple of that between runs that are moved by a unit."""

NOISE_RUNS = 3
"""The number of runs that tell how far rounding may go, if a difference might be that: two moved, one without TF32."""

RESULT, GRADIENT, WRITTEN = "result", "gradient of ", "written "

Observed: TypeAlias = dict[str, PyTree]
"""The values that a run computed, by name: copies of its results, of gradients, and of tensors that it wrote to."""


@dataclass(frozen=True)
class CheckReport:
    """A bucketed call beside the plain program.

    Args:
        sizes: the call's true sizes, by Dim.
        difference: the first difference; "" if there is none.
        not_checked: the reason why nothing was compared; "" if it was.
        lines: `file:line: message` for each line of the program that computed with a padded size, if they differ.

    Example:
        >>> import subtensors as st
        >>> run = st.bucketed(lambda x: x.sum(1), {"x": {1: st.Dim("n", max=8, buckets=4)}})
        >>> run.check(torch.ones(2, 3)).passed
        True
    """

    sizes: Mapping[str, int]
    difference: str = ""
    not_checked: str = ""
    lines: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if the results were compared and agree."""
        return not self.difference and not self.not_checked

    def __str__(self) -> str:
        at = ", ".join(f"{name}={size}" for name, size in self.sizes.items()) or "no Dim"
        if self.not_checked:
            return f"not checked at {at}: {self.not_checked}"
        found = f"differs: {self.difference}" if self.difference else "passed: the same as the plain program"
        return "\n".join([f"{found}, at {at}", *(f"  {line}" for line in self.lines)])


def observe(
    result: PyTree,
    given: Sequence[PyTree],
    inputs: Mapping[str, Tensor],
    written: Mapping[str, Tensor],
    unit: float = 0.0,
    seed: int = 0,
    keeps_graph: bool = False,
) -> Observed:
    """Copy what a run computed.

    Args:
        result: of the program, any pytree.
        given: the program's arguments.
        inputs: the tensors whose gradients are taken, by name; for the same random cotangents in each run.
        written: the tensors that the program may have written to, by name.
        unit: how far the cotangents are moved, as a fraction of each.
        seed: chooses the direction in which they are moved.
        keeps_graph: leave the autograd graph of the results to the caller.
    """
    opened = flatten_result_objects(result, {id(x) for x in given})
    results = {f"{RESULT}{pytree.keystr(path)}": x for path, x in pytree.tree_flatten_with_path(opened)[0]}
    observed = _copies(results)
    roots = [x for x in results.values() if isinstance(x, Tensor) and x.requires_grad]
    if roots and inputs:
        cotangents = [moved(_random_like(root, 0), unit, seed) for root in roots]
        # On this thread, which holds the runner's lock: the backward of a replay takes it, too.
        with torch.autograd.set_multithreading_enabled(False):
            wanted = [*inputs.values()]
            found = torch.autograd.grad(roots, wanted, cotangents, retain_graph=keeps_graph, allow_unused=True)
        observed |= _copies({f"{GRADIENT}{name}": g for name, g in zip(inputs, found, strict=True)})
    return observed | _copies({f"{WRITTEN}{name}": t for name, t in written.items()})


def _copies(values: Mapping[str, PyTree]) -> Observed:
    """Return copies of values, of a ragged one those of its rows."""
    found: Observed = {}
    for name, x in values.items():
        plain = x.unpad() if isinstance(x, PaddedTensor) else x
        rows = {f"{name}[{i}]": row for i, row in enumerate(plain)} if isinstance(plain, list) else {name: plain}
        found |= {place: t.detach().clone() if isinstance(t, Tensor) else t for place, t in rows.items()}
    return found


def _random_like(t: Tensor, seed: int) -> Tensor:
    """Return normal numbers that depend on the shape and the seed alone, without a draw from torch's own generators."""
    generator = torch.Generator(t.device).manual_seed(1000 * seed + t.numel())
    return torch.randn(t.shape, generator=generator, device=t.device, dtype=torch.float32).to(t.dtype)


def moved(t: Tensor, unit: float, seed: int) -> Tensor:
    """Return a tensor of floats whose numbers are moved by up to `unit` times themselves; others as they are."""
    if not unit or not (t.is_floating_point() or t.is_complex()):
        return t
    shift = t.detach().abs() if t.is_floating_point() else t.detach()
    out = t.detach() + shift * _random_like(t, seed + 1).real.clamp(-1, 1) * unit
    return out.requires_grad_(t.requires_grad)


def unit_in_the_last_place(values: Iterable[PyTree], dtypes: Collection[torch.dtype]) -> float:
    """Return the coarsest precision that a program rounds to.

    Args:
        values: the tensors that it reads, among others.
        dtypes: of what its functions return.
    """
    found = {x.dtype for x in values if isinstance(x, Tensor)}.union(dtypes)
    each = (torch.finfo(dtype).eps for dtype in found if dtype.is_floating_point)
    return max(each, default=torch.finfo(torch.float32).eps)


def all_zero(values: Mapping[int, PyTree]) -> dict[int, Tensor]:
    """Return the dense tensors of floats that have elements, and all are zero; wait for each device once."""
    found = {name: x for name, x in values.items() if isinstance(x, Tensor) and _can_be_read(x)}
    are_any = {name: x.detach().any() for name, x in found.items()}
    by_kind: dict[object, list[int]] = {}
    for name, is_any in are_any.items():
        by_kind.setdefault(is_any.device if type(is_any) is Tensor else name, []).append(name)
    zeros: set[int] = set()
    for names in by_kind.values():
        each = torch.stack([are_any[name] for name in names]).tolist() if len(names) > 1 else [bool(are_any[names[0]])]
        zeros.update(name for name, is_any in zip(names, each, strict=True) if not is_any)
    return {name: x for name, x in found.items() if name in zeros}


def _can_be_read(x: Tensor) -> bool:
    if isinstance(x, (PaddedTensor, ReleasedTensor)) or not x.is_floating_point():
        return False
    return x.layout is torch.strided and not x.is_meta and x.itemsize > 1 and x.numel() > 0


def filled(t: Tensor) -> Tensor:
    """Return positive random numbers of a tensor's shape."""
    return (_random_like(t, -1).abs() + 0.5).requires_grad_(t.requires_grad)


def uniform_batches(leaves: Iterable[PyTree]) -> list[PyTree]:
    """Return arguments with ragged batches replaced by batches of one length, for which there is a plain tensor."""
    made: dict[int, TrueSizes] = {}
    found = []
    for x in leaves:
        sizes = x._sizes if isinstance(x, PaddedTensor) else None
        if isinstance(x, PaddedTensor) and sizes is not None and sizes.rows is not None:
            longest = [n if isinstance(n, int) else max(n) for n in sizes.host()]
            host = tuple(max(min(n, bucket - 1), 1) for n, bucket in zip(longest, sizes.buckets, strict=True))
            values = torch.tensor(host, dtype=torch.int64, device=sizes.values.device)
            own = made.setdefault(id(sizes), TrueSizes(sizes.symbols, sizes.buckets, values, host))
            dims = [[static(f.bucket) if f.size == rows_symbol() else f for f in factors] for factors in x._dims]
            x = make_padded(PaddedValue(x._dense.detach(), tuple(map(tuple, dims)), own))
        found.append(x)
    return found


class WithoutDropout(TorchFunctionMode):
    """A mode in which dropout, also that of attention, returns what it is given."""

    def __torch_function__(
        self, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if name == "multi_head_attention_forward":  # which calls functions that the mode does not see
            kwargs = kwargs | {"training": False}
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = kwargs | {"dropout_p": 0.0}
        return func(*args, **kwargs)


@contextmanager
def full_float32() -> Iterator[None]:
    """A context in which float32 products and convolutions run without TF32, which rounds their operands."""
    cudnn = torch.backends.cudnn
    backends = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)  # type: ignore[attr-defined]
    before = [getattr(backend, "fp32_precision") for backend in backends]  # noqa: B009  # no stub has it
    try:
        for backend in backends:
            setattr(backend, "fp32_precision", "ieee")  # noqa: B010
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            setattr(backend, "fp32_precision", precision)  # noqa: B010


def first_difference(
    got: Observed,
    want: Observed,
    unit: float,
    moved_run: Callable[[int], Observed | None],
    known: dict[str, float] | None = None,
) -> str:
    """Return the first difference between two runs in words, or "".

    Args:
        got: what the bucket gave.
        want: what the plain program gave.
        unit: the precision, as of `unit_in_the_last_place`.
        moved_run: runs the plain program moved by a unit, in a direction by number; None if that can't be done.
        known: by how much each value differed in such runs at other sizes, over its scale; grows. A difference of less
            than a unit is held against it, and a larger one against runs at these sizes.
    """
    known = {} if known is None else known
    if [*got] != [*want]:
        return f"it returns {', '.join(got) or 'nothing'} where the program returns {', '.join(want) or 'nothing'}"
    noise: Mapping[str, float] | None = None
    scales = _scales(want)
    for name, expected in want.items():
        least = unit if name.startswith((GRADIENT, WRITTEN)) else 0.0
        remembered = min(known.get(name, 0.0), unit / NOISE_FACTOR) * scales[name]
        found = _compare(got[name], expected, least, scales[name], remembered)
        if found and found.may_be_rounding:
            if noise is None:
                noise = _noise(map(moved_run, range(NOISE_RUNS)), want)
                known |= {n: max(known.get(n, 0.0), noise[n] / scale) for n, scale in scales.items() if scale}
            found = _compare(got[name], expected, least, scales[name], noise[name])
        if found:
            return f"{name} {found.words}"
    return ""


def _noise(runs: Iterable[Observed | None], want: Observed) -> dict[str, float]:
    """Return for each value by how much it differs in some runs at most, of which one is kept at a time."""
    found = dict.fromkeys(want, 0.0)
    for run in runs:
        for name, x in (run or {}).items():
            if name in want:
                found[name] = max(found[name], _error(x, want[name]))
    return found


def _scales(want: Observed) -> dict[str, float]:
    """Return for each value the largest magnitude that its rounding errors come from.

    A result is its own scale. Gradients, and values that are written, may be sums that cancel: these have the largest
    one of their kind.
    """
    own = {name: _largest(x) for name, x in want.items()}
    kinds = {
        kind: max((scale for name, scale in own.items() if name.startswith(kind)), default=0.0)
        for kind in (GRADIENT, WRITTEN)
    }
    return {
        name: next((largest for kind, largest in kinds.items() if name.startswith(kind)), scale)
        for name, scale in own.items()
    }


def _largest(x: PyTree) -> float:
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return 0.0
    if x.layout != torch.strided or x.is_meta:
        return 0.0
    finite = x.abs()[x.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


@dataclass(frozen=True)
class _Difference:
    words: str
    may_be_rounding: bool = False


def _compare(got: PyTree, want: PyTree, unit: float, scale: float, noise: float) -> _Difference | None:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return None if _is_same(got, want) else _Difference(f"is {got!r:.60}, and {want!r:.60} in the program")
    if got.shape != want.shape or got.dtype != want.dtype:
        ours, theirs = (f"{str(x.dtype)[6:]}{[*x.shape]}" for x in (got, want))
        return _Difference(f"is {ours}, and {theirs} in the program")
    is_exact = not (want.is_floating_point() or want.is_complex())
    error, allowed = _error(got, want), NOISE_FACTOR * noise
    if not is_exact:
        allowed += TOLERATED_UNITS * max(unit, torch.finfo(want.dtype).eps) * scale
    if error <= allowed:
        return None
    if is_exact:
        return _Difference(f"differs in {error:.0f} of {want.numel()} places", may_be_rounding=True)
    return _Difference(f"differs by {error:.3g}, of {_largest(want):.3g} at most", may_be_rounding=error != torch.inf)


def _error(got: PyTree, want: PyTree) -> float:
    """Return the largest difference, infinite if NaN or infinities stand in other places; 0 for what is not alike.

    Of integers and bools, of which rounding may change some, such as the indices of a maximum, it is their number.
    """
    if not isinstance(want, Tensor) or not isinstance(got, Tensor) or got.shape != want.shape:
        return 0.0
    if got.layout != torch.strided or not want.numel() or want.is_meta:
        return 0.0
    if not (want.is_floating_point() or want.is_complex()):
        return float((got != want).sum())
    wide = torch.complex128 if want.is_complex() else torch.float64
    ours, theirs = got.to(wide), want.to(wide)
    error = torch.where((ours == theirs) | (ours.isnan() & theirs.isnan()), 0.0, (ours - theirs).abs())
    return float(error.nan_to_num(nan=torch.inf).max())


def _is_same(got: PyTree, want: PyTree) -> bool:
    """Compare what is no tensor: plain values by value; objects of the user's, which may have no comparison, never."""
    if isinstance(want, float) and isinstance(got, float):
        return got == want or abs(got - want) <= 1e-5 * abs(want) or (got != got and want != want)
    if not isinstance(want, (int, str, complex, type(None), torch.dtype, torch.device)):
        return True
    return type(got) is type(want) and bool(got == want)
