"""The Dynamo rules of our types, installed when compiled code first uses a tensor of one.

Importing this package changes nothing of torch's compiler, and does not load it. Before Dynamo traces anything of a
tensor that compiled code is given, it reads the mark of a constant address, which `mark_static_address` sets:

    compiled code reads x -> Dynamo wraps x -> x._dynamo_static_input_type -> the rules of type(x), once

So that attribute of our types is a descriptor, and reading it installs the type's rules. Where this torch lacks what a
rule needs, that is logged, once, and Dynamo breaks its graph at every tensor of the type: what follows runs eagerly,
with the right numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from subtensors.dispatch.torch_internals.dynamo import break_graph, compile_methods_only_inlined

_log = logging.getLogger(__name__)

_STATIC = "_dynamo_static_input_type"

_pending: dict[type, list[Callable[[], object]]] = {}
_broken: dict[type, str] = {}


class _InstallsRules:
    """`_dynamo_static_input_type` of a type that has rules; its value is kept where torch keeps it."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __get__(self, tensor: torch.Tensor | None, owner: type | None = None) -> object:
        if tensor is None:
            return None
        install_rules(self._kind)
        return vars(tensor).get(_STATIC)

    def __set__(self, tensor: torch.Tensor, value: object) -> None:
        vars(tensor)[_STATIC] = value

    def __delete__(self, tensor: torch.Tensor) -> None:
        vars(tensor).pop(_STATIC, None)


def declare(kind: type, *rules: Callable[[], object]) -> None:
    """Declare how compiled code takes tensors of a type: its methods are compiled only inlined, and its rules hold.

    Args:
        kind: one of our types, or a class that they inherit from.
        rules: each makes one change to torch's compiler, or raises where it can't. They are installed when compiled
            code first uses a tensor of the type.
    """
    compile_methods_only_inlined(kind)
    if rules:
        _pending[kind] = list(rules)
        setattr(kind, _STATIC, _InstallsRules(kind))


def install_rules(kind: type) -> None:
    """Install the rules of a type that were declared; break the graph where one can't be installed."""
    rules = _pending.pop(kind, [])
    for rule in rules:
        try:
            rule()
        except Exception as error:  # a newer torch may fail in any way
            _broken[kind] = (
                f"torch {torch.__version__} has changed what a {kind.__name__} needs in compiled code, which therefore "
                f"breaks its graph at one: {error}"
            )
            _log.warning("%s", _broken[kind])
            break
    if kind in _broken:
        break_graph(_broken[kind], kind)
