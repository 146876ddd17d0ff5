"""Rows about pairs of columns: one type's values in another's program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subtensors as st
from composition.subjects import SEQ, Subject, total
from composition.table import ROWS, WORKS, Column, Expected, Meaningless, Refused, Row, Run, Slower

GROUP = "each other"

PADDED, LISTS, CHUNKED, STATIC, BUCKETED, OPTIM = Column

MEETS = {column: ROWS.setdefault(f"`{column.value}`", Row(GROUP, f"`{column.value}`")) for column in Column}


def meets(one: Column, other: Column, expected: Expected = WORKS) -> Callable[[Run], Run]:
    """Register a cell of two columns in both places."""

    def register(run: Run) -> Run:
        MEETS[one].cell(other, expected)(run)
        return MEETS[other].cell(one, expected)(run)

    return register


class Pair:
    """The types by their constructors, or plain torch.

    Args:
        subject: of either column: the device, dtype and model.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject, self.plain, self.module = subject, subject.plain, subject.model()
        self.leaves: list[Tensor] = []

    def leaf(self, *shape: int) -> Tensor:
        self.leaves.append(self.subject.leaf(*shape))
        return self.leaves[-1]

    def pad(self, x: Tensor) -> Any:
        return x if self.plain else st.pad(x, {x.dim() - 2: SEQ})

    def unpad(self, x: Any) -> Tensor:
        return x.unpad() if isinstance(x, st.PaddedTensor) else x

    def chunk(self, x: Any) -> Any:
        return x if self.plain else st.chunk(x, chunks=2)

    def static(self, x: Any) -> Any:
        return x if self.plain else st.static(x)

    def bucketed(self, program: Any, *padded: str) -> Any:
        return program if self.plain else st.bucketed(program, {name: {0: SEQ} for name in padded})

    def each(self, function: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
        """Call a function with each value, or once with the list of them."""
        return [function(x) for x in values] if self.plain else list(function(st.TensorList(list(values))))

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return (torch.optim.AdamW if self.plain else st.optim.AdamW)(parameters, lr=0.05)

    def static_module(self) -> nn.Module:
        """The model, its weights static."""
        for layer in (self.module[0], self.module[2]):
            layer.weight = self.static(layer.weight)
        return self.module

    def parameters(self) -> list[Tensor]:
        return [*self.leaves, *self.module.parameters()]

    def backward(self, *outs: Tensor) -> list[Tensor]:
        """Return results and gradients."""
        for p in self.parameters():
            p.grad = None
        total(outs).backward()
        return [*outs, *(p.grad for p in self.parameters() if p.grad is not None)]

    def trained(self, loss: Callable[[], Tensor], parameters: Any = None) -> list[Tensor]:
        """Return the parameters after two steps."""
        optimizer = self.optimizer(self.module.parameters() if parameters is None else parameters)
        for _ in range(2):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        return [p.detach() for p in self.module.parameters()]


@meets(PADDED, PADDED)
def padded_padded(subject: Subject) -> list[Tensor]:
    """Two padded tensors of one Dim in an op."""
    pair = Pair(subject)
    x, y = pair.leaf(5, 4), pair.leaf(5, 4)
    return pair.backward(pair.unpad(pair.module(pair.pad(x) * pair.pad(y))))


@meets(PADDED, LISTS)
def padded_in_list(subject: Subject) -> list[Tensor]:
    """A TensorList of padded tensors."""
    pair = Pair(subject)
    values = [pair.pad(pair.leaf(n, 4)) for n in (5, 7)]
    return pair.backward(*(pair.unpad(x) for x in pair.each(pair.module, values)))


@meets(PADDED, CHUNKED)
def padded_chunked(subject: Subject) -> list[Tensor]:
    """`st.chunk` of a padded tensor."""
    pair = Pair(subject)
    hidden, target = pair.leaf(5, 4), torch.arange(5, device=subject.device)
    target = target if pair.plain else st.pad(target, {0: SEQ})
    return pair.backward(F.cross_entropy(pair.module(pair.chunk(pair.pad(hidden))), target))


@meets(PADDED, STATIC)
def padded_static(subject: Subject) -> list[Tensor]:
    """A padded tensor and static weights."""
    pair = Pair(subject)
    return pair.backward(pair.unpad(pair.static_module()(pair.pad(pair.leaf(5, 4)))))


@meets(PADDED, BUCKETED, Slower("hand over the plain tensor"))
def padded_bucketed(subject: Subject) -> list[Tensor]:
    """A padded tensor as an argument of a runner, which pads by itself."""
    pair = Pair(subject)
    x, run = pair.leaf(5, 4), pair.bucketed(pair.module, "input")
    return [out for _ in range(3) for out in pair.backward(pair.unpad(run(pair.pad(x))))]


@meets(PADDED, OPTIM)
def padded_optim(subject: Subject) -> list[Tensor]:
    """Training on padded tensors."""
    pair = Pair(subject)
    x = pair.leaf(5, 4)
    return pair.trained(lambda: pair.module(pair.pad(x)).square().mean())


@meets(LISTS, LISTS)
def list_list(subject: Subject) -> list[Tensor]:
    """Two lists in an op, which pairs their elements."""
    pair = Pair(subject)
    left, right = ([pair.leaf(n, 4) for n in (3, 2)] for _ in range(2))
    if pair.plain:
        return pair.backward(*(pair.module(a * b) for a, b in zip(left, right, strict=True)))
    return pair.backward(*pair.module(st.TensorList(left) * st.TensorList(right)))


@meets(LISTS, CHUNKED)
def chunked_in_list(subject: Subject) -> list[Tensor]:
    """A TensorList of chunked tensors."""
    pair = Pair(subject)
    values = [pair.chunk(pair.leaf(n, 4)) for n in (6, 4)]
    return pair.backward(*pair.each(lambda x: pair.module(x).logsumexp(-1).mean(), values))


@meets(LISTS, STATIC)
def static_in_list(subject: Subject) -> list[Tensor]:
    """A TensorList of static tensors."""
    pair = Pair(subject)
    values = [pair.static(pair.leaf(n, 4)) for n in (3, 2)]
    pair.leaves = values
    return pair.backward(*pair.each(pair.module, values))


@meets(LISTS, BUCKETED, Slower("an argument is a TensorList"))
def list_bucketed(subject: Subject) -> list[Tensor]:
    """A runner that takes a TensorList beside the tensor that it pads."""
    pair = Pair(subject)
    x, scales = pair.leaf(5, 4), [pair.leaf(3), pair.leaf(2)]
    run = pair.bucketed(lambda x, scales: (pair.module(x), [t.exp() for t in scales]), "x")
    out, others = run(x, scales if pair.plain else st.TensorList(scales))
    return pair.backward(out, *others)


@meets(LISTS, OPTIM)
def list_optim(subject: Subject) -> list[Tensor]:
    """An optimizer of the elements of a packed TensorList."""
    pair = Pair(subject)
    x, parameters = pair.leaf(5, 4), list(pair.module.parameters())
    packed = parameters if pair.plain else st.TensorList(parameters).pack()
    return pair.trained(lambda: pair.module(x).square().mean(), list(packed))


@meets(CHUNKED, CHUNKED)
def chunked_chunked(subject: Subject) -> list[Tensor]:
    """Two chunked tensors in an op."""
    pair = Pair(subject)
    x, y = (pair.chunk(pair.leaf(6, 4)) for _ in range(2))
    return pair.backward(pair.module(x * y).logsumexp(-1).mean())


@meets(CHUNKED, STATIC)
def chunked_static(subject: Subject) -> list[Tensor]:
    """A static tensor in chunks, and static weights."""
    pair = Pair(subject)
    pair.leaves = [pair.static(pair.leaf(6, 4))]
    return pair.backward(pair.static_module()(pair.chunk(pair.leaves[0])).logsumexp(-1).mean())


@meets(CHUNKED, BUCKETED)
def chunked_bucketed(subject: Subject) -> list[Tensor]:
    """A runner whose program chunks its hidden states."""
    pair = Pair(subject)
    x = pair.leaf(3, 5, 4)

    def program(x: Tensor) -> Tensor:
        return pair.module(x if pair.plain else st.chunk(x, dim=0, chunks=3)).logsumexp(-1).mean()

    run = program if pair.plain else st.bucketed(program, {"x": {1: SEQ}})
    return [out for _ in range(3) for out in pair.backward(run(x))]


@meets(CHUNKED, OPTIM)
def chunked_optim(subject: Subject) -> list[Tensor]:
    """Training with a chunked loss."""
    pair = Pair(subject)
    x, target = pair.leaf(6, 4), torch.tensor([0, 1, 4, 2, 1, 3], device=subject.device)
    return pair.trained(lambda: F.cross_entropy(pair.module(pair.chunk(x)), target))


@meets(STATIC, STATIC)
def static_static(subject: Subject) -> list[Tensor]:
    """Two static tensors in an op."""
    pair = Pair(subject)
    pair.leaves = [pair.static(pair.leaf(5, 4)) for _ in range(2)]
    return pair.backward(pair.static_module()(pair.leaves[0] * pair.leaves[1]))


@meets(STATIC, BUCKETED)
def static_bucketed(subject: Subject) -> list[Tensor]:
    """A runner of a model with static weights."""
    pair = Pair(subject)
    x, run = pair.leaf(5, 4), pair.bucketed(pair.static_module(), "input")
    return [out for _ in range(3) for out in pair.backward(run(x))]


@meets(STATIC, OPTIM)
def static_optim(subject: Subject) -> list[Tensor]:
    """Training of static weights."""
    pair = Pair(subject)
    x, module = pair.leaf(5, 4), pair.static_module()
    return pair.trained(lambda: module(x).square().mean())


@meets(BUCKETED, BUCKETED)
def bucketed_bucketed(subject: Subject) -> list[Tensor]:
    """A runner that another runner calls."""
    pair = Pair(subject)
    inner = pair.bucketed(pair.module, "input")
    x, run = pair.leaf(5, 4), pair.bucketed(lambda x: inner(x) * 2, "x")
    return [out for _ in range(3) for out in pair.backward(run(x))]


@meets(BUCKETED, OPTIM)
def bucketed_step(subject: Subject) -> list[Tensor]:
    """A runner of a whole step."""
    pair = Pair(subject)
    x, optimizer = pair.leaf(5, 4).detach(), pair.optimizer(pair.module.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = pair.module(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = pair.bucketed(step, "x")
    return [*(run(x) for _ in range(4)), *(p.detach() for p in pair.module.parameters())]


@meets(OPTIM, OPTIM)
def optim_optim(subject: Subject) -> list[Tensor]:
    """Two optimizers of one model."""
    pair = Pair(subject)
    x = pair.leaf(5, 4)
    others = [pair.optimizer(list(pair.module[i].parameters())) for i in (0, 2)]
    for _ in range(2):
        pair.module(x).square().mean().backward()
        for optimizer in others:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in pair.module.parameters()]


OWN_MEMORY = "make static what it is made of"

MADE_STATIC = ROWS.setdefault("made static", Row(GROUP, "made static"))
PACKED = ROWS.setdefault("in a packed TensorList", Row(GROUP, "in a packed TensorList"))
NO_VALUE = Meaningless("no value")


def made_static(subject: Subject) -> list[Tensor]:
    """`st.static` of the value."""
    value = subject.value()
    return [x.detach() for x in subject.leave(subject.body(value if subject.plain else st.static(value)))]


def in_packed_list(subject: Subject) -> list[Tensor]:
    """`st.TensorList([value]).pack()`."""
    value = subject.value()
    if subject.plain:
        return [subject.body(value)]
    return [subject.body(st.TensorList([value]).pack()[0])]


for _column in (PADDED, LISTS, CHUNKED):
    MADE_STATIC.cell(_column, Refused(TypeError, "takes a strided torch.Tensor", OWN_MEMORY))(made_static)
MADE_STATIC.cell(STATIC)(made_static)
for _column in (PADDED, CHUNKED, STATIC):
    PACKED.cell(_column, Refused(ValueError, "pack()", "pack a list of plain tensors"))(in_packed_list)
PACKED.cell(LISTS, Refused(TypeError, "TensorList", "`st.TensorList([*a, *b])`"))(in_packed_list)
for _column in (BUCKETED, OPTIM):
    MADE_STATIC.cell(_column, NO_VALUE)(made_static)
    PACKED.cell(_column, NO_VALUE)(in_packed_list)
