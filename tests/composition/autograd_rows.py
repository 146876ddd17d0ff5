"""Rows about autograd, autocast and dtypes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import subtensors as st
from composition.subjects import Subject, total
from composition.table import Meaningless, Refused, Slower, row

GROUP = "autograd and dtypes"

PAD_BEFORE = Refused(st.RuleError, "inside a transform of torch.func", "transform the function of unpadded tensors")
CHUNK_OUTSIDE = Refused(st.RuleError, "torch.func", "transform the function of plain tensors, or use torch.autograd")
ELEMENT_BY_ELEMENT = Refused(TypeError, "call it for each element", "or hand over `x.tree()`")
TRANSFORMED = Slower("inside a transform of torch.func")
NO_STEP = Meaningless("a step is no function of values")


@row(GROUP, "backward")
def backward(subject: Subject) -> list[Tensor]:
    """`loss.backward()`."""
    return subject.trained()


@row(GROUP, "`torch.autograd.grad`", optim=NO_STEP)
def grad_of_parameters(subject: Subject) -> list[Tensor]:
    """`torch.autograd.grad` of the loss, for inputs and parameters."""
    return list(torch.autograd.grad(subject.loss(*subject.leaves), subject.parameters()))


@row(GROUP, "a backward for each result")
def backward_of_each(subject: Subject) -> list[Tensor]:
    """A backward from each of two results that share a part of the graph, which is retained."""
    outs = subject.leave(subject.body(subject.value()))
    totals = [total(outs), *(out.abs().sum() for out in outs)]
    for number in totals[:-1]:
        number.backward(retain_graph=True)
    totals[-1].backward()
    subject.step()
    return subject.gradients()


@row(
    GROUP,
    "double backward",
    chunked=Refused(st.RuleError, "can't be differentiated twice", "compute a second derivative from the plain tensor"),
    bucketed=Refused(RuntimeError, "create_graph=True", "differentiate the program itself"),
)
def double_backward(subject: Subject) -> list[Tensor]:
    """A penalty on gradients: a backward through `autograd.grad(..., create_graph=True)`."""
    penalized = torch.autograd.grad(subject.loss(*subject.leaves), subject.parameters(), create_graph=True)
    total(penalized).backward()
    subject.step()
    return subject.gradients()


@row(
    GROUP,
    "full backward hooks",
    lists=ELEMENT_BY_ELEMENT,
    chunked=Refused(st.RuleError, "full backward hooks", "hook the parameters, or a module around the chunked rows"),
)
def full_backward_hook(subject: Subject) -> list[Tensor]:
    """A hook that doubles the gradient of a module's input."""
    subject.module[2].register_full_backward_hook(lambda module, gin, gout: (2 * gin[0],))
    return subject.trained()


@row(
    GROUP,
    "checkpoint, not reentrant",
    lists=ELEMENT_BY_ELEMENT,
    bucketed=Slower("saved-tensor hooks, such as a checkpoint's"),
)
def checkpointed(subject: Subject) -> list[Tensor]:
    """`torch.utils.checkpoint(program, value, use_reentrant=False)`."""
    return subject.trained(lambda value: checkpoint(subject.body, value, use_reentrant=False))


@row(
    GROUP,
    "checkpoint, reentrant",
    lists=ELEMENT_BY_ELEMENT,
    chunked=Refused(st.RuleError, "give that function the tensor's realize()", "chunk within what is checkpointed"),
)
def checkpointed_reentrant(subject: Subject) -> list[Tensor]:
    """`torch.utils.checkpoint(program, value, use_reentrant=True)`."""
    for leaf in subject.leaves:
        leaf.requires_grad_()
    return subject.trained(lambda value: checkpoint(subject.body, value, use_reentrant=True))


@row(GROUP, "`torch.func.grad`", padded=PAD_BEFORE, chunked=CHUNK_OUTSIDE, bucketed=TRANSFORMED, optim=NO_STEP)
def func_grad(subject: Subject) -> list[Tensor]:
    """`torch.func.grad` of a function that wraps its arguments itself."""
    gradients = torch.func.grad(subject.loss, argnums=tuple(range(len(subject.leaves))))
    return list(gradients(*[x.detach() for x in subject.leaves]))


@row(GROUP, "`torch.func.vmap`", padded=PAD_BEFORE, chunked=CHUNK_OUTSIDE, bucketed=TRANSFORMED, optim=NO_STEP)
def func_vmap(subject: Subject) -> list[Tensor]:
    """`torch.func.vmap` of a function that wraps its arguments itself."""
    batches = [torch.stack([x.detach(), 2 * x.detach()]) for x in subject.leaves]
    return [torch.func.vmap(subject.loss)(*batches)]


@row(GROUP, "`torch.func.jvp`", padded=PAD_BEFORE, chunked=CHUNK_OUTSIDE, bucketed=TRANSFORMED, optim=NO_STEP)
def func_jvp(subject: Subject) -> list[Tensor]:
    """`torch.func.jvp` of a function that wraps its arguments itself."""
    primals = tuple(x.detach() for x in subject.leaves)
    return list(torch.func.jvp(subject.loss, primals, tuple(x.cos() for x in primals)))


@row(GROUP, "`torch.func.functional_call`")
def functional_call(subject: Subject) -> list[Tensor]:
    """`functional_call` of the model with other parameters, which gradients reach."""
    others = {name: (2 * p.detach()).requires_grad_() for name, p in subject.module.named_parameters()}
    value, module = subject.value(), subject.module

    def body(value: object) -> object:
        return torch.func.functional_call(module, others, (value,))

    if isinstance(value, list):
        outs = [body(x) for x in value]
    else:
        outs = subject.leave(body(value))
    return [*outs, *torch.autograd.grad(total(outs), list(others.values()))]


@row(GROUP, "`torch.no_grad`", optim=NO_STEP)
def no_grad(subject: Subject) -> list[Tensor]:
    """The program without gradients."""
    with torch.no_grad():
        return [subject.loss(*subject.leaves) for _ in range(subject.calls)]


@row(GROUP, "`torch.inference_mode`")
def inference_mode(subject: Subject) -> list[Tensor]:
    """The program in inference mode."""
    with torch.inference_mode():
        outs = [subject.loss(*subject.leaves) for _ in range(subject.calls)]
        subject.step()
    return outs


@row(GROUP, "autocast to bfloat16")
def autocast(subject: Subject) -> list[Tensor]:
    """`torch.autocast` around the program; its backward is outside."""

    def body(value: object) -> object:
        with torch.autocast(subject.device, torch.bfloat16):
            return subject.body(value)

    return subject.trained(body)


@row(GROUP, "bfloat16", dtype=torch.bfloat16)
def bfloat16(subject: Subject) -> list[Tensor]:
    """Values and parameters of bfloat16."""
    return subject.trained()


@row(GROUP, "float16", dtype=torch.float16)
def float16(subject: Subject) -> list[Tensor]:
    """Values and parameters of float16."""
    return subject.trained()


@row(GROUP, "complex", dtype=torch.complex64)
def complex64(subject: Subject) -> list[Tensor]:
    """Values and parameters of complex64."""
    return subject.trained()


@row(GROUP, "`GradScaler`, accumulation")
def scaled_accumulation(subject: Subject) -> list[Tensor]:
    """Gradients of two scaled losses, accumulated, unscaled, and one step."""
    scaler = torch.amp.GradScaler(subject.device, init_scale=8.0)
    optimizer = getattr(subject, "optimizer", None) or torch.optim.SGD(subject.module.parameters(), lr=0.1)
    for p in subject.parameters():
        p.grad = None
    for _ in range(2):
        scaler.scale(subject.loss(*subject.leaves)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return [*subject.gradients(), *(p.detach() for p in subject.module.parameters())]
