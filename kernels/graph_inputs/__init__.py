"""Kernels of captured programs: loading their inputs, and linear layers of one input in one launch."""
