"""Docstrings of optimizers: what many of them share is written here and in `Options`, and each class says the rest."""

from __future__ import annotations

import inspect
import re

from subtensors.optim.options import DEFAULTS, Options

SHARED = """
    Args:
        params: parameters, `(name, parameter)` pairs, or parameter groups.
        lr: the learning rate, a number or a tensor of one element.
        betas: the decay rate of each average.
        eps: added to the denominator, to keep the quotient finite.
        weight_decay: the L2 penalty.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> import torch, subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.{name}([w], lr=0.5)
        >>> for _ in range(3):
        ...     opt.zero_grad()
        ...     w.square().sum().backward()
        ...     opt.step()
        >>> bool(w.square().sum() < 2)
        True

"""
"""The sections of a class that doesn't say otherwise; of its arguments those that it has."""


def inherit_docstring(cls: type) -> None:
    """Complete the docstring of an optimizer by what it shares with its bases and with other optimizers.

    Example:
        >>> class Mine:
        ...     "A step.\\n\\n    Args:\\n        size: how far.\\n\\n    Source: me."
        ...     def __init__(self, params, lr, size, **options): ...
        >>> inherit_docstring(Mine)
        >>> [line.split(":")[0].strip() for line in Mine.__doc__.splitlines()[3:7]]
        ['params', 'lr', 'size', 'master_weights']
    """
    if not cls.__doc__:  # as under python -OO
        return
    texts = (Options.__doc__, SHARED.replace("{name}", cls.__name__), *[base.__doc__ for base in reversed(cls.__mro__)])
    documented = [_sections(text or "") for text in texts]
    entries = [x for own in documented for x in re.split(r"(?m)^        (?=\w)", own.get("Args", ""))[1:]]
    known = {entry.partition(":")[0]: f"        {entry.rstrip()}\n" for entry in entries}
    names = [name for name in inspect.signature(cls).parameters if name != "options"]
    sections = documented[1] | documented[-1]
    sections["Args"] = "".join(["    Args:\n", *map(known.__getitem__, dict.fromkeys((*names, *DEFAULTS))), "\n"])
    cls.__doc__ = "".join(sections.get(name, "") for name in ("", "Args", "Raises", "Example", "Source"))


def _sections(docstring: str) -> dict[str, str]:
    """The sections of a docstring by their names, and under "" what comes before them."""
    first, *rest = re.split(r"(?m)^(?=    (?:Args|Raises|Example|Source):)", docstring)
    return {"": first} | {section.split(":")[0].strip(): section for section in rest}
