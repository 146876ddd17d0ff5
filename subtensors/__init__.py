"""Tensor types around values you already have: lists of tensors as one value, and maths fused over them."""

from subtensors import optim
from subtensors.dispatch.errors import AddressError, RuleError, SizeError
from subtensors.explanation import explain
from subtensors.fuse import fused
from subtensors.norms import clip_grad_norm_, total_norm
from subtensors.rounding import stochastic_round_
from subtensors.tensor_list import TensorList

__all__ = [
    "AddressError",
    "RuleError",
    "SizeError",
    "TensorList",
    "clip_grad_norm_",
    "explain",
    "fused",
    "optim",
    "stochastic_round_",
    "total_norm",
]
