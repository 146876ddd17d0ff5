"""The rules of chunked values, one file a kind of op; importing this fills the table."""

from subtensors.dispatch.chunked.rules import (
    along_dim,
    contractions,
    copies,
    indexing,
    losses,
    per_sample,
    pointwise,
    random,
    reductions,
    views,
)
from subtensors.dispatch.chunked.rules.table import RULES, record

__all__ = [
    "RULES",
    "along_dim",
    "contractions",
    "copies",
    "indexing",
    "losses",
    "per_sample",
    "pointwise",
    "random",
    "record",
    "reductions",
    "views",
]
