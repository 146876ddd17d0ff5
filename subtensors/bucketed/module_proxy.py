"""A proxy for a program: attributes that it lacks are looked up on the program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from subtensors.dispatch.ops.tree import PyTree

Program: TypeAlias = Callable[..., PyTree]


class ModuleProxy:
    """An object with the attributes of `program` besides its own, such as a module's `parameters` and `eval`.

    A method that returns the program, as `eval` does, returns the proxy instead.
    """

    program: Program

    def __dir__(self) -> list[str]:
        names = dir(vars(self).get("program"))
        return sorted({*super().__dir__(), *(name for name in names if not name.startswith("__"))})

    if not TYPE_CHECKING:  # so that mypy sees a wrong name of its own

        def __getattr__(self, name: str) -> object:
            program = vars(self).get("program")
            if program is None or name.startswith("__") or not hasattr(program, name):
                raise AttributeError(f"neither {type(self).__name__!r} nor its program has an attribute {name!r}")
            found = getattr(program, name)
            if getattr(found, "__self__", None) is not program:
                return found

            @functools.wraps(found)
            def method(*args: object, **kwargs: object) -> object:
                result = found(*args, **kwargs)
                return self if result is program else result

            return method
