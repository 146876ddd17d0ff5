"""Many tensors as one value: `TensorList`, and how its calls run."""

from subtensors.lists import torch_function as torch_function  # which gives the class its three ways to run calls
