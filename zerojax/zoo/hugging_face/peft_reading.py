"""Adapters of a PEFT folder as parameters of zerojax: A and B of each projection, and the arrays
that were saved whole.

PEFT has one adapter per module of the base model. A module that holds several of zerojax's
projections gives each of them the rows of its B. If B is block-diagonal, as zerojax writes it,
each projection gets its own columns only; otherwise all of them begin with the same A.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from zerojax.config import LoraConfig
from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.tracing import trees
from zerojax.zoo.hugging_face.config_reading import UnsupportedError
from zerojax.zoo.hugging_face.folder import Folder
from zerojax.zoo.hugging_face.layouts import Architecture, Layout, Leaf, Range
from zerojax.zoo.hugging_face.peft_settings import AdapterSettings
from zerojax.zoo.hugging_face.safetensors import Tensor, read_block, read_table
from zerojax.zoo.lora import A_SUFFIX, B_SUFFIX, KERNEL_SUFFIX
from zerojax.zoo.task_heads import TASK_HEAD

ADAPTER_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_OF_LORA = re.compile(r"\.lora_|\.(dora|vera|ranknum)_")
_NO_ADAPTERS = (r"/router/", r"/experts/", r"^lm_head/", rf"^{TASK_HEAD}/")


class HeldArray:
    """Array in memory that is read like an array in files (`tracing.LazyArray`).

    Attributes:
      shape, dtype: shape and dtype of the array.
      is_stacked: False.
    """

    is_stacked = False

    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        self.shape, self.dtype = values.shape, values.dtype

    def read(self, index: Sequence[Range]) -> np.ndarray:
        """Returns a copy of the part given by a range [first, end) for each dimension."""
        return self._values[tuple(slice(*bounds) for bounds in index)].copy()


@dataclass(frozen=True, kw_only=True)
class ReadAdapters:
    """What a PEFT folder adds to its base model.

    Attributes:
      settings: settings of the adapters.
      loras: settings of groups of adapters with equal rank and scale; their targets are exact.
      arrays: {parameter: array} of the adapters.
      whole: the base model's folder, in which tensors of the PEFT folder replace those of the base.
      saved: names of the parameters that the PEFT folder replaces.
    """

    settings: AdapterSettings
    loras: tuple[LoraConfig, ...]
    arrays: Mapping[str, HeldArray]
    whole: Folder
    saved: tuple[str, ...]


class _LowRank(NamedTuple):
    """Adapter of one projection in one layer: A [rank, inputs], B [outputs, rank], scale."""

    a: np.ndarray
    b: np.ndarray
    scale: float


class _Place(NamedTuple):
    """Projection in a module of the base model."""

    leaf: Leaf
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    first: int
    all_outputs: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + math.prod(self.outputs))


class _Files:
    """Tensors of adapter_model.safetensors, under the base model's names.

    Attributes:
      adapters: {module: {"A" or "B": tensor}}.
      saved: {tensor of the base model: the tensor that replaces it}.
    """

    def __init__(self, settings: AdapterSettings) -> None:
        self.path, self.settings = settings.path / ADAPTER_FILE, settings
        if not self.path.is_file():
            pickled = any(settings.path.glob("*.bin"))
            raise FileNotFoundError(
                f"{settings.path} has no {ADAPTER_FILE}; "
                + (
                    "its adapters are pickled (*.bin), and unpickling may run code; save them "
                    "again with peft: model.save_pretrained(OTHER)"
                    if pickled
                    else "fetch it"
                )
            )
        self.adapters: dict[str, dict[str, Tensor]] = {}
        self.saved: dict[str, Tensor] = {}
        for name, tensor in read_table(self.path).items():
            # PEFT puts the whole copy of a module under this name inside of the module.
            bare = name.removeprefix(_PREFIX).replace(".modules_to_save.", ".")
            # end[6] is the letter of the suffix, A or B.
            module, part = next(
                ((bare.removesuffix(end), end[6]) for end in (_A, _B) if bare.endswith(end)),
                (bare, ""),
            )
            if part:
                self.adapters.setdefault(module, {})[part] = tensor
            elif _OF_LORA.search(bare):
                raise UnsupportedError(
                    f"{self.path}: tensor {quoted(name)} is not of a linear LoRA adapter; "
                    f"{settings.merging()}"
                )
            else:
                self.saved[bare.replace(".base_layer.", ".")] = tensor

    def read(self, tensor: Tensor) -> np.ndarray:
        """Reads a whole tensor as float32."""
        values, _ = read_block(self.path, tensor, [[(0, size)] for size in tensor.shape])
        return values.astype(np.float32)


def rows_of_head(settings: AdapterSettings) -> int | None:
    """Returns the number of outputs of the head that a PEFT folder has, or None."""
    heads = re.compile(r"(?:^|\.)(score|classifier|qa_outputs)\.weight$")
    found = [x.shape[0] for name, x in _Files(settings).saved.items() if heads.search(name)]
    return found[0] if found else None


def read_adapters(
    settings: AdapterSettings, base: Folder, row: Architecture, config: Any
) -> ReadAdapters:
    """Reads adapters into memory, and finds the tensors that replace those of the base model.

    Args:
      settings: settings of the adapters.
      base: opened folder of the base model.
      row: architecture of the base model.
      config: its configuration.

    Raises:
      UnsupportedError: an adapter belongs to no projection, has another shape, or zerojax does not
        support it.
      FileNotFoundError: the folder has no tensors.
      ValueError: a file is damaged.
    """
    files, leaves = _Files(settings), row.leaves(config)
    shapes = {
        trees.path_name(path): leaf.get_raw_value().shape
        for path, leaf in nnx.to_flat_state(
            nnx.eval_shape(lambda: nnx.state(row.build(config, nnx.Rngs(0)), nnx.Param))
        )
    }
    by_tensor: dict[str, list[tuple[Leaf, int]]] = {}
    for leaf in leaves:
        for layer, expert in leaf.numbers(shapes[leaf.name]):
            by_tensor.setdefault(leaf.tensor_of(layer, expert), []).append((leaf, layer))

    def own_name(name: str) -> str:
        bare = name.removeprefix(row.prefix)
        return next((x for x in (name, bare, row.prefix + bare) if x in by_tensor), name)

    modules: dict[str, dict[int, tuple[np.ndarray, np.ndarray, float]]] = {}
    for module in sorted(files.adapters):
        found = by_tensor.get(own_name(f"{module}.weight"), [])
        _check_projection(files, module, [leaf for leaf, _ in found])
        leaf, layer = found[0]
        a, b = _pair(files, module)
        places = _places(leaves, leaf, shapes)
        wanted = (math.prod(places[0].inputs), places[0].all_outputs)
        if (a.shape[1], b.shape[0]) != wanted or a.shape[0] != b.shape[1]:
            raise UnsupportedError(
                f"{files.path}: {quoted(module)} has A {list(a.shape)} and B {list(b.shape)}, but "
                f"the module of the base model has {wanted[0]} inputs and {wanted[1]} outputs; use "
                "the base model that they were trained with: base=FOLDER"
            )
        scale = settings.scale_of(module)
        modules.setdefault(leaf.tensor, {})[layer] = (a, b, scale)
    groups: dict[tuple[int, float], list[str]] = {}
    arrays: dict[str, HeldArray] = {}
    for tensor, layers in modules.items():
        first = next(leaf for leaf in leaves if leaf.tensor == tensor)
        for place, own in _divided(_places(leaves, first, shapes), layers):
            name = place.leaf.name.removesuffix(KERNEL_SUFFIX)
            a, b, scale = _stacked(files, place, own, shapes[place.leaf.name])
            arrays[name + A_SUFFIX], arrays[name + B_SUFFIX] = HeldArray(a), HeldArray(b)
            groups.setdefault((a.shape[-1], scale), []).append(name)
    loras = tuple(
        LoraConfig(
            rank=rank,
            alpha=scale * rank,
            dropout=settings.dropout,
            targets=tuple(f"^{re.escape(name)}$" for name in sorted(names)),
        )
        for (rank, scale), names in sorted(groups.items())
    )
    saved, replaced = _saved(files, config, by_tensor, own_name)
    known = {own_name(name): name for name in base.tensors}
    tensors = {known.get(name, name): (files.path, tensor) for name, tensor in replaced.items()}
    coded = {name: x for name, x in base.coded.items() if name not in tensors}
    whole = dataclasses.replace(base, tensors={**base.tensors, **tensors}, coded=coded)
    return ReadAdapters(settings=settings, loras=loras, arrays=arrays, whole=whole, saved=saved)


def _check_projection(files: _Files, module: str, leaves: Sequence[Leaf]) -> None:
    """Raises an UnsupportedError unless a module holds projections that may have adapters."""
    names = [leaf.name for leaf in leaves]
    if names and all(name.endswith(KERNEL_SUFFIX) for name in names):
        name = names[0]
        if not any(re.search(pattern, name) for pattern in _NO_ADAPTERS):
            return
    what = (
        f"is {names[0]}, which has none in zerojax" if names else "is no module of the base model"
    )
    raise UnsupportedError(
        f"{files.path}: adapter of {quoted(module)}, but it {what}; {files.settings.merging()}"
    )


def _pair(files: _Files, module: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads A [rank, inputs] and B [outputs, rank] of a module."""
    parts = files.adapters[module]
    missing = {"A", "B"} - set(parts)
    if missing:
        raise UnsupportedError(
            f"{files.path}: {quoted(module)} has no lora_{min(missing)}; fetch the file again"
        )
    if any(len(part.shape) != 2 for part in parts.values()):
        raise UnsupportedError(
            f"{files.path}: the adapter of {quoted(module)} is not one of a linear layer; "
            f"{files.settings.merging()}"
        )
    rank, rows = files.settings.rank_of(module), parts["A"].shape[0]
    if rank != rows:
        raise UnsupportedError(
            f"{files.path}: lora_A of {quoted(module)} has rank {rows}, but adapter_config.json "
            f"says {rank}; correct r or rank_pattern, by which the scale is divided"
        )
    return files.read(parts["A"]), files.read(parts["B"])


def _places(
    leaves: Sequence[Leaf], first: Leaf, shapes: Mapping[str, tuple[int, ...]]
) -> list[_Place]:
    """Lists the projections of a module, in the order of its outputs."""
    group = [leaf for leaf in leaves if leaf.tensor == first.tensor]
    return sorted((_place(leaf, shapes[leaf.name]) for leaf in group), key=lambda x: x.first)


def _place(leaf: Leaf, shape: tuple[int, ...]) -> _Place:
    layout: Layout = leaf.layout
    sizes = layout.sizes(shape[leaf.num_stacked :])
    one, two = (tuple(name for name in group if name in layout.ours) for group in layout.theirs)
    inputs, outputs = (one, two) if one + two == layout.ours else (two, one)
    assert inputs + outputs == layout.ours, (leaf.name, layout)
    outs = tuple(sizes[name] for name in outputs)
    own = math.prod(outs)
    rows = leaf.rows
    return _Place(
        leaf,
        tuple(sizes[name] for name in inputs),
        outs,
        own * leaf.part if rows is None else rows.first,
        own * layout.parts if rows is None else rows.all,
    )


def _divided(
    places: Sequence[_Place], layers: Mapping[int, tuple[np.ndarray, np.ndarray, float]]
) -> list[tuple[_Place, dict[int, _LowRank]]]:
    """Divides the adapters of a module over its projections; see the module's docstring."""
    columns = _blocks(places, [b for _, b, _ in layers.values()])
    result = []
    for number, place in enumerate(places):
        own = slice(None) if columns is None else columns.get(number)
        if own is not None:
            parts = {n: _LowRank(a[own], b[place.rows, own], s) for n, (a, b, s) in layers.items()}
            result.append((place, parts))
    return result


def _blocks(places: Sequence[_Place], bs: Sequence[np.ndarray]) -> dict[int, slice] | None:
    """Returns {index of a projection: its columns of B} if all B are block-diagonal, else None."""
    ranks = {b.shape[1] for b in bs}
    if len(places) == 1 or len(ranks) != 1:
        return None
    used = [
        np.flatnonzero(np.any([np.any(b[place.rows] != 0, axis=0) for b in bs], axis=0))
        for place in places
    ]
    there = [number for number, columns in enumerate(used) if columns.size]
    size, rest = divmod(ranks.pop(), max(len(there), 1))
    if rest or not there:
        return None
    blocks = {number: slice(k * size, (k + 1) * size) for k, number in enumerate(there)}
    fits = all(x.start <= used[n][0] and used[n][-1] < x.stop for n, x in blocks.items())
    return blocks if fits else None


def _stacked(
    files: _Files, place: _Place, layers: Mapping[int, _LowRank], shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns A [*layers, *inputs, rank], B [*layers, rank, *outputs] and the scale.

    A layer without an adapter, or with a smaller rank, is filled with zeros in both matrices, whose
    gradients are then 0, so that they stay 0.
    """
    scales = {part.scale for part in layers.values()}
    if len(scales) > 1:
        raise UnsupportedError(
            f"{files.path}: {place.leaf.name} has the scales {sorted(scales)} in its layers, but "
            f"all layers of a projection need one alpha / rank; {files.settings.merging()}"
        )
    rank = max(part.a.shape[0] for part in layers.values())
    count = shape[0] if place.leaf.is_stacked else 1
    a = np.zeros((count, *place.inputs, rank), np.float32)
    b = np.zeros((count, rank, *place.outputs), np.float32)
    for layer, part in layers.items():
        own = part.a.shape[0]
        a[layer, ..., :own] = part.a.T.reshape(*place.inputs, own)
        b[layer, :own] = part.b.T.reshape(own, *place.outputs)
    if not place.leaf.is_stacked:
        a, b = a[0], b[0]
    return a, b, scales.pop()


def _saved(
    files: _Files,
    config: object,
    by_tensor: Mapping[str, Sequence[tuple[Leaf, int]]],
    own_name: Callable[[str], str],
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """Returns (parameters saved whole, {tensor of the base model: tensor that replaces it})."""
    replaced = {own_name(name): tensor for name, tensor in files.saved.items()}
    unknown = [name for name in replaced if name not in by_tensor]
    names = {leaf.name for name in replaced for leaf, _ in by_tensor.get(name, ())}
    is_tied = getattr(config, "tie_embeddings", False) and getattr(config, "task", None) is None
    if is_tied and "token_embedding/embedding" in names:
        unknown.append("a token table whose base model ties it to the output weights")
    if unknown:
        raise UnsupportedError(
            f"{files.path}: {quoted(unknown[0])} is saved whole, but belongs to no parameter "
            f"of its own in the base model; {files.settings.merging()}"
        )
    for name in sorted(names):
        all_of_it = {x for x, own in by_tensor.items() if any(leaf.name == name for leaf, _ in own)}
        if missing := sorted(all_of_it - set(replaced)):
            raise UnsupportedError(
                f"{files.path}: {name} is saved for some layers only, not as {missing[0]!r}, but "
                f"all layers are trained together; {files.settings.merging()}"
            )
    return tuple(sorted(names)), replaced
