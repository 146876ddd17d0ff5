"""Every family of rules, imported so that it is registered."""

from subtensors.dispatch.padded import (
    attention,
    contractions,
    convolution,
    copies,
    factories,
    indexing,
    losses,
    normalisation,
    pointwise,
    random,
    reductions,
    row_wise,
    softmax,
    sorting,
    views,
)

__all__ = [
    "attention",
    "contractions",
    "convolution",
    "copies",
    "factories",
    "indexing",
    "losses",
    "normalisation",
    "pointwise",
    "random",
    "reductions",
    "row_wise",
    "softmax",
    "sorting",
    "views",
]
