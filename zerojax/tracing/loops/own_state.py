"""Finds which part of a loss, split at its layers, writes and reads each extra of the model.

Extras are the non-parameter arrays of the model, such as running averages.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from jax.extend.core import Literal

from zerojax.tracing.jaxpr import Piece, cut_piece
from zerojax.tracing.loops.detection import LayerLoop


class Writers(NamedTuple):
    """Extras (non-parameter arrays) that a loss writes, grouped by the part of the loss that writes
    them.

    Attributes:
      counters: {name: variable of the program} of extras computed only from counters and unwritten
        extras.
      embed, head: {name: variable of the program} of extras that the part before or after the
        layers writes.
      layers: {name: index among the loop's outputs that have one row per layer}.
    """

    counters: dict[str, Any]
    embed: dict[str, Any]
    layers: dict[str, int]
    head: dict[str, Any]


def sort_extras(loop: LayerLoop, written: Mapping[str, Any], places: Mapping[str, int]) -> Writers:
    """Groups the extras (non-parameter arrays) that a loss writes by the part of the loss that
    writes them.

    Args:
      loop: loop over the layers.
      written: {name: variable of the new value}, without unchanged extras.
      places: {name of an extra: position among the inputs of the program}, for all extras.

    Raises:
      ValueError: an extra is computed from outputs of the loop that have one row per layer.
    """
    depends, returned = loop.dependence(), loop.row_outputs()
    by_embed, by_layers, by_head = {}, {}, {}
    for name, atom in written.items():
        if not isinstance(atom, Literal) and atom in returned:
            by_layers[name] = returned.index(atom)
        elif not depends(atom):
            by_embed[name] = atom
        elif "rows" not in depends(atom):
            by_head[name] = atom
        else:
            raise ValueError(
                f"the model's state {name} is computed from values that the loop of "
                f"{loop.num_layers} layers returns for each layer, but no pipeline stage has the "
                "values of all layers; store the rows themselves (the second result of "
                "jax.lax.scan), or compute the state from the carried value"
            )
    counters = _counters(loop, by_embed, written, places)
    rest = {name: atom for name, atom in by_embed.items() if name not in counters}
    return Writers(counters, rest, by_layers, by_head)


def _counters(
    loop: LayerLoop, free: Mapping[str, Any], written: Mapping[str, Any], places: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the extras (non-parameter arrays) in `free` that depend only on each other and on
    extras that the loss does not write.
    """
    reads = {name: set(cut_piece(loop.program, [atom]).inputs) for name, atom in free.items()}
    counters = dict(free)
    # Each removal may leave others that depended on the removed one.
    while True:
        known = {place for name, place in places.items() if name in counters or name not in written}
        fewer = {name: atom for name, atom in counters.items() if reads[name] <= known}
        if len(fewer) == len(counters):
            return counters
        counters = fewer


def check_readers(
    writers: Writers, places: Mapping[str, int], *, embed: Piece, around: Piece, head: Piece
) -> None:
    """Raises if one pipeline stage writes an extra (non-parameter array) that another stage reads.

    Args:
      writers: the written extras.
      places: {name of an extra: position among the inputs of the program}, for all extras.
      embed: part of the loss that computes the inputs of the first layer.
      around: part of the loss that computes the other inputs of the loop.
      head: part of the loss that computes the loss from the loop's results.

    Raises:
      ValueError: writer and reader are on different stages, which exchange only activations.
    """
    pieces = {"before the layers": embed, "by the layers": around, "after the layers": head}
    written = zip(pieces, (writers.embed, writers.layers, writers.head), strict=True)
    for where, names in written:
        others = {place: piece for place, piece in pieces.items() if place != where}
        for name in names:
            for reader in [place for place, p in others.items() if places[name] in p.inputs]:
                raise ValueError(
                    f"the model's state {name} is written {where} and read {reader}, but pipeline "
                    "stages exchange only activations; use separate state variables for these "
                    "parts, or put the value into the carried value"
                )


class Overwritten(NamedTuple):
    """Extras (non-parameter arrays) that are replaced by their gradient, grouped by the part of the
    loss that reads them.

    Each extra of `layers` has one row for each layer, which only that layer reads.
    """

    embed: frozenset[str] = frozenset()
    layers: frozenset[str] = frozenset()
    head: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """Names of all overwritten extras (non-parameter arrays), sorted."""
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
    """Groups overwritten extras (non-parameter arrays) by the part of the loss that reads them;
    omits unread extras.

    The new value of such an extra is its gradient in one part. If two parts, or two pipeline
    stages, read it, their gradients would have to be added, but new values are combined by their
    maximum.

    Args:
      loop: loop over the layers.
      names: names of the overwritten extras.
      places, embed, around, head: see `check_readers`.

    Raises:
      ValueError: two parts read an extra, or the layers read it other than as one row per layer.
    """
    pieces = {"before the layers": embed, "by the layers": around, "after the layers": head}
    read: dict[str, set[str]] = {place: set() for place in pieces}
    for name in sorted(names):
        readers = [place for place, piece in pieces.items() if places[name] in piece.inputs]
        if len(readers) > 1:
            raise ValueError(
                f"the model's state {name}, which is overwritten with its gradient, is read "
                f"{readers[0]} and {readers[1]}, but each pipeline stage has only a part of that "
                "gradient; use separate state variables for these parts, or use stage=1"
            )
        if readers == ["by the layers"]:
            _check_rows(loop, name, places[name])
        for place in readers:
            read[place].add(name)
    return Overwritten(*(frozenset(read[place]) for place in pieces))


def _check_rows(loop: LayerLoop, name: str, place: int) -> None:
    """Raises unless layers read an overwritten extra (non-parameter array) only as one row per
    layer.
    """
    variable = loop.program.jaxpr.invars[place]
    rest = [atom for atom in loop.others if atom is not variable]
    if place in cut_piece(loop.program, [*loop.consts, *rest]).inputs:
        raise ValueError(
            f"the model's state {name}, which is overwritten with its gradient, is read by the "
            f"loop of {loop.num_layers} layers other than as one row per layer, but no pipeline "
            "stage has the gradient of all layers; let the loop slice a row for each layer, or use "
            "stage=1"
        )
