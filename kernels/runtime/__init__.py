"""Launching and compiling kernels, tile math, custom ops, valid lengths."""
