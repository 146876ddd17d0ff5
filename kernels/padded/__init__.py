"""Padded tensors: padding and unpadding, and what reads their valid elements alone."""
