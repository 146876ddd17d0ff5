"""Chunked tensors: ops are recorded in a lazy graph (a region), and run chunk by chunk when a value is needed."""
