"""Rows about the compiler: `torch.compile`, export, and tensors without values."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import subtensors as st
from composition.subjects import Subject
from composition.table import Column, Meaningless, Refused, Slower, row

GROUP = "compiler"
BACKEND = "aot_eager"


def compiled(body: Any, **options: Any) -> Any:
    """Compile a function."""
    return torch.compile(body, **{"backend": BACKEND, **options})


OWN_GRAPHS = Refused(RuntimeError, "st.bucketed replays graphs of its own", "`st.bucketed(compile=True)`")
FAKE = Slower("a dispatch mode is around it")
EXPORTED = Slower("it is being compiled")
NO_STEP = Meaningless("a step is no function of values")


@row(
    GROUP,
    "argument of a full graph",
    chunked=Refused(RuntimeError, "is made by st.chunk within compiled code", "chunk within the compiled function"),
    bucketed=OWN_GRAPHS,
)
def fullgraph(subject: Subject) -> list[Tensor]:
    """`torch.compile(program, fullgraph=True)` of the wrapped value."""
    return subject.trained(compiled(subject.body, fullgraph=True))


@fullgraph.cell(Column.LISTS)
def list_in_fullgraph(subject: Subject) -> list[Tensor]:
    """A compiled function that returns the elements of its list, which require grad."""
    return subject.trained(compiled(lambda value: list(subject.body(value)), fullgraph=True))


@row(
    GROUP,
    "made in a full graph",
    padded=Refused(RuntimeError, "pad before compiled code", "compile the function of the padded tensor"),
    bucketed=OWN_GRAPHS,
)
def made_in_fullgraph(subject: Subject) -> list[Tensor]:
    """`torch.compile(fullgraph=True)` of a function that wraps its plain arguments itself."""
    loss = compiled(lambda *leaves: subject.loss(*leaves), fullgraph=True)(*subject.leaves)
    loss.backward()
    return [loss, *subject.gradients()]


@row(
    GROUP,
    "graph breaks",
    lists=Refused(
        st.RuleError, "return its elements", "hand the elements over a break, or break under `torch.no_grad()`"
    ),
)
def graph_breaks(subject: Subject) -> list[Tensor]:
    """A compiled program with a break before and after its math."""

    def body(value: Any) -> Any:
        torch._dynamo.graph_break()
        out = subject.body(value)
        torch._dynamo.graph_break()
        return out

    with warnings.catch_warnings():
        # Torch's own, of each tensor that is no leaf where a graph begins.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        return subject.trained(compiled(body))


@row(GROUP, "compiled by inductor", slow=True)
def inductor(subject: Subject) -> list[Tensor]:
    """`torch.compile(program)`."""
    return subject.trained(compiled(subject.body, backend="inductor"))


@inductor.cell(Column.LISTS)
def list_by_inductor(subject: Subject) -> list[Tensor]:
    """A compiled function that returns the elements of its list, which require grad."""
    return subject.trained(compiled(lambda value: list(subject.body(value)), backend="inductor"))


class Exported(nn.Module):
    """A module of a function, with the parameters that it reads."""

    def __init__(self, body: Any, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.body = body

    def forward(self, *values: Any) -> Any:
        return self.body(*values)


@row(
    GROUP,
    "argument of `torch.export`",
    padded=Refused(st.RuleError, "has no rule under torch.export", "export the program of unpadded tensors"),
    lists=Refused(st.RuleError, "hand it x.tree()", "hand it `x.tree()`, and make the list within"),
    bucketed=EXPORTED,
)
def exported(subject: Subject) -> list[Tensor]:
    """`torch.export.export` of the program with the wrapped value as its argument."""
    program = torch.export.export(Exported(subject.body, subject.module), (subject.value(),))
    return subject.leave(program.module()(subject.value()))


@row(
    GROUP,
    "made in `torch.export`",
    padded=Refused(st.RuleError, "has no rule under torch.export", "export the program of unpadded tensors"),
    bucketed=EXPORTED,
    optim=NO_STEP,
)
def made_in_export(subject: Subject) -> list[Tensor]:
    """`torch.export.export` of a program that wraps its plain arguments itself."""
    program = torch.export.export(Exported(subject.loss, subject.module), tuple(subject.leaves))
    return [program.module()(*subject.leaves)]


def shapes(outs: list[Tensor]) -> list[Tensor]:
    """Return the shapes of tensors as tensors with values."""
    return [torch.tensor(out.shape, dtype=torch.float64) for out in outs]


@row(
    GROUP,
    "meta device",
    static=Refused(TypeError, "a tensor on a CPU or a CUDA device", "make it static once it has memory"),
)
def meta(subject: Subject) -> list[Tensor]:
    """The program on the meta device: shapes of results and gradients."""
    return shapes(type(subject)("meta", subject.dtype, subject.plain).trained())


@row(
    GROUP,
    "fake tensors",
    static=Refused(TypeError, "takes a strided torch.Tensor", "make it static outside of the mode"),
    bucketed=FAKE,
)
def fake(subject: Subject) -> list[Tensor]:
    """The program under `FakeTensorMode`: shapes of results and gradients."""
    with warnings.catch_warnings(), FakeTensorMode():
        # Torch's own, once a process: the address of a fake tensor is 0.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        outs = type(subject)(subject.device, subject.dtype, subject.plain).trained()
    return shapes(outs)
