"""Padded tensors: padding and unpadding, and what reads their real elements alone."""
