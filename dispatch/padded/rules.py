"""The table of rules with every family registered, which importing a family does."""

from subtensors.dispatch.padded import (
    attention,
    contractions,
    convolution,
    copies,
    factories,
    indexing,
    losses,
    normalisation,
    order_statistics,
    pointwise,
    random,
    reductions,
    row_wise,
    softmax,
    sorting,
    views,
)
from subtensors.dispatch.padded.engine import table

__all__ = [
    "attention",
    "contractions",
    "convolution",
    "copies",
    "factories",
    "indexing",
    "losses",
    "normalisation",
    "order_statistics",
    "pointwise",
    "random",
    "reductions",
    "row_wise",
    "softmax",
    "sorting",
    "table",
    "views",
]
