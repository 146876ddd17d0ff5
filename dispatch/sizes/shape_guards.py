"""The decisions that a program makes on the sizes of its arguments, found in one run without values.

The program runs on stand-ins whose sizes are symbols with a value each. Wherever it asks a size something, in Python or
inside torch, the answer for that value is given and written down. The conditions together describe all sizes that take
the same way through the program, whether it ends well or is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import nn
from torch.func import functional_call

from subtensors.dispatch.sizes.expressions import size_symbol
from subtensors.dispatch.sizes.symbolic_sizes import SymbolicSizes


@dataclass(frozen=True)
class Way:
    """One way through a program.

    Args:
        conditions: in the symbols of `size_symbol`; all hold for the sizes that take it.
        refusal: the error at its end; None where it ends well.
    """

    conditions: tuple[sympy.Basic, ...]
    refusal: str | None


def way_through(
    program: Callable[..., Any], arguments: Callable[[SymbolicSizes], Sequence[Any]], sizes: Mapping[str, int]
) -> Way:
    """The way that a program takes for these sizes.

    Args:
        program: what to run. Its arguments are stand-ins, and so are the parameters and buffers of a module.
        arguments: makes its arguments from the symbolic sizes, within their mode.
        sizes: a value for each name.

    Example:
        >>> import torch
        >>> def halves(x):
        ...     return x.view(2, -1)
        >>> way_through(halves, lambda s: [torch.empty(s.numbers["n"])], {"n": 7})
        Way(conditions=(Ne(Mod(n, 2), 0),), refusal="RuntimeError: shape '[2, -1]' is invalid for input of size n")
    """
    symbolic = SymbolicSizes(dict(sizes))
    names = {symbol: size_symbol(name) for symbol, name in symbolic.symbols.items()}
    refusal = None
    with _quiet(), symbolic.mode:
        given = arguments(symbolic)
        state = {}
        if isinstance(program, nn.Module):
            # A real tensor that a module counts in, as batch norm does, would be counted up.
            tensors = itertools.chain(program.named_parameters(), program.named_buffers())
            state = {name: symbolic.stand_in(tensor) for name, tensor in tensors}
        # What it took to make the arguments is no decision of the program.
        before = len(symbolic.guards)
        try:
            functional_call(program, state, tuple(given)) if isinstance(program, nn.Module) else program(*given)
        except Exception as error:  # whatever the program says of sizes that it does not take
            refusal = f"{type(error).__name__}: {error}".splitlines()[0]
            for symbol, name in sorted(names.items(), key=lambda pair: -len(str(pair[0]))):
                refusal = refusal.replace(str(symbol), str(name))
        found = symbolic.guards[before:]
    conditions = [symbolic.plain(guard.xreplace(names)) for guard in found]
    return Way(tuple(c for c in dict.fromkeys(conditions) if c != sympy.true), refusal)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs what stand-ins are refused as its own failure; here it is an answer."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
