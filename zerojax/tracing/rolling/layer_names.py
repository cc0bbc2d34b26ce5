"""Finds lists of layers by the names of their parameters, and names stacks of parameters.

`layers/3/attention/query`, `blocks_3/kernel` and `h.3/kernel` name layer 3 of a list.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from zerojax.config.late_dataclasses import dataclass
from zerojax.tracing.rolling.flat_program import Place

_NUMBER = re.compile(r"(?:^|(?<=[A-Za-z/._-]))(\d+)(?=[/.]|$)")


@dataclass(frozen=True)
class LayerList:
    """Parameters of numbered layers with a common name prefix, or of several such lists used
    together.

    Layers are counted from 0, in the order of the numbers in their names: `layer1` to `layer6` are
    layers 0 to 5.

    Attributes:
      prefix: text before the number, such as "layers/" or "blocks_"; for several joined lists
        "norms/+mlps/".
      numbers: numbers in the names of the layers, ascending, for messages.
      places: {name of a parameter: layer and name within the layer}.
    """

    prefix: str
    numbers: tuple[int, ...]
    places: Mapping[str, Place]

    @property
    def num_layers(self) -> int:
        return len(self.numbers)

    def title_of(self, names: Iterable[str]) -> str:
        """Returns a name such as "layers/0..23" for messages, from the names of the layers'
        parameters.
        """
        names, titles = list(names), []
        for prefix in self.prefix.split("+"):
            numbered = re.compile(re.escape(prefix) + r"(\d+)(?:[/.]|$)")
            numbers = [int(match[1]) for match in map(numbered.match, names) if match]
            if numbers:
                titles.append(f"{prefix}{min(numbers)}..{max(numbers)}")
        return " with ".join(titles)


def find_lists(names: Iterable[str], *, at_least: int = 2) -> list[LayerList]:
    """Returns the lists among parameters' names with at least `at_least` layers, outer lists first.

    >>> [layers.prefix for layers in find_lists(["layers/0/w", "layers/1/w", "head/w"])]
    ['layers/']
    """
    by_prefix: dict[str, dict[str, Place]] = {}
    for name in names:
        for number in _NUMBER.finditer(name):
            prefix, within = name[: number.start()], name[number.end() :].lstrip("/.")
            by_prefix.setdefault(prefix, {})[name] = Place(int(number[1]), within)
    lists = [_list_of(prefix, _repeated(places)) for prefix, places in by_prefix.items()]
    long = [layers for layers in lists if layers.num_layers >= at_least]
    return sorted(long, key=lambda layers: (layers.prefix.count("/"), len(layers.prefix)))


def _list_of(prefix: str, places: Mapping[str, Place]) -> LayerList:
    numbers = tuple(sorted({place.layer for place in places.values()}))
    order = {number: layer for layer, number in enumerate(numbers)}
    counted = {name: Place(order[x.layer], x.within) for name, x in places.items()}
    return LayerList(prefix, numbers, counted)


def _repeated(places: Mapping[str, Place]) -> dict[str, Place]:
    """Drops parameters that only one layer has, because all layers may share them (tied
    weights).
    """
    count = collections.Counter(place.within for place in places.values())
    return {name: place for name, place in places.items() if count[place.within] > 1}


def join_lists(lists: Sequence[LayerList]) -> LayerList:
    """Joins several lists of modules, which one Python loop calls together, to one list of layers.

    The number of layers is chosen so that it divides the lengths of the lists best. A list that is
    k times as long has k modules in each layer: `Dense_0` to `Dense_11` of six Linen blocks, for
    example, are two per layer. Remaining modules, such as a last norm, belong to additional layers.

    Raises:
      ValueError: a parameter is in two lists.
    """
    shortest = min(lists, key=lambda layers: layers.num_layers)
    # Descending, so that of equally good numbers the largest is taken.
    numbers = range(shortest.num_layers, 1, -1)
    num_layers = min(numbers, key=lambda n: sum(layers.num_layers % n for layers in lists))
    places: dict[str, Place] = {}
    for layers in lists:
        per_layer = layers.num_layers // num_layers
        for name, place in layers.places.items():
            if name in places:
                raise ValueError(f"{name} is in two lists")
            layer, part = divmod(place.layer, per_layer)
            places[name] = Place(layer, f"{layers.prefix}{part}/{place.within}")
    count = 1 + max(place.layer for place in places.values())
    first = shortest.numbers[0]
    return LayerList("+".join(x.prefix for x in lists), tuple(range(first, first + count)), places)


def stack_name(names: Sequence[str]) -> str:
    """Returns the name of the stack of parameters with the same place in several layers.

    >>> stack_name(["layers/0/w", "layers/1/w", "layers/2/w"])
    'layers/0..2/w'
    >>> stack_name(["layers/1/w", "layers/3/w", "layers/5/w"])
    'layers/1..5:2/w'
    >>> stack_name(["layers/1/w", "layers/4/w", "layers/5/w"])
    'layers/1,4,5/w'
    """
    parts = [_NUMBER.split(name) for name in names]
    # `split` puts the numbers at the odd places.
    for place in range(1, len(parts[0]), 2):
        numbers = [int(part[place]) for part in parts]
        if len(set(numbers)) > 1:
            break
    else:
        raise ValueError(f"{list(names)} are not parameters of numbered layers")
    first = parts[0]
    return "".join([*first[:place], _numbers_text(numbers), *first[place + 1 :]])


def _numbers_text(numbers: Sequence[int]) -> str:
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    if len(steps) > 1:
        return ",".join(map(str, numbers))
    [step] = steps
    return f"{numbers[0]}..{numbers[-1]}" + (f":{step}" if step != 1 else "")
