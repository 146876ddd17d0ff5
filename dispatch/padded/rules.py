"""The rule table with every family of rules registered by its import, and the functions that run an op by it."""

from subtensors.dispatch.padded import (  # noqa: F401
    attention,
    carried_dims,
    contractions,
    copies,
    data_dependent,
    factories,
    indexing,
    losses,
    normalisation,
    order_statistics,
    pointwise,
    recurrent,
    reductions,
    slicing,
    spatial,
    views,
)
from subtensors.dispatch.padded.interpreter import run, run_call, table

__all__ = ["run", "run_call", "table"]
