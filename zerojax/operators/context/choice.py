"""Chooses the attention method for split sequences by the bytes sent, and explains refusals."""

from __future__ import annotations

from typing import Literal, NamedTuple

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.context.order import Order, nearest_lengths, parts_of
from zerojax.operators.context.ways import ORDERS, WAYS, Way, kv_repeats

Asked = Literal["auto", "ulysses", "ring", "allgather"]
ASKED: tuple[Asked, ...] = ("auto", *WAYS)
FLOAT32 = 4
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of one attention over a sequence that is split over a mesh axis.

    Attributes:
      rows: number of sequences on each device.
      tokens: number of tokens of the whole sequence.
      heads, kv_heads, head_dim: sizes of one layer; with tensor parallelism, of one device's part.
      itemsize: size of an element of query, key and value in bytes.
      devices: number of devices of the mesh axis.
      causal: whether a token sees only itself and tokens before it.
      windows_differ: whether layers have different windows.
    """

    rows: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    devices: int
    causal: bool = True
    windows_differ: bool = False


class Wire(NamedTuple):
    """Bytes that one device sends for one layer, in the forward and in the backward pass."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Choice:
    """Chosen attention method, the order of tokens that it needs, and the reason in one
    sentence."""

    way: Way
    order: Order
    reason: str


def wire_bytes(way: Way, sizes: Sizes) -> Wire:
    """Computes the bytes that one device sends for one layer.

    With remat the forward pass counts twice. Let P be the number of devices, and s the bytes of one
    head for the tokens of one device. Ulysses sends (P-1)/P (2 heads + 2 r kv_heads) s in each
    pass, with r from `kv_repeats`. All-gather sends 2 (P-1) kv_heads s in each pass. The ring sends
    2 (P-1) kv_heads s in the forward pass. In the backward pass it sends the same again, and the
    gradients: P-1 times in float32 and once in their dtype. The segment ids of packed texts are not
    counted: 4 bytes per token and hop.

    >>> sizes = dict(rows=1, tokens=32768, heads=32, kv_heads=8, head_dim=128, itemsize=2)
    >>> wire_bytes("ulysses", Sizes(**sizes, devices=8))
    Wire(forward=73400320.0, backward=73400320.0)
    """
    others = sizes.devices - 1
    head = sizes.rows * sizes.tokens / sizes.devices * sizes.head_dim * sizes.itemsize
    both = 2 * sizes.kv_heads * head
    if way == "allgather":
        return Wire(others * both, others * both)
    if way == "ring":
        wide = both * FLOAT32 / sizes.itemsize
        return Wire(others * both, others * (both + wide) + both)
    repeats = kv_repeats(sizes.heads, sizes.kv_heads, sizes.devices) or 1
    sent = others / sizes.devices * (2 * sizes.heads * head + repeats * both)
    return Wire(sent, sent)


def why_not(way: Way, sizes: Sizes) -> str | None:
    """Returns why an attention method is impossible for these sizes, with a remedy; None if it is
    possible.
    """
    option = f"context_parallel={way!r}"
    if sizes.devices == 1:
        return None
    if way == "ring" and not sizes.causal:
        return (
            f"{option} supports only causal attention, but here tokens also see later tokens; use "
            "context_parallel='ulysses' or 'allgather'"
        )
    if way == "ring" and sizes.windows_differ:
        return (
            f"{option} supports only one window for all layers, but here layers have different "
            "windows; use context_parallel='ulysses' or 'allgather'"
        )
    order = ORDERS[way]
    parts = parts_of(order, sizes.devices)
    if sizes.tokens % parts:
        return (
            f"{option} splits a sequence into {parts} parts with context={sizes.devices}, but "
            f"{sizes.tokens} tokens are not divisible by {parts}; use sequences of "
            f"{nearest_lengths(order, sizes.tokens, sizes.devices)} tokens"
        )
    if way == "ulysses" and sizes.heads % sizes.devices:
        fewer = max(n for n in range(1, sizes.devices) if sizes.heads % n == 0)
        return (
            f"{option} splits the heads over devices, but {sizes.heads} heads are not divisible by "
            f"context={sizes.devices}; use context={fewer}, or context_parallel='ring' or "
            "'allgather'"
        )
    return None


def choose_way(context_parallel: Asked, sizes: Sizes, *, crosses_nodes: bool = False) -> Choice:
    """Returns the requested attention method, or for "auto" the best possible one.

    Between nodes "auto" chooses the ring, whose transfers overlap with matrix products. Within a
    node it chooses Ulysses or all-gather, whichever sends fewer bytes, and the ring if the devices
    do not divide the heads.

    Args:
      context_parallel: name of a method, or "auto".
      sizes: sizes of the attention.
      crosses_nodes: whether the devices of the axis belong to several nodes.

    Raises:
      ValueError: the method is unknown or not possible, or no method is possible.
    """
    if context_parallel not in ASKED:
        raise ValueError(f"{context_parallel=} is not valid; use {', '.join(ASKED)}")
    against = {way: why_not(way, sizes) for way in WAYS}
    if context_parallel != "auto":
        if against[context_parallel] is not None:
            raise ValueError(against[context_parallel])
        way = context_parallel
        return Choice(way, ORDERS[way], f"context_parallel {way} (requested)")
    possible = [way for way in WAYS if against[way] is None]
    if not possible:
        # All-gather has the fewest requirements, so its remedy is the one that makes any method
        # possible.
        raise ValueError(against["allgather"])
    sent = {way: sum(wire_bytes(way, sizes)) for way in possible}
    if crosses_nodes and "ring" in possible:
        way, why = "ring", "between nodes its transfers overlap with matrix products"
    elif "ulysses" in possible:
        inside: list[Way] = [way for way in possible if way != "ring"]
        way, why = min(inside, key=sent.__getitem__), "fewest bytes within a node"
    # The ring's condition on the tokens is stricter than that of Ulysses, so only the heads can
    # have excluded Ulysses here.
    elif "ring" in possible:
        way, why = "ring", "the number of heads is not divisible by the devices"
    else:
        way, why = "allgather", "the only possible method"
    shown = ", ".join(f"{name} {sent[name] / MIB:.1f}" for name in possible)
    return Choice(
        way, ORDERS[way], f"context_parallel {way} (auto: {why}; MiB sent per layer: {shown})"
    )
