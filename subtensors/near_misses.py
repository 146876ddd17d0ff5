"""Names that are nearly right: calls of a subpackage, and attributes that a module lacks, with what to write."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import NoReturn


class Subpackage(ModuleType):
    """A folder of the package that is called like what it holds, in place of the function."""

    _instead: str

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise TypeError, with the function that is meant."""
        raise TypeError(f"{self.__name__} is a folder of the package: call {self._instead}")


def refuse_calls(instead: Mapping[str, str]) -> None:
    """Make calls of subpackages errors that say what to call.

    Args:
        instead: by the full name of a subpackage that was imported, the call that is meant.

    Example:
        >>> import subtensors as st
        >>> st.chunked(1)
        Traceback (most recent call last):
        ...
        TypeError: subtensors.chunked is a folder of the package: call st.chunk(x)
    """
    for name, call in instead.items():
        module = sys.modules[name]
        module.__class__ = Subpackage
        vars(module)["_instead"] = call


def missing_name(module: str, name: str, names: Collection[str], elsewhere: Mapping[str, str]) -> AttributeError:
    """Return the error about an attribute that a module lacks.

    Args:
        module: its full name.
        name: of the attribute.
        names: its public names.
        elsewhere: what to say of names that users may expect there.

    Example:
        >>> print(missing_name("m", "adamw", ["Adam", "AdamW"], {}))
        module 'm' has no attribute 'adamw'; did you mean 'AdamW'?
        >>> print(missing_name("m", "LBFGS", ["Adam"], {"LBFGS": "torch has it"}))
        module 'm' has no attribute 'LBFGS'; torch has it
    """
    known = {x.lower(): x for x in names}
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.7)
    advice = elsewhere.get(name) or (f"did you mean {known[close[0]]!r}?" if close else "")
    return AttributeError(f"module {module!r} has no attribute {name!r}{'; ' * bool(advice)}{advice}")
