"""Tensor types around values you already have: padded tensors, lists of tensors, chunked tensors, static addresses."""

from subtensors import arguments as _arguments
from subtensors import integrations, optim
from subtensors.bucketed.bucketed import bucketed
from subtensors.bucketed.compare_runs import CheckReport
from subtensors.chunked.chunked_tensor import ChunkedTensor, chunk
from subtensors.dispatch.ops.errors import AddressError, RuleError, SizeError
from subtensors.dispatch.torch_internals import requires as _internals
from subtensors.explanation import explain
from subtensors.fused.custom_ops import stochastic_round_
from subtensors.fused.fuse import fused
from subtensors.lists.norms import clip_grad_norm_, total_norm
from subtensors.lists.tensor_list import TensorList
from subtensors.padded import torch_function as _rules  # noqa: F401  (registers rules at import, not at the first call)
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.padded.padding import pad, pad_masked, pad_nested, to_masked, to_nested
from subtensors.padded.size_debug import PaddedSizeWarning, watch_size_arithmetic
from subtensors.sizes.bucket_policies import Geometric, Linear, Sizes
from subtensors.sizes.dims import Dim
from subtensors.sizes.fit_buckets import fit_buckets
from subtensors.sizes.infer_sizes import infer_sizes
from subtensors.sizes.plot_buckets import plot_buckets
from subtensors.static.arena import Arena
from subtensors.static.static_tensor import StaticAddressTensor, static

__version__ = "0.1.0"

__all__ = [
    "AddressError",
    "Arena",
    "CheckReport",
    "ChunkedTensor",
    "Dim",
    "Geometric",
    "Linear",
    "PaddedSizeWarning",
    "PaddedTensor",
    "RuleError",
    "SizeError",
    "Sizes",
    "StaticAddressTensor",
    "TensorList",
    "__version__",
    "bucketed",
    "chunk",
    "clip_grad_norm_",
    "explain",
    "fit_buckets",
    "fused",
    "infer_sizes",
    "integrations",
    "optim",
    "pad",
    "pad_masked",
    "pad_nested",
    "plot_buckets",
    "static",
    "stochastic_round_",
    "to_masked",
    "to_nested",
    "total_norm",
    "watch_size_arithmetic",
]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


_arguments.refuse_calls(
    {
        "subtensors.chunked": "st.chunk(x)",
        "subtensors.padded": "st.pad(x, {1: seq})",
        "subtensors.lists": "st.TensorList(tensors)",
        "subtensors.sizes": 'st.Dim("seq", max=512)',
    }
)
_internals.note_newer_torch()
