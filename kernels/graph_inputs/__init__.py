"""Programs that are replayed: their inputs, and what their compiled code computes at once."""
