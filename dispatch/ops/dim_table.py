"""All dimension maps: importing this module fills the table that `dims` looks them up in."""

from subtensors.dispatch.ops import index_dims, product_dims, reduction_dims, sample_dims, view_dims  # noqa: F401
from subtensors.dispatch.ops.dims import dim_map, is_map, map_function

__all__ = ["dim_map", "is_map", "map_function"]
