"""Optimizers written for one tensor and run on all of them at once; drop-ins for torch.optim's."""

from subtensors.optim.conversion import convert
from subtensors.optim.optimizer import Optimizer
from subtensors.optim.updates.adadelta import Adadelta
from subtensors.optim.updates.adafactor import Adafactor
from subtensors.optim.updates.adagrad import Adagrad
from subtensors.optim.updates.adam import Adam, AdamW
from subtensors.optim.updates.adamax import Adamax
from subtensors.optim.updates.ademamix import AdEMAMix
from subtensors.optim.updates.asgd import ASGD
from subtensors.optim.updates.lamb import LAMB
from subtensors.optim.updates.lion import Lion
from subtensors.optim.updates.matrix_optimizer import MatrixOptimizer, by_shape
from subtensors.optim.updates.muon import Muon
from subtensors.optim.updates.nadam import NAdam
from subtensors.optim.updates.radam import RAdam
from subtensors.optim.updates.rmsprop import RMSprop
from subtensors.optim.updates.rprop import Rprop
from subtensors.optim.updates.schedule_free import AdamWScheduleFree
from subtensors.optim.updates.sgd import SGD
from subtensors.optim.updates.shampoo import Shampoo
from subtensors.optim.updates.signsgd import SignSGD
from subtensors.optim.updates.soap import SOAP

__all__ = [
    "ASGD",
    "LAMB",
    "SGD",
    "SOAP",
    "AdEMAMix",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamWScheduleFree",
    "Adamax",
    "Lion",
    "MatrixOptimizer",
    "Muon",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Shampoo",
    "SignSGD",
    "by_shape",
    "convert",
]
