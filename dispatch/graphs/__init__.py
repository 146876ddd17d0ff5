"""CUDA graphs: capture, memory pools, dynamic scalars, guards, released tensors, deferred finalizers."""
