"""Attention over a sequence that is split over devices: methods, their choice, order of tokens."""

from zerojax.operators.context.choice import (
    ASKED,
    Asked,
    Choice,
    Sizes,
    Wire,
    choose_way,
    why_not,
    wire_bytes,
)
from zerojax.operators.context.order import (
    Order,
    inverse_order,
    local_index,
    nearest_lengths,
    order_of_tokens,
    parts_of,
)
from zerojax.operators.context.ring import ring_attention
from zerojax.operators.context.sequence_split import (
    SCOPE,
    ContextSplit,
    attend_over,
    current_split,
    sequences_split,
    whole_length,
)
from zerojax.operators.context.ways import (
    ORDERS,
    WAYS,
    Way,
    allgather_attention,
    kv_repeats,
    ulysses_attention,
)

__all__ = [
    "ASKED",
    "ORDERS",
    "SCOPE",
    "WAYS",
    "Asked",
    "Choice",
    "ContextSplit",
    "Order",
    "Sizes",
    "Way",
    "Wire",
    "allgather_attention",
    "attend_over",
    "choose_way",
    "current_split",
    "inverse_order",
    "kv_repeats",
    "local_index",
    "nearest_lengths",
    "order_of_tokens",
    "parts_of",
    "ring_attention",
    "sequences_split",
    "ulysses_attention",
    "whole_length",
    "why_not",
    "wire_bytes",
]
