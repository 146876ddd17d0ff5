"""Single-tensor math over many tensors: traced once, grouped by how they run, launched as few kernels."""
