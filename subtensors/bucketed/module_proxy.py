"""A runner in a program's place: what is asked of it that it has not is asked of the program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any


class ModuleProxy:
    """What has the attributes of `program` beside its own, as `parameters` and `eval` of a module.

    A method that returns the program, as `eval` does, returns what stands for it.
    """

    program: Callable[..., Any]

    if not TYPE_CHECKING:  # a wrong name of its own is to be seen

        def __getattr__(self, name: str) -> Any:
            program = vars(self).get("program")
            if program is None or name.startswith("__") or not hasattr(program, name):
                raise AttributeError(f"neither {type(self).__name__!r} nor its program has an attribute {name!r}")
            found = getattr(program, name)
            if getattr(found, "__self__", None) is not program:
                return found

            @functools.wraps(found)
            def method(*args: Any, **kwargs: Any) -> Any:
                result = found(*args, **kwargs)
                return self if result is program else result

            return method
