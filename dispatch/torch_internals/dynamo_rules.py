"""The Dynamo rules of our types, put in place when compiled code first meets a tensor of one.

Importing this package changes nothing of torch's compiler, and does not load it. Before Dynamo traces anything of a
tensor that compiled code is given, it reads whether the address is constant, which `mark_static_address` notes:

    compiled code reads x -> Dynamo wraps x -> x._dynamo_static_input_type -> the rules of type(x), once

So that attribute of our types is a descriptor, and reading it puts the type's rules in place. Where this torch lacks
what a rule needs, that is logged, once, and Dynamo breaks its graph at every tensor of the type: what follows runs
eagerly, and its numbers are right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from subtensors.dispatch.torch_internals.dynamo import break_graph

_log = logging.getLogger(__name__)

_STATIC = "_dynamo_static_input_type"

_waiting: dict[type, list[Callable[[], object]]] = {}
_broken: dict[type, str] = {}


class _MeetsCompiler:
    """`_dynamo_static_input_type` of a type that has rules; its value is kept where torch keeps it."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __get__(self, tensor: Any, owner: type | None = None) -> Any:
        if tensor is None:
            return None
        install_rules(self._kind)
        return vars(tensor).get(_STATIC)

    def __set__(self, tensor: Any, value: Any) -> None:
        vars(tensor)[_STATIC] = value

    def __delete__(self, tensor: Any) -> None:
        vars(tensor).pop(_STATIC, None)


def on_first_compile(kind: type[torch.Tensor], *rules: Callable[[], object]) -> None:
    """Keep rules of a type until compiled code first meets a tensor of it.

    Args:
        kind: one of our types, or a class that they inherit from.
        rules: each makes one change to torch's compiler, or raises where it can't.
    """
    _waiting[kind] = list(rules)
    setattr(kind, _STATIC, _MeetsCompiler(kind))


def install_rules(kind: type[torch.Tensor]) -> None:
    """Put the rules of a type in place; break the graph where one can't be.

    Args:
        kind: as `on_first_compile` had it.
    """
    rules = _waiting.pop(kind, [])
    for rule in rules:
        try:
            rule()
        except Exception as error:  # whatever a torch that nobody here has seen makes of it
            _broken[kind] = (
                f"torch {torch.__version__} has changed what a {kind.__name__} needs in compiled code, which therefore "
                f"breaks its graph at one: {error}"
            )
            _log.warning("%s", _broken[kind])
            break
    if kind in _broken:
        break_graph(_broken[kind], kind)
