"""The program that each column runs, wrapped in the column's type or in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subtensors as st
from composition.table import Column

SEQ = st.Dim("n", max=32, buckets=[8, 16])

Value = Any
"""A tensor, a TensorList, or the list of tensors that stands for it in plain torch."""

Body = Callable[[Value], Value]


class Subject:
    """A small model and its inputs, of a device and dtype.

    Args:
        device, dtype: of all values.
        plain: run plain torch, not the column's type.
    """

    column: ClassVar[Column]
    shapes: ClassVar[Sequence[tuple[int, ...]]] = [(2, 5, 4)]
    """Of the inputs."""
    calls: ClassVar[int] = 1
    """How often the program is called; the gradients of the last count."""

    def __init__(self, device: str, dtype: torch.dtype, plain: bool) -> None:
        torch.manual_seed(0)
        self.generator = torch.Generator().manual_seed(0)  # of its own: threads make subjects at the same time
        self.device, self.dtype, self.plain = device, dtype, plain
        self.module = self.model()
        self.leaves = [self.leaf(*shape) for shape in self.shapes]
        self.prepare()

    def model(self) -> nn.Module:
        """Return a model with values that every dtype of the program begins with."""
        of = {"device": self.device, "dtype": self.dtype}
        module = nn.Sequential(nn.Linear(4, 6, **of), nn.Tanh(), nn.Linear(6, 5, **of))
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(self.leaf(*p.shape) / 2)
        return module

    def leaf(self, *shape: int) -> Tensor:
        """Return a tensor that requires grad, with values that every dtype of the program begins with."""
        start = torch.complex64 if self.dtype.is_complex else torch.float32
        return torch.randn(shape, dtype=start, generator=self.generator).to(self.device, self.dtype).requires_grad_()

    def prepare(self) -> None:
        """Make what belongs to the column and is no value."""

    def enter(self, leaves: Sequence[Tensor]) -> Value:
        """Return what the program takes."""
        return leaves[0]

    def body(self, value: Value) -> Value:
        """Run the program."""
        return self.module(value)

    def leave(self, result: Value) -> list[Tensor]:
        """Return a result as plain tensors."""
        return [result]

    def value(self) -> Value:
        """Return the wrapped inputs."""
        return self.enter(self.leaves)

    def loss(self, *leaves: Tensor) -> Tensor:
        """Return one number, from plain inputs."""
        return total(self.leave(self.body(self.enter(leaves))))

    def parameters(self) -> list[Tensor]:
        """Return the tensors that gradients are taken of."""
        return [*self.leaves, *self.module.parameters()]

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the inputs and parameters that have one."""
        return [p.grad for p in self.parameters() if p.grad is not None]

    def step(self) -> None:
        """Update the parameters, where the column has an optimizer."""

    def trained(self, body: Body | None = None, backward: Callable[[Tensor], None] = Tensor.backward) -> list[Tensor]:
        """Run the program and its backward, and return results and gradients."""
        for _ in range(self.calls):
            for p in self.parameters():
                p.grad = None
            outs = self.leave((body or self.body)(self.value()))
            backward(total(outs))
            self.step()
        return [*outs, *self.gradients()]

    def fallbacks(self) -> list[str]:
        """Return why calls did not take the fast way, where the column counts that."""
        return []


class Padded(Subject):
    """A batch of sequences whose length is padded."""

    column = Column.PADDED

    def enter(self, leaves: Sequence[Tensor]) -> Value:
        return leaves[0] if self.plain else st.pad(leaves[0], {1: SEQ})

    def leave(self, result: Value) -> list[Tensor]:
        # A bucketed program gives plain results.
        return [result.unpad() if isinstance(result, st.PaddedTensor) else result]


class Lists(Subject):
    """Tensors of several shapes as one value."""

    column = Column.LISTS
    shapes: ClassVar = [(3, 4), (2, 4)]

    def enter(self, leaves: Sequence[Tensor]) -> Value:
        return list(leaves) if self.plain else st.TensorList(list(leaves))

    def body(self, value: Value) -> Value:
        return [self.module(x) for x in value] if isinstance(value, list) else self.module(value)

    def leave(self, result: Value) -> list[Tensor]:
        return list(result)


class Chunked(Subject):
    """Hidden states and the loss of a head, in chunks of rows."""

    column = Column.CHUNKED
    shapes: ClassVar = [(6, 4)]

    def prepare(self) -> None:
        self.target = torch.tensor([0, 1, 4, 2, 1, 3], device=self.device)

    def enter(self, leaves: Sequence[Tensor]) -> Value:
        return leaves[0] if self.plain else st.chunk(leaves[0], chunks=3)

    def body(self, value: Value) -> Value:
        logits = self.module(value)
        return logits.abs().logsumexp(-1).mean() if self.dtype.is_complex else F.cross_entropy(logits, self.target)


class Static(Subject):
    """A model whose inputs and weights never move."""

    column = Column.STATIC

    def prepare(self) -> None:
        if self.plain:
            return
        self.leaves = [st.static(x) for x in self.leaves]
        for layer in self.module.modules():
            if isinstance(layer, nn.Linear):
                layer.weight = st.static(layer.weight)


class Bucketed(Subject):
    """A runner of the model; its second call at a size replays."""

    column = Column.BUCKETED
    calls = 3

    def prepare(self) -> None:
        self.run = self.module if self.plain else st.bucketed(self.module, {0: {1: SEQ}})

    def body(self, value: Value) -> Value:
        return self.run(value)

    def fallbacks(self) -> list[str]:
        return [] if self.plain else [str(reason) for reason in self.run.stats().fallbacks]


class Optim(Subject):
    """Training of the model; its parameters are compared, too."""

    column = Column.OPTIM
    calls = 3

    def prepare(self) -> None:
        self.leaves[0].requires_grad_(False)
        self.optimizer = self.optimizer_of(self.module)

    def optimizer_of(self, module: nn.Module, **options: Any) -> torch.optim.Optimizer:
        """Return the optimizer of the column for a model."""
        kind = torch.optim.AdamW if self.plain else st.optim.AdamW
        return kind(module.parameters(), lr=0.05, **options)

    def parameters(self) -> list[Tensor]:
        return list(self.module.parameters())

    def step(self) -> None:
        self.optimizer.step()

    def gradients(self) -> list[Tensor]:
        return [*super().gradients(), *(p.detach() for p in self.parameters())]


def total(outs: Sequence[Tensor]) -> Tensor:
    """Return one real number that depends on all of some tensors."""
    return torch.stack([out.abs().square().sum() for out in outs]).sum()


SUBJECTS: dict[Column, type[Subject]] = {
    kind.column: kind for kind in (Padded, Lists, Chunked, Static, Bucketed, Optim)
}
