"""Tensor subclasses for lists of tensors, varying sizes, huge intermediates and fixed addresses."""

from subtensors.dispatch.errors import AddressError, RuleError, SizeError

__all__ = ["AddressError", "RuleError", "SizeError"]
