"""Chunked losses in training: gradient scaling, DDP, the loss of a language model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from language_model import LanguageModel, batches
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import subtensors as st


def trained(model: nn.Module, scaler: Any = None, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The parameters after a few steps, gradients accumulated over two batches in the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first, second, third = batches()
    for step in ([first, second], [third]):
        optimizer.zero_grad()
        for tokens in step:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = model(tokens) / len(step)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def assert_as_near_the_truth(mine: list[Tensor], plain: list[Tensor], truth: list[Tensor], dtype: torch.dtype) -> None:
    """All parameters err by 1.5 times as much as plain torch's, and one rounding of what a step adds up."""
    mine, plain, truth = (torch.cat([p.double().flatten() for p in run]) for run in (mine, plain, truth))
    rounding = torch.finfo(dtype).eps * truth.norm()
    assert (mine - truth).norm() <= 1.5 * (plain - truth).norm() + rounding


def in_float64(model: nn.Module, scaler: Any = None) -> list[Tensor]:
    return trained(model.double(), scaler)


@pytest.mark.parametrize("tied", [False, True])
def test_training_with_a_chunked_loss_equals_training_without(tied: bool) -> None:
    plain, truth = trained(LanguageModel(tied, chunked=False)), in_float64(LanguageModel(tied, chunked=False))
    assert_as_near_the_truth(trained(LanguageModel(tied)), plain, truth, torch.float32)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_scaled_gradients_are_unscaled_clipped_and_stepped_with(dtype: torch.dtype | None) -> None:
    mine, plain = (trained(LanguageModel(chunked=c), torch.amp.GradScaler("cpu", 1024.0), dtype) for c in (True, False))
    truth = in_float64(LanguageModel(chunked=False), torch.amp.GradScaler("cpu", 1024.0))
    assert_as_near_the_truth(mine, plain, truth, torch.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_ddp_reduces_each_gradient_once_a_step(tied: bool, process_group: None) -> None:
    plain, truth = trained(LanguageModel(tied, chunked=False)), in_float64(LanguageModel(tied, chunked=False))
    model = DistributedDataParallel(LanguageModel(tied))
    seen: list[int] = []

    def count(state: Any, bucket: Any) -> Any:
        seen.extend(p.numel() for p in bucket.parameters())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # Torch reads the annotations themselves.
    count.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    model.register_comm_hook(None, count)
    assert_as_near_the_truth(trained(model), plain, truth, torch.float32)
    assert sorted(seen) == sorted(3 * [p.numel() for p in model.parameters()])


def test_a_weight_that_was_freed_before_its_loss_is_refused_clearly(process_group: None) -> None:
    model = LanguageModel()
    weight = copy.deepcopy(model.head.weight.detach())
    logits = F.linear(st.chunk(torch.ones(4, 8), rows=2), weight)
    weight.untyped_storage().resize_(0)
    with pytest.raises(st.RuleError, match="reshard_after_forward=False"):
        F.cross_entropy(logits, torch.zeros(4, dtype=torch.int64)).item()
