"""Optimizers written for one tensor and run on all of them at once; drop-ins for torch.optim's."""

from typing import TYPE_CHECKING, NoReturn

from subtensors.arguments import missing_name
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

_ELSEWHERE = {
    "LBFGS": "it evaluates the loss several times a step, which no fused step does: torch.optim.LBFGS",
    "SparseAdam": "gradients are dense here: torch.optim.SparseAdam",
    "lr_scheduler": "torch.optim.lr_scheduler takes these optimizers",
    "swa_utils": "ema= of any optimizer averages weights in its step; torch.optim.swa_utils works with them, too",
}
"""Names that torch.optim has and this lacks, each with what to take instead."""

for _name in __all__:
    if getattr(globals()[_name], "_accepted", None) is not None:
        inherit_docstring(globals()[_name])


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


if not TYPE_CHECKING:  # to a type checker every name would be there

    def __getattr__(name: str) -> NoReturn:
        raise missing_name(__name__, name, __all__, _ELSEWHERE)
