"""A decorator that declares the private parts of torch that a function uses, and a fallback where they are missing.

A function that uses something private says so, by its dotted path:

    @requires("torch._C._autograd._top_saved_tensors_default_hooks", otherwise=lambda: True)
    def has_saved_tensor_hooks() -> bool: ...

What is loaded with torch is looked for once, when the function is defined, so that a call costs nothing more. What
torch loads later, such as its compiler, is looked for at the first call. Where something is missing, `otherwise` is
called, or `MissingInternal` raised, which says what this torch lacks. Importing this package never fails for it.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

import torch

_log = logging.getLogger("subtensors")

F = TypeVar("F", bound=Callable[..., Any])

NEWEST_TESTED = (2, 15)
"""The newest minor version of torch that the whole suite has passed on."""

REQUIRED: dict[str, list[str]] = {}
"""Each private part by its dotted path, and the functions that use it."""


class MissingInternal(RuntimeError):
    """Something private of torch that this version of it does not have, or has otherwise."""


def note_newer_torch() -> None:
    """Log, once, that this torch is newer than those that the suite has passed on."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version > NEWEST_TESTED:
        _log.warning(
            "torch %s is newer than %d.%d, the newest that subtensors has been tested on; where it lacks what is "
            "needed, compiled code breaks its graph and says why",
            torch.__version__,
            *NEWEST_TESTED,
        )


def requires(*paths: str, otherwise: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Declare the private parts of torch that a function uses.

    Args:
        paths: dotted, from `torch` on.
        otherwise: called instead, with the same arguments, where one of them is missing.
    """

    def decorate(function: F) -> F:
        for path in paths:
            REQUIRED.setdefault(path, []).append(f"{function.__module__}.{function.__qualname__}")
        instead = otherwise or _raising(function, paths)
        loaded = [path for path in paths if _is_loaded(path)]
        if not all(map(exists, loaded)):

            @wraps(function)
            def stand_in(*args: Any, **kwargs: Any) -> Any:
                return instead(*args, **kwargs)

            return cast(F, stand_in)
        return function if len(loaded) == len(paths) else cast(F, _looking(function, instead, paths))

    return decorate


def exists(path: str) -> bool:
    """Return whether torch has something at a dotted path, loading the modules on the way."""
    return _found(path, importlib.import_module) is not None


def _is_loaded(path: str) -> bool:
    """Return whether the modules on the way to it have been loaded."""
    try:
        _found(path, sys.modules.__getitem__)
    except KeyError:
        return False
    return True


def _found(path: str, load: Callable[[str], Any]) -> Any:
    """The object at a dotted path; None where there is none.

    Args:
        path: from `torch` on.
        load: gives a module by its name; raises ImportError where there is none, KeyError where it is not loaded.
    """
    found: Any = torch
    parts = path.split(".")
    for count, name in enumerate(parts[1:], start=2):
        if hasattr(found, "__path__") and name not in vars(found):  # a package may keep a module's name for itself
            try:
                found = load(".".join(parts[:count]))
            except ImportError:
                return None
        else:
            found = getattr(found, name, None)
    return found


def _looking(function: Callable[..., Any], instead: Callable[..., Any], paths: tuple[str, ...]) -> Callable[..., Any]:
    known: list[Callable[..., Any]] = []

    @wraps(function)
    def look(*args: Any, **kwargs: Any) -> Any:
        if not known:
            known.append(function if all(map(exists, paths)) else instead)
        return known[0](*args, **kwargs)

    return look


def _raising(function: Callable[..., Any], paths: tuple[str, ...]) -> Callable[..., NoReturn]:
    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        lacks = ", ".join(path for path in paths if not exists(path))
        raise MissingInternal(
            f"torch {torch.__version__} lacks {lacks}, which subtensors needs for {function.__qualname__}: use a "
            f"version of torch that docs/compatibility.md lists"
        )

    return missing
