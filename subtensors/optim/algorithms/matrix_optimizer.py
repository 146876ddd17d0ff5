"""The base class of optimizers whose math is of full matrices: `update` sees all of them at once, as TensorLists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from subtensors.dispatch.fused.bound_call import FusedCall
from subtensors.dispatch.fused.read_values import ReadValues
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.fused.writes import WriteWatch
from subtensors.dispatch.graphs.fused_graph import current_recording
from subtensors.dispatch.lists.batched import group_by_shape, stack
from subtensors.fused.fuse import fused
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype
from subtensors.lists.tensor_list import TensorList
from subtensors.optim.batches import BatchKind
from subtensors.optim.dtensor import full_tensor, is_sharded, write_part
from subtensors.optim.optimizer import Optimizer
from subtensors.optim.options import IN_STEP
from subtensors.optim.step import StepFunction
from subtensors.optim.traced_update import (
    PARAMETER,
    SUM_OF_SQUARES,
    StepValues,
    prepare_gradient,
    refuse_lost_writes,
)


class MatrixOptimizer(Optimizer):
    """An optimizer with an `update` of lists: matrix functions run once a shape, not once a matrix.

    `update(self, p, g, <state entries>, *, <hyperparameters>)` is as for `Optimizer`, except that every tensor is a
    `TensorList` of the parameters of a batch, and that it is run, not traced. Functions made by `fused` are one kernel
    over the list, torch's matrix functions are one batched call a shape, and `by_shape` does the same for a function of
    your own. Parameters of one shape are neighbours, so that results of fused functions are stacked without a copy.

    Args:
        params: parameters, `(name, parameter)` pairs, or parameter groups.
        defaults: the hyperparameters of a group that doesn't give its own.
        options: the options of every optimizer, `Options`.

    Example:
        >>> import subtensors as st
        >>> class Whitened(st.optim.MatrixOptimizer):
        ...     def update(self, p, g, *, lr):
        ...         u, _, vh = torch.linalg.svd(g, full_matrices=False)
        ...         p.sub_(lr * (u @ vh))
        >>> w = torch.nn.Parameter(torch.zeros(2, 2))
        >>> opt = Whitened([w], dict(lr=0.5))
        >>> w.grad = torch.tensor([[3.0, 0.0], [0.0, -4.0]])
        >>> opt.step()
        >>> w.detach().diag()
        tensor([-0.5000,  0.5000])
    """

    state: Any

    is_replayable = False  # `update` may be anything; a class that knows better says so

    WORKSPACE: ClassVar[int] = 2**28
    """The most elements of a batch: temporaries of `update` are a few times as large, whatever the number of
    parameters."""

    @classmethod
    def _step_function(cls) -> StepFunction:
        return ListStep(cls)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        for p in group["params"]:
            if p.is_complex():
                raise ValueError(
                    f"{type(self).__name__} takes matrices of real numbers, and a parameter of size {tuple(p.shape)} "
                    f"is {p.dtype}: give it to another optimizer, such as AdamW"
                )

    def _split_kinds(
        self, kinds: dict[BatchKind, list[int]], params: list[Tensor]
    ) -> Iterator[tuple[BatchKind, list[int]]]:
        for kind, indices in kinds.items():
            batch: list[int] = []
            size = 0
            for i in sorted(indices, key=lambda i: tuple(params[i].shape)):
                if batch and size + params[i].numel() > self.WORKSPACE:
                    yield kind, batch
                    batch, size = [], 0
                batch.append(i)
                size += params[i].numel()
            yield kind, batch


def by_shape(function: Callable[..., Tensor | tuple[Tensor, ...]], *lists: TensorList) -> Any:
    """Call a function of stacked tensors once for each shape in the lists.

    Args:
        function: takes a stack of each list, (n, *shape), and returns a tensor, or a tuple of tensors, each with n as
            its first dimension.
        lists: of one structure.

    Returns:
        A TensorList, or a tuple of them.

    Example:
        >>> x = TensorList([torch.eye(2), torch.ones(3, 3), 2 * torch.eye(2)])
        >>> by_shape(torch.linalg.matrix_norm, x)
        TensorList(3 tensors, 3 values: 3 x float32[] cpu)
    """
    columns = [x.tensors for x in lists]
    results: list[list[Tensor]] = []
    for indices in group_by_shape(columns):
        returned = function(*[stack([column[i] for i in indices]) for column in columns])
        parts = returned if isinstance(returned, tuple) else (returned,)
        results = results or [list(columns[0]) for _ in parts]  # replaced below, one by one
        for result, part in zip(results, parts, strict=True):
            for i, tensor in zip(indices, part.unbind(), strict=True):
                result[i] = tensor
    made = tuple([lists[0].like(result) for result in results])
    return made[0] if len(made) == 1 else made


@fused
def _gradient(
    p: Tensor, g: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None, maximize: bool, values: StepValues
) -> Tensor:
    """The gradient for `update`; zero after an overflow, so that no factorization meets an infinity."""
    g = g.to(arithmetic_dtype(p.dtype))
    g, _ = prepare_gradient(g, grad_scale, maximize, values)
    return g if found_inf is None else torch.where(found_inf != 0, 0, g)


@fused
def _undo(target: Tensor, before: Tensor, found_inf: Tensor | None) -> None:
    assert found_inf is not None
    target.copy_(torch.where(found_inf != 0, before, target))


@fused
def _approach(average: Tensor, w: Tensor, ema: float | Tensor) -> None:
    average.add_((1 - ema) * (w - average))


@fused
def assign(target: Tensor, source: Tensor) -> None:
    """target <- source."""
    target.copy_(source)


class ListStep:
    """The step of an optimizer class for the lists of a batch; it writes parameters, masters and state in place.

    Args:
        cls: a class with `update(self, p, g, *states, **hyperparameters)` on TensorLists.
    """

    def __init__(self, cls: type[Optimizer]) -> None:
        self._cls = cls
        self._values: ReadValues | None = None
        self._has_written = False
        """True once an update was seen to write something."""
        # An instance without attributes, as in `single_tensor_step`.
        self._update: Callable[..., None] = object.__new__(cls).update  # type: ignore[attr-defined]

    def read_values(self) -> tuple[object, ...]:
        """The values that `update` reads besides its arguments now, in a form that can be compared."""
        if self._values is None or not self._values.hold():
            self._values = ReadValues(self._update)
        return self._values.key

    def run(self, call: FusedCall) -> None:
        """Take one step; for DTensors on the full tensors, of which each process then keeps its part."""
        (p, g, master, entries, *rest), _ = call.arguments()
        if not any(map(is_sharded, p)):
            self(p, g, master, entries, *rest)
            return
        weights = TensorColumn(map(full_tensor, p))
        state = [None if column is None else TensorColumn(map(full_tensor, column)) for column in (master, *entries)]
        # The full gradients live no longer than the step.
        self(weights, TensorColumn(map(full_tensor, g)), state[0], tuple(state[1:]), *rest)
        for column, new_values in zip((p, master, *entries), (weights, *state), strict=True):
            for t, result in zip(column or (), new_values or (), strict=True):
                if is_sharded(t):
                    write_part(t, result)
        # The step wrote through shards; autograd must be told that the DTensors were written.
        torch.autograd.graph.increment_version(p)

    def __call__(
        self,
        p: TensorColumn,
        g: TensorColumn,
        master: TensorColumn | None,
        entries: tuple[TensorColumn | None, ...],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        maximize: bool,
        hyperparameters: StepValues,
    ) -> None:
        """Take one step for these parameters."""
        weights = _list(p if master is None else master)
        gradients: Any = _list(g)
        *states, average = [None if column is None else _list(column) for column in entries]
        in_step = {name: hyperparameters.pop(name) for name in (*IN_STEP, SUM_OF_SQUARES) if name in hyperparameters}
        ema = in_step.pop("ema", None)
        if grad_scale is not None or found_inf is not None or maximize or in_step:
            gradients = _gradient(weights, gradients, grad_scale, found_inf, maximize, in_step)
        # State on the CPU, such as a count that decides what a step does, can't depend on a flag on the device.
        present = [x for x in (weights, *states, average) if x is not None]
        written = [x for x in present if x.tensors[0].device == weights.tensors[0].device]
        before = [] if found_inf is None else [x.clone() for x in written]
        # Only the first step looks: there may be a thousand tensors.
        looks = not self._has_written and current_recording() is None
        named = zip((PARAMETER, *self._cls._declaration.entries), (weights, *states), strict=True)
        watch = WriteWatch({name: x.tensors for name, x in named if looks and x is not None})
        self._update(weights, gradients, *states, **hyperparameters)
        if looks:
            refuse_lost_writes(self._cls, watch)
            self._has_written = True
        if average is not None:
            _approach(average, weights, ema)
        for target, value in zip(written, before, strict=False):
            _undo(target, value, found_inf)
        if master is not None:
            assign(_list(p), weights)


def _list(tensors: Iterable[Tensor]) -> TensorList:
    return TensorList(list(tensors))
