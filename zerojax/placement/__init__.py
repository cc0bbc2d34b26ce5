"""Placement: a partition spec for each parameter, and the rules that choose it.

Sources: ZeRO, Rajbhandari et al. 2019 (arXiv:1910.02054); tensor parallelism, Shoeybi et al. 2019
(arXiv:1909.08053).
"""

from zerojax.placement.leaf import Access, LeafPlacement
from zerojax.placement.living import Piece, straight_pieces, unrolled
from zerojax.placement.rules import PlacementRules, Rules
from zerojax.placement.table import Placement, axes_of_spec, place_parameters

__all__ = [
    "Access",
    "LeafPlacement",
    "Piece",
    "Placement",
    "PlacementRules",
    "Rules",
    "axes_of_spec",
    "place_parameters",
    "straight_pieces",
    "unrolled",
]
