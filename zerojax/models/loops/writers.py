"""Pieces of a loss that write the model's own state, and reads of it by the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.extend.core import Literal

from zerojax.models.jaxpr import Piece, cut_piece
from zerojax.models.loops.finding import LayerLoop


class Writers(NamedTuple):
    """The extras that a loss writes, by who does.

    counters: {name: value of the program}, found from counters and from extras that nobody writes;
    embed, head: {name: value}; layers: {name: which of the values that the loop gives a row of for
    each layer}.
    """

    counters: dict[str, Any]
    embed: dict[str, Any]
    layers: dict[str, int]
    head: dict[str, Any]


def sort_extras(loop: LayerLoop, written: Mapping[str, Any], places: Mapping[str, int]) -> Writers:
    """The extras by who writes them.

    Args:
      loop: over the layers.
      written: {name: its new value in the program}, without those that stay as they are.
      places: {name: its position among the inputs}, of all extras.

    Raises:
      ValueError: one is computed from what the loop returns for each layer.
    """
    depends, given = loop.dependence(), loop.row_outputs()
    by_embed, by_layers, by_head = {}, {}, {}
    for name, atom in written.items():
        if not isinstance(atom, Literal) and atom in given:
            by_layers[name] = given.index(atom)
        elif not depends(atom):
            by_embed[name] = atom
        elif "rows" not in depends(atom):
            by_head[name] = atom
        else:
            raise ValueError(
                f"the model's state {name} is computed from what the loop of {loop.num_layers} "
                "layers returns for each layer, and no pipeline stage has that of all layers: "
                "store the rows themselves (the second result of jax.lax.scan), or compute it from "
                "the carried value"
            )
    counters = _counters(loop, by_embed, written, places)
    rest = {name: atom for name, atom in by_embed.items() if name not in counters}
    return Writers(counters, rest, by_layers, by_head)


def _counters(
    loop: LayerLoop, free: Mapping[str, Any], written: Mapping[str, Any], places: Mapping[str, int]
) -> dict[str, Any]:
    """Those of some extras that depend on nothing but counters and extras that nobody writes."""
    reads = {name: set(cut_piece(loop.program, [atom]).inputs) for name, atom in free.items()}
    found = dict(free)
    while True:
        known = {place for name, place in places.items() if name in found or name not in written}
        fewer = {name: atom for name, atom in found.items() if reads[name] <= known}
        if len(fewer) == len(found):
            return found
        found = fewer


def check_readers(
    writers: Writers, places: Mapping[str, int], *, embed: Piece, around: Piece, head: Piece
) -> None:
    """Refuses an extra that one pipeline stage writes and another reads.

    Args:
      writers, places: see `sort_extras`; embed, around, head: what computes the first activations,
        what the loop takes besides, and the loss.

    Raises:
      ValueError: the two are on different stages, and only activations go from one to another.
    """
    pieces = {"before the layers": embed, "by the layers": around, "after the layers": head}
    written = zip(pieces, (writers.embed, writers.layers, writers.head), strict=True)
    for where, names in written:
        others = {place: piece for place, piece in pieces.items() if place != where}
        for name in names:
            for reader in [place for place, p in others.items() if places[name] in p.inputs]:
                raise ValueError(
                    f"the model's state {name} is written {where} and read {reader}, and pipeline "
                    "stages hand on activations only: keep one for each of the two, or put it "
                    "into the carried value"
                )
