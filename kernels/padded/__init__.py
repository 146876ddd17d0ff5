"""Padded tensors: padding and unpadding, and ops that read only their valid elements."""
