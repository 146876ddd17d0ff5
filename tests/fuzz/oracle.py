"""Which errors a wrong call may end with: one that names what is wrong, or torch's own for the same plain call."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import subtensors as st

NAMED = (st.RuleError, st.SizeError, st.AddressError)
"""The library's own errors."""

ALLOWED = (TypeError, ValueError, MemoryError)
"""Where a `raise` of the library's is the place that they come from."""

_OF_VALUES = torch.linalg.LinAlgError
"""Of a matrix that torch can't decompose, as a hyperparameter of inf makes one."""

_LOOKUPS = (IndexError, KeyError)
"""No such dim, position or key: as of the above."""

_ROOT = str(Path(st.__file__).resolve().parents[1])
_LIBRARY = tuple(f"{_ROOT}/{folder}/" for folder in ("subtensors", "dispatch", "kernels"))


def complaint(error: BaseException, plain: Callable[[], object] | None) -> str:
    """Return what is wrong with the error that a call ended with; "" if nothing is.

    Args:
        error: the error.
        plain: the same call of torch's function; None if there is none.
    """
    text = str(error)
    if "INTERNAL ASSERT" in text:
        return "an internal assert of torch's"
    if isinstance(error, (*NAMED, _OF_VALUES)):
        return "" if text else "says nothing"
    if plain is not None and _same_error(error, plain):
        return ""
    if _is_wrong_signature(error):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    inner = frames[-1]
    if not isinstance(error, (*ALLOWED, *_LOOKUPS)):
        return f"{type(error).__name__} from {_place(error)}"
    if not _is_deliberate(inner.filename, inner.lineno or 0):
        return f"an accident, at {_place(error)}"
    return "" if text else "says nothing"


def _same_error(error: BaseException, plain: Callable[[], object]) -> bool:
    try:
        plain()
    except Exception as theirs:
        return type(theirs) is type(error)
    return False


def _is_wrong_signature(error: BaseException) -> bool:
    """Return whether Python itself refused the arguments at the call of a public function."""
    return isinstance(error, TypeError) and bool(
        re.search(r"\(\) (missing|takes|got an unexpected keyword|got multiple values)", str(error))
    )


def _is_deliberate(path: str, line: int) -> bool:
    """Return whether a `raise` of the library's, or of torch's check of an optimizer's arguments, is at this line."""
    source = linecache.getline(path, line).strip()
    is_ours = str(Path(path).resolve()).startswith(_LIBRARY)
    return source.startswith("raise ") and (is_ours or "/torch/optim/" in path)


def _place(error: BaseException) -> str:
    """Return the innermost place in the library that an error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if str(Path(f.filename).resolve()).startswith(_LIBRARY)] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
