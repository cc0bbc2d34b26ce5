"""The loop over layers in a traced loss, and the loss cut around it."""

from zerojax.models.loops.detection import LayerLoop, find_layer_loop, find_stacks, keeps_products
from zerojax.models.loops.loss_pieces import LossPieces, cut_loss
from zerojax.models.loops.own_state import Overwritten
from zerojax.models.loops.split import SplitPasses, split_layers, split_passes

__all__ = [
    "LayerLoop",
    "LossPieces",
    "Overwritten",
    "SplitPasses",
    "cut_loss",
    "find_layer_loop",
    "find_stacks",
    "keeps_products",
    "split_layers",
    "split_passes",
]
