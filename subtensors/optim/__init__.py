"""Optimizers written for one tensor and run on all of them at once; drop-ins for torch.optim's."""

from subtensors.optim.algorithms.adafactor import Adafactor
from subtensors.optim.algorithms.adam import Adam, AdamW
from subtensors.optim.algorithms.adam_variants import LAMB, Adamax, AdEMAMix, NAdam, RAdam
from subtensors.optim.algorithms.adaptive_rates import Adadelta, Adagrad, RMSprop
from subtensors.optim.algorithms.matrix_optimizer import MatrixOptimizer, by_shape
from subtensors.optim.algorithms.muon import Muon
from subtensors.optim.algorithms.schedule_free import AdamWScheduleFree
from subtensors.optim.algorithms.sgd import ASGD, SGD
from subtensors.optim.algorithms.shampoo import Shampoo
from subtensors.optim.algorithms.sign_steps import Lion, Rprop, SignSGD
from subtensors.optim.algorithms.soap import SOAP
from subtensors.optim.convert import convert
from subtensors.optim.docstrings import inherit_docstring
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
        inherit_docstring(_cls)
