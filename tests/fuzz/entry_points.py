"""The public entry points, each with arguments that it takes: a fuzzed call has some of them replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from wrong_values import N

import subtensors as st
from subtensors.lists.tree_structure import indexes_each
from subtensors.optim.options import DEFAULTS


@dataclass(frozen=True)
class EntryPoint:
    """A public function.

    Args:
        call: calls it, and whatever is to be done with what it returns.
        right: makes arguments that it takes, by name.
        others: more of its arguments, which `right` leaves at their defaults.
        plain: calls torch's function of the same arguments, whose errors are allowed, too.
    """

    call: Callable[..., object]
    right: Callable[[], dict[str, Any]]
    others: tuple[str, ...] = ()
    plain: Callable[..., object] | None = None


def _leaf(*shape: int) -> Tensor:
    tensor = torch.ones(*shape, requires_grad=True)
    tensor.grad = torch.ones(*shape)
    return tensor


def _stepped(cls: type[torch.optim.Optimizer]) -> Callable[..., object]:
    def make_and_step(params: object, **options: object) -> None:
        opt = cls(params, **options)
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        opt.step()
        opt.zero_grad()

    return make_and_step


def _sgd(p: Tensor, g: Tensor, lr: float = 0.1) -> None:
    p.sub_(lr * g)


def _mapped_sgd(**given: object) -> None:
    for i in range(2):
        _sgd(**{name: value[i] if isinstance(value, st.TensorList) else value for name, value in given.items()})


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        x = self.linear(x).relu() * scale
        return (x if mask is None else x * mask).sum(1)


def _run(**options: Any) -> Any:
    return st.bucketed(Tiny(), {"x": {1: N}}, **options)


def _make_and_call(program: Any, dims: Any, **options: Any) -> object:
    run = st.bucketed(program, dims, **options)
    with torch.no_grad():
        result = run(torch.ones(2, 3, 4))
    run.stats(), run.explain(), st.explain(run)
    return result


def _arena(**options: Any) -> object:
    arena = st.Arena(**options)
    arena.zeros(3).add_(1)
    arena.release()
    arena.restore()
    return arena.explain()


def _in_arena(method: str) -> Callable[..., object]:
    return lambda **given: getattr(st.Arena("cpu", reserve="64MiB"), method)(**given)


def lists() -> st.TensorList:
    """Return a list of two tensors."""
    return st.TensorList([torch.ones(3), torch.ones(2, 2)])


def nested() -> Tensor:
    """Return a jagged tensor of two rows."""
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def _watched(first: object = None) -> None:
    with st.watch_size_arithmetic(*(() if first is None else (first,))):
        pass


OPTIMIZERS = {
    name: getattr(st.optim, name)
    for name in st.optim.__all__
    if isinstance(getattr(st.optim, name), type) and name not in ("Optimizer", "MatrixOptimizer")
}


def _infer(fn: Any, args: Any, dims: Any) -> object:
    found = st.infer_sizes(fn, args, dims)
    return repr(found), found.dim("n"), found.of("n")


_POINTS: dict[str, EntryPoint] = {
    "Dim": EntryPoint(
        lambda **given: (st.Dim(**given).bucket(3), st.Dim(**given).buckets, repr(st.Dim(**given))),
        lambda: {"name": "n", "max": 16},
        ("min", "buckets", "strict"),
    ),
    "Dim.bucket": EntryPoint(N.bucket, lambda: {"size": 3}),
    "Linear": EntryPoint(lambda **given: st.Linear(**given).up_to(40), lambda: {"step": 4}),
    "Linear.bucket": EntryPoint(st.Linear(4).bucket, lambda: {"size": 3}),
    "Linear.up_to": EntryPoint(st.Linear(4).up_to, lambda: {"limit": 30}),
    "Geometric": EntryPoint(lambda **given: st.Geometric(**given).up_to(40), lambda: {"base": 2.0, "start": 4}),
    "Geometric.bucket": EntryPoint(st.Geometric(2, 4).bucket, lambda: {"size": 3}),
    "Sizes": EntryPoint(lambda **given: st.Sizes(**given).bucket(3), lambda: {"sizes": [4, 8]}),
    "Sizes.bucket": EntryPoint(st.Sizes([4, 8]).bucket, lambda: {"size": 3}),
    "fit_buckets": EntryPoint(st.fit_buckets, lambda: {"lengths": [3, 4, 9], "max_graphs": 2}, ("multiple_of",)),
    "infer_sizes": EntryPoint(
        _infer, lambda: {"fn": lambda x: x.view(-1, 2), "args": [torch.ones(4)], "dims": [{0: N}]}
    ),
    "pad": EntryPoint(st.pad, lambda: {"t": torch.ones(2, 3), "dims": {1: N}}, ("value",)),
    "pad of a list": EntryPoint(st.pad, lambda: {"t": [torch.ones(2), torch.ones(3)], "dims": {0: N}}, ("value",)),
    "PaddedTensor": EntryPoint(st.PaddedTensor, lambda: {"t": torch.ones(3), "dims": {0: N}}),
    "PaddedTensor.count": EntryPoint(st.pad(torch.ones(3), {0: N}).count, lambda: {"dim": 0}),
    "pad_nested": EntryPoint(st.pad_nested, lambda: {"nested": nested(), "dim": N}, ("value",)),
    "pad_masked": EntryPoint(
        st.pad_masked, lambda: {"t": torch.ones(2, 3), "mask": torch.ones(2, 3), "dim": N}, ("value",)
    ),
    "to_nested": EntryPoint(st.to_nested, lambda: {"x": st.pad([torch.ones(2), torch.ones(3)], {0: N})}),
    "to_masked": EntryPoint(st.to_masked, lambda: {"x": st.pad([torch.ones(2), torch.ones(3)], {0: N})}, ("value",)),
    "bucketed": EntryPoint(
        _make_and_call,
        lambda: {"program": lambda x: x.sum(1), "dims": {0: {1: N}}},
        ("max_graphs", "memory_limit", "on_miss", "max_waste", "check"),
        plain=lambda program, dims, **given: program(torch.ones(2, 3, 4)),
    ),
    "bucketed.compile": EntryPoint(lambda **given: st.bucketed(torch.exp, {0: {0: N}}, **given), dict, ("compile",)),
    "Bucketed()": EntryPoint(
        lambda **given: _run()(**given),
        lambda: {"x": torch.ones(2, 3, 4)},
        ("mask", "scale"),
        plain=lambda **given: Tiny()(**given),
    ),
    "Bucketed.check": EntryPoint(
        lambda **given: _run().check(**given),
        lambda: {"x": torch.ones(2, 3, 4)},
        ("mask", "scale"),
        plain=lambda **given: Tiny()(**given),
    ),
    "Bucketed.warmup": EntryPoint(
        lambda **given: _run().warmup(**{"progress": False, **given}),
        lambda: {"x": torch.ones(2, 3, 4)},
        ("mask", "scale", "progress"),
        plain=lambda **given: Tiny()(**given),
    ),
    "Bucketed.refit": EntryPoint(lambda **given: _run().refit(**given), dict, ("max_graphs",)),
    "TensorList": EntryPoint(
        lambda x: ((made := st.TensorList(x)), made.tree(), made + 1, repr(made)),
        lambda: {"x": [torch.ones(3)]},
        plain=lambda x: torch.utils._pytree.tree_map(lambda t: t + 1, x),
    ),
    "TensorList.pack": EntryPoint(lambda x: st.TensorList(x).pack(), lambda: {"x": [torch.ones(3)]}),
    "TensorList.like": EntryPoint(
        lambda **given: lists().like(**given).tree(), lambda: {"tensors": [torch.ones(3), torch.ones(3)]}
    ),
    "TensorList.same_structure": EntryPoint(
        lambda **given: lists().same_structure(**given), lambda: {"other": lists()}
    ),
    "TensorList[]": EntryPoint(
        lambda key: lists()[key], lambda: {"key": 0}, plain=lambda key: [t[key] for t in lists()]
    ),
    "TensorList[] =": EntryPoint(
        lambda key, value: lists().__setitem__(key, value),
        lambda: {"key": 0, "value": 1},
        plain=lambda key, value: [
            t.__setitem__(key, value)
            if indexes_each(key)
            else t.copy_(value)
            if isinstance(value, Tensor)
            else t.fill_(value)
            for t in lists()
        ],
    ),
    "TensorList add": EntryPoint(
        lambda other: lists() + other, lambda: {"other": 1}, plain=lambda other: [t + other for t in lists()]
    ),
    "fused": EntryPoint(lambda function: st.fused(function), lambda: {"function": _sgd}),
    "Fused()": EntryPoint(
        lambda **given: st.fused(_sgd)(**given), lambda: {"p": lists(), "g": lists()}, ("lr",), plain=_mapped_sgd
    ),
    "Fused.explain": EntryPoint(
        lambda **given: st.fused(_sgd).explain(**given),
        lambda: {"p": lists(), "g": lists()},
        ("lr",),
        plain=_mapped_sgd,
    ),
    "total_norm": EntryPoint(
        st.total_norm,
        lambda: {"tensors": [torch.ones(3)]},
        ("norm_type", "error_if_nonfinite"),
        plain=torch.nn.utils.get_total_norm,
    ),
    "clip_grad_norm_": EntryPoint(
        st.clip_grad_norm_,
        lambda: {"parameters": [_leaf(3)], "max_norm": 1.0},
        ("norm_type", "error_if_nonfinite"),
        plain=torch.nn.utils.clip_grad_norm_,
    ),
    "stochastic_round_": EntryPoint(
        st.stochastic_round_,
        lambda: {"target": torch.ones(3, dtype=torch.bfloat16), "source": torch.ones(3)},
        plain=lambda target, source: target.copy_(source),
    ),
    "chunk": EntryPoint(
        lambda **given: getattr(st.chunk(**given) * 2, "realize", list)(),
        lambda: {"x": torch.ones(4, 3)},
        ("dim", "chunks", "rows", "memory_limit", "accumulate"),
        plain=lambda x, **given: x * 2,
    ),
    "chunk.compile": EntryPoint(lambda **given: st.chunk(**given), lambda: {"x": torch.ones(4, 3)}, ("compile",)),
    "ChunkedTensor": EntryPoint(
        lambda **given: st.ChunkedTensor(**given).sum(),
        lambda: {"x": torch.ones(4, 3)},
        ("dim", "chunks", "rows"),
        plain=lambda x, **given: x.sum(),
    ),
    "static": EntryPoint(
        lambda t: ((made := st.static(t)), made + 1, st.explain(made)),
        lambda: {"t": torch.ones(3)},
        plain=lambda t: t + 1,
    ),
    "StaticAddressTensor": EntryPoint(st.StaticAddressTensor, lambda: {"t": torch.ones(3)}),
    "Arena": EntryPoint(_arena, lambda: {"device": "cpu", "reserve": "64MiB"}, ("alignment", "chunk")),
    "Arena.zeros": EntryPoint(
        lambda size, **given: st.Arena("cpu", reserve="64MiB").zeros(size, **given),
        lambda: {"size": 3},
        ("dtype", "requires_grad"),
        plain=lambda size, **given: torch.zeros(size, **given),
    ),
    "Arena.full": EntryPoint(
        _in_arena("full"), lambda: {"size": (3,), "fill_value": 1}, ("dtype", "requires_grad"), plain=torch.full
    ),
    "Arena.empty_like": EntryPoint(_in_arena("empty_like"), lambda: {"t": torch.ones(3)}, ("dtype",)),
    "Arena.static": EntryPoint(_in_arena("static"), lambda: {"t": torch.ones(3)}),
    "Arena.release": EntryPoint(_in_arena("release"), dict, ("keep",)),
    "Arena.guard": EntryPoint(
        lambda call: st.Arena("cpu", reserve="64MiB").guard(call)(),
        lambda: {"call": dict},
        plain=lambda call: call(),
    ),
    "explain": EntryPoint(
        lambda subject, **given: st.explain(subject, *given.values()),
        lambda: {"subject": torch.add, "first": lists()},
        ("second",),
        plain=lambda subject, first=None, **given: subject(first[0], *given.values()),
    ),
    "watch_size_arithmetic": EntryPoint(_watched, dict, ("first",)),
    "optim.convert": EntryPoint(
        st.optim.convert, lambda: {"optimizer": torch.optim.SGD([_leaf(3)], lr=0.1)}, ("max_norm", "state_dtype")
    ),
    "Optimizer.capture": EntryPoint(
        lambda **given: st.optim.SGD([_leaf(3)], lr=0.1).capture(**given), dict, ("packed", "check")
    ),
    "Optimizer.load_state_dict": EntryPoint(
        lambda state_dict: st.optim.SGD([_leaf(3)], lr=0.1).load_state_dict(state_dict),
        lambda: {"state_dict": st.optim.SGD([_leaf(3)], lr=0.1).state_dict()},
        plain=lambda state_dict: torch.optim.SGD([_leaf(3)], lr=0.1).load_state_dict(state_dict),
    ),
    "Optimizer.add_param_group": EntryPoint(
        lambda param_group: st.optim.SGD([_leaf(3)], lr=0.1).add_param_group(param_group),
        lambda: {"param_group": {"params": [_leaf(2)]}},
        plain=lambda param_group: torch.optim.SGD([_leaf(3)], lr=0.1).add_param_group(param_group),
    ),
    "Optimizer.step": EntryPoint(
        lambda closure: st.optim.SGD([_leaf(3)], lr=0.1).step(closure),
        lambda: {"closure": None},
        plain=lambda closure: torch.optim.SGD([_leaf(3)], lr=0.1).step(closure),
    ),
}


def _of_optimizer(name: str, cls: type[torch.optim.Optimizer]) -> EntryPoint:
    own = tuple(p for p in inspect.signature(cls).parameters if p not in ("params", "options", "device"))
    theirs = getattr(torch.optim, name, None)
    shape = (3, 2)
    known = inspect.signature(theirs or torch.optim.SGD).parameters

    def plain(params: object, **given: object) -> None:
        given = {name: value for name, value in given.items() if name in known} if theirs else {"lr": 0.1}
        _stepped(theirs or torch.optim.SGD)(params, **given)

    return EntryPoint(
        _stepped(cls),
        lambda: {"params": [_leaf(*shape)], "lr": 0.1},
        tuple(dict.fromkeys((*own, *DEFAULTS))),
        plain=plain,
    )


ENTRY_POINTS: dict[str, EntryPoint] = {
    **_POINTS,
    **{f"optim.{name}": _of_optimizer(name, cls) for name, cls in OPTIMIZERS.items()},
}
"""By name; those of optimizers have a step with the gradient in each call."""
