"""The rules of chunked values, one file a kind of op; importing this fills the table."""

from subtensors.dispatch.chunked.record import RULES, record
from subtensors.dispatch.chunked.rules import (
    along_dim,
    carried_dims,
    contractions,
    copies,
    factories,
    indexing,
    losses,
    random,
    reductions,
    statistics,
    views,
)

__all__ = [
    "RULES",
    "along_dim",
    "carried_dims",
    "contractions",
    "copies",
    "factories",
    "indexing",
    "losses",
    "random",
    "record",
    "reductions",
    "statistics",
    "views",
]
