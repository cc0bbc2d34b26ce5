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
from zerojax.config.display import quoted
from zerojax.config.loader import user_path
from zerojax.models.from_nnx import NnxModel
from zerojax.tracing.protocol import Arrays, LazyArray
from zerojax.zoo.hugging_face.architectures import architecture_of, architecture_of_config
from zerojax.zoo.hugging_face.config_reading import ConfigReading, UnsupportedError
from zerojax.zoo.hugging_face.folder import (
    ADAPTER_CONFIG,
    CONFIG,
    Folder,
    check_kind,
    check_unquantized,
    has_adapters,
    open_folder,
    read_json,
)
from zerojax.zoo.hugging_face.layouts import Architecture, Leaf, Range
from zerojax.zoo.hugging_face.peft_reading import ReadAdapters, read_adapters, rows_of_head
from zerojax.zoo.hugging_face.peft_settings import TASK_TYPES, base_folder, read_settings
from zerojax.zoo.hugging_face.safetensors import INDEX, SINGLE
from zerojax.zoo.hugging_face.task_keys import class_in, class_of, new_head, read_pad_token
from zerojax.zoo.lora import add_lora, trained_only
from zerojax.zoo.task_heads import TASK_HEAD, TaskConfig, numbered_task

ROWS_COMPARED = 256
"""Minimum number of rows of a table that are compared with its copy; fewer than twice as many are,
and all of a smaller table."""
NEW_WITH_TASK = (f"^{TASK_HEAD}/", "^pooler/")
"""Regular expressions of parameters that are new if the files have the head of another task. The
pooler is read if the files have one."""
ADAPTERS = r"(^|/)lora/[ab]$"
"""Regular expression of adapter parameters, which a base model's files do not have."""


class StoredArray:
    """Parameter that is read lazily from Hugging Face files; a `tracing.LazyArray`.

    Attributes:
      shape: shape of the whole parameter.
      dtype: dtype of the values that are read: that of the files; bfloat16 for 8-bit floats, which
        are exact in it, and float32 for float64, or if the parameter's tensors have several dtypes.
      is_stacked: whether dimension 0 is the layer, with one tensor per layer.
    """

    def __init__(
        self, folder: Folder, leaf: Leaf, shape: tuple[int, ...], place_of: Callable[[str], str]
    ) -> None:
        """Checks the shapes of the tensors; reads none of them.

        Args:
          folder: opened folder.
          leaf: parameter and its tensors.
          shape: shape of the whole parameter.
          place_of: function from a tensor name of the architecture to its name in the files.

        Raises:
          UnsupportedError: a tensor is missing, has another shape, or does not hold floats.
        """
        self.shape, self.is_stacked = shape, leaf.is_stacked
        self._folder, self._layout, self._num_stacked = folder, leaf.layout, leaf.num_stacked
        self._own = shape[leaf.num_stacked :]
        self._names = [place_of(leaf.tensor_of(*numbers)) for numbers in leaf.numbers(shape)]
        expected = self._layout.their_shape(self._own)
        for name in self._names:
            tensor = folder.tensors[name][1] if name in folder.tensors else None
            if tensor is None or tensor.shape != expected:
                if name in folder.absent:
                    raise UnsupportedError(
                        f"{folder.path}: tensor {name!r} is not in {folder.absent[name]}, although "
                        f"{INDEX} lists it there; fetch both again"
                    )
                state = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
                is_new = leaf.name.startswith(TASK_HEAD)
                is_new = is_new or not any(x in folder.tensors for x in self._names)
                raise UnsupportedError(
                    f"{folder.path}: tensor {name!r} {state}, but {leaf.name} {list(shape)} needs "
                    f"shape {list(expected)}; correct config.json or the changes to it"
                    + (f", or pass new=({leaf.name!r},) to initialize it" * is_new)
                )
        kinds = {_dtype_read(folder, name) for name in self._names}
        # float32 has the values of every dtype that `_dtype_read` returns.
        self.dtype = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)

    @property
    def tensors(self) -> Sequence[str]:
        """Returns the names of the parameter's tensors in the files, by layer, then by expert."""
        return self._names

    @property
    def files(self) -> list[str]:
        """Returns the sorted names of the files of this parameter, relative to the folder."""
        return sorted({self._folder.file_of(name) for name in self._names})

    def read(self, index: Sequence[Range]) -> np.ndarray:
        """Reads a slice of the parameter, and no other bytes of the files.

        Args:
          index: range (start, stop) in each dimension.
        """
        outer, inner = index[: self._num_stacked], index[self._num_stacked :]
        positions = list(itertools.product(*(range(*bounds) for bounds in outer)))
        if len(positions) == 1:
            values = self._read_tensor(positions[0], inner).astype(self.dtype, copy=False)
            return values.reshape([stop - start for start, stop in index])
        result = np.empty([stop - start for start, stop in index], self.dtype)
        for position in positions:
            at = tuple(x - first for x, (first, _) in zip(position, outer, strict=True))
            result[at] = self._read_tensor(position, inner)
        return result

    def _read_tensor(self, indices: tuple[int, ...], index: Sequence[Range]) -> np.ndarray:
        """Reads a slice of the tensor at `indices` of the leading (layer, expert) dimensions."""
        number = 0
        for position, size in zip(indices, self.shape, strict=False):
            number = number * size + position
        runs = self._layout.their_runs(self._own, index)
        return self._layout.to_ours(self._folder.read(self._names[number], runs), index)


def _dtype_read(folder: Folder, name: str) -> np.dtype:
    """Returns the dtype in which a tensor of the files is read.

    Models compute in the dtype of their parameters, so that parameters in 8 bits would round
    activations to 8 bits.

    Raises:
      UnsupportedError: the tensor holds integers or truth values.
    """
    dtype = folder.tensors[name][1].dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UnsupportedError(
            f"{folder.path}: tensor {name!r} is {dtype.name}, but parameters are floats, and "
            "config.json has no quantization_config that says what the numbers mean; use the "
            "unquantized model, or save the tensor as bfloat16 with its real values"
        )
    if dtype.itemsize == 1:
        return np.dtype(jnp.bfloat16)
    return np.dtype(np.float32) if dtype == np.float64 else dtype


class Pretrained(NnxModel):
    """Model with Hugging Face weights, accepted wherever zerojax accepts a model.

    No weights are in memory: a plan uses only shapes, and each process reads the slices of its own
    devices when the state is initialized.

    Attributes:
      folder: opened folder; `folder.bytes_read` counts the bytes read.
      row: architecture of the model.
      config: configuration of the model.
      loras: settings of groups of adapters with equal rank and scale; () without adapters.
      stored: {name: `StoredArray`} of the parameters in the files.
      tuned: {name: array} of the adapters and other parameters that are read from a PEFT folder.
      left_out: names of tensors that this model does not use, such as those of another head.
    """

    def __init__(
        self,
        folder: Folder,
        row: Architecture,
        config: Any,
        *,
        new: Sequence[str] = (),
        loras: Sequence[LoraConfig] = (),
        adapters: ReadAdapters | None = None,
    ) -> None:
        """Finds the parameters in the files.

        Args:
          folder: the opened folder.
          row: architecture of the model.
          config: configuration of the model.
          new: see `from_hugging_face`.
          loras: settings of new adapters.
          adapters: adapters that were read from a PEFT folder; None for none.
        """
        self.loras = tuple(loras) if adapters is None else adapters.loras
        factory: Callable[[nnx.Rngs], nnx.Module] = lambda rngs: row.build(config, rngs)  # noqa: E731
        for lora in self.loras:
            factory = add_lora(factory, lora)
        super().__init__(factory)
        self.kind = "pretrained model"
        self.folder, self.row, self.config, self._adapters = folder, row, config, adapters
        self._new = tuple(new)
        task, own = getattr(config, "task", None), class_in(folder.config, row.tasks)
        if task is not None and (own is None or row.tasks[own] != task.kind):
            self._new = (*self._new, *NEW_WITH_TASK)
        self._abstract = jax.eval_shape(lambda: self._arrays_of(self._make(jax.random.key(0))))
        saved = () if adapters is None else adapters.saved
        beside = tuple(f"^{re.escape(name)}$" for name in saved)
        stored, self.left_out = _find_arrays(
            folder, row, config, self._abstract[0], (*self._new, *beside)
        )
        self.stored = {name: array for name, array in stored.items() if name not in saved}
        self.tuned: dict[str, LazyArray] = {}
        if adapters is not None:
            place_of, shapes = _place_of(adapters.whole, row), self._abstract[0]
            leaves = {leaf.name: leaf for leaf in row.leaves(config)}
            self.tuned = {
                **adapters.arrays,
                **{
                    name: StoredArray(
                        adapters.whole, leaves[name], tuple(shapes[name].shape), place_of
                    )
                    for name in saved
                },
            }

    def initial_arrays(self) -> tuple[Arrays, Arrays]:
        """Returns unread arrays, or a `ShapeDtypeStruct` for each array that `init` must create."""
        params, extras = self._abstract
        known: Arrays = {**self.stored, **self.tuned}
        return {name: known.get(name, leaf) for name, leaf in params.items()}, dict(extras)

    def to_model(self) -> nnx.Module:
        """Loads the model with its weights as arrays, for embedding texts or generation.

        All weights are loaded to JAX's default device (training reads slices instead). Parameters
        that are not in the files are initialized with seed 0.
        """
        params, extras = self._abstract
        known: dict[str, LazyArray] = {**self.stored, **self.tuned}
        # Only if something is not in the files, because this initializes every parameter.
        if extras or len(known) < len(params):
            params, extras = self._arrays_of(self._make(jax.random.key(0)))
        whole = {
            name: jnp.asarray(array.read([(0, size) for size in array.shape]))
            for name, array in known.items()
        }
        return self.to_source({**params, **whole}, extras)

    def with_changes(self, *, new: Sequence[str] = (), **changes: Any) -> Pretrained:
        """Returns the same weights in a model with other settings, see `from_hugging_face`."""
        if changes.get("task") is not None:
            changes["task"] = _task_of(changes["task"], self.folder.config)
        config = dataclasses.replace(self.config, **changes)
        options: dict[str, Any] = {"loras": self.loras, "adapters": self._adapters}
        return Pretrained(self.folder, self.row, config, new=(*self._new, *new), **options)

    def with_lora(self, lora: LoraConfig) -> Pretrained:
        """Returns the same weights with new adapters.

        Raises:
          ValueError: the model has adapters.
        """
        if self.loras:
            where = f" of {self._adapters.settings.path}" if self._adapters else ""
            raise ValueError(
                f"the model has the adapters{where} already; train them on without new ones (in a "
                "run file lora.rank=0), or merge them first: "
                "zerojax.merge_lora(pretrained.to_model())"
            )
        return Pretrained(self.folder, self.row, self.config, new=self._new, loras=(lora,))

    @property
    def freeze(self) -> tuple[str, ...]:
        """Value of `freeze` of a run that trains adapters, the head of a task, and parameters that
        are new or that a PEFT folder holds; () without adapters, which trains all parameters."""
        if not self.loras:
            return ()
        return trained_only(name for name in self.saved if not name.startswith(TASK_HEAD))

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of the parameters that a PEFT folder has to hold whole: those of the head of a
        task, those that were read from such a folder, and new ones."""
        names = (x for x in self._abstract[0] if not _matches(x, (ADAPTERS,)))
        return tuple(x for x in names if x not in self.stored or x.startswith(TASK_HEAD))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for a plan's reasons: new parameters, and how training differs from training
        with transformers."""
        known = {*self.stored, *self.tuned}
        names = [x for x in self.saved if x not in known]
        made = f"new parameters, which {self.folder.path} does not have: {', '.join(names)}"
        return (*self._dropout_notes(), *([made] if names else []))

    @property
    def adapter_folder(self) -> Path | None:
        """PEFT folder that the adapters were read from; None if there is none."""
        return None if self._adapters is None else self._adapters.settings.path

    def _dropout_notes(self) -> tuple[str, ...]:
        rate = lambda key: self.folder.config.get(key, 0.1)  # noqa: E731
        of_attention = any(map(rate, self.row.attention_dropout))
        if not of_attention and all(rate(x) == self.config.dropout for x in self.row.dropout):
            return ()
        keys = dict.fromkeys((*self.row.dropout, *self.row.attention_dropout))
        listed = ", ".join(f"{key}={quoted(rate(key))}" for key in keys)
        return (
            f"dropout: transformers trains this {self.row.model_type} with {listed}, but this run "
            f"uses dropout={self.config.dropout}; from_hugging_face(..., dropout=...), or "
            "model.dropout of a run file, changes it; attention weights are never dropped",
        )

    def describe(self) -> str:
        """Describes in one line the parameters read, their files, and the tensors not used."""
        count = len(self._abstract[0]) - len(self.stored) - len(self.tuned)
        made = f", {count} new ones" if count else ""
        if self.tuned:
            made = f", {len(self.tuned)} from the adapters in {self.adapter_folder}{made}"
        left = f"; not used: {', '.join(self.left_out)}" if self.left_out else ""
        files = len({file for file, _ in self.folder.tensors.values()})
        index = self.folder.path / INDEX
        unused = self.folder.files == [SINGLE] and index.is_file()
        ignored = f"; {INDEX} is ignored, because transformers reads {SINGLE}" if unused else ""
        return (
            f"model: {self.row.model_type} with {len(self.stored)} parameters from {files} file"
            f"{'s' if files > 1 else ''} in {self.folder.path}{made}{left}{ignored}"
        )


def from_hugging_face(
    folder: str | Path,
    *,
    base: str | Path | None = None,
    new: Sequence[str] = (),
    **changes: Any,
) -> Pretrained:
    """Returns a model with weights from a Hugging Face folder: config.json and safetensors files.

    A folder of LoRA adapters of PEFT is read with its base model; train the result with
    `freeze=model.freeze`, so that the base model is frozen.

    Each process reads only the slices of its own devices, one tensor at a time, directly into the
    plan's shards. `zoo.hugging_face.ARCHITECTURES` lists the supported model types: Llama, Mistral,
    Qwen, Gemma, Phi, OLMo, SmolLM3, GPT-2, BERT and more.

    Args:
      folder: a folder written by `save_pretrained` or `hf download`.
      base: folder of the base model, for a folder of adapters; None: the folder that
        adapter_config.json names.
      new: regular expressions for names of parameters that are not in the files; they are
        initialized as in a new model. Adapters need not be listed.
      **changes: settings of the model that override the files, such as remat="full", dropout=0.1,
        loss_chunk=1024 or max_seq_len; fields of `zoo.DecoderConfig`, or of `LlamaConfig`,
        `GPT2Config` or `BertConfig`. With task=zoo.TaskConfig(...) the model gets the head of this
        task, which is new unless the folder has the same kind of task.

    Raises:
      FileNotFoundError: the folder or that of the base model does not exist or has no safetensors
        file.
      UnsupportedError: config.json or adapter_config.json has an unsupported setting, or a tensor
        is missing, unknown or has another shape; a subclass of ValueError.
      ValueError: a file is damaged, a change is not a setting of the model, or `base` is given for
        a folder without adapters.
    """
    path = user_path(folder)
    if has_adapters(path):
        return _with_adapters(path.absolute(), base, new, changes)
    if base is not None:
        raise ValueError(
            f"base={str(base)!r} is only for folders of adapters, but {folder} has no "
            f"{ADAPTER_CONFIG}; leave base out, or pass the folder of the adapters"
        )
    opened = open_folder(folder)
    row, config = _settings(opened.config, changes)
    try:
        return Pretrained(opened, row, config, new=new)
    except UnsupportedError as error:
        theirs = opened.config.get("architectures")
        if not isinstance(theirs, list) or {row.class_name, *row.tasks} & {*theirs} or not theirs:
            raise
        raise UnsupportedError(
            f"{opened.path}: config.json has architectures={theirs}, but zerojax reads "
            f"{row.model_type} as {row.class_name}; save it as that class with transformers. "
            f"{new_head(row.tasks)}. Difference: {error}"
        ) from None


def _with_adapters(
    path: Path, base: str | Path | None, new: Sequence[str], changes: dict[str, Any]
) -> Pretrained:
    """Returns the base model of a PEFT folder with its adapters.

    If the folder has the head of a task and the base model has none, the model gets this task, with
    numbered labels.
    """
    settings = read_settings(path)
    opened = open_folder(base_folder(settings, base))
    kind, row = TASK_TYPES.get(settings.task_type or ""), architecture_of(opened.config)
    own = class_in(opened.config, row.tasks)
    if "task" not in changes and kind is not None and (own is None or row.tasks[own] != kind):
        count = rows_of_head(settings)
        if count is None:
            raise UnsupportedError(
                f"{path}: task_type={settings.task_type!r}, but neither the adapters nor the base "
                "model have a head for it; to begin with a new one, pass "
                f"task=zerojax.zoo.TaskConfig(kind={kind!r}, labels=...)"
            )
        changes = {**changes, "task": numbered_task(kind, count)}
    row, config = _settings(opened.config, changes)
    adapters = read_adapters(settings, opened, row, config)
    return Pretrained(opened, row, config, new=new, adapters=adapters)


def config_from_hugging_face(path: str | Path, **changes: Any) -> Any:
    """Reads the configuration of a model from its config.json, without weights.

    Args:
      path: a config.json, or its folder, which need not contain weights.
      **changes: settings of the model that override config.json.

    Returns:
      A `DecoderConfig`, or the configuration of the model's class; see `factory_of`.

    Raises:
      FileNotFoundError: there is no config.json.
      UnsupportedError: config.json has an unsupported setting.
      ValueError: config.json is damaged, or a change is not a setting of the model.
    """
    path = user_path(path)
    if path.is_dir():
        check_kind(path)
    return _settings(read_json(path / CONFIG if path.is_dir() else path), changes)[1]


def arrays_in(folder: str | Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredArray]:
    """Returns parameters of a Hugging Face folder as unread (lazy) arrays.

    Args:
      folder: a folder written by `save_pretrained` or `hf download`.
      shapes: {parameter name: shape of the whole parameter}.

    Raises:
      FileNotFoundError, ValueError: the folder or a file is missing or damaged.
      UnsupportedError: the model is not supported, or has no parameter of a name.
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


def factory_of(config: object) -> Callable[[nnx.Rngs], nnx.Module]:
    """Returns a factory `rngs -> model` for a configuration; the model has new weights.

    Raises:
      UnsupportedError: the configuration is not that of a model in `ARCHITECTURES`.
    """
    row = architecture_of_config(config)
    return lambda rngs: row.build(config, rngs)


def _settings(
    config_json: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[Architecture, Any]:
    """Reads (architecture, configuration) from a config.json."""
    check_unquantized(config_json)
    row = architecture_of(config_json)
    if (task := changes.get("task")) is not None:
        changes = {**changes, "task": (task := _task_of(task, config_json))}
        # Read as if the files were those of a class with this task.
        config_json = {**config_json, "architectures": [class_of(task.kind, row.tasks)]}
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


def _task_of(task: object, config_json: Mapping[str, Any]) -> TaskConfig:
    """Returns a task of the user, with the id of padding of a config.json if it has none.

    Raises:
      TypeError: it is not a `TaskConfig`.
    """
    if not isinstance(task, TaskConfig):
        raise TypeError(
            f"task={quoted(task)} is a {type(task).__name__}, not a task; use "
            "task=zerojax.zoo.TaskConfig(kind=..., labels=...)"
        )
    if task.pad_token is not None:
        return task
    return dataclasses.replace(task, pad_token=read_pad_token(ConfigReading(config_json)))


def _find_arrays(
    folder: Folder,
    row: Architecture,
    config: Any,
    params: Mapping[str, Any],
    new: Sequence[str],
) -> tuple[dict[str, StoredArray], list[str]]:
    """Finds (parameters in the files, names of tensors that the model does not use).

    Raises:
      UnsupportedError: a parameter has no tensor, or a tensor belongs to no parameter.
    """
    leaves, places, place_of = row.leaves(config), _places(folder, row), _place_of(folder, row)
    stored: dict[str, StoredArray] = {}
    for leaf in leaves:
        is_absent = place_of(leaf.tensor_of(0)) not in folder.tensors
        # The files may have the head of another task.
        if _matches(leaf.name, new) and (is_absent or leaf.name.startswith(TASK_HEAD)):
            continue
        stored[leaf.name] = StoredArray(folder, leaf, tuple(params[leaf.name].shape), place_of)
    for name in params:
        if name not in stored and not _matches(name, (*new, ADAPTERS)):
            raise UnsupportedError(
                f"parameter {name} has no tensor in files of {row.model_type}; pass "
                f"new=({name!r},) to initialize it"
            )
    taken = {name for array in stored.values() for name in array.tensors}
    rest = sorted(name for name, place in places.items() if place not in taken)
    has_task = getattr(config, "task", None) is not None
    copies = {} if has_task else _copies(leaves, row)
    has_task = has_task or class_in(folder.config, row.tasks) is not None
    copies = {places[x]: place_of(y) for x, y in copies.items() if x in places}
    copies = {name: original for name, original in copies.items() if original in folder.tensors}
    for name, original in copies.items():
        _check_copy(folder, name, original)
    unknown = [x for x in rest if x not in copies and not row.is_ignored(x, has_task=has_task)]
    if unknown:
        raise UnsupportedError(
            f"{folder.path}: {len(unknown)} tensors belong to no parameter of the model, such as "
            f"{unknown[0]!r}; ignoring them would change its results: save the model as "
            f"{row.class_name} with transformers"
        )
    return stored, rest


def _places(folder: Folder, row: Architecture) -> dict[str, str]:
    """Returns {name after `Architecture.renamed`: name in the files}."""
    result = {}
    for place in folder.tensors:
        name = place
        for pattern, replacement in row.renamed:
            name = re.sub(pattern, replacement, name)
        result[name] = place
    return result


def _place_of(folder: Folder, row: Architecture) -> Callable[[str], str]:
    """Returns a function from a tensor's name in `row.leaves` to its name in the folder's files."""
    places = _places(folder, row)

    def place_of(name: str) -> str:
        bare = name.removeprefix(row.prefix)
        return next((places[x] for x in (name, bare, row.prefix + bare) if x in places), name)

    return place_of


def _copies(leaves: Iterable[Leaf], row: Architecture) -> dict[str, str]:
    """Returns {optional tensor: tensor that it must equal}."""
    tensors = {leaf.name: leaf.tensor for leaf in leaves}
    table, copies = tensors.get("token_embedding/embedding"), dict(row.copies)
    if table is not None and "lm_head/kernel" not in tensors:
        copies["lm_head.weight"] = table  # tied output weights
    return copies


def _check_copy(folder: Folder, name: str, original: str) -> None:
    """Raises an UnsupportedError if a tensor differs from the tensor that it should copy.

    Evenly spaced rows are compared, see `ROWS_COMPARED`; separately trained weights differ in all
    rows.
    """
    first, second = (folder.tensors[tensor][1] for tensor in (name, original))
    same = first.shape == second.shape and first.dtype == second.dtype
    if same:
        number = first.shape[0]
        step = max(number // ROWS_COMPARED, 1)
        runs = [
            [(row, row + 1) for row in range(0, number, step)],
            *([(0, size)] for size in first.shape[1:]),
        ]
        blocks = [folder.read(tensor, runs) for tensor in (name, original)]
        # Bytes, because NaN does not equal itself.
        same = blocks[0].tobytes() == blocks[1].tobytes()
    if not same:
        raise UnsupportedError(
            f"{folder.path}: tensor {name!r} differs from {original!r}, but config.json ties them; "
            'write "tie_word_embeddings": false into config.json to use it, or remove the tensor '
            "from the files"
        )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
