"""Tensor subclasses for lists of tensors, varying sizes, huge intermediates and fixed addresses."""

from subtensors.dispatch.errors import AddressError, RuleError, SizeError
from subtensors.tensor_list import TensorList

__all__ = ["AddressError", "RuleError", "SizeError", "TensorList"]
