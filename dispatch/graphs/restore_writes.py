"""A mode that restores the values of the tensors that are written to under it.

A trace writes to stand-ins only, unless an op is given none: `steps.add_(1)` on a tensor that the program owns is run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.torch_internals import dispatcher, ops


class RestoreWrites(TorchDispatchMode):
    """While this is on, every tensor is copied before it is first written to; then the copies are written back.

    Example:
        >>> x = torch.ones(2)
        >>> with RestoreWrites():
        ...     print(x.add_(1))
        tensor([2., 2.])
        >>> x
        tensor([1., 1.])
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the op, on tensors whose values are kept."""
        kwargs = kwargs or {}
        for i, argument in enumerate(ops.schema_of(op).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                x = args[i] if i < len(args) else kwargs.get(argument.name)
                if type(x) in PLAIN_TYPES and id(x) not in self._kept:
                    with dispatcher.without_modes():
                        self._kept[id(x)] = x, x.clone()
        return op(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        """Write the copies back."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for x, values in self._kept.values():
                x.copy_(values)
