"""Triton kernels and, beside each, its readable torch reference."""
