"""`apply` and `apply_to_trainer`: chunked losses, optimizers, compilation and buckets for models of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast, overload

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from subtensors import optim
from subtensors.arguments import shown
from subtensors.chunked.chunked_tensor import chunk
from subtensors.integrations.causal_lm import Body, ChunkedHead, output_head, prefer_attention
from subtensors.integrations.pointwise import compile_pointwise
from subtensors.integrations.token_scores import TokenScores
from subtensors.integrations.trainer_step import Arguments, BucketedStep, Clipping, Trainer
from subtensors.integrations.undo import keep
from subtensors.optim.algorithms.muon import with_adamw
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.sizes.dims import Dim

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): cls
    for name in optim.__all__
    if isinstance(cls := getattr(optim, name), type) and not inspect.isabstract(cls) and "Optimizer" not in name
}
"""The optimizers by name."""


LossOption: TypeAlias = str | Mapping[str, object] | None
CompileOption: TypeAlias = bool | Literal["pointwise"] | Mapping[str, object]

Made = TypeVar("Made", bound=Optimizer)
MadeOrNone = TypeVar("MadeOrNone", bound=Optimizer | None)


class Applied(Generic[MadeOrNone]):
    """The changes to a model, and perhaps its trainer.

    Attributes:
        optimizer: of the model's trainable parameters; None where none was asked for, or a trainer makes it.
    """

    def __init__(self, optimizer: MadeOrNone, undo: ExitStack) -> None:
        self.optimizer = optimizer
        self._undo = undo

    def __repr__(self) -> str:
        return (
            f"<Applied, optimizer={type(self.optimizer).__name__ if self.optimizer else None}: revert() takes it back>"
        )

    def revert(self) -> None:
        """Take all changes back. The model keeps what it learned; a second call does nothing."""
        self._undo.close()


@overload
def apply(
    model: nn.Module,
    optimizer: None = None,
    *,
    loss: LossOption = "chunked",
    compile: CompileOption = False,
    buckets: Dim | None = None,
    attention: SDPBackend | None = None,
) -> Applied[None]: ...


@overload
def apply(
    model: nn.Module,
    optimizer: type[Made],
    *,
    loss: LossOption = "chunked",
    compile: CompileOption = False,
    buckets: Dim | None = None,
    attention: SDPBackend | None = None,
    **options: object,
) -> Applied[Made]: ...


@overload
def apply(
    model: nn.Module,
    optimizer: str,
    *,
    loss: LossOption = "chunked",
    compile: CompileOption = False,
    buckets: Dim | None = None,
    attention: SDPBackend | None = None,
    **options: object,
) -> Applied[Optimizer]: ...


def apply(
    model: nn.Module,
    optimizer: str | type[Optimizer] | None = None,
    *,
    loss: LossOption = "chunked",
    compile: CompileOption = False,
    buckets: Dim | None = None,
    attention: SDPBackend | None = None,
    **options: object,
) -> Applied[Any]:
    """Train a causal language model of transformers with less memory and in less time, its code unchanged.

    Args:
        model: any whose head is linear, tied or not, one with adapters of PEFT included; then the one that is called.
        optimizer: a name of a class of st.optim, such as "adamw", or the class; None for none. By the name "muon" the
            matrices of the layers are Muon's, and embeddings, the head, norms and biases AdamW's, at one `lr`.
        loss: "chunked" for logits that are never materialized where a loss reads them, whichever loss that is; or the
            arguments of `st.chunk` as a dict, such as `{"memory_limit": "1GiB"}`; None to leave it alone.
        compile: True to compile the layers, one by one, or the arguments of `torch.compile` as a dict. A mask that
            says nothing stays None, and attention causal by a flag, as in eager code. What fuses into kernels of the
            backward is recomputed there, and not kept. "pointwise" to compile norms, MLPs and rotary embeddings alone,
            where gradients are recorded, and leave all else eager.
        buckets: the dim of the sequence, such as `st.Dim("seq", max=2048, buckets=128)`: the body then runs through
            `st.bucketed` where gradients are off, as in evaluation. With `compile` or `buckets`, a call makes a cache
            only if it says `use_cache=True`, as `generate` does.
        attention: the kernel of `torch.nn.functional.scaled_dot_product_attention` to prefer where there is no mask,
            such as `SDPBackend.CUDNN_ATTENTION`; None for torch's choice.
        options: of the optimizer, such as `lr=1e-4` and `max_norm=1.0`.

    Returns:
        an object with the `optimizer`, and `revert()`.

    Raises:
        TypeError: not a causal language model, or one without a linear head; an option that the optimizer doesn't take.
        ValueError: an unknown name of an optimizer or a loss; a model whose loss is chunked already, or that a trainer
            of TRL has made compute logits in float32; `attention` for a model whose attention isn't "sdpa"; layers to
            compile with kernels of Liger's.

    Example:
        >>> import torch, transformers, subtensors as st
        >>> sizes = dict(vocab_size=64, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
        >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        >>> applied = st.integrations.transformers.apply(model, "adamw", lr=1e-3, max_norm=1.0)
        >>> ids = torch.arange(12).view(1, 12)
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> applied.optimizer.step()
        >>> applied.revert()
    """
    chunking = _loss(loss)
    if not isinstance(compile, bool | Mapping) and compile != "pointwise":
        raise TypeError(
            f'compile is a bool, "pointwise", or a dict of the arguments of torch.compile; got {shown(compile)}'
        )
    compiling = compile if isinstance(compile, Mapping) else {} if compile is True else None
    if buckets is not None and not isinstance(buckets, Dim):
        raise TypeError(f"buckets is a st.Dim or None, got {shown(buckets)}")
    if attention is not None and not isinstance(attention, SDPBackend):
        raise TypeError(f"attention is a torch.nn.attention.SDPBackend or None, got {shown(attention)}")
    if optimizer is None and options:
        raise TypeError(f"apply takes no {', '.join(options)} without an optimizer")
    head = output_head(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    made = None if optimizer is None else _optimizer(optimizer, model, head)(trained, **options)
    undo = ExitStack()
    try:
        if chunking is not None:
            ChunkedHead(chunking).attach(model, head, undo)
            TokenScores.install(model, undo)
        if attention is not None:
            prefer_attention(model, attention, undo)
        if compile == "pointwise":
            compile_pointwise(model, undo)
        if compiling is not None or buckets is not None:
            Body.install(model, compiling, buckets, undo)
    except BaseException:  # the model is left as it was
        undo.close()
        raise
    return Applied(made, undo)


def apply_to_trainer(
    trainer: Trainer,
    optimizer: str | type[Optimizer] | None = None,
    *,
    loss: LossOption = "chunked",
    compile: CompileOption = False,
    buckets: Dim | None = None,
    attention: SDPBackend | None = None,
    **options: object,
) -> Applied[None]:
    """Make a `transformers.Trainer`, or one of its kind, train and evaluate as `apply` says.

    The trainer makes the optimizer, with its own groups, from `learning_rate`, and from `adam_beta1`, `adam_beta2` and
    `adam_epsilon` where these were changed; its checkpoints hold the state. `max_grad_norm` is the optimizer's
    `max_norm` in each step, so that gradients are clipped once, inside it; the norm is logged as before. With `buckets`
    a training step is one program of `st.bucketed`, too, or one line of the log says why not. TRL's trainers for SFT,
    DPO and GRPO, which score tokens without calling the head, then do so by chunks of the model's own logits.

    Args:
        trainer: one that has made no optimizer yet.
        optimizer, loss, compile, buckets, attention: see `apply`.
        options: of the optimizer; they go before what the trainer's arguments say.

    Returns:
        an object with `revert()`, which takes back all but an optimizer that the trainer has made.

    Raises:
        TypeError, ValueError: see `apply`; a trainer with an optimizer of its own, told to compile or to replace the
            loss itself, or about to copy its model to several GPUs by DataParallel.

    Example:
        >>> import subtensors as st
        >>> st.integrations.transformers.apply_to_trainer(None)
        Traceback (most recent call last):
        ...
        TypeError: apply_to_trainer takes a transformers.Trainer, got None
    """
    arguments = getattr(trainer, "args", None)
    if not hasattr(arguments, "max_grad_norm") or not isinstance(getattr(trainer, "model", None), nn.Module):
        raise TypeError(f"apply_to_trainer takes a transformers.Trainer, got {shown(trainer)}")
    changes: dict[str, Any] = {"loss": loss, "compile": compile, "buckets": buckets, "attention": attention}
    for theirs, name in (("torch_compile", "compile"), ("use_liger_kernel", "loss"), ("use_liger_kernel", "compile")):
        ours = changes[name]
        if ours and getattr(arguments, theirs, False):
            raise ValueError(f"{theirs}=True does what {name}={shown(ours)} does, otherwise: take one of them")
    if (gpus := getattr(arguments, "n_gpu", 1)) > 1:
        raise ValueError(
            f"the trainer would copy its model to {gpus} GPUs by DataParallel, without what is applied here: "
            "run a process a GPU (torchrun), or set CUDA_VISIBLE_DEVICES=0"
        )
    undo, of_model = ExitStack(), ExitStack()

    def change(model: nn.Module) -> None:
        of_model.close()
        of_model.callback(apply(model, None, **changes).revert)

    class Made(torch.optim.Optimizer):
        """The class that a trainer asks for: it makes what the trainer's model and arguments then say."""

        def __new__(cls, params: Params, **given: object) -> Optimizer:  # type: ignore[misc]  # of another class
            make = _optimizer(cast("str | type[Optimizer]", optimizer), trainer.model, output_head(trainer.model))
            return make(params, **{**_trainer_options(make, trainer.args), **given})

    if optimizer is None:
        changes.update(options)  # which it refuses
    elif trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise ValueError("the trainer has an optimizer already; give it none, or apply_to_trainer no name of one")
    else:
        Made([p for p in trainer.model.parameters() if p.requires_grad], **options)  # what would fail later
    change(trainer.model)
    undo.callback(of_model.close)
    _follow(trainer, "call_model_init", change, undo)
    clipping = Clipping(trainer, optimizer is not None and options.get("max_norm", 0.0) is not None, options)
    clipping.install(undo)
    _follow(trainer, "create_accelerator_and_postprocess", lambda _: clipping.install(undo), undo)
    if optimizer is not None:
        keep(trainer, "optimizer_cls_and_kwargs", undo)
        trainer.optimizer_cls_and_kwargs = (Made, options)
    if buckets is not None:
        BucketedStep(trainer, buckets, bool(compile), clipping).install(undo)
    return Applied(None, undo)


def _follow(trainer: Trainer, name: str, then: Callable[[Any], None], undo: ExitStack) -> None:
    """Call a function with what a trainer's method returns, such as the model of a new trial."""
    method = getattr(trainer, name)

    def followed(*args: object, **kwargs: object) -> object:
        result = method(*args, **kwargs)
        then(result)
        return result

    keep(trainer, name, undo)
    setattr(trainer, name, followed)


def _trainer_options(make: Callable[..., Optimizer], arguments: Arguments) -> dict[str, object]:
    """The optimizer's options that a trainer's arguments say."""
    taken = inspect.signature(make).parameters
    options: dict[str, object] = {"lr": arguments.learning_rate}
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    if betas != (0.9, 0.999) and "betas" in taken:
        options["betas"] = betas
    if arguments.adam_epsilon != 1e-8 and "eps" in taken:
        options["eps"] = arguments.adam_epsilon
    if arguments.max_grad_norm:
        options["max_norm"] = arguments.max_grad_norm
    return options


def _optimizer(which: str | type[Optimizer], model: nn.Module, head: nn.Module) -> Callable[..., Optimizer]:
    """Look up an optimizer; Muon by its name is for the matrices of a model's layers."""
    if isinstance(which, type) and issubclass(which, Optimizer):
        return which
    name = which.lower() if isinstance(which, str) else getattr(which, "__name__", "").lower()
    if isinstance(which, str) and name in OPTIMIZERS:
        return with_adamw(model, head) if name == "muon" else OPTIMIZERS[name]
    advice = f": {name!r} names that of st.optim" if name in OPTIMIZERS else ""
    raise ValueError(f"optimizer is one of {', '.join(OPTIMIZERS)}, or a class of st.optim; got {shown(which)}{advice}")


def _loss(loss: LossOption) -> Mapping[str, object] | None:
    """The arguments of `st.chunk`; None for a loss that is left alone."""
    if loss is None:
        return None
    division = {} if loss == "chunked" else loss
    if not isinstance(division, Mapping):
        raise ValueError(f'loss is "chunked", a dict of the arguments of st.chunk, or None; got {shown(loss)}')
    chunk(torch.zeros(1, 1), dim=-2, **division)  # type: ignore[arg-type]  # refuses wrong ones
    return division
