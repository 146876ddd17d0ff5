"""Lists of tensors: programs over their elements, the kernels that these become, and sums over all of them."""
