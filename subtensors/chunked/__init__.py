"""`ChunkedTensor`: a tensor too big in what follows it, and what its calls become."""
