"""`ChunkedTensor`: a tensor whose ops run chunk by chunk, since their results would be too large in full."""
