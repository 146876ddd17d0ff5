"""Under CUDA's autocast a padded result has the dtype that it has without padding; without a GPU on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import subtensors as st
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import padded_dim, static_dims
from subtensors.padded.padded_tensor import make_padded

SEQ = st.Dim("n", max=8, buckets=[8])

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "cross_entropy of each": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "cross_entropy, smoothed": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "cross_entropy of probabilities": lambda x, t: F.cross_entropy(x, x.softmax(1)),
    "nll_loss": F.nll_loss,
    "mse_loss": lambda x, t: F.mse_loss(x, x),
    "l1_loss": lambda x, t: F.l1_loss(x, x),
    "smooth_l1_loss": lambda x, t: F.smooth_l1_loss(x, x),
    "huber_loss": lambda x, t: F.huber_loss(x, x),
    "kl_div": lambda x, t: F.kl_div(x, x, reduction="sum"),
    "binary_cross_entropy_with_logits": lambda x, t: F.binary_cross_entropy_with_logits(x, x),
    "cosine_embedding_loss": lambda x, t: F.cosine_embedding_loss(x, x, t),
    "poisson_nll_loss": lambda x, t: F.poisson_nll_loss(x, x),
    "hinge_embedding_loss": lambda x, t: F.hinge_embedding_loss(x, x),
    "margin_ranking_loss": lambda x, t: F.margin_ranking_loss(x, x, x),
    "multi_margin_loss": F.multi_margin_loss,
    "soft_margin_loss": lambda x, t: F.soft_margin_loss(x, x),
    "multilabel_soft_margin_loss": lambda x, t: F.multilabel_soft_margin_loss(x, x),
    "triplet_margin_loss": lambda x, t: F.triplet_margin_loss(x, x, x),
    "softmax": lambda x, t: x.softmax(1),
    "log_softmax": lambda x, t: x.log_softmax(1),
    "softmin": lambda x, t: F.softmin(x, 1),
    "logsumexp": lambda x, t: x.logsumexp(1),
    "sum": lambda x, t: x.sum(),
    "sum of rows": lambda x, t: x.sum(0),
    "prod": lambda x, t: x.prod(0),
    "cumsum": lambda x, t: x.cumsum(0),
    "cumprod": lambda x, t: x.cumprod(0),
    "norm": lambda x, t: x.norm(),
    "vector_norm": lambda x, t: torch.linalg.vector_norm(x, dim=1),
    "normalize": lambda x, t: F.normalize(x),
    "dist": lambda x, t: torch.dist(x, x),
    "cdist": lambda x, t: torch.cdist(x, x),
    "pairwise_distance": lambda x, t: F.pairwise_distance(x, x),
    "cosine_similarity": lambda x, t: F.cosine_similarity(x, x),
    "layer_norm": lambda x, t: F.layer_norm(x, (4,)),
    "group_norm": lambda x, t: F.group_norm(x, 2),
    "rms_norm": lambda x, t: F.rms_norm(x, (4,)),
    "exp": lambda x, t: x.exp(),
    "log": lambda x, t: x.log(),
    "pow": lambda x, t: x**2,
    "rsqrt": lambda x, t: x.rsqrt(),
    "softplus": lambda x, t: F.softplus(x),
    "mean": lambda x, t: x.mean(),
    "std": lambda x, t: x.std(1),
    "gelu": lambda x, t: F.gelu(x),
    "matmul": lambda x, t: x.float() @ x.float().mT,
    "einsum": lambda x, t: torch.einsum("ij,kj->ik", x.float(), x.float()),
    "cat": lambda x, t: torch.cat([x, x.float()], 1),
    "addcmul": lambda x, t: torch.addcmul(x, x, x.float()),
}


@pytest.fixture
def fake(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[AbstractContextManager[object]]:
    """On a CPU the mode in which tensors only say that they are on a GPU, with autocast on as there."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        # An index into such a tensor asks for its device.
        monkeypatch.setattr(TrueSizes, "_of", lambda self, size: torch.empty((), dtype=torch.int64, device="cuda"))
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    try:
        yield FakeTensorMode() if device == "cpu" else nullcontext()
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)


def padded(x: Tensor) -> Tensor:
    """Return a PaddedTensor over all of a storage, whose true sizes are on its device alone."""
    sizes = TrueSizes((SEQ.symbol,), (8,), torch.full((1,), 5, dtype=torch.int64, device=x.device))
    return make_padded(PaddedValue(x, (padded_dim(8, SEQ.symbol), *static_dims(list(x.shape[1:]))), sizes))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", OPS)
def test_a_padded_result_has_the_dtype_that_it_has_without_padding(
    name: str, dtype: torch.dtype, fake: AbstractContextManager[object]
) -> None:
    with fake:
        x, target = torch.rand(8, 4, device="cuda").to(dtype), torch.zeros(8, dtype=torch.int64, device="cuda")
        expected = OPS[name](x, target)
        found = OPS[name](padded(x), padded(target))
    assert found.dtype == expected.dtype
