"""Launching kernels, tile maths, compiling beside other work."""
