"""Tensor types around values you already have: lists of tensors as one value, and maths fused over them."""

from subtensors import optim
from subtensors.arena import Arena
from subtensors.bucket_policies import Geometric, Linear, Sizes
from subtensors.chunked_tensor import ChunkedTensor, chunk
from subtensors.dispatch.errors import AddressError, RuleError, SizeError
from subtensors.explanation import explain
from subtensors.fit_buckets import fit_buckets
from subtensors.fuse import fused
from subtensors.infer_sizes import infer_sizes
from subtensors.norms import clip_grad_norm_, total_norm
from subtensors.padded_tensor import PaddedTensor
from subtensors.padding import pad
from subtensors.padding_formats import pad_masked, pad_nested, to_masked, to_nested
from subtensors.rounding import stochastic_round_
from subtensors.size_arithmetic import PaddedSizeWarning, watch_size_arithmetic
from subtensors.sizes import Dim
from subtensors.static_tensor import StaticAddressTensor, static
from subtensors.tensor_list import TensorList

__all__ = [
    "AddressError",
    "Arena",
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
    "chunk",
    "clip_grad_norm_",
    "explain",
    "fit_buckets",
    "fused",
    "infer_sizes",
    "optim",
    "pad",
    "pad_masked",
    "pad_nested",
    "static",
    "stochastic_round_",
    "to_masked",
    "to_nested",
    "total_norm",
    "watch_size_arithmetic",
]
