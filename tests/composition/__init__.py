"""How the types, the runner and the optimizers compose with each other and with torch: a table whose cells are run."""

# They fill the table in the order of the page.
from composition import (
    pair_rows,
    autograd_rows,
    compiled_rows,
    observer_rows,
    storage_rows,
    optimizer_rows,
    distributed_rows,
)  # noqa: F401, I001
from composition.table import ROWS, Column, Meaningless, Refused, Slower, Works

__all__ = ["ROWS", "Column", "Meaningless", "Refused", "Slower", "Works"]
