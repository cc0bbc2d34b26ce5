"""The loop over layers in a traced loss: where it is, and the loss cut into what is around it.

Knows traced programs, and which of their inputs are which parameters; never models, meshes,
schedules or who runs the pieces.
"""

from zerojax.layer_loop.cutting import LossPieces, cut_loss
from zerojax.layer_loop.finding import LayerLoop, find_layer_loop, find_stacks

__all__ = ["LayerLoop", "LossPieces", "cut_loss", "find_layer_loop", "find_stacks"]
