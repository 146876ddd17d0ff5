"""How the types, the runner and the optimizers compose with each other and with torch: a table whose cells are run."""

from importlib import import_module

from composition.table import ROWS, Column, Meaningless, Refused, Slower, Works

# Each fills the table, in the order of the page.
for _rows in ("pair", "autograd", "compiled", "observer", "storage", "optimizer", "distributed"):
    import_module(f"composition.{_rows}_rows")

__all__ = ["ROWS", "Column", "Meaningless", "Refused", "Slower", "Works"]
