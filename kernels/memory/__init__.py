"""Reserved address ranges, and tensors over existing memory."""
