"""CUDA graphs: capture, memory pools, live scalars, guards, deferred work."""
