"""Many tensors as one value: `TensorList`, and what its calls become."""
