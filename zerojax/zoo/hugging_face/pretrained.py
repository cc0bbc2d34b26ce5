"""Pretrained model whose parameters are read from files, slice by slice."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from zerojax.config import LoraConfig
from zerojax.config.checks import unknown_keyword
from zerojax.config.loader import user_path
from zerojax.models.from_nnx import NnxModel
from zerojax.tracing.protocol import Arrays
from zerojax.zoo.hugging_face.architectures import architecture_of, architecture_of_config
from zerojax.zoo.hugging_face.config_reading import UnsupportedError
from zerojax.zoo.hugging_face.folder import (
    CONFIG,
    Folder,
    check_unquantized,
    open_folder,
    read_json,
)
from zerojax.zoo.hugging_face.layouts import Architecture, Leaf, Range
from zerojax.zoo.lora import add_lora

ROWS_COMPARED = 256
"""Of a table and of what config.json says is a copy of it."""
ADAPTERS = r"(^|/)lora/[ab]$"
"""Names of parameters that no checkpoint of a base model has."""


class StoredArray:
    """One of our parameters as it lies in their files; a `tracing.LazyArray`.

    Attributes:
      shape, dtype: of our whole array; the dtype is that of the files.
      is_stacked: dimension 0 counts layers, each of which is a tensor of its own.
    """

    def __init__(
        self, folder: Folder, leaf: Leaf, shape: tuple[int, ...], place_of: Callable[[str], str]
    ) -> None:
        """`place_of`: a tensor's name in the table -> its name in the files.

        Raises:
          UnsupportedError: a tensor is missing or has another shape.
        """
        self.shape, self.is_stacked = shape, leaf.is_stacked
        self._folder, self._layout, self._num_stacked = folder, leaf.layout, leaf.num_stacked
        self._own = shape[leaf.num_stacked :]
        self._names = [place_of(leaf.tensor_of(*each)) for each in leaf.numbers(shape)]
        wanted = self._layout.their_shape(self._own)
        for name in self._names:
            found = folder.tensors[name][1] if name in folder.tensors else None
            if found is None or found.shape != wanted:
                state = "is missing" if found is None else f"has shape {list(found.shape)}"
                is_new = not any(each in folder.tensors for each in self._names)
                raise UnsupportedError(
                    f"{folder.path}: tensor {name!r} {state}, and {leaf.name} {list(shape)} needs "
                    f"{list(wanted)} of it; config.json or the changes to it describe another model"
                    + (f", or pass new=({leaf.name!r},) to begin with new values" * is_new)
                )
        kinds = {folder.tensors[name][1].dtype for name in self._names}
        self.dtype = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)

    @property
    def tensors(self) -> Sequence[str]:
        """The names in the files, layer by layer, and in a layer expert by expert."""
        return self._names

    @property
    def files(self) -> list[str]:
        """The names of the files that these are in, relative to the folder, sorted."""
        return sorted({self._folder.file_of(name) for name in self._names})

    def read(self, index: Sequence[Range]) -> np.ndarray:
        """A box of the array; of the files only its own bytes are read.

        Args:
          index: (first, behind the last) in each dimension.
        """
        counted, inner = index[: self._num_stacked], index[self._num_stacked :]
        wanted = list(itertools.product(*(range(*each) for each in counted)))
        if len(wanted) == 1:
            values = self._read_tensor(wanted[0], inner).astype(self.dtype, copy=False)
            return values.reshape([stop - start for start, stop in index])
        result = np.empty([stop - start for start, stop in index], self.dtype)
        for place in wanted:
            at = tuple(x - first for x, (first, _) in zip(place, counted, strict=True))
            result[at] = self._read_tensor(place, inner)
        return result

    def _read_tensor(self, place: tuple[int, ...], index: Sequence[Range]) -> np.ndarray:
        """`place`: the position of a tensor in our array's leading dimensions."""
        number = 0
        for position, size in zip(place, self.shape, strict=False):
            number = number * size + position
        runs = self._layout.their_runs(self._own, index)
        return self._layout.to_ours(self._folder.read(self._names[number], runs), index)


class Pretrained(NnxModel):
    """A model with weights of Hugging Face; goes wherever a model goes.

    No weight is in memory: a plan asks for shapes, and a new state reads what belongs to this
    process's devices.

    Attributes:
      folder: the open files; `folder.bytes_read` counts.
      row: of the table of architectures.
      config: sizes of the model.
      lora: its adapters, or None.
      stored: {name: array in the files} of the parameters that are read.
      left_out: names of tensors that are not parameters of this model, such as another head's.
    """

    def __init__(
        self,
        folder: Folder,
        row: Architecture,
        config: Any,
        *,
        new: Sequence[str] = (),
        lora: LoraConfig | None = None,
    ) -> None:
        """See `from_hugging_face`."""

        def factory(rngs: nnx.Rngs) -> nnx.Module:
            return row.build(config, rngs)

        super().__init__(factory if lora is None else add_lora(factory, lora))
        self.kind = "pretrained model"
        self.folder, self.row, self.config, self.lora = folder, row, config, lora
        self._new = tuple(new)
        self._abstract = jax.eval_shape(lambda: self._arrays_of(self._make(jax.random.key(0))))
        self.stored, self.left_out = _find_arrays(
            folder, row, row.leaves(config), self._abstract[0], self._new
        )

    def initial_arrays(self) -> tuple[Arrays, Arrays]:
        """What the files have, unread; a `ShapeDtypeStruct` where `init` has to make an array."""
        params, extras = self._abstract
        return {name: self.stored.get(name, leaf) for name, leaf in params.items()}, dict(extras)

    def to_model(self) -> nnx.Module:
        """The model with its weights as plain arrays, to embed texts or to draw tokens from.

        Everything is read onto JAX's default device; a run reads slices instead. Parameters that
        are not in the files are those of seed 0.
        """
        params, extras = self._abstract
        if extras or len(self.stored) < len(params):
            params, extras = self._arrays_of(self._make(jax.random.key(0)))
        whole = {
            name: jnp.asarray(array.read([(0, size) for size in array.shape]))
            for name, array in self.stored.items()
        }
        return self.to_source({**params, **whole}, extras)

    def with_changes(self, *, new: Sequence[str] = (), **changes: Any) -> Pretrained:
        """The same weights in a model with other settings, see `from_hugging_face`."""
        config = dataclasses.replace(self.config, **changes)
        return Pretrained(self.folder, self.row, config, new=(*self._new, *new), lora=self.lora)

    def with_lora(self, lora: LoraConfig) -> Pretrained:
        """The same weights with new adapters beside them."""
        return Pretrained(self.folder, self.row, self.config, new=self._new, lora=lora)

    def describe(self) -> str:
        """One line for people: what is read from where, and what is not."""
        count = len(self._abstract[0])
        made = "" if len(self.stored) == count else f", {count - len(self.stored)} new ones"
        left = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        files = len({file for file, _ in self.folder.tensors.values()})
        return (
            f"model: {self.row.model_type} with {len(self.stored)} parameters from {files} file"
            f"{'s' if files > 1 else ''} in {self.folder.path}{made}{left}"
        )


def from_hugging_face(folder: str | Path, *, new: Sequence[str] = (), **changes: Any) -> Pretrained:
    """A model with weights from a folder of Hugging Face: config.json and safetensors files.

    Every process reads only what its own devices hold, one tensor at a time, straight into the
    shards that the plan says. `zoo.hugging_face.ARCHITECTURES` has the model types that are
    known: Llama, Mistral, Qwen, Gemma, Phi, OLMo, SmolLM3, GPT-2, BERT and more.

    Args:
      folder: as `save_pretrained` or `hf download` has left it.
      new: regular expressions on names of parameters that are not in the files, and begin as the
        model's own initialisation makes them. Those of adapters need none.
      **changes: settings of the model that are not the files', such as remat="full", dropout=0.1,
        loss_chunk=1024 or max_seq_len; fields of `zoo.DecoderConfig`, or of `LlamaConfig`,
        `GPT2Config` or `BertConfig`.

    Raises:
      FileNotFoundError: no such folder, or no safetensors in it.
      UnsupportedError: a ValueError: config.json asks for what zerojax does not compute, a tensor
        is missing, has another shape or is not known.
      ValueError: a file is damaged, or a change is not a setting of the model.
    """
    opened = open_folder(folder)
    row, config = _settings(opened.config, changes)
    try:
        return Pretrained(opened, row, config, new=new)
    except UnsupportedError as error:
        theirs = opened.config.get("architectures")
        if not isinstance(theirs, list) or not theirs or row.class_name in theirs:
            raise
        raise UnsupportedError(
            f"{opened.path}: config.json names architectures={theirs}, and zerojax reads a "
            f"{row.model_type} as {row.class_name}; save it as that class with transformers. What "
            f"differs: {error}"
        ) from None


def config_from_hugging_face(path: str | Path, **changes: Any) -> Any:
    """Sizes and switches of a model from its config.json, without weights.

    Args:
      path: a config.json, or its folder, which needs no weights in it.
      **changes: as of `from_hugging_face`.

    Returns:
      A `DecoderConfig`, or the configuration of the model's own class; see `factory_of`.

    Raises:
      FileNotFoundError, UnsupportedError, ValueError: as of `from_hugging_face`.
    """
    path = user_path(path)
    return _settings(read_json(path / CONFIG if path.is_dir() else path), changes)[1]


def arrays_in(folder: str | Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredArray]:
    """Parameters of ours in a folder of Hugging Face; reads no weights.

    Args:
      folder: as of `from_hugging_face`.
      shapes: {name of a parameter: its whole shape}.

    Raises:
      FileNotFoundError, UnsupportedError, ValueError: as of `from_hugging_face`; or the folder's
        model has no parameter of this name.
    """
    opened = open_folder(folder)
    row, config = _settings(opened.config, {})
    leaves = {leaf.name: leaf for leaf in row.leaves(config)}
    unknown = sorted(set(shapes) - set(leaves))
    if unknown:
        raise UnsupportedError(f"{opened.path}: a {row.model_type} has no {unknown[0]!r}")
    place_of = _place_of(opened, row)
    return {
        name: StoredArray(opened, leaves[name], shape, place_of) for name, shape in shapes.items()
    }


def factory_of(config: Any) -> Callable[[nnx.Rngs], nnx.Module]:
    """What makes a model of these sizes with new weights: `rngs -> model`.

    Raises:
      UnsupportedError: sizes of a model of the user's own.
    """
    row = architecture_of_config(config)
    return lambda rngs: row.build(config, rngs)


def _settings(
    config_json: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[Architecture, Any]:
    """(the row, our sizes) of a config.json."""
    check_unquantized(config_json)
    row = architecture_of(config_json)
    fields = {field.name for field in dataclasses.fields(row.config_class)}
    unknown = sorted(set(changes) - fields)
    if unknown:
        raise ValueError(unknown_keyword(row.config_class.__name__, unknown[0], sorted(fields)))
    try:
        config = row.config_class(**row.read_config(config_json))
    except UnsupportedError:
        raise
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"{CONFIG}: {error}") from error
    return row, dataclasses.replace(config, **changes)


def _find_arrays(
    folder: Folder,
    row: Architecture,
    leaves: Sequence[Leaf],
    params: Mapping[str, Any],
    new: Sequence[str],
) -> tuple[dict[str, StoredArray], list[str]]:
    """(parameters that the files have, names of tensors that are none and may be).

    Raises:
      UnsupportedError: a parameter without a tensor, or a tensor without a place in the model.
    """
    places, place_of = _places(folder, row), _place_of(folder, row)
    found: dict[str, StoredArray] = {}
    for leaf in leaves:
        if place_of(leaf.tensor_of(0)) not in folder.tensors and _matches(leaf.name, new):
            continue
        found[leaf.name] = StoredArray(folder, leaf, tuple(params[leaf.name].shape), place_of)
    for name in params:
        if name not in found and not _matches(name, (*new, ADAPTERS)):
            raise UnsupportedError(
                f"parameter {name} has no tensor in {row.model_type}'s files; pass "
                f"new=({name!r},) to begin with new values"
            )
    taken = {name for array in found.values() for name in array.tensors}
    rest = sorted(name for name, place in places.items() if place not in taken)
    copies = {places[x]: place_of(y) for x, y in _copies(leaves, row).items() if x in places}
    for name, original in copies.items():
        _check_copy(folder, name, original)
    unknown = [name for name in rest if name not in copies and not _matches(name, row.ignored)]
    if unknown:
        raise UnsupportedError(
            f"{folder.path}: {len(unknown)} tensors have no place in the model, such as "
            f"{unknown[0]!r}, and would not compute what theirs does; save it as "
            f"{row.class_name} with transformers"
        )
    return found, rest


def _places(folder: Folder, row: Architecture) -> dict[str, str]:
    """{name as the table may have it: name in the files}."""
    result = {}
    for place in folder.tensors:
        name = place
        for pattern, replacement in row.renamed:
            name = re.sub(pattern, replacement, name)
        result[name] = place
    return result


def _place_of(folder: Folder, row: Architecture) -> Callable[[str], str]:
    """A tensor's name in the table -> its name in the files."""
    places = _places(folder, row)

    def place_of(name: str) -> str:
        bare = name.removeprefix(row.prefix)
        return next((places[x] for x in (name, bare, row.prefix + bare) if x in places), name)

    return place_of


def _copies(leaves: Iterable[Leaf], row: Architecture) -> dict[str, str]:
    """{tensor that a file may have besides: the tensor that it repeats}."""
    tensors = {leaf.name: leaf.tensor for leaf in leaves}
    table, copies = tensors.get("token_embedding/embedding"), dict(row.copies)
    if table is not None and "lm_head/kernel" not in tensors:
        copies["lm_head.weight"] = table  # the token table serves for output weights
    return copies


def _check_copy(folder: Folder, name: str, original: str) -> None:
    """Refuses a copy of a table with other values: then another model was trained.

    `ROWS_COMPARED` rows are read, evenly spaced: weights that were trained apart differ in all.
    """
    first, second = (folder.tensors[each][1] for each in (name, original))
    same = first.shape == second.shape and first.dtype == second.dtype
    if same:
        number = first.shape[0]
        step = max(number // ROWS_COMPARED, 1)
        runs = [
            [(row, row + 1) for row in range(0, number, step)],
            *([(0, size)] for size in first.shape[1:]),
        ]
        blocks = [folder.read(each, runs) for each in (name, original)]
        same = blocks[0].tobytes() == blocks[1].tobytes()
    if not same:
        raise UnsupportedError(
            f"{folder.path}: tensor {name!r} is not the {original!r} that config.json says it "
            'repeats; write "tie_word_embeddings": false into config.json if it is to be used, or '
            "take the tensor out of the files"
        )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
