"""The base class of all optimizers: a `state` declaration and one `update` method, the math of a single tensor.

    class MySGD(Optimizer):                      the declaration is read once, when the class is made, and
        state = dict(buf=torch.zeros_like)       `update` is traced once for all instances; numbers such as lr
        def update(self, p, g, buf, *, lr): ...  stay dynamic, so that a new value never retraces

    step():   param_groups --> batches ------------> one fused call a batch --------> a CUDA graph
                               like parameters,      update, and clipping, loss       with capture(): later
                               with their state      scaling, masters, averages       steps replay it

A batch is the parameters of one group that are alike, mostly all of it. A fused call runs the traced math over them, as
one Triton kernel on a GPU. An optimizer is put together of parts, none of which knows the optimizer class:

    Declaration, StateFactory  what state there is, and how it starts (`state`)
    Updater                    batches, gradients, hyperparameters, and the fused calls (`step`)
    Capture                    captured steps, and the checks before a replay (`capture`, `captured_step`)
    saved_state, restore_state saving and loading in torch.optim's form (`state_dict`)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, ClassVar, Unpack, overload

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from subtensors.arguments import flag, shown
from subtensors.counts import counted
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.torch_internals import dynamo
from subtensors.lists.tensor_list import TensorList
from subtensors.optim import accumulation
from subtensors.optim.backward_step import hook_updates, refuse_scaler
from subtensors.optim.batches import BatchKind
from subtensors.optim.capture import Capture
from subtensors.optim.hyperparameters import Accepted, checked_values, parameters_in
from subtensors.optim.low_bit_state import check_state_dtype
from subtensors.optim.options import TORCH_DEFAULTS, Options, ParamGroup, check_flags, check_options, group_options
from subtensors.optim.state import Declaration, Initializer, StateFactory, checked_initializers, swapped_averages
from subtensors.optim.state_dict import copied_state, loading, restore_state, saved_state, take_checkpoint_step
from subtensors.optim.step import StepFunction, Updater, accumulates, with_hooks
from subtensors.optim.traced_update import single_tensor_step
from subtensors.optim.versions import States
from subtensors.static.arena import Arena

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Optimizer(torch.optim.Optimizer):
    """An optimizer whose whole step is one fused call a parameter group.

    A subclass says which state a parameter has and how one tensor is updated:

    - `state`: for each entry of a parameter's state, the function that makes its initial value of the parameter (of its
      float32 master, where there is one).
    - `update(self, p, g, <state entries>, *, <hyperparameters>)`: straight-line math that writes `p` and the entries
      in place, traced once for the class (see `fused`). What comes after `p` and `g` is taken from the state by
      name; `step` needs no declaration: it is a 0-d float32 count on the parameter's device, 0 before the first
      step, and `update` adds to it. Keyword-only arguments come from the parameter group: numbers stay dynamic (a new
      value never retraces) and arrive as floats, tensors of one element as 0-d tensors; bools, None and strings are
      static, so that `if` may ask for them.
    - `optional`: hyperparameters that `update` is given as None while they are the number 0, so that it can leave out
      what would do nothing.

    Values stored in less than float32 are computed in float32 and rounded once, when they are stored. Complex
    parameters are seen as `torch.view_as_real` shows them. `maximize=True` in a group negates the gradient.

    Args:
        params: parameters (a TensorList of them, too), `(name, parameter)` pairs, or parameter groups.
        defaults: the hyperparameters of a group that doesn't give its own.
        options: the options of `Options`; put into the defaults.

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

    low_bit: ClassVar[Mapping[str, bool]] = {}
    """The state entries that may be kept in fewer bits, and whether their numbers are signed."""

    host_entries: ClassVar[Collection[str]] = ("step",)
    """State of 0 dimensions that `state_dict` puts on the CPU, as torch.optim keeps it there."""

    is_replayable: ClassVar[bool] = True
    """True if a step does the same for any values of numbers and state, and writes them in fused functions alone."""

    # GradScaler then sets `grad_scale` and `found_inf` instead of reading on the host whether to step.
    _step_supports_amp_scaling = True

    _optional_state: ClassVar[Mapping[str, str]] = {}
    """The state entries that a group needs only where an option is set, and the names of these options."""

    _accepted: ClassVar[Accepted | None] = None
    _initializers: ClassVar[Mapping[str, Initializer]] = {}
    _declaration: ClassVar[Declaration]
    _fusion: ClassVar[StepFunction]

    _updater: Updater
    _arena: Arena | None = None
    _capture: Capture | None = None
    _parts: dict[Tensor, Updater]
    _is_provisional = False
    """True while the state is what `torch.distributed.checkpoint` made to learn what there is."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if isinstance(cls.__dict__.get("__init__"), FunctionType):
            dynamo.call_eagerly(cls.__init__, "an optimizer is made of the parameters that there are")
        if "state" in cls.__dict__:
            cls._initializers = checked_initializers(cls.__name__, cls.__dict__["state"])
            del cls.state
        if cls.update is not Optimizer.update:
            cls._declaration = Declaration(cls, Optimizer)
            cls._fusion = cls._step_function()

    @classmethod
    def _step_function(cls) -> StepFunction:
        """The function that a step calls with the columns of a batch."""
        return FusedFunction(single_tensor_step(cls))

    def __init__(self, params: Params, defaults: dict[str, Any], **options: Unpack[Options]) -> None:
        if not hasattr(type(self), "_fusion"):
            raise TypeError(f"{type(self).__name__} has no update method")
        self._arena = options.get("arena")
        self._updater = Updater(type(self), self._fusion)
        check_flags({**defaults, **options}, self._declaration.flags)
        given = defaults | {name: x for name, x in options.items() if name in TORCH_DEFAULTS}
        checked = checked_values(given, self._declaration.number_counts, self._accepted)
        super().__init__(parameters_in(params), checked | group_options(options, type(self)))
        self.state = States()
        if options.get("graph"):
            self.capture()

    def _create_state(self) -> None:
        """Create the state of all parameters now, before they have gradients."""
        for group in self.param_groups:
            StateFactory(self).create_all(group["params"], group)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update one tensor in one step; each subclass implements it."""
        raise NotImplementedError

    def needs_state(self, entry: str, group: ParamGroup) -> bool:
        """Return whether the parameters of this group have a state entry; `update` is given None if they lack it.

        Args:
            entry: a name from `state`, or `step`.
            group: the parameter group, whose options alone decide.
        """
        return entry not in self._optional_state or bool(group[self._optional_state[entry]])

    def applies_to(self, entry: str, p: Tensor, group: ParamGroup) -> bool:
        """Return whether this parameter has a state entry that its group needs; `update` is given None if it lacks it.

        Args:
            entry: a name from `state`, or `step`.
            p: the parameter.
            group: its group.
        """
        return True

    def init_state(self, entry: str, p: Tensor, group: ParamGroup) -> Tensor:
        """The initial value of a state entry; override it if the value depends on more than the parameter.

        Args:
            entry: a name from `state`.
            p: the parameter, or its float32 master.
            group: the parameter group.

        Returns:
            By default, what the function that `state` has for the entry makes of `p`.
        """
        return self._initializers[entry](p)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @with_hooks
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The return value of the closure.

        Raises:
            RuntimeError: a gradient is sparse.
            RuleError: `update` is no straight-line math, or writes nothing.
        """
        if (
            closure is None
            and self._capture is not None
            and type(self.state) is States
            and not accumulates(self.param_groups)
            and self._capture.try_fast_replay(self)
        ):
            return None
        return self._take_step(closure)

    @torch.no_grad()
    def _take_step(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if type(self.state) is not States:
            self.state = States(dict, self.state)
        if (self._is_provisional or not self.state) and take_checkpoint_step(self):
            return loss
        if accumulates(self.param_groups):
            accumulation.take_pass(self.param_groups, self._update_all, getattr(self, "found_inf", None) is not None)
        else:
            self._update_all()
        return loss

    def _update_all(self) -> None:
        if self._capture is None or not self._capture.take_step(self):
            self._updater.update_all(self)

    def _split_kinds(
        self, kinds: dict[BatchKind, list[int]], params: list[Tensor]
    ) -> Iterable[tuple[BatchKind, list[int]]]:
        """Split the parameters of each kind, given by their positions in the group, into batches."""
        return kinds.items()

    def capture(self, *, packed: bool = False, check: bool | None = None) -> Capture:
        """Take steps by replaying a CUDA graph, captured in the next step and recaptured when a step no longer matches.

        Numbers of the parameter groups may change between replays, and so may the addresses of gradients. A step that
        can't be replayed runs eagerly: on a CPU, and inside a graph that the caller captures. `st.explain(opt)` tells
        the reasons.

        Args:
            packed: move the parameters into one flat tensor a device and dtype, and give each a gradient in another, to
                which backward passes add. Then one fast check covers all addresses, whatever the number of parameters.
                `zero_grad` writes zeros, whatever its argument, so a parameter that no backward pass reaches is updated
                too, with a gradient of zero; without packing it is left as it is.
            check: check, at every replay, each address that it uses; None: if `SUBTENSORS_CHECK_REPLAYS` is set.

        Returns:
            The captured steps, with their counts; none at first.

        Raises:
            RuleError: a parameter is a DTensor.

        Example:
            >>> import subtensors as st
            >>> w = torch.nn.Parameter(torch.ones(2))
            >>> opt = st.optim.SGD([w], lr=0.5)
            >>> capture = opt.capture()
            >>> w.grad = torch.ones(2)
            >>> opt.step()
            >>> print(st.explain(opt))
            SGD of 1 parameter, captured: no graph on a CPU, 1 eager step
              ran eagerly: the parameters are on the CPU, where a step has no graph (1)
        """
        flag("packed", packed)
        if check is not None:
            flag("check", check)
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._updater.forget()  # packing needs parameters that nothing else holds
        self._capture = Capture(check, params, packed)
        return self._capture

    def step_in_backward(self) -> list[RemovableHandle]:
        """Update each parameter as soon as a backward pass has its gradient, and free the gradient there.

        `step()` is left to schedulers, and to parameters that are added later. An update sees one parameter: an
        optimizer of your own that reduces over several, or changes numbers in a hook before its step, belongs to plain
        steps, and so do two optimizers of one parameter.

        Returns:
            The hooks; `remove()` each to take plain steps again.

        Raises:
            RuntimeError: here or in the backward, with `max_norm`, `accumulate`, captured steps, a graph that is being
                captured, or several processes; in `step()`, with a GradScaler.

        Example:
            >>> import subtensors as st
            >>> w = torch.nn.Parameter(torch.ones(2))
            >>> hooks = st.optim.SGD([w], lr=0.5).step_in_backward()
        """
        return [*hook_updates(self), self.register_step_pre_hook(refuse_scaler)]

    @property
    def replays(self) -> int | None:
        """The number of steps replayed since `capture()`; None if it was not called."""
        return None if self._capture is None else self._capture.replays

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, unless they are still being accumulated for an update; packed ones become zero.

        Args:
            set_to_none: drop them rather than write zeros.
        """
        if accumulation.is_underway(self.param_groups):
            return
        if self._capture is None or (packed := self._capture.packed) is None:
            super().zero_grad(set_to_none)
            return
        packed.zero_gradients()
        for p in packed.not_packed(p for group in self.param_groups for p in group["params"]):
            p.grad = None if set_to_none or p.grad is None else p.grad.detach_().zero_()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """A context in which the parameters hold their averages (`ema=`), to evaluate or save; take no step in it.

        Raises:
            ValueError: no parameter has an average.

        Example:
            >>> import subtensors as st
            >>> w = torch.nn.Parameter(torch.zeros(1))
            >>> opt = st.optim.SGD([w], lr=1.0, ema=0.75)
            >>> w.grad = -torch.ones(1)
            >>> opt.step()
            >>> with opt.averaged_weights():
            ...     print(w.item())
            0.25
            >>> w.item()
            1.0
        """
        return swapped_averages(self.state)

    def __repr__(self) -> str:
        text = super().__repr__()
        return text if self._capture is None else f"{text.removesuffix(')')}{self._capture.summary()}\n)"

    def explain(self) -> str:
        """Describe how steps run, in a few lines; `st.explain(opt)` returns the same."""
        count = sum(len(group["params"]) for group in self.param_groups)
        how = "steps run eagerly" if self._capture is None else self._capture.explain()
        return f"{type(self).__name__} of {counted(count, 'parameter')}, {how}"

    def state_dict(self) -> dict[str, Any]:
        """The state as torch.optim's class of the same name saves it.

        Returns:
            `state` and `param_groups`; step counts are on the CPU, unless `capturable` or `fused` says otherwise.
        """
        return saved_state(self, super().state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that this class, or torch.optim's of the same name, saved.

        Values are copied, each into the dtype and onto the device that this optimizer would have started it with.

        Args:
            state_dict: a return value of `state_dict()`.

        Raises:
            ValueError: the groups, or the shape of a state entry, don't fit this optimizer's parameters.
            KeyError: the state is another optimizer's, or that of a parameter lacks an entry.
            RuntimeError: the entries of the state were lost on the way.
        """
        with loading(self):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **copied_state(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        former = list(vars(self).get("param_groups", []))
        super().__setstate__(state)
        self._updater = Updater(type(self), self._fusion)
        restore_state(self, former)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with the defaults for what it doesn't say.

        Args:
            param_group: `params`, and hyperparameters of its own.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"param_group is a dict with 'params', got {shown(param_group)}")
        if isinstance(param_group["params"], TensorList):
            param_group = {**param_group, "params": param_group["params"].tensors}
        super().add_param_group(param_group)
        if any(isinstance(p, TensorList) for p in param_group["params"]):
            raise TypeError("params are tensors, and one is a TensorList: give the list itself, or its .tensors")
        known = {*self.defaults, *self._declaration.hyperparameters}
        try:
            values = {name: value for name, value in param_group.items() if name in known}
            checked_values(values, self._declaration.number_counts, self._accepted)
            self._check(param_group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        accumulation.start(param_group, self.param_groups[0])

    def _check(self, group: ParamGroup) -> None:
        """Refuse options that are not supported."""
        name = type(self).__name__
        check_flags(group, self._declaration.flags)
        check_options(name, group, self.param_groups[0])
        check_state_dtype(name, group.get("state_dtype"), self.low_bit)
        if missing := self._declaration.required - set(group):
            raise ValueError(f"{name}.update needs {sorted(missing)}, which the group {sorted(group)} lacks")
