"""The path that sizes take through a program: the conditions on them, found in one run without values.

The program runs on fake tensors whose sizes are symbols with a value each. Each branch on a size, in Python or inside
torch, takes the side that the value decides, and its condition is recorded. The conditions together describe all sizes
that take the same path through the program, whether it returns or raises.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy
from torch import nn
from torch.func import functional_call

from subtensors.dispatch.sizes.expressions import size_symbol
from subtensors.dispatch.sizes.symbolic_sizes import SymbolicSizes


@dataclass(frozen=True)
class ProgramPath:
    """One path through a program.

    Args:
        conditions: in the symbols of `size_symbol`; all hold for the sizes that take it.
        refusal: the error at its end; None where the program returns.
    """

    conditions: tuple[sympy.Basic, ...]
    refusal: str | None


def trace_path(
    program: Callable[..., object], arguments: Callable[[SymbolicSizes], Sequence[object]], sizes: Mapping[str, int]
) -> ProgramPath:
    """Return the path that these sizes take through a program.

    Args:
        program: the program. Its arguments are fake tensors, and so are the parameters and buffers of a module.
        arguments: makes its arguments from the symbolic sizes, within their mode.
        sizes: a value for each name.

    Example:
        >>> import torch
        >>> def halves(x):
        ...     return x.view(2, -1)
        >>> trace_path(halves, lambda s: [torch.empty(s.numbers["n"])], {"n": 7})
        ProgramPath(conditions=(Ne(Mod(n, 2), 0),), refusal="RuntimeError: shape '[2, -1]' is invalid ... of size n")
    """
    symbolic = SymbolicSizes(dict(sizes))
    names = {symbol: size_symbol(name) for symbol, name in symbolic.symbols.items()}
    refusal = None
    with _without_logs(), symbolic.mode:
        given = arguments(symbolic)
        state = {}
        if isinstance(program, nn.Module):
            # A module that counts in a buffer, as batch norm does, would change the caller's.
            tensors = itertools.chain(program.named_parameters(), program.named_buffers())
            state = {name: symbolic.fake(tensor) for name, tensor in tensors}
        # Conditions met while making the arguments are none of the program's.
        before = len(symbolic.guards)
        try:
            functional_call(program, state, tuple(given)) if isinstance(program, nn.Module) else program(*given)
        except Exception as error:  # whatever the program raises at sizes that it does not accept
            refusal = f"{type(error).__name__}: {error}".splitlines()[0]
            for symbol, name in sorted(names.items(), key=lambda pair: -len(str(pair[0]))):
                refusal = refusal.replace(str(symbol), str(name))
        found = symbolic.guards[before:]
    conditions = [symbolic.plain(guard.xreplace(names)) for guard in found]
    return ProgramPath(tuple(c for c in dict.fromkeys(conditions) if c != sympy.true), refusal)


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Silence torch's log of errors on fake tensors, which are an expected outcome here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
