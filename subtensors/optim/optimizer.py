"""The base class: an optimizer is a `state` declaration and one `update` method of single-tensor math."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from numbers import Real
from operator import attrgetter
from types import FunctionType
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from subtensors.dispatch.fused.bound_call import interprets_kernels
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.torch_internals import dynamo
from subtensors.kernels.fused.launch import Prelude
from subtensors.kernels.runtime.gc_pause import gc_paused
from subtensors.lists.tensor_list import TensorList
from subtensors.optim.batches import Batch, GroupBatches, column_of, kept_form, missing
from subtensors.optim.dtensor import sharding_of
from subtensors.optim.gradient_norm import GradientNorm
from subtensors.optim.low_bit_state import check_sharded_forms, check_state_dtype, forms_of
from subtensors.optim.options import IN_STEP, Options, check_options, recorded
from subtensors.optim.state import AVERAGE, MASTER
from subtensors.optim.step import Stepping
from subtensors.optim.traced_update import SQUARES, single_tensor
from subtensors.optim.versioned_state import States

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

# Mapped in C over each group, in every step.
_grad = attrgetter("grad")


class Optimizer(Stepping):
    """An optimizer whose whole step is one fused call a parameter group.

    A subclass says which state a parameter has and how one tensor is updated:

    - `state`: for each entry of a parameter's state, how it starts: a function of the parameter (of its float32
      master, where there is one).
    - `update(self, p, g, <state entries>, *, <hyperparameters>)`: straight-line math that writes `p` and the entries
      in place, traced once for the class (see `fused`). What comes after `p` and `g` is taken from the state by
      name; `step` needs no declaration: it is a 0-d float32 count on the parameter's device, 0 before the first
      step, and `update` adds to it. Keyword-only arguments come from the parameter group: numbers stay live (a new
      value never retraces) and arrive as floats, tensors of one element as 0-d tensors; bools, None and strings are
      static, so that `if` may ask for them.
    - `optional`: hyperparameters that `update` is given as None while they are the number 0, so that it can leave out
      what would do nothing.

    Values stored in less than float32 are computed in float32 and rounded once, when they are stored. Complex
    parameters are seen as `torch.view_as_real` shows them. What `defaults` or a group may hold, for any subclass, are
    `maximize` (default False): the gradient is negated, and what `Options` names.

    Args:
        params: parameters (a TensorList of them, too), `(name, parameter)` pairs, or parameter groups.
        defaults: the hyperparameters of a group that doesn't give its own.
        options: what `Options` names; put into the defaults.

    Raises:
        ValueError: `differentiable` is asked for, or a hyperparameter of `update` has no value.
        TypeError: when the class is made, if `state` and `update` don't name the same entries; an unknown option.

    Example:
        >>> import subtensors as st
        >>> class MySGD(st.optim.Optimizer):
        ...     def __init__(self, params, lr=1e-2, momentum=0.9):
        ...         super().__init__(params, dict(lr=lr, momentum=momentum))
        ...     state = dict(buf=torch.zeros_like)
        ...     def update(self, p, g, buf, *, lr, momentum): buf.mul_(momentum).add_(g); p.sub_(lr * buf)
        >>> w = torch.nn.Parameter(torch.ones(3))
        >>> opt = MySGD([w], lr=0.5)
        >>> for _ in range(2):
        ...     w.grad = torch.ones(3)
        ...     opt.step()
        >>> w
        Parameter containing:
        tensor([-0.4500, -0.4500, -0.4500], requires_grad=True)
        >>> opt.state[w]
        {'buf': tensor([1.9000, 1.9000, 1.9000])}
    """

    # In a class body: the declaration, read and taken away by `__init_subclass__`. On an instance: torch's state.
    state: Any
    optional: ClassVar[Collection[str]] = ()

    is_replayable: ClassVar[bool] = True
    """True if a step does the same for any values of numbers and state, and writes them in fused functions alone."""

    # GradScaler then sets `grad_scale` and `found_inf` instead of reading on the host whether to step.
    _step_supports_amp_scaling = True

    _hyperparameters: ClassVar[tuple[str, ...]]
    _required: ClassVar[frozenset[str]]
    _fusion: ClassVar[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if isinstance(cls.__dict__.get("__init__"), FunctionType):
            dynamo.call_eagerly(cls.__init__, "an optimizer is made of the parameters that there are")
        if "state" in cls.__dict__:
            cls._declaration = dict(cls.__dict__["state"])
            del cls.state
        if cls.update is Optimizer.update:
            return
        _, _, _, *entries = signature = list(inspect.signature(cls.update).parameters.values())
        if [s.kind for s in signature[:3]] != [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 3:
            raise TypeError(f"{cls.__name__}.update takes self, p and g first")
        hyperparameters = [s for s in entries if s.kind is inspect.Parameter.KEYWORD_ONLY]
        cls._entries = tuple(s.name for s in entries if s not in hyperparameters)
        cls._hyperparameters = tuple(s.name for s in hyperparameters)
        cls._required = frozenset(s.name for s in hyperparameters if s.default is inspect.Parameter.empty)
        if taken := {*cls._hyperparameters, *cls._entries} & {*IN_STEP, SQUARES}:
            raise TypeError(f"{cls.__name__}.update takes {sorted(taken)}, the name of an option of every optimizer")
        if set(cls._entries) - {"step"} != set(cls._declaration) - {"step"}:
            raise TypeError(
                f"{cls.__name__}.update takes the state entries {sorted(cls._entries)} (its arguments between g and "
                f"the keyword-only ones), and {cls.__name__}.state declares {sorted(cls._declaration)}"
            )
        cls._fusion = cls._step_function()

    @classmethod
    def _step_function(cls) -> Callable[..., Any]:
        """The function that a step calls with the columns of a batch."""
        return FusedFunction(single_tensor(cls))

    def __init__(self, params: Params, defaults: dict[str, Any], **options: Unpack[Options]) -> None:
        if not hasattr(type(self), "_fusion"):
            raise TypeError(f"{type(self).__name__} has no update method")
        self._lists, self._shard_fusions = {}, {}
        self._mark = None
        self._norm = GradientNorm()
        self._arena = options.get("arena")
        # Torch would take a list, which is a Tensor, for one parameter.
        params = params.tensors if isinstance(params, TensorList) else params
        super().__init__(params, defaults | recorded(options))
        self.state = States()
        if options.get("graph"):
            self.capture()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update one tensor in one step; each subclass implements it."""
        raise NotImplementedError

    def _gradients(self) -> list[TensorColumn]:
        """Each group's gradients, None for a parameter without one."""
        # Like the parameters of the one batch that they are most often all of.
        return [TensorColumn(map(_grad, g["params"]), like=self._whole(i)) for i, g in enumerate(self.param_groups)]

    def _whole(self, index: int) -> TensorColumn | None:
        """The parameters of a group, where one batch is all of it and the gradients are laid out as they are."""
        lists = self._lists.get(index)
        return lists.batches[0].whole if lists is not None and lists.batches else None

    @property
    def _is_fused(self) -> bool:
        return isinstance(self._fusion, FusedFunction)

    def _update_batch(self, group: dict[str, Any], batch: Batch, grads: TensorColumn, prelude: Prelude | None) -> None:
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        options = [
            scale,
            found_inf,
            group.get("maximize"),
            len(group),
            *map(group.get, (*self._hyperparameters, *IN_STEP)),
        ]
        gradients = batch.gradients(grads)
        if not batch.holds_parameters and (self._capture is None or self._capture.packed is None):
            batch.hold_parameters()
        call = batch.call_again(options, gradients) or batch.call(
            options,
            gradients,
            None if scale is None else _live(scale, batch.device),
            None if found_inf is None else _live(found_inf, batch.device),
            bool(group.get("maximize")),
            self._values(group, batch.device),
        )
        try:
            self._fusion_of(batch).run(call, prelude)
            if batch.sees_shards:
                # The step wrote the local shards; autograd must be told that the whole DTensors were written.
                torch.autograd.graph.increment_version(batch.params)
        except RuntimeError:
            self._refuse_sparse(grads)
            raise

    def _values(self, group: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """The group's hyperparameters as the fused call takes them."""
        values: dict[str, Any] = {}
        for name in IN_STEP:
            if group.get(name) is not None:
                values[name] = _live(group[name], device)
        if "max_norm" in values:
            values[SQUARES] = self._norm.squares(device)
        for name in self._hyperparameters:
            if name in group:
                value = group[name]
                if type(value) is not float:
                    value = _live(value, device)
                if type(value) is float and value == 0 and name in self.optional:
                    value = None
                values[name] = value
        return values

    def _refuse_sparse(self, grads: list[Tensor]) -> None:
        for i, g in enumerate(grads):
            if g is not None and g.layout is not torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} updates dense gradients, and parameter {i} of its group has one of layout "
                    f"{g.layout}: make it dense (Embedding(sparse=False)), or give it to torch.optim.SparseAdam"
                )

    def _batches(self, index: int, group: dict[str, Any], grads: list[Tensor]) -> list[Batch]:
        """The group's batches for this set of gradients; state that a parameter lacks is made."""
        if self.state.changes.mark is not self._mark or len(self._lists) > len(self.param_groups):
            self._forget()
        params = group["params"]
        entries = self._kept(group)
        form = kept_form(group)
        lists = self._lists.get(index)
        if lists is not None and lists.is_current(params, grads, entries, form):
            return lists.batches
        self._refuse_sparse(grads)
        if lists is not None and not lists.has_params(params):
            self._forget()
        with gc_paused():
            kinds = self._cut(self._kinds(params, grads, entries, group), params)
            batches = [self._batch(kind, indices, group) for kind, indices in kinds]
        self._lists[index] = GroupBatches(list(params), missing(grads), entries, form, batches)
        self._mark = self.state.changes.mark
        return batches

    def _kinds(
        self, params: list[Tensor], grads: list[Tensor], entries: tuple[str, ...], group: dict[str, Any]
    ) -> dict[tuple[Any, ...], list[int]]:
        """Group the parameters with a gradient by what a batch must have in common, and make the state they lack."""
        present = [i for i, g in enumerate(grads) if g is not None]
        names = [self._names(params[i], entries, group) for i in present]
        self._fill_all([params[i] for i in present], names, group)
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for i, kept in zip(present, names, strict=True):
            p = params[i]
            forms = forms_of(kept, p, group, self.low_bit)
            kinds.setdefault((p.device, p.is_complex(), sharding_of(p), kept, forms), []).append(i)
        return kinds

    def _batch(self, kind: tuple[Any, ...], indices: list[int], group: dict[str, Any]) -> Batch:
        """The batch of these parameters of the group, which are of one kind."""
        device, is_complex, sharding, kept, forms = kind
        sees_shards = adds_up = False
        if sharding is not None:
            sees_shards, adds_up = self._views(group, device)
            check_sharded_forms(forms, sees_shards, sharding.is_repeated)
        params = group["params"]
        own = [params[i] for i in indices]
        # Only where there are entries: asking for the state would make an empty one.
        states = [self.state[p] for p in own] if kept else []
        columns = {name: column_of(states, name, form, sees_shards) for name, form in zip(kept, forms, strict=True)}
        return Batch(
            None if indices == [*range(len(params))] else indices,
            device,
            is_complex,
            TensorColumn(own, keeps_layout=not is_complex and sharding is None),
            columns.get(MASTER),
            tuple([columns.get(entry) for entry in (*self._entries, AVERAGE)]),
            sharding,
            sees_shards,
            adds_up,
        )

    def _cut(self, kinds: dict[Any, list[int]], params: list[Tensor]) -> Iterable[tuple[Any, list[int]]]:
        """The parameters of each kind, by their places in the group, as they go into batches."""
        return kinds.items()

    def _forget(self) -> None:
        """Drop the batches of all groups; traced and compiled functions stay."""
        self._lists.clear()

    def _views(self, group: dict[str, Any], device: torch.device) -> tuple[bool, bool]:
        """Return whether a sharded step can run on local shards, and whether it then sums over processes."""
        if not self._is_fused:
            return False, False
        p = torch.ones(2, device="cpu")
        kept = self._kept(group)
        entries = [
            TensorColumn([self._start(p, e, False, group)]) if e in kept else None for e in (*self._entries, AVERAGE)
        ]
        column, values = TensorColumn([p]), self._values(group, p.device)
        call = (column, column, None, tuple(entries), None, None, False, values)
        if not self._fusion.reduces(*call):
            return True, False
        has_kernels = device.type == "cuda" or interprets_kernels()
        return (has_kernels and self._fusion.takes_parts(*call),) * 2

    def _fusion_of(self, batch: Batch) -> Any:
        """The function that a step calls for this batch."""
        if not batch.adds_up:
            return self._fusion
        assert batch.sharding is not None
        if batch.sharding not in self._shard_fusions:
            self._shard_fusions[batch.sharding] = FusedFunction(
                single_tensor(type(self)), exchange=batch.sharding.bring_together
            )
        return self._shard_fusions[batch.sharding]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with the defaults for what it doesn't say.

        Args:
            param_group: `params`, and hyperparameters of its own.
        """
        if isinstance(param_group["params"], TensorList):
            param_group = {**param_group, "params": param_group["params"].tensors}
        super().add_param_group(param_group)
        self._check(param_group)

    def _check(self, group: dict[str, Any]) -> None:
        check_state_dtype(type(self).__name__, group.get("state_dtype"), self.low_bit)
        check_options(group)
        if group.get("accumulate", 1) != (passes := self.param_groups[0].get("accumulate", 1)):
            raise ValueError(f"Invalid accumulate: {group.get('accumulate', 1)}; another group has {passes}")
        if group.get("differentiable"):
            raise ValueError(
                "differentiable=True is not supported: the step is one fused update in place, which autograd can't "
                f"follow; expected False (torch.optim.{type(self).__name__} can differentiate through its step)"
            )
        if missing := self._required - set(group):
            raise ValueError(
                f"{type(self).__name__}.update needs {sorted(missing)}, which the group {sorted(group)} lacks"
            )


def _live(value: Any, device: torch.device) -> Any:
    """A value as the fused call takes it: a number as a float, a tensor of one element without dimensions."""
    if isinstance(value, Tensor):
        value = value.reshape(())
        # From the host its value is handed over; one on a device is read there.
        return value if value.device.type == "cpu" else value.to(device, non_blocking=True)
    if isinstance(value, tuple | list):
        return tuple([_live(v, device) for v in value])
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value
