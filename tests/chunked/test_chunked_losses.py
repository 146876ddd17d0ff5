"""Losses and layers that are usually chunked by hand: plain code on chunked tensors gives their results.

Each program runs against itself on plain tensors, and never makes a tensor of all rows times the wide dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chunked_programs import allocations, check_chunked, in_dtype
from torch import Tensor

import subtensors as st
from subtensors.chunked.record_call import fallbacks

BATCH, LENGTH, HIDDEN, VOCAB = 4, 10, 6, 160


def log_probs_of(h: Tensor, w: Tensor, tokens: Tensor) -> Tensor:
    return F.linear(h, w).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    w: Tensor,
    w_ref: Tensor,
    yes: Tensor,
    no: Tensor,
    mask: Tensor,
) -> Tensor:
    """https://arxiv.org/abs/2305.18290, equation 7."""
    policy = [(log_probs_of(h, w, t) * mask).sum(1) for h, t in ((chosen, yes), (rejected, no))]
    with torch.no_grad():
        reference = [(log_probs_of(h, w_ref, t) * mask).sum(1) for h, t in ((ref_chosen, yes), (ref_rejected, no))]
    margin = (policy[0] - policy[1]) - (reference[0] - reference[1])
    return -F.logsigmoid(0.1 * margin).mean()


def orpo(chosen: Tensor, rejected: Tensor, w: Tensor, yes: Tensor, no: Tensor, mask: Tensor) -> Tensor:
    """https://arxiv.org/abs/2403.07691, equations 6 and 7."""
    means = [(log_probs_of(h, w, t) * mask).sum(1) / mask.sum(1) for h, t in ((chosen, yes), (rejected, no))]
    odds = [m - torch.log1p(-m.exp()) for m in means]
    return -means[0].mean() - 0.1 * F.logsigmoid(odds[0] - odds[1]).mean()


def grpo(
    h: Tensor, w: Tensor, tokens: Tensor, old: Tensor, reference: Tensor, advantage: Tensor, mask: Tensor
) -> Tensor:
    """https://arxiv.org/abs/2402.03300, equations 3 and 4, its mean over all tokens."""
    log_probs = log_probs_of(h, w, tokens)
    ratio = torch.exp(log_probs - old)
    a = advantage[:, None]
    gain = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    drift = torch.exp(reference - log_probs) - (reference - log_probs) - 1
    return -((gain - 0.04 * drift) * mask).sum() / mask.sum()


def distillation(h: Tensor, w: Tensor, teacher: Tensor, w_teacher: Tensor) -> Tensor:
    """https://arxiv.org/abs/1503.02531: KL to the teacher's softened distribution."""
    student = (F.linear(h, w) / 2).log_softmax(-1).flatten(0, -2)
    with torch.no_grad():
        wanted = (F.linear(teacher, w_teacher) / 2).log_softmax(-1).flatten(0, -2)
    return F.kl_div(student, wanted, reduction="batchmean", log_target=True) * 4


def clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """https://arxiv.org/abs/2103.00020, figure 3."""
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    similarity = image @ text.t() * scale.exp()
    labels = torch.arange(len(image))
    return (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.t(), labels)) / 2


def gated_mlp(h: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """https://arxiv.org/abs/2002.05202, SwiGLU."""
    return F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def gelu_mlp(h: Tensor, up: Tensor, b: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(h, up, b), approximate="tanh"), down)


def wide_projection(h: Tensor, w: Tensor, wanted: Tensor) -> Tensor:
    return F.mse_loss(F.linear(h, w), wanted)


def sampled(h: Tensor, w: Tensor, tokens: Tensor) -> Tensor:
    return log_probs_of(h, w, tokens)


def entropy_and_accuracy(h: Tensor, w: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(h, w)
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    right = (logits.argmax(-1) == tokens).float().mean()
    return entropy.mean(), entropy, right


def z_loss(h: Tensor, w: Tensor, tokens: Tensor) -> Tensor:
    """https://arxiv.org/abs/2204.02311, section 5: the cross entropy, and 1e-4 times the squared normaliser."""
    logits = F.linear(h, w).float()
    log_sum = logits.logsumexp(-1)
    picked = logits.gather(-1, tokens[..., None]).squeeze(-1)
    return (log_sum - picked + 1e-4 * log_sum.square()).mean()


@dataclass(frozen=True)
class Case:
    """A program, what it reads, and what of that is chunked."""

    program: Callable[..., Any]
    shapes: dict[str, Any]
    chunked: tuple[str, ...]
    constants: frozenset[str] = frozenset()
    dims: tuple[int, ...] = (0, 1)
    passes: int = 1
    wide: int = VOCAB

    def tensors(self) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(0)
        made: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            if shape == "tokens":
                made[name] = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=g)
            elif shape == "mask":
                made[name] = (torch.rand(BATCH, LENGTH, generator=g) < 0.8).float()
            else:
                made[name] = torch.randn(shape, generator=g)
        return made

    @property
    def needs(self) -> set[str]:
        return {n for n, s in self.shapes.items() if not isinstance(s, str)} - self.constants


STATES, HEAD = (BATCH, LENGTH, HIDDEN), (VOCAB, HIDDEN)
CASES = [
    Case(
        dpo,
        {
            "chosen": STATES,
            "rejected": STATES,
            "ref_chosen": STATES,
            "ref_rejected": STATES,
            "w": HEAD,
            "w_ref": HEAD,
            "yes": "tokens",
            "no": "tokens",
            "mask": "mask",
        },
        ("chosen", "rejected", "ref_chosen", "ref_rejected"),
        frozenset({"ref_chosen", "ref_rejected", "w_ref"}),
        passes=2,
    ),
    Case(
        orpo,
        {"chosen": STATES, "rejected": STATES, "w": HEAD, "yes": "tokens", "no": "tokens", "mask": "mask"},
        ("chosen", "rejected"),
        passes=2,
    ),
    Case(
        grpo,
        {
            "h": STATES,
            "w": HEAD,
            "tokens": "tokens",
            "old": (BATCH, LENGTH),
            "reference": (BATCH, LENGTH),
            "advantage": (BATCH,),
            "mask": "mask",
        },
        ("h",),
        frozenset({"old", "reference", "advantage"}),
    ),
    Case(
        distillation,
        {"h": STATES, "w": HEAD, "teacher": STATES, "w_teacher": HEAD},
        ("h", "teacher"),
        frozenset({"teacher", "w_teacher"}),
    ),
    Case(clip, {"image": (40, HIDDEN), "text": (40, HIDDEN), "scale": ()}, ("image",), dims=(0,), passes=2, wide=40),
    Case(gated_mlp, {"h": STATES, "gate": HEAD, "up": HEAD, "down": (HIDDEN, VOCAB)}, ("h",)),
    Case(gelu_mlp, {"h": STATES, "up": HEAD, "b": (VOCAB,), "down": (HIDDEN, VOCAB)}, ("h",)),
    Case(wide_projection, {"h": STATES, "w": HEAD, "wanted": (BATCH, LENGTH, VOCAB)}, ("h",), frozenset({"wanted"})),
    Case(sampled, {"h": STATES, "w": HEAD, "tokens": "tokens"}, ("h",)),
    Case(entropy_and_accuracy, {"h": STATES, "w": HEAD, "tokens": "tokens"}, ("h",), passes=2),
    Case(z_loss, {"h": STATES, "w": HEAD, "tokens": "tokens"}, ("h",)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.program.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_program_on_chunked_tensors_equals_the_plain_one(case: Case, dtype: torch.dtype) -> None:
    for dim in case.dims:
        chunks = {name: {"dim": dim, "rows": 3} for name in case.chunked}
        check_chunked(case.program, case.tensors(), chunks, dtype=dtype, needs=case.needs, passes=case.passes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.program.__name__)
def test_a_program_never_materializes_a_wide_value_of_all_rows(case: Case) -> None:
    before = sum(fallbacks.values())
    tensors = in_dtype(case.tensors(), torch.float32, case.needs)
    with allocations() as seen:
        values = {n: st.chunk(t, dim=0, chunks=4) if n in case.chunked else t for n, t in tensors.items()}
        out = case.program(**values)
        first = out[0] if isinstance(out, tuple) else out
        (first.sum() if isinstance(first, st.ChunkedTensor) else first).backward()
    rows = tensors[case.chunked[0]].shape[:-1].numel()
    assert seen.largest <= max(case.wide * LENGTH, VOCAB * HIDDEN) < case.wide * rows
    assert sum(fallbacks.values()) == before
