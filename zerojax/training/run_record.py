"""Writes and reads run.json, the record from which `zerojax.load_run` rebuilds a run's model.

It is written when training starts. It contains only values: no code, and no class to import.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from zerojax.config import (
    LoraConfig,
    MeshConfig,
    MixturePart,
    from_dict,
    to_dict,
)
from zerojax.config.checks import MAX_SIZE, check_fraction, check_size, expand_folders
from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import ConfigError, coerce_fields
from zerojax.config.tree_types import Tree
from zerojax.data.tokenizer import Tokenizer
from zerojax.optim.precision import Precision
from zerojax.plan.make import Plan
from zerojax.runtime.user_files import replace_text
from zerojax.tracing.protocol import ModelLike
from zerojax.tracing.trees import path_name
from zerojax.zoo import MODELS, add_lora
from zerojax.zoo.config_values import config_of, values_of
from zerojax.zoo.layers import Projection
from zerojax.zoo.lora import LowRank

RECORD_FILE = "run.json"
_FREEZE_DTYPE = "freeze_dtype"
_FREEZE_CODES = "freeze_codes"
_DTYPE_NAMES = (
    "param_dtype",
    "compute_dtype",
    "reduce_dtype",
    "accumulate_dtype",
    "moments_dtype",
    _FREEZE_DTYPE,
)

LossKind = Literal["model", "next_token", "own"]
"""Kind of a loss: "model" is the model's method `loss`, "next_token" is the cross-entropy of
`model(tokens)`, "own" is the user's own function, which is not recorded."""


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Description of the text data of a run."""

    path: str | None = None
    """Path of a file or folder; None: the text inside the package."""
    seq_len: int = 128
    """Number of tokens of a row."""
    validation_fraction: float = 0.05
    """Fraction of the text, at its end, that was held out for validation."""
    pack: bool = False
    """True if attention was restricted to each text of a packed row."""
    mixture: tuple[MixturePart, ...] = ()
    """Several datasets with weights, which replace `path`."""
    long_texts: Literal["refuse", "split", "drop"] = "refuse"
    """How texts that are longer than a row were handled."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        expand_folders(self, "path")
        check_size(self, "seq_len")
        check_fraction(self, "validation_fraction", below_one=True)

    @property
    def data(self) -> Any:
        """Value of the argument `data` of `as_source`."""
        return self.mixture or self.path


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """LoRA adapters of a model that have the same rank, scale and dropout."""

    rank: int
    """Rank of both matrices of an adapter."""
    scale: float
    """Factor by which the product of the matrices is multiplied."""
    dropout: float
    """Dropout probability of the adapter's input."""
    names: tuple[str, ...]
    """Names of the projections that have these adapters."""

    def __post_init__(self) -> None:
        coerce_fields(self)


@dataclass(frozen=True, kw_only=True)
class RunNotes:
    """What only the caller of a run knows: entries of the record, and the tokenizer and chat
    template that are written beside it."""

    loss: LossKind
    data: TextData | None = None
    eval_batches: int | None = None
    checkpoints: str | None = None
    tokenizer: Tokenizer | None = None
    template: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of run.json.

    Attributes:
      architecture: key of `zoo.MODELS`; "" for a model of the user's own.
      model_name: name of the model's class, for display.
      sizes: fields of the architecture's configuration.
      adapters: LoRA adapters of the model, grouped by equal settings.
      loss: kind of the loss: "model", "next_token" or "own".
      precision: {field of `Precision`: name of a dtype or of a weight code}.
      frozen: names of parameters that were not trained.
      mesh: mesh options with all sizes resolved.
      platform: JAX platform of the devices of the run.
      num_devices: number of devices of the run.
      batch: the global batch as JSON (`abstract_of` reads it); None if it has no JSON form.
      data: the text data; None if batches came from Python.
      eval_batches: number of batches per evaluation that the user set; None: not set.
      checkpoints: folder of the checkpoints if it is not inside the run folder, else None.
    """

    architecture: str
    model_name: str
    sizes: Mapping[str, Any]
    adapters: tuple[Adapters, ...]
    loss: LossKind
    precision: Mapping[str, str]
    frozen: tuple[str, ...]
    mesh: MeshConfig
    platform: str
    num_devices: int
    batch: Any
    data: TextData | None
    eval_batches: int | None
    checkpoints: str | None

    def as_precision(self) -> Precision:
        """Returns the run's dtypes, without the loss scale, which an evaluation does not need."""
        dtypes: dict[str, Any] = {
            name: value if name == _FREEZE_CODES else _dtype_of(name, value)
            for name, value in self.precision.items()
        }
        # Records from before 2026-11-25 lack this key: frozen parameters were in param_dtype.
        dtypes.setdefault(_FREEZE_DTYPE, dtypes.get("param_dtype", np.dtype(np.float32)))
        return Precision(**dtypes)

    def factory(self) -> Callable[[nnx.Rngs], nnx.Module]:
        """Returns a factory of the model; only for architectures in `zoo.MODELS`."""
        return _factory(self.architecture, self.sizes, self.adapters)


def record_of(plan: Plan, notes: RunNotes) -> RunRecord:
    """Returns the record of a run with this plan and these notes."""
    template = getattr(plan.model, "template", None) or plan.model.source
    architecture, sizes, adapters = _describe(template)
    devices = plan.mesh.devices
    settings = plan.settings
    if not isinstance(settings.pipeline_schedule, str):  # reading the run places layers anew
        settings = dataclasses.replace(
            settings,
            pipeline_schedule=MeshConfig.pipeline_schedule,
            partition=MeshConfig.partition,
        )
    return RunRecord(
        architecture=architecture,
        model_name=getattr(template, "__qualname__", None) or type(template).__qualname__,
        sizes=sizes,
        adapters=adapters,
        loss=notes.loss,
        precision=_dtype_names(plan.precision),
        frozen=tuple(name for name, leaf in plan.users_placement.leaves.items() if leaf.frozen),
        mesh=settings,
        platform=devices.flat[0].platform,
        num_devices=devices.size,
        batch=_as_json(plan.abstract_batch),
        data=notes.data,
        eval_batches=notes.eval_batches,
        checkpoints=notes.checkpoints,
    )


def _dtype_of(name: str, value: str) -> np.dtype:
    try:
        return np.dtype(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{quoted(value)} is not the name of a dtype", (name,)) from None


def _dtype_names(precision: Precision) -> dict[str, str]:
    dtypes = {name: getattr(precision, name) for name in _DTYPE_NAMES}
    dtypes[_FREEZE_DTYPE] = precision.frozen_dtype
    codes = {} if precision.freeze_codes is None else {_FREEZE_CODES: precision.freeze_codes}
    return {name: np.dtype(dtype).name for name, dtype in dtypes.items()} | codes


def write_record(folder: Path, record: RunRecord) -> None:
    """Writes run.json to the run folder."""
    text = json.dumps(to_dict(record), indent=1)
    replace_text(folder / RECORD_FILE, text + "\n")


def read_record(values: object, where: str) -> RunRecord:
    """Converts the content of a run.json to a record.

    Args:
      values: the parsed JSON.
      where: name of the file for error messages.

    Raises:
      ConfigError: a key is unknown or missing, or a value has a wrong type.
    """
    try:
        return _record_in(values, where)
    except ConfigError as error:
        raise ConfigError(error.message, error.key, where) from error


def check_record(record: RunRecord, where: str) -> None:
    """Raises if sizes, adapters, dtypes or the batch are not valid; allocates no array.

    Raises:
      ConfigError: the message names `where` and the value.
    """
    try:
        record.as_precision()
        abstract_of(record.batch)
        if record.architecture:
            record.factory()
    except ConfigError as error:
        raise ConfigError(error.message, error.key, where) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not a valid record of a run: {error}", (), where) from error


def _record_in(values: object, where: str) -> RunRecord:
    if not isinstance(values, Mapping):
        raise ConfigError(f"holds a {type(values).__name__}, not an object", (), where)
    known = [field.name for field in dataclasses.fields(RunRecord)]
    unknown, missing = sorted(values.keys() - set(known)), sorted(set(known) - values.keys())
    if unknown or missing:
        problem = "unknown key" if unknown else "missing key"
        name = str((unknown or missing)[0])
        raise ConfigError(f"{problem}; known keys: {', '.join(known)}", (name,), where)
    checked = _Checked(**{name: values[name] for name in _hints_of(_Checked)})
    architecture = checked.architecture
    if architecture and architecture not in MODELS:
        raise ConfigError(
            f"unknown architecture; use one of {', '.join(MODELS)}", ("architecture",), where
        )
    sizes, precision = values["sizes"], values["precision"]
    fields = _hints_of(MODELS[architecture][0]) if architecture else ()
    known_dtypes = (*_DTYPE_NAMES, _FREEZE_CODES)
    for key, found, allowed in (("sizes", sizes, fields), ("precision", precision, known_dtypes)):
        if not isinstance(found, Mapping) or not set(found) <= set(allowed):
            raise ConfigError(
                f"known keys: {', '.join(allowed)}; got {quoted(found, 200)}", (key,), where
            )
    return RunRecord(
        **{name: getattr(checked, name) for name in _hints_of(_Checked)},
        sizes=sizes,
        precision=precision,
        adapters=tuple(from_dict(Adapters, each) for each in _listed(values["adapters"], where)),
        mesh=from_dict(MeshConfig, values["mesh"]),
        batch=values["batch"],
        data=None if values["data"] is None else from_dict(TextData, values["data"]),
    )


def _listed(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"expected a list; got {quoted(value, 200)}", ("adapters",), where)
    return value


def abstract_of(batch: Mapping[str, Any]) -> Any:
    """Converts the batch of a record to `ShapeDtypeStruct`s; None if the record has no batch.

    Raises:
      ConfigError: the JSON does not describe a batch.
    """
    if batch is None:
        return None
    try:
        return _from_json(batch)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            f"not a description of a batch: {quoted(batch, 200)}", ("batch",)
        ) from None


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """Fields of a record whose types are checked by the configuration loader."""

    architecture: str
    model_name: str
    loss: Literal["model", "next_token", "own"]
    frozen: tuple[str, ...]
    platform: str
    num_devices: int
    eval_batches: int | None
    checkpoints: str | None

    def __post_init__(self) -> None:
        coerce_fields(self)
        expand_folders(self, "checkpoints")
        check_size(self, "num_devices", "eval_batches")


def _hints_of(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def _describe(template: ModelLike) -> tuple[str, dict[str, Any], tuple[Adapters, ...]]:
    """Returns (architecture, sizes, adapters) of a model in `zoo`; ("", {}, ()) of any other model.

    A subclass, or a module that was changed after its creation, may compute something else, so it
    counts as a model of the user's own.
    """
    name = next((name for name, (_, cls) in MODELS.items() if type(template) is cls), None)
    if name is None:
        return "", {}, ()
    sizes, adapters = values_of(template.config), _adapters_of(template)
    made = nnx.eval_shape(lambda: _factory(name, sizes, adapters)(nnx.Rngs(0)))
    return (name, sizes, adapters) if _structure(made) == _structure(template) else ("", {}, ())


def _factory(
    architecture: str, sizes: Mapping[str, Any], adapters: tuple[Adapters, ...]
) -> Callable[[nnx.Rngs], nnx.Module]:
    config_class, model_class = MODELS[architecture]
    config = config_of(config_class, sizes)
    make: Callable[[nnx.Rngs], nnx.Module] = lambda rngs: model_class(config, rngs=rngs)  # noqa: E731
    for each in adapters:
        make = _with_adapters(make, each)
    return make


def _structure(module: nnx.Module) -> dict[str, Any]:
    """Returns {path: (class, static attributes)} of the submodules of `module`."""
    found = {}
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Module):
            plain = {k: v for k, v in vars(node).items() if _is_plain(k, v)}
            found[path_name(path)] = type(node), plain
    return found


def _is_plain(name: str, value: object) -> bool:
    # Random state is created anew, because evaluations do not read it. The caller sets train or
    # eval mode.
    if name.startswith("_") or name in ("rngs", "deterministic", "use_running_average"):
        return False
    if isinstance(value, np.generic):  # a number of a config; it has a shape, but is no array
        return True
    return not isinstance(value, nnx.Module | nnx.Variable | nnx.RngStream) and not hasattr(
        value, "shape"
    )


def _adapters_of(module: nnx.Module) -> tuple[Adapters, ...]:
    groups: dict[tuple[int, float, float], list[str]] = {}
    for path, node in nnx.iter_graph(module):
        if isinstance(node, Projection) and isinstance(node.lora, LowRank):
            key = int(node.lora.a.shape[-1]), float(node.lora.scale), float(node.lora.dropout.rate)
            groups.setdefault(key, []).append(path_name(path))
    return tuple(
        Adapters(rank=rank, scale=scale, dropout=dropout, names=tuple(sorted(names)))
        for (rank, scale, dropout), names in groups.items()
    )


def _with_adapters(
    make: Callable[[nnx.Rngs], nnx.Module], adapters: Adapters
) -> Callable[[nnx.Rngs], nnx.Module]:
    config = LoraConfig(
        rank=adapters.rank,
        alpha=adapters.scale * adapters.rank,
        dropout=adapters.dropout,
        targets=tuple(f"^{re.escape(name)}$" for name in adapters.names),
    )

    def factory(rngs: nnx.Rngs) -> nnx.Module:
        module = add_lora(make, config)(rngs)
        for path, node in nnx.iter_graph(module):
            if path_name(path) in adapters.names:
                node.lora.scale = adapters.scale  # alpha / rank may differ in the last digit
        return module

    return factory


def _as_json(tree: Tree) -> Any:
    """Returns the JSON form of a batch made of dicts, lists, tuples and arrays; None for other
    containers.
    """
    if isinstance(tree, jax.ShapeDtypeStruct):
        return {"shape": list(tree.shape), "dtype": np.dtype(tree.dtype).name}
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        parts = {key: _as_json(value) for key, value in tree.items()}
        return None if None in parts.values() else {"dict": parts}
    if type(tree) in (list, tuple):
        items = [_as_json(value) for value in tree]
        return None if None in items else {type(tree).__name__: items}
    return None


def _from_json(value: Mapping[str, Any]) -> Any:
    if "dict" in value:
        return {str(key): _from_json(part) for key, part in value["dict"].items()}
    if "list" in value:
        return [_from_json(part) for part in value["list"]]
    if "tuple" in value:
        return tuple(_from_json(part) for part in value["tuple"])
    shape = tuple(int(size) for size in value["shape"])
    if not all(0 <= size <= MAX_SIZE for size in shape):
        raise ValueError(f"no array has the shape {shape}")
    return jax.ShapeDtypeStruct(shape, np.dtype(value["dtype"]))
