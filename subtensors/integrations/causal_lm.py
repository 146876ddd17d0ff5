"""The parts of a causal language model of transformers, and the change to each.

    body (layers) -> hidden states -> head -> logits -> loss
      |    |                           |
      |    compiled one by one         given a ChunkedTensor, so that the logits and whatever loss reads them
      |                                are run chunk by chunk, the model's and the trainer's code unchanged
      run in buckets without gradients

Layers are compiled rather than the body, since the body makes the mask: compiled code can't read what it is given, and
makes a tensor of a mask that says nothing, which keeps attention from its flash kernel. In eager code the mask is then
None, and attention causal by a flag.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MethodType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from subtensors.arguments import shown
from subtensors.bucketed.bucketed import bucketed
from subtensors.bucketed.generation import CACHE_NAMES
from subtensors.bucketed.runner import Bucketed
from subtensors.chunked.chunked_tensor import chunk
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.torch_internals.compiler import recomputing_what_fuses
from subtensors.integrations.undo import keep
from subtensors.sizes.dims import Dim


def output_head(model: nn.Module) -> nn.Module:
    """Return the linear layer that makes the logits, adapters of PEFT around it included.

    Raises:
        TypeError: the model has none, or is no decoder of its own.
    """
    name = type(model).__name__
    find = getattr(model, "get_output_embeddings", None)
    if find is None:
        raise TypeError(f"apply takes a causal language model of transformers, got {shown(model)}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise TypeError(f"apply takes a causal language model; {name} is an encoder and a decoder")
    head = find()
    inner = next((part for part in map(vars(head).get("_modules", {}).get, _WRAPPED) if part), head) if head else head
    if not isinstance(inner, nn.Linear):
        raise TypeError(
            f"apply takes a model whose head is a torch.nn.Linear; that of {name}, get_output_embeddings(), is "
            f"{'None' if inner is None else f'a {type(inner).__name__}'}"
        )
    return cast(nn.Module, head)


_WRAPPED = ("base_layer", "original_module")
"""Under which names PEFT keeps the layer that an adapter is for."""


class ChunkedHead:
    """The hooks that chunk what the head is given, where a loss is going to read its logits.

    That is where the model is called with labels, and where it trains. Logits that are asked for themselves, by
    `generate` or in evaluation without labels, are plain.

    Args:
        division: the arguments of `st.chunk`.
    """

    def __init__(self, division: Mapping[str, object]) -> None:
        self.division = dict(division)
        self.has_labels = False

    def attach(self, model: nn.Module, head: nn.Module, undo: ExitStack) -> None:
        """Register the hooks.

        Raises:
            ValueError: the model has them already.
        """
        if any(isinstance(getattr(hook, "__self__", None), ChunkedHead) for hook in head._forward_pre_hooks.values()):
            raise ValueError(f"the head of {type(model).__name__} is chunked already; revert() that first")
        undo.callback(model.register_forward_pre_hook(self._before_model, with_kwargs=True).remove)
        undo.callback(model.register_forward_hook(self._after_model, always_call=True).remove)
        # Before a hook of `parallelize_module`, which makes a DTensor of what it is given.
        undo.callback(head.register_forward_pre_hook(self._before_head, prepend=True).remove)

    def _before_model(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.has_labels = kwargs.get("labels") is not None

    def _after_model(self, model: nn.Module, args: tuple[object, ...], result: object) -> None:
        self.has_labels = False

    def _before_head(self, head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        is_read = self.has_labels or (head.training and torch.is_grad_enabled())
        if is_read and args and args[0].ndim > 1:
            return (chunk(args[0], dim=-2, **self.division), *args[1:])  # type: ignore[arg-type]  # checked by it
        return None


class Body:
    """The forward of a model's body, compiled layer by layer, and run in buckets where gradients are off.

    A call that doesn't ask for a cache, as one for a loss doesn't, makes none: each layer writes a place of its own in
    it, and would be compiled by itself. With a cache, as in `generate`, the body runs as it did.

    Args:
        body: a model without its head.
        length: the dim of the sequence; None for no buckets.
    """

    def __init__(self, body: nn.Module, length: Dim | None) -> None:
        self.body, self.length = body, length
        self.replaced = vars(body).get("forward")

    def __getstate__(self) -> dict[str, object]:
        """A copy of a model has buckets of its own."""
        return {name: value for name, value in vars(self).items() if name != "run"}

    @classmethod
    def install(
        cls, model: nn.Module, compiling: Mapping[str, object] | None, length: Dim | None, undo: ExitStack
    ) -> None:
        """Put it in the place of the body's own forward, and compile the layers.

        Raises:
            TypeError: a body can't be told from the model, or has no layers of the class that transformers gives them.
            ValueError: it has been put there already, or the layers to compile have kernels of Liger's.
        """
        inner: nn.Module = getattr(model, "get_base_model", lambda: model)()
        base: nn.Module = getattr(inner, getattr(inner, "base_model_prefix", ""), inner)
        body: nn.Module = getattr(base, "decoder", base)  # such as OPT's, whose head reads what the decoder gives
        layer_class = importlib.import_module("transformers.modeling_layers").GradientCheckpointingLayer
        layers = [module for module in body.modules() if isinstance(module, layer_class)]
        if body is inner or not layers:
            raise TypeError(
                f"compile= and buckets= take a model whose body has layers, and {type(model).__name__} hasn't"
            )
        forward = cls(body, length)
        if isinstance(forward.replaced, Body):
            raise ValueError(
                f"the body of {type(model).__name__} is compiled or in buckets already; revert() that first"
            )
        parts = {part for layer in layers for part in layer.modules()}
        if compiling is not None and any(part.forward.__module__.startswith("liger_kernel") for part in parts):
            raise ValueError(
                f"compile= would compile Liger's kernels in the layers of {type(model).__name__}, which write over what"
                " they are given and what autograd keeps: take one of them"
            )
        keep(body, "forward", undo)
        body.forward = forward
        undo.callback(forward.release)
        for layer in [] if compiling is None else layers:
            keep(layer, "_compiled_call_impl", undo)
            layer.compile(**compiling or {})

    @property
    def plain(self) -> Callable[..., object]:
        """The forward that was there."""
        return self.replaced or MethodType(type(self.body).forward, self.body)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """That of the class: a forward that a user put there may be one of any arguments."""
        return inspect.signature(MethodType(type(self.body).forward, self.body))

    @functools.cached_property
    def run(self) -> Bucketed[..., PyTree]:
        """The body in buckets."""
        return bucketed(
            self.plain, {name: {1: self.length} for name in _PER_TOKEN if name in self.signature.parameters}
        )

    def release(self) -> None:
        """Give the memory of the buckets back."""
        if "run" in vars(self):
            self.run.release()

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the body."""
        if torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        if any(kwargs.get(name) is not None for name in CACHE_NAMES) or kwargs.get("use_cache"):
            with torch.compiler.set_stance("force_eager"):
                return self.plain(*args, **kwargs)
        kwargs["use_cache"] = False
        if self.length is None or torch.is_grad_enabled():
            with recomputing_what_fuses():
                return self.plain(*args, **kwargs)
        given = self.signature.bind(*args, **kwargs).arguments
        others = next((x.name for x in self.signature.parameters.values() if x.kind is x.VAR_KEYWORD), "")
        given.update(given.pop(others, {}))
        tokens = [given.get(name) for name in _PER_TOKEN]
        if tokens[0] is None or any(x is not None and (not isinstance(x, Tensor) or x.ndim != 2) for x in tokens):
            return self.plain(*args, **kwargs)
        with torch.compiler.set_stance("force_eager"):  # each bucket would be a compilation of each layer's code
            return self.run(**given)


_PER_TOKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
"""The arguments of a body with a number a token."""


def prefer_attention(model: nn.Module, backend: SDPBackend, undo: ExitStack) -> None:
    """Make scaled dot product attention without a mask prefer a kernel, in compiled code too.

    Raises:
        ValueError: the model has another implementation of attention.
    """
    transformers = importlib.import_module("transformers")
    attend = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    before: str | None = getattr(model.config, "_attn_implementation", None)
    if before != "sdpa":
        raise ValueError(f'attention= takes a model with attn_implementation="sdpa", and this one has "{before}"')
    order = [backend, *(other for other, is_enabled in _ENABLED.items() if is_enabled() and other != backend)]

    def attend_without_mask(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: object
    ) -> object:
        if attention_mask is not None:
            return attend(module, query, key, value, attention_mask, **options)
        with sdpa_kernel(order, set_priority=True):
            return attend(module, query, key, value, None, **options)

    name = f"sdpa_{backend.name.lower()}"
    transformers.AttentionInterface.register(name, attend_without_mask)
    transformers.AttentionMaskInterface.register(name, transformers.masking_utils.sdpa_mask)
    set_implementation = cast(Callable[[str], None], model.set_attn_implementation)
    undo.callback(set_implementation, before)
    set_implementation(name)


_ENABLED: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}
"""The functions that say if a kernel of attention is enabled, in torch's order."""
