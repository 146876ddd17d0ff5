"""The types of a user's program, which `make lint` checks: calls have theirs, and what is documented passes."""

from typing import assert_type

import torch
from torch import Tensor, nn

import subtensors as st


def lists(p: st.TensorList) -> None:
    assert_type(p[0], Tensor)
    assert_type(p["w"], Tensor)
    assert_type(p["layers", 0], Tensor)
    assert_type(p[1:], st.TensorList)
    assert_type(p[...], st.TensorList)


def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


def programs() -> None:
    run = st.bucketed(scaled, {"x": {0: st.Dim("n", max=8, buckets=4)}})
    assert_type(run(torch.ones(3), factor=3.0), Tensor)
    layer = st.bucketed(nn.Linear(4, 4), {0: st.Dim("n", max=8, buckets=4)}, compile=True)
    assert_type(layer(torch.ones(3, 4)), Tensor)


def optimizers(model: nn.Module) -> None:
    opt = st.optim.AdamW(model.parameters(), lr=1e-3, max_norm=1.0)
    opt.step()
    assert_type(opt.step(lambda: 1.0), float)
    assert_type(opt.capture(packed=True).stats(), dict[str, int])
    torch.optim.lr_scheduler.StepLR(opt, 10).step()


def transformers_models(model: nn.Module) -> None:
    applied = st.integrations.transformers.apply(model, "adamw", lr=1e-3, compile=True)
    applied.optimizer.step()
    lion = st.integrations.transformers.apply(model, st.optim.Lion, lr=1e-3)
    assert_type(lion.optimizer, st.optim.Lion)
    alone = st.integrations.transformers.apply(model, loss={"memory_limit": "1GiB"})
    assert_type(alone.optimizer, None)
    alone.revert()


def mistakes(model: nn.Module) -> None:
    st.bucketed(nn.Linear(4, 4), {})(torch.ones(3, 4), 2.0)  # type: ignore[call-arg]
    st.chunked(torch.ones(3))  # type: ignore[operator]
    st.optim.adamw(model.parameters())  # type: ignore[attr-defined]
    st.optim.AdamW(model.parameters(), learning_rate=1e-3)  # type: ignore[call-arg]
