"""Optimizers written for one tensor and run on all of them at once; drop-ins for torch.optim's."""

from subtensors.optim.algorithms.adadelta import Adadelta
from subtensors.optim.algorithms.adafactor import Adafactor
from subtensors.optim.algorithms.adagrad import Adagrad
from subtensors.optim.algorithms.adam import Adam, AdamW
from subtensors.optim.algorithms.adamax import Adamax
from subtensors.optim.algorithms.ademamix import AdEMAMix
from subtensors.optim.algorithms.asgd import ASGD
from subtensors.optim.algorithms.lamb import LAMB
from subtensors.optim.algorithms.lion import Lion
from subtensors.optim.algorithms.matrix_optimizer import MatrixOptimizer, by_shape
from subtensors.optim.algorithms.muon import Muon
from subtensors.optim.algorithms.nadam import NAdam
from subtensors.optim.algorithms.radam import RAdam
from subtensors.optim.algorithms.rmsprop import RMSprop
from subtensors.optim.algorithms.rprop import Rprop
from subtensors.optim.algorithms.schedule_free import AdamWScheduleFree
from subtensors.optim.algorithms.sgd import SGD
from subtensors.optim.algorithms.shampoo import Shampoo
from subtensors.optim.algorithms.signsgd import SignSGD
from subtensors.optim.algorithms.soap import SOAP
from subtensors.optim.convert import convert
from subtensors.optim.docstrings import inherit_arguments
from subtensors.optim.optimizer import Optimizer

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

for _cls in [globals()[name] for name in __all__]:
    if getattr(_cls, "_accepted", None) is not None:
        inherit_arguments(_cls)
