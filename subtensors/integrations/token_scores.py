"""The forward that TRL's trainers call, which scores tokens without giving logits, on the model's own forward.

TRL gives a model a forward that multiplies hidden states by the head's weight itself, so no head is called. Here the
head is called, with a ChunkedTensor, and what the model does to its logits (scaling, softcapping, adapters) is done.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MethodType
from typing import cast

import torch
from torch import Tensor, nn

from subtensors.chunked.chunked_tensor import ChunkedTensor
from subtensors.integrations.undo import keep

IGNORED = -100


class TokenScores:
    """A forward with TRL's arguments and results, in the place of TRL's own.

    Args:
        forward: TRL's, a method made by its `add_fused_lm_head`.
        options: of that, which the method has in its closure.
    """

    def __init__(self, forward: MethodType, options: Mapping[str, object]) -> None:
        self.forward, self.options = forward, options
        self.fields = frozenset(cast("tuple[str, ...]", self.options["outputs"]))
        self.temperature = cast(float, self.options["temperature"])
        self.output_type = cast("Callable[..., object]", forward.__func__.__globals__["FusedCausalLMOutput"])
        self.takes_positions = "logits_to_keep" in inspect.signature(forward).parameters
        functools.update_wrapper(self, forward)  # `generate` reads the signature

    @classmethod
    def install(cls, model: nn.Module, undo: ExitStack) -> None:
        """Replace TRL's forward, if the model has it.

        Raises:
            ValueError: it is to compute logits in float32 from weights in another dtype.
        """
        inner: nn.Module = getattr(model, "get_base_model", lambda: model)()
        forward = vars(inner).get("forward")
        if not isinstance(forward, MethodType) or not inspect.isfunction(forward.__func__):
            return
        options = inspect.getclosurevars(forward.__func__).nonlocals
        if not options.keys() >= {"outputs", "temperature", "cast_lm_head_to_fp32"}:
            return
        if options["cast_lm_head_to_fp32"]:
            raise ValueError("cast_lm_head_to_fp32=True needs TRL's own head; pass loss=None to keep it")
        keep(inner, "forward", undo)
        inner.forward = cls(forward, options)

    def __call__(self, *args: object, fused_lm_head: bool = False, **kwargs: object) -> object:
        """Return TRL's output where it asks for scores, else the model's."""
        if not fused_lm_head:
            return self.forward(*args, **kwargs)
        labels, targets = cast(Tensor, kwargs.pop("labels", None)), cast(Tensor, kwargs.pop("shift_labels", None))
        count = kwargs.pop("num_items_in_batch", None)
        targets = labels[:, 1:] if targets is None else targets
        mask = targets != IGNORED
        # A prompt's positions are left out, for which the head would be run in vain.
        scored = (
            mask.any(0).nonzero().squeeze(1) if self.takes_positions else torch.arange(mask.shape[1]).to(mask.device)
        )
        scored = scored if len(scored) else torch.zeros(1, dtype=torch.long, device=mask.device)
        if self.takes_positions:
            kwargs["logits_to_keep"] = scored
        kwargs["use_cache"] = False
        result = self.forward(*args, **kwargs)
        logits: Tensor = result.logits if self.takes_positions else result.logits[:, : mask.shape[1]]
        found = self._scores(logits, targets[:, scored].clamp(min=0))
        scores = {
            name: value.new_zeros(mask.shape).index_copy(1, scored, value.masked_fill(~mask[:, scored], 0))
            for name, value in found.items()
        }
        loss = -scores["log_probs"].sum() / (mask.sum().clamp(min=1) if count is None else cast(Tensor, count))
        aux_loss: Tensor | None = getattr(result, "aux_loss", None)
        if aux_loss is not None:
            loss = loss + aux_loss * cast(float, getattr(self.options["text_config"], "router_aux_loss_coef", 0.0))
        return self.output_type(loss=loss, label_mask=mask, aux_loss=aux_loss, **scores)

    def _scores(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the fields that TRL asks for, each (batch, positions).

        Args:
            logits: (batch, positions, classes), a ChunkedTensor where its head was given one.
            targets: (batch, positions).
        """
        scaled = logits.float() / self.temperature
        log_probs = scaled.log_softmax(-1)

        @torch.no_grad()
        def log_sum_sq_probs() -> Tensor:
            doubled: Tensor = (2 * scaled).logsumexp(-1) - 2 * scaled.logsumexp(-1)
            return doubled

        # Each reads the logits of a chunk once, for all of them or by itself, and writes none.
        fields: dict[str, Callable[[], Tensor]] = {
            "log_probs": lambda: log_probs.gather(-1, targets[..., None]).squeeze(-1),
            "entropy": lambda: -(log_probs.exp() * log_probs).sum(-1),
            "log_sum_sq_probs": log_sum_sq_probs,
            "mean_logits": lambda: logits.detach().mean(-1, dtype=torch.float32) / self.temperature,
            "is_top1": lambda: log_probs.detach().argmax(-1) == targets,
        }
        found = {name: field() for name, field in fields.items() if name in self.fields | {"log_probs"}}
        return {name: x.realize() if isinstance(x, ChunkedTensor) else x for name, x in found.items()}
