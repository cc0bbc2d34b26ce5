"""Finds dimensions of a traced program that can be split over devices together.

The dimensions of every value are followed through the program: matrix products, element-wise
operations, reshapes that split heads, transposes, loops over layers. Names of parameters are not
used.
"""

from zerojax.tracing.splitting.dim_groups import DimGroup, DimGroups, gradient_program
from zerojax.tracing.splitting.record import Sum

__all__ = ["DimGroup", "DimGroups", "Sum", "gradient_program"]
