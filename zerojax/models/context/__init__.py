"""Attention over a sequence that lies over several devices: its ways, their choice, the order."""

from zerojax.models.context.choice import (
    ASKED,
    Asked,
    Choice,
    Sizes,
    Wire,
    choose_way,
    why_not,
    wire_bytes,
)
from zerojax.models.context.order import (
    Order,
    inverse_order,
    local_index,
    nearest_lengths,
    order_of_tokens,
    parts_of,
)
from zerojax.models.context.ring import ring_attention
from zerojax.models.context.ways import (
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
    "WAYS",
    "Asked",
    "Choice",
    "Order",
    "Sizes",
    "Way",
    "Wire",
    "allgather_attention",
    "choose_way",
    "inverse_order",
    "kv_repeats",
    "local_index",
    "nearest_lengths",
    "order_of_tokens",
    "parts_of",
    "ring_attention",
    "ulysses_attention",
    "why_not",
    "wire_bytes",
]
