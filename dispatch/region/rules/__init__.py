"""The rules of chunked values, one file a kind of op; importing this fills the table."""

from subtensors.dispatch.region.rules import (
    contractions,
    copies,
    indexing,
    losses,
    pointwise,
    reductions,
    slices,
    views,
)
from subtensors.dispatch.region.rules.table import RULES, record

__all__ = [
    "RULES",
    "contractions",
    "copies",
    "indexing",
    "losses",
    "pointwise",
    "record",
    "reductions",
    "slices",
    "views",
]
