"""A model's own state in a loss that is cut at its layers: who writes it and who reads it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from jax.extend.core import Literal

from zerojax.tracing.jaxpr import Piece, cut_piece
from zerojax.tracing.loops.detection import LayerLoop


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


class Overwritten(NamedTuple):
    """The extras that are overwritten with their gradient, by the piece that reads them.

    Those of the layers have one row for each layer, which that layer alone reads.
    """

    embed: frozenset[str] = frozenset()
    layers: frozenset[str] = frozenset()
    head: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """All of them, sorted."""
        return sorted(self.embed | self.layers | self.head)


def sort_overwritten(
    loop: LayerLoop,
    names: Set[str],
    places: Mapping[str, int],
    *,
    embed: Piece,
    around: Piece,
    head: Piece,
) -> Overwritten:
    """The extras that are overwritten, by who reads them; one that nobody reads is in no set.

    A new value is the gradient of what one piece computes; of two pieces, or of the layers of two
    stages, there would be two to add, and what makes one of the microbatches' values is their
    largest.

    Args:
      loop: over the layers.
      names: of these extras; places, embed, around, head: see `check_readers`.

    Raises:
      ValueError: one is read by two pieces, or by the layers otherwise than a row by each.
    """
    pieces = {"before the layers": embed, "by the layers": around, "after the layers": head}
    read: dict[str, set[str]] = {place: set() for place in pieces}
    for name in sorted(names):
        readers = [place for place, piece in pieces.items() if places[name] in piece.inputs]
        if len(readers) > 1:
            raise ValueError(
                f"the model's state {name}, which is overwritten with its gradient, is read "
                f"{readers[0]} and {readers[1]}, and each pipeline stage has a part of that "
                "gradient: keep one for each of the two, or use stage=1"
            )
        if readers == ["by the layers"]:
            _check_rows(loop, name, places[name])
        for place in readers:
            read[place].add(name)
    return Overwritten(*(frozenset(read[place]) for place in pieces))


def _check_rows(loop: LayerLoop, name: str, place: int) -> None:
    """Refuses an overwritten extra of the layers that is more than a row for each of them."""
    variable = loop.program.jaxpr.invars[place]
    rest = [atom for atom in loop.others if atom is not variable]
    if place in cut_piece(loop.program, [*loop.consts, *rest]).inputs:
        raise ValueError(
            f"the model's state {name}, which is overwritten with its gradient, is not only sliced "
            f"by the loop of {loop.num_layers} layers, one row for each, and no pipeline stage has "
            "the gradient of all layers: let the loop slice a row for each layer, or use stage=1"
        )
