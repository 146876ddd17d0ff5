"""Single-tensor math over many tensors: traced once, grouped by what can run alike, launched as few kernels."""
