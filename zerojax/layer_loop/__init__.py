"""The loop over layers in a traced loss, and the loss cut around it."""

from zerojax.layer_loop.cutting import LossPieces, cut_loss
from zerojax.layer_loop.finding import LayerLoop, find_layer_loop, find_stacks

__all__ = ["LayerLoop", "LossPieces", "cut_loss", "find_layer_loop", "find_stacks"]
