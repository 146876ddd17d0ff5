"""Optimizers written for one tensor and run on all of them at once; drop-ins for torch.optim's."""

from subtensors.optim.adam import Adam, AdamW
from subtensors.optim.lion import Lion
from subtensors.optim.optimizer import Optimizer
from subtensors.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Optimizer"]
