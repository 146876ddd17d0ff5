"""The engine for aten ops: op classes, dimension maps, rule tables, errors. Its import fills the table of maps."""

from subtensors.dispatch.ops import (  # noqa: F401  # each fills a part of it
    index_dims,
    product_dims,
    reduction_dims,
    sample_dims,
    view_dims,
)
