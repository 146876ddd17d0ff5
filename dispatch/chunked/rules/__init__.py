"""The rules of chunked values, one file a kind of op; importing this fills the table."""

from subtensors.dispatch.chunked.record import RULES, record
from subtensors.dispatch.chunked.rules import (  # noqa: F401
    carried_dims,
    contractions,
    copies,
    indexing,
    losses,
    random,
    reductions,
    statistics,
    views,
)

__all__ = ["RULES", "record"]
