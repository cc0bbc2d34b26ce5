"""Finds the loop over layers in a traced loss, and cuts the loss into parts around the loop."""

from zerojax.tracing.loops.detection import (
    LayerLoop,
    StackLoop,
    find_layer_loop,
    find_stack_loops,
    find_stacks,
    keeps_products,
)
from zerojax.tracing.loops.loss_pieces import LossPieces, cut_loss
from zerojax.tracing.loops.own_state import Overwritten
from zerojax.tracing.loops.split import SplitPasses, split_layers, split_passes

__all__ = [
    "LayerLoop",
    "LossPieces",
    "Overwritten",
    "SplitPasses",
    "StackLoop",
    "cut_loss",
    "find_layer_loop",
    "find_stack_loops",
    "find_stacks",
    "keeps_products",
    "split_layers",
    "split_passes",
]
