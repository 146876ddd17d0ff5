"""The rule table with every family of rules registered, and the functions that run an op by it."""

from subtensors.dispatch.padded import (
    attention,
    batch_independent,
    contractions,
    copies,
    data_dependent,
    factories,
    indexing,
    losses,
    normalisation,
    order_statistics,
    pad_ops,
    pointwise,
    recurrent,
    reductions,
    softmax,
    spatial,
    splitting,
    views,
)
from subtensors.dispatch.padded.interpreter import run, run_call, table

__all__ = ["FAMILIES", "run", "run_call", "table"]

FAMILIES = (
    attention,
    batch_independent,
    contractions,
    copies,
    data_dependent,
    factories,
    indexing,
    losses,
    normalisation,
    order_statistics,
    pad_ops,
    pointwise,
    recurrent,
    reductions,
    softmax,
    spatial,
    splitting,
    views,
)
"""The modules of rules; each registers its own when it is imported."""
