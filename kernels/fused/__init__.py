"""Programs over the elements of tensor lists, the Triton kernels and torch code generated from them, and norms."""
