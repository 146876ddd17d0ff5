"""The rules of chunked values, one file a kind of op; importing this fills the table."""

from subtensors.dispatch.region.rules import (
    batches,
    contractions,
    copies,
    indexing,
    losses,
    pointwise,
    random,
    reductions,
    slices,
    views,
)
from subtensors.dispatch.region.rules.table import RULES, record

__all__ = [
    "RULES",
    "batches",
    "contractions",
    "copies",
    "indexing",
    "losses",
    "pointwise",
    "random",
    "record",
    "reductions",
    "slices",
    "views",
]
