"""An optimizer's state that tells when it was changed, so that a step need not look at all of it.

`optimizer.state` and each entry of it are dicts of these classes. Every change of what one of them holds, in whatever
way, puts a new mark on the state; a step that finds its own mark knows that all tensors are where they were. Copied
or pickled they are plain dicts: a copy is not the optimizer's state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any, Self


class Changes:
    """The mark of a state: another object after every change."""

    def __init__(self) -> None:
        self.mark = object()


def _marking(method: Callable[..., Any]) -> Any:
    """The method of dict, which also marks a change."""

    @wraps(method, assigned=("__name__",))  # not the documentation, whose examples are dict's own
    def changing(self: Any, *args: Any) -> Any:
        self.changes.mark = object()
        return method(self, *args)

    return changing


class _Watched(dict[Any, Any]):
    """A dict all of whose changes are marked."""

    __slots__ = ()
    changes: Changes

    __delitem__ = _marking(dict.__delitem__)
    pop = _marking(dict.pop)
    popitem = _marking(dict.popitem)
    clear = _marking(dict.clear)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.changes.mark = object()
        super().__setitem__(key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[override, misc]
        self.update(other)
        return self


class Entry(_Watched):
    """The state of one parameter: by name, its tensors.

    Args:
        entries: what it holds first.
        changes: where its changes are marked.
    """

    __slots__ = ("changes",)

    def __init__(self, entries: Any = (), changes: Changes | None = None) -> None:
        super().__init__(entries)
        self.changes = changes or Changes()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class States(_Watched, defaultdict[Any, Any]):
    """The state of an optimizer: for each parameter its entry, an empty one when it is first asked for.

    A dict that is put into it is copied, so that changes of what it then holds are marked.

    Args:
        default_factory: only dict; it stands here because defaultdict makes others of its kind so.
        entries: what it holds first.
    """

    __slots__ = ("changes",)

    def __init__(self, default_factory: Any = dict, entries: Any = ()) -> None:
        super().__init__(default_factory)
        self.changes = Changes()
        self.update(entries)

    def __setitem__(self, key: Any, value: Any) -> None:
        is_ours = isinstance(value, Entry) and value.changes is self.changes
        super().__setitem__(key, Entry(value, self.changes) if isinstance(value, dict) and not is_ours else value)

    def __missing__(self, key: Any) -> Any:
        self[key] = {}
        return self[key]

    def __copy__(self) -> Any:
        return defaultdict(dict, self)

    copy = __copy__

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))
