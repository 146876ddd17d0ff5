"""Optimizers written for one tensor and run on all of them at once; drop-ins for torch.optim's."""

from subtensors.optim.adadelta import Adadelta
from subtensors.optim.adafactor import Adafactor
from subtensors.optim.adagrad import Adagrad
from subtensors.optim.adam import Adam, AdamW
from subtensors.optim.adamax import Adamax
from subtensors.optim.ademamix import AdEMAMix
from subtensors.optim.asgd import ASGD
from subtensors.optim.conversion import convert
from subtensors.optim.lamb import LAMB
from subtensors.optim.lion import Lion
from subtensors.optim.matrix_optimizer import MatrixOptimizer, by_shape
from subtensors.optim.muon import Muon
from subtensors.optim.nadam import NAdam
from subtensors.optim.optimizer import Optimizer
from subtensors.optim.radam import RAdam
from subtensors.optim.rmsprop import RMSprop
from subtensors.optim.rprop import Rprop
from subtensors.optim.schedule_free import AdamWScheduleFree
from subtensors.optim.sgd import SGD
from subtensors.optim.shampoo import Shampoo
from subtensors.optim.signsgd import SignSGD
from subtensors.optim.soap import SOAP

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
