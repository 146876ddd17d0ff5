"""Address ranges, and tensors over memory that is there."""
