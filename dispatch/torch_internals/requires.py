"""A decorator that declares the private parts of torch that a function uses, and a fallback where they are missing.

A function that uses something private says so, by its dotted path:

    @requires("torch._C._autograd._top_saved_tensors_default_hooks", otherwise=lambda: True)
    def has_saved_tensor_hooks() -> bool: ...

Parts that are loaded with torch are looked up once, when the function is defined, so that a call costs nothing more.
Parts that torch loads later, such as its compiler, are looked up at the first call. Where one is missing, `otherwise`
is called, or `MissingInternal` is raised, which names it. Importing this package never fails.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import NoReturn, TypeVar, cast

import torch

_log = logging.getLogger("subtensors")

F = TypeVar("F", bound=Callable[..., object])

NEWEST_TESTED = (2, 15)
"""The newest minor version of torch on which the full test suite has passed."""

REQUIRED: dict[str, list[str]] = {}
"""Each private part by its dotted path, and the functions that use it."""


class MissingInternal(RuntimeError):
    """A private part of torch that this version lacks, or has in another form."""


def note_newer_torch() -> None:
    """Log, once, that this torch is newer than any that the test suite has passed on."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version > NEWEST_TESTED:
        _log.warning(
            "torch %s is newer than %d.%d, the newest that subtensors has been tested on; where it lacks what is "
            "needed, compiled code breaks its graph and says why",
            torch.__version__,
            *NEWEST_TESTED,
        )


def requires(*paths: str, otherwise: Callable[..., object] | None = None) -> Callable[[F], F]:
    """Declare the private parts of torch that a function uses.

    Args:
        paths: dotted, from `torch` on.
        otherwise: called instead, with the same arguments, where one of them is missing.
    """

    def decorate(function: F) -> F:
        for path in paths:
            REQUIRED.setdefault(path, []).append(f"{function.__module__}.{function.__qualname__}")
        replacement = otherwise or _raising(function, paths)
        loaded = [path for path in paths if _is_loaded(path)]
        if not all(map(exists, loaded)):

            @wraps(function)
            def fallback(*args: object, **kwargs: object) -> object:
                return replacement(*args, **kwargs)

            return cast(F, fallback)
        return function if len(loaded) == len(paths) else cast(F, _checked_at_first_call(function, replacement, paths))

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


def _found(path: str, load: Callable[[str], object]) -> object:
    """Return the object at a dotted path; None if there is none.

    Args:
        path: from `torch` on.
        load: returns a module by its name; raises ImportError if there is none, KeyError if it is not loaded.
    """
    part: object = torch
    parts = path.split(".")
    for count, name in enumerate(parts[1:], start=2):
        if hasattr(part, "__path__") and name not in vars(part):  # a package may keep a module's name for itself
            try:
                part = load(".".join(parts[:count]))
            except ImportError:
                return None
        else:
            part = getattr(part, name, None)
    return part


def _checked_at_first_call(
    function: Callable[..., object], replacement: Callable[..., object], paths: tuple[str, ...]
) -> Callable[..., object]:
    known: list[Callable[..., object]] = []

    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        if not known:
            known.append(function if all(map(exists, paths)) else replacement)
        return known[0](*args, **kwargs)

    return call


def _raising(function: Callable[..., object], paths: tuple[str, ...]) -> Callable[..., NoReturn]:
    def missing(*args: object, **kwargs: object) -> NoReturn:
        lacks = ", ".join(path for path in paths if not exists(path))
        raise MissingInternal(
            f"torch {torch.__version__} lacks {lacks}, which subtensors needs for {function.__qualname__}: use a "
            f"version of torch that docs/compatibility.md lists"
        )

    return missing
