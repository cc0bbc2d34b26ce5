"""Lists of layers, by the names of their parameters, and names of stacks.

`layers/3/attention/query`, `blocks_3/kernel` and `h.3/kernel` name layer 3 of a list.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from zerojax.models.rolling.flat_program import Place

_NUMBER = re.compile(r"(?:^|(?<=[A-Za-z/._-]))(\d+)(?=[/.]|$)")


@dataclasses.dataclass(frozen=True)
class LayerList:
    """Parameters of layers that are numbered under one name.

    Attributes:
      prefix: what stands before the number: "layers/", "blocks_".
      places: {name of a parameter: its place}.
    """

    prefix: str
    places: Mapping[str, Place]

    @property
    def title(self) -> str:
        """The name of the list, for people."""
        return self.prefix.rstrip("/._-") or "the layers"

    @property
    def num_layers(self) -> int:
        return 1 + max(place.layer for place in self.places.values())


def find_lists(names: Iterable[str], *, at_least: int = 2) -> list[LayerList]:
    """The lists among parameters' names that have at least so many layers, outer ones first.

    >>> [found.prefix for found in find_lists(["layers/0/w", "layers/1/w", "head/w"])]
    ['layers/']
    """
    found: dict[str, dict[str, Place]] = {}
    for name in names:
        for number in _NUMBER.finditer(name):
            prefix, within = name[: number.start()], name[number.end() :].lstrip("/.")
            found.setdefault(prefix, {})[name] = Place(int(number[1]), within)
    lists = [LayerList(prefix, _repeated(places)) for prefix, places in found.items()]
    complete = [one for one in lists if _is_complete(one) and one.num_layers >= at_least]
    return sorted(complete, key=lambda one: (one.prefix.count("/"), len(one.prefix)))


def _repeated(places: Mapping[str, Place]) -> dict[str, Place]:
    """Without parameters that one layer alone has: those may belong to all layers, as tied ones."""
    count = collections.Counter(place.within for place in places.values())
    return {name: place for name, place in places.items() if count[place.within] > 1}


def _is_complete(found: LayerList) -> bool:
    """Whether there is a layer of every number."""
    numbers = {place.layer for place in found.places.values()}
    return bool(numbers) and numbers == set(range(found.num_layers))


def stack_name(names: Sequence[str]) -> str:
    """The name of the stack of parameters of the same place in several layers.

    >>> stack_name(["layers/0/w", "layers/1/w", "layers/2/w"])
    'layers/0..2/w'
    >>> stack_name(["layers/1/w", "layers/3/w", "layers/5/w"])
    'layers/1..5:2/w'
    """
    parts = [_NUMBER.split(name) for name in names]
    for place in range(1, len(parts[0]), 2):
        numbers = [int(part[place]) for part in parts]
        if len(set(numbers)) > 1:
            break
    else:
        raise ValueError(f"{list(names)} are not parameters of numbered layers")
    step = numbers[1] - numbers[0]
    text = f"{numbers[0]}..{numbers[-1]}" + (f":{step}" if step != 1 else "")
    first = parts[0]
    return "".join([*first[:place], text, *first[place + 1 :]])
