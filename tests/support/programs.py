"""Fused math under test: the ways to run it, and its oracle.

The oracle calls the same function on each element in turn, on plain tensors. The effect of
rounding is measured rather than guessed: beside the plain tensors run float64 ones (the truth), and some in which each
result that torch rounds is shifted by one rounding of its dtype. The error of a kernel may not exceed 1.5 times the
largest error among them, plus one rounding of the result.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import optree
import pytest
import torch
from kernels_on_cpu import kernels_on_cpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.kernels.fused.launch import Tiling


class Lowering(Enum):
    """A way to run fused math."""

    TORCH = "torch"
    INTERPRETER = "interpreter"
    CUDA = "cuda"

    @property
    def device(self) -> str:
        return "cuda" if self is Lowering.CUDA else "cpu"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which fused calls run in this way."""
        if self is not Lowering.INTERPRETER:
            yield
            return
        # The interpreter computes with numpy, which warns where a GPU gives inf or NaN.
        with np.errstate(all="ignore"), kernels_on_cpu():
            yield

    def slack(self, dtype: torch.dtype) -> float:
        """Roundings beyond one that a result of this dtype may be off: the interpreter truncates to half precision."""
        return float(self is Lowering.INTERPRETER and dtype in (torch.bfloat16, torch.float16))

    def lost(self, dtype: torch.dtype) -> float:
        """An absolute error to allow in any result: the interpreter garbles denormal numbers of bfloat16."""
        return torch.finfo(dtype).smallest_normal if self is Lowering.INTERPRETER and dtype == torch.bfloat16 else 0


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles where there is a GPU")

INTERPRETER = pytest.param(Lowering.INTERPRETER, id="interpreter", marks=interpreted)
CUDA = pytest.param(Lowering.CUDA, id="cuda", marks=pytest.mark.gpu)
KERNELS = [INTERPRETER, CUDA]
LOWERINGS = [pytest.param(Lowering.TORCH, id="torch"), *KERNELS]

each_lowering = pytest.mark.parametrize("lowering", LOWERINGS)
each_kernel_lowering = pytest.mark.parametrize("lowering", KERNELS)

SMALL_TILES = Tiling(block=64, warps=2)
"""Tiles so small that a tensor of a few hundred elements has several."""


# Ops whose result is one of their operands or a boolean: nothing is rounded.
_EXACT = frozenset(
    "clone detach alias copy_ where neg neg_ abs abs_ maximum minimum fmax fmin clamp clamp_ clamp_min clamp_max relu "
    "amax amin max min sign zeros_like ones_like zero_ floor ceil trunc round isnan masked_fill masked_fill_".split()
)

PERTURBED = 8
"""Runs with shifted results. The directions are the columns of a Hadamard matrix of this order: the results of any two
ops are shifted in the same direction in half of the runs, and in opposite directions in the other half."""


# Ops that round more than once; a fused multiply-add, where there is one, rounds less.
_FUSED = frozenset("lerp lerp_ addcmul addcmul_ addcdiv addcdiv_ sum mean add add_ sub sub_ rsub".split())


def _terms(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The magnitude of the terms that an op adds up, before cancellation."""
    if name in ("sum", "mean"):
        return getattr(args[0].abs(), name)()  # type: ignore[no-any-return]
    if name.rstrip("_") in ("add", "sub", "rsub"):
        alpha = kwargs.get("alpha", 1)
        return abs(args[0] + alpha * args[1]) if alpha == 1 else abs(args[0]) + abs(alpha * args[1])
    x, a, b = (abs(v) for v in args[:3])
    value = abs(kwargs.get("value", 1))
    if name.startswith("lerp"):
        return x + (x + a) * b  # type: ignore[no-any-return]
    return x + value * (a * b if name.startswith("addcmul") else a / b)  # type: ignore[no-any-return]


@dataclass
class _Shadows(TorchDispatchMode):
    """Runs every op once more in float64 for each shadow; shadow 0 is the truth, the others are perturbed.

    Truths and integers are taken from the plain run, so all shadows take the same decisions.
    """

    rounded: int = 0
    """The number of ops that have rounded so far."""
    shadows: dict[int, tuple[Tensor, list[Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def of(self, tensor: Tensor) -> list[Tensor]:
        """The shadows of a tensor; the tensor itself where it holds neither floats nor complex numbers."""
        if not _is_rounded(tensor):
            return [tensor] * (1 + PERTURBED)
        if id(tensor) not in self.shadows:
            self.shadows[id(tensor)] = tensor, [tensor.to(_wide(tensor), copy=True) for _ in range(1 + PERTURBED)]
        return self.shadows[id(tensor)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = [[self.of(a)[k] if isinstance(a, Tensor) else a for a in args] for k in range(1 + PERTURBED)]
        plain = func(*args, **kwargs)
        if not isinstance(plain, Tensor) or not _is_rounded(plain):
            return plain
        keywords = {k: _wide(plain) if v in _PRECISIONS and k == "dtype" else v for k, v in kwargs.items()}
        name = func._schema.name.rpartition("::")[2]
        exact = func.is_view or (name in _EXACT and (name != "copy_" or _widens(args[1].dtype, plain.dtype)))
        exact |= name == "_to_copy" and _widens(args[0].dtype, plain.dtype)
        results = []
        for k, shadow_args in enumerate(before):
            given = {key: self.of(v)[k] if isinstance(v, Tensor) else v for key, v in keywords.items()}
            terms = _terms(name, shadow_args, given) if name in _FUSED else None
            shadow = func(*shadow_args, **given)
            if shadow.dtype != _wide(plain):
                shadow = shadow.to(_wide(plain))
            if k and not exact:
                info = torch.finfo(plain.dtype)
                # Pairwise summation of n numbers rounds each of them log2 n times.
                longest = max((t.numel() for t in tensors_of(args)), default=1)
                depth = max(1.0, math.log2(longest / max(plain.numel(), 1) + 1))
                size = shadow.abs() if terms is None else terms
                step = (size + info.smallest_normal) * info.eps * depth
                sign = 1 - 2 * ((k - 1 & self.rounded).bit_count() % 2)
                moved = shadow + step * sign * (1 + 1j if plain.is_complex() else 1)
                # A finite truth stays finite: overflow is tested by the plain run.
                shadow.copy_(torch.where(shadow.isfinite(), moved, shadow))
            results.append(shadow)
        self.rounded += not exact
        if plain is not args[0]:
            self.shadows[id(plain)] = plain, results
        return plain


_PRECISIONS = {torch.float64: 3, torch.float32: 2, torch.float16: 1, torch.bfloat16: 1}
_PRECISIONS |= {torch.complex128: 3, torch.complex64: 2, torch.complex32: 1}


def _is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype of the truth for a tensor."""
    return torch.complex128 if tensor.is_complex() else torch.float64


def _widens(source: torch.dtype, target: torch.dtype) -> bool:
    return source == target or {torch.bool: 0, **_PRECISIONS}.get(source, 9) < _PRECISIONS[target]


@dataclass(frozen=True)
class Expected:
    """The expected tensor: torch's result, the truth, and the largest effect of rounding."""

    plain: Tensor
    shadows: list[Tensor]

    def check(self, actual: Tensor, slack: float = 0, per_element: bool = False, lost: float = 0) -> None:
        """Raise AssertionError where `actual` is further from the truth than rounding explains.

        Roundings of a complex number are of the size of that, not of each part.
        """
        plain = self.plain
        assert actual.dtype == plain.dtype
        assert actual.shape == plain.shape
        if not _is_rounded(plain):
            assert torch.equal(actual, plain), f"{actual} is not {plain}"
            return
        info = torch.finfo(plain.dtype)
        got, found, truth = actual.to(_wide(plain)), plain.to(_wide(plain)), self.shadows[0]
        errors = torch.stack([(s - truth).abs() for s in (found, *self.shadows[1:])]).nan_to_num(0, 0, 0)
        unit = truth.abs().clamp(min=info.smallest_normal) * info.eps
        # One element may be exact by luck: the effect of rounding is measured over the whole tensor.
        roundings = (errors / unit).nan_to_num(0, 0, 0)
        worst = roundings.amax(0) if per_element or not plain.numel() else roundings.amax()
        right = (got - truth).abs() <= (1.5 * worst + 1 + slack) * unit
        # Where torch itself overflows, a kernel that works in higher precision may not; or it agrees.
        right |= (got - truth).abs() <= 2 * lost
        for agreed in (found, truth):
            right |= (got == agreed) | (got.isnan() & agreed.isnan())
        assert right.all(), (
            f"off by {((got - truth).abs() / unit)[~right].tolist()} roundings where torch is by "
            f"{worst.expand_as(right)[~right].tolist()}:\n"
            f" got {actual[~right]}\n torch {plain[~right]}\n truth {truth[~right]}"
        )


def same_strides(tensor: Tensor) -> Tensor:
    """A copy in new memory with the same strides and alignment; a broadcast tensor is shared."""
    if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor.detach()
    offset = tensor.storage_offset()
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
    memory = torch.empty(offset + reach, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), offset).copy_(tensor.detach())


def fresh(arguments: Any) -> Any:
    """Arguments with copies for tensors; lists of tensors become `TensorColumn`."""

    def copied(value: Any) -> Any:
        if isinstance(value, TensorColumn):
            return TensorColumn(map(same_strides, value))
        return same_strides(value) if isinstance(value, Tensor) else value

    return optree.tree_map(copied, arguments, none_is_leaf=True)


def each_element(arguments: Any) -> list[Any]:
    """The arguments of the call for each element."""
    lists = [v for v in optree.tree_leaves(arguments, none_is_leaf=True) if isinstance(v, TensorColumn)]
    count = len(lists[0]) if lists else 1
    return [
        optree.tree_map(lambda v: v[i] if isinstance(v, TensorColumn) else v, arguments, none_is_leaf=True)  # noqa: B023
        for i in range(count)
    ]


def tensors_of(nest: Any) -> list[Tensor]:
    """The tensors among the leaves of a pytree, and the elements of lists."""
    leaves = optree.tree_leaves(nest, none_is_leaf=True)
    return [t for v in leaves for t in (v if isinstance(v, TensorColumn) else [v]) if isinstance(t, Tensor)]


def expected(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Expected]:
    """The results of the map, element by element, then the arguments after it."""
    arguments = fresh((tuple(args), kwargs))
    found = []
    shadows = _Shadows()
    results = []
    with torch.no_grad():
        for element_args, element_kwargs in each_element(arguments):
            for tensor in tensors_of((element_args, element_kwargs)):
                shadows.of(tensor)
            with shadows:
                results.append(function(*element_args, **element_kwargs))
    for tensor in (*itertools.chain.from_iterable(map(tensors_of, results)), *tensors_of(arguments)):
        found.append(Expected(tensor, shadows.of(tensor)))
    return found


@contextlib.contextmanager
def _about(subject: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{subject}: {error}") from None


def check(
    lowering: Lowering,
    function: Callable[..., Any],
    *args: Any,
    fusion: FusedFunction | None = None,
    tiling: Tiling = SMALL_TILES,
    per_element: bool = False,
    **kwargs: Any,
) -> FusedFunction | None:
    """Fused math equals the same math element by element; where that raises, so does it.

    Args:
        lowering: how the fused call runs.
        function: the math.
        args, kwargs: its arguments, `TensorColumn` for lists; they are copied first.
        fusion: what to call; by default the function, fused.
        tiling: how that is cut up; by default into small tiles.
        per_element: whether each element may only err as far as rounding pushes that element.

    Returns:
        What was called; None where the math was refused, by torch too.
    """
    args, kwargs = optree.tree_map(
        lambda v: TensorColumn(t.to(lowering.device) for t in v) if isinstance(v, TensorColumn) else v,
        (args, kwargs),
        none_is_leaf=True,
    )
    arguments, keywords = fresh((args, kwargs))
    fusion = fusion or FusedFunction(function, tiling)
    try:
        wanted = expected(function, args, kwargs)
    except Exception as error:  # whatever torch raises, the fused call must raise something too
        with lowering.running(), torch.no_grad():
            try:
                fusion(*arguments, **keywords)
            except Exception:  # it refuses too, with another error
                return None
        raise AssertionError(f"torch refuses with {error!r}, the fused call does not") from error
    with lowering.running(), torch.no_grad():
        result = fusion(*arguments, **keywords)
    got = [t for row in each_element(result) for t in tensors_of(row)] + tensors_of((arguments, keywords))
    assert len(got) == len(wanted)
    for number, (a, e) in enumerate(zip(got, wanted, strict=True)):
        with _about(f"of {len(got)} results and arguments, number {number}"):
            e.check(a, lowering.slack(a.dtype), per_element, lowering.lost(a.dtype))
    return fusion
