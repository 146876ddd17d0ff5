"""Docstrings of optimizers: what many of them share is written here and in `Options`, and each class says the rest."""

from __future__ import annotations

import inspect
import re

from subtensors.optim.options import Options

SHARED = """
    Args:
        params: parameters, `(name, parameter)` pairs, or parameter groups.
        lr: the learning rate, a number or a tensor of one element.
        betas: the decay rate of each average.
        eps: added to the denominator, to keep the quotient finite.
        weight_decay: the L2 penalty.

    Raises:
        ValueError: a value is out of range.

"""
"""Hyperparameters that mean the same wherever a class doesn't say otherwise."""


def inherit_arguments(cls: type) -> None:
    """Complete the docstring of an optimizer by the arguments, options and errors that it shares with others.

    Example:
        >>> class Mine:
        ...     "A step.\\n\\n    Args:\\n        size: how far.\\n\\n    Example:\\n"
        ...     def __init__(self, params, lr, size, **options): ...
        >>> inherit_arguments(Mine)
        >>> [line.split(":")[0].strip() for line in Mine.__doc__.splitlines()[3:7]]
        ['params', 'lr', 'size', 'master_weights']
    """
    if not cls.__doc__:  # as under python -OO
        return
    known: dict[str, str] = {}
    for text in (Options.__doc__, SHARED, *[base.__doc__ for base in reversed(cls.__mro__)]):
        section = re.search(r"(?<=    Args:\n)(.*?\n)(?=\n|    \S|    $)", text or "", re.DOTALL)
        entries = re.split(r"(?m)^        (?=\w)", section[1])[1:] if section else []
        known |= {entry.partition(":")[0]: f"        {entry.rstrip()}\n" for entry in entries}
    names = [name for name in inspect.signature(cls).parameters if name != "options"]
    own = re.sub(r"    Args:\n.*?\n\n", "", cls.__doc__, flags=re.DOTALL)
    raises = "" if "    Raises:\n" in own else SHARED[SHARED.index("    Raises:") :]
    arguments = "".join(known[name] for name in dict.fromkeys((*names, *Options.__annotations__)))
    start = re.search("    (Raises|Example):\n", own)
    assert start is not None
    cls.__doc__ = f"{own[: start.start()]}    Args:\n{arguments}\n{raises}{own[start.start() :]}"
