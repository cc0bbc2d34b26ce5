"""Exports parameters as Hugging Face tensors, one at a time, with their config.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from zerojax.config.compression import BitScheduleConfig
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import to_dict
from zerojax.models.adapt import bound_attribute
from zerojax.operators.rounded_weights import FORMATS
from zerojax.tracing.protocol import Model
from zerojax.tracing.trees import path_name
from zerojax.zoo.bit_widths import is_always_full
from zerojax.zoo.decoder_config import DecoderConfig
from zerojax.zoo.fp8 import rounded_format
from zerojax.zoo.hugging_face.architectures import architecture_of, architecture_of_config
from zerojax.zoo.hugging_face.config_reading import ConfigReading, UnsupportedError
from zerojax.zoo.hugging_face.layouts import Architecture, Leaf
from zerojax.zoo.hugging_face.moe_rows import as_mixtral
from zerojax.zoo.hugging_face.pretrained import Pretrained
from zerojax.zoo.hugging_face.safetensors import Tensor
from zerojax.zoo.layers import Projection
from zerojax.zoo.llama import LlamaConfig
from zerojax.zoo.lora import LowRank, adapted_kernels, merged_kernel
from zerojax.zoo.task_heads import TASK_HEAD

Read = Callable[[str, int | None], np.ndarray]
"""Function (parameter name, layer or None for all layers) that returns values on the host."""

_REPLACED = (
    *("rope_parameters", "dtype", "torch_dtype", "_name_or_path", "transformers_version"),
    "quantization_config",
)
"""Keys of the original config.json that are not copied to the exported one."""
_OF_THE_RUN = (
    *("dropout", "family", "remat", "loss_chunk", "mlp_chunk"),
    *("matmul_dtype", "bit_schedule", "attention", "attention_layout"),
)
"""Fields of `DecoderConfig` that are settings of the run, not of the family."""

_ROUNDING = "rounding"
"""Key of a description for `matmul_dtype` and `bit_schedule` of a run with a schedule."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """Everything except the arrays that is needed to write a model in Hugging Face's format.

    Attributes:
      row: architecture of the model.
      config: configuration of the zerojax model.
      kept: config.json of the folder from which the model was read.
      scales: {kernel name: factor of its adapter's product}.
      source: folder from which the model was read, or None.
      saved: names of parameters that files of adapters hold whole, such as the head of a task.
    """

    row: Architecture
    config: Any
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scales: Mapping[str, float] = dataclasses.field(default_factory=dict)
    source: str | None = None
    saved: tuple[str, ...] = ()

    def config_json(self, dtype: np.dtype | None = None) -> dict[str, Any]:
        """Builds config.json, with "torch_dtype" if `dtype` is not None."""
        written = self.row.write_keys(self.config)
        # Keys that the architecture reads are written anew; other keys have no effect and are
        # copied.
        own = {*_REPLACED, *written, *self.row.keys_read(written)}
        kept = {key: x for key, x in self.kept.items() if key not in own}
        return {**kept, **written, **({} if dtype is None else {"torch_dtype": dtype.name})}

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON object for `from_dict`, without settings that config.json cannot
        represent."""
        return {
            "config": self.config_json(),
            "scales": dict(self.scales),
            "source": self.source,
            **({"saved": list(self.saved)} if self.saved else {}),
            **({_ROUNDING: rounding} if (rounding := self._rounding()) else {}),
        }

    def _rounding(self) -> dict[str, Any]:
        """Returns the settings of kernels that are rounded by schedule; {} for other models."""
        schedule = getattr(self.config, "bit_schedule", None)
        if is_always_full(schedule):
            return {}
        return {"matmul_dtype": self.config.matmul_dtype, "bit_schedule": to_dict(schedule)}

    def check_width(self, quantize: str | None, num_updates: int) -> None:
        """Raises if the codes of an export differ in width from the kernels of the run.

        Args:
          quantize: format of the codes; None: none.
          num_updates: number of updates that the run has applied.

        Raises:
          UnsupportedError: the model's `bit_schedule` has not yet reached its last width.
        """
        if quantize is None or not self._rounding():
            return
        bits = FORMATS[rounded_format(self.config.matmul_dtype)].bits
        schedule = self.config.bit_schedule
        width, last = schedule.bits_after(num_updates, bits), schedule.last_change(bits)
        if num_updates >= last:
            return
        computed = "unrounded kernels" if width is None else f"kernels of {width} bits"
        raise UnsupportedError(
            f"quantize={quantize}: after {num_updates} updates the run computes with {computed}; "
            f"its bit_schedule reaches the {bits} bits of {self.config.matmul_dtype} after {last} "
            "updates: train on until then, or export without quantize"
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Description:
        """Restores a description from `to_dict`."""
        config = values["config"]
        row = architecture_of(config)
        return cls(
            row=row,
            # Other keys are not checked, because the run was trained with the keys read here.
            config=row.config_class(
                **row.read_fields(ConfigReading(config)), **_rounding_in(values.get(_ROUNDING))
            ),
            kept=config,
            scales=values["scales"],
            source=values["source"],
            saved=tuple(values.get("saved", ())),
        )


def _rounding_in(values: Mapping[str, Any] | None) -> dict[str, Any]:
    if values is None:
        return {}
    return {**values, "bit_schedule": BitScheduleConfig(**values["bit_schedule"])}


def describe_model(model: Model) -> Description:
    """Returns the description of a model for a later export, before the model is trained.

    A Llama with a window is written as a Mistral, and a Llama with experts as a Mixtral, which
    compute the same.

    Raises:
      UnsupportedError: the class has no Hugging Face format, or config.json has no key for one of
        the model's settings.
    """
    config = bound_attribute(model, "config")
    if isinstance(config, LlamaConfig) and config.moe.num_experts:
        config = as_mixtral(config)
    elif isinstance(config, LlamaConfig) and config.attention_window is not None:
        config = dataclasses.replace(config.as_decoder(), family="mistral")
    row = architecture_of_config(config)
    layout = config.attention_layout
    if layout is not None:
        raise UnsupportedError(
            f"attention_layout={layout.mode} cannot be exported: Hugging Face's {row.class_name} "
            "attends to all tokens; train with attention_layout=None, or use zerojax.load_run"
        )
    window = getattr(config, "attention_window", None)
    if window is not None:
        raise UnsupportedError(
            f"attention_window={window} cannot be exported: Hugging Face's {row.class_name} has no "
            "sliding window; train with attention_window=None, or use zerojax.load_run"
        )
    if isinstance(config, DecoderConfig):
        _check_family(row, config)
    scales = {
        f"{path_name(path)}/kernel": float(node.lora.scale)
        for path, node in nnx.iter_graph(getattr(model, "template", None) or model.source)
        if isinstance(node, Projection) and isinstance(node.lora, LowRank)
    }
    if isinstance(model, Pretrained):
        kept, source = model.folder.config, str(model.folder.path)
        return Description(
            row=row,
            config=config,
            kept=kept,
            scales=scales,
            source=source,
            saved=model.saved if model.loras else (),
        )
    heads = [leaf.name for leaf in row.leaves(config) if leaf.name.startswith(TASK_HEAD)]
    return Description(row=row, config=config, scales=scales, saved=tuple(heads) if scales else ())


def _check_family(row: Architecture, config: DecoderConfig) -> None:
    """Checks that the written config.json describes the same model when it is read again.

    Raises:
      UnsupportedError: a switch has no key in the family's config.json.
    """
    again = row.config_class(**row.read_config(row.write_keys(config)))
    if config.moe.bias_rate is not None and again.moe.bias_rate is None:
        raise UnsupportedError(
            f"moe.bias_rate={config.moe.bias_rate!r} cannot be exported: {row.class_name} has no "
            "biases for the choice of experts; export the checkpoint under zerojax's names, or use "
            "zerojax.load_run"
        )
    for field in dataclasses.fields(DecoderConfig):
        if field.name in _OF_THE_RUN:
            continue
        name = "features_per_head" if field.name == "head_dim" else field.name
        ours, theirs = getattr(config, name), getattr(again, name)
        if field.name == "moe":
            trained = ("balance", "balance_weight", "z_weight")  # used in training only
            ours = dataclasses.replace(ours, **{name: getattr(theirs, name) for name in trained})
        if field.name == "norm":
            # `rounds_first` (the position of a cast) changes only rounding.
            ours = dataclasses.replace(ours, rounds_first=theirs.rounds_first)
        if field.name == "attention_scale":
            ours, theirs = (x or config.features_per_head**-0.5 for x in (ours, theirs))
        both_floats = isinstance(ours, float) and isinstance(theirs, float)
        if ours != theirs and not (both_floats and math.isclose(ours, theirs)):
            raise UnsupportedError(
                f"{field.name}={ours!r} cannot be exported: {row.class_name} would compute with "
                f"{theirs!r}; set DecoderConfig.family to a family that supports it, or use "
                "zerojax.load_run"
            )


@dataclass(frozen=True)
class Outgoing:
    """Tensor to write, and the parameters that it contains, with their layouts.

    Attributes:
      tensor: name, shape and dtype of the tensor.
      layer: layer of the stacked parameters; None if they are not stacked.
      leaves: the parameters.
      expert: index of the expert; None if the tensor contains the whole layer.
      held: cache of the layer that was read last, shared by all experts of a parameter, so that
        each layer is read once.
    """

    tensor: Tensor
    layer: int | None
    leaves: tuple[Leaf, ...]
    expert: int | None = None
    held: dict[int | None, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)

    def values(self, read: Read) -> np.ndarray:
        """Computes the tensor's values; reads each parameter once, and only this layer."""
        first = self.leaves[0]
        if self.expert is not None:
            # The experts of a layer are one array, which is read once. Only one layer is held.
            if self.layer not in self.held:
                self.held.clear()
                self.held[self.layer] = read(first.name, self.layer)
            values = first.layout.as_theirs(self.held[self.layer][self.expert])
            if self.expert == len(self.held[self.layer]) - 1:
                self.held.clear()
            return values.astype(self.tensor.dtype, copy=False)
        if first.layout.is_whole:
            values = first.layout.as_theirs(read(first.name, self.layer))
            return values.astype(self.tensor.dtype, copy=False)
        out = np.empty(self.tensor.shape, self.tensor.dtype)
        for leaf in self.leaves:
            leaf.layout.to_theirs(read(leaf.name, self.layer), out)
        return out


def outgoing(
    description: Description,
    params: Mapping[str, Any],
    *,
    dtype: str | None = None,
) -> list[Outgoing]:
    """Lists all tensors to write; tensors of all layers of a parameter are consecutive.

    Args:
      description: description of the model.
      params: {name: object with shape and dtype} of all parameters.
      dtype: dtype of all tensors, such as "bfloat16"; None keeps that of the parameters.

    Raises:
      UnsupportedError: a parameter has no tensor in the format, or is missing.
    """
    leaves = list(description.row.leaves(description.config))
    adapters = {x for pair in adapted_kernels(params).values() for x in pair}
    rest = sorted(set(params) - adapters - {leaf.name for leaf in leaves})
    missing = sorted({leaf.name for leaf in leaves} - set(params))
    if rest or missing:
        name = (rest or missing)[0]
        problem = "has no tensor in" if rest else "is missing, but required by"
        raise UnsupportedError(
            f"parameter {name} {problem} the files of {description.row.model_type}; "
            "`zerojax checkpoint export` without --format writes parameters under zerojax's names"
        )
    together: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        together.setdefault(leaf.tensor, []).append(leaf)
    result = []
    for group in together.values():
        first = group[0]
        array = params[first.name]
        kind = np.dtype(jnp.dtype(dtype) if dtype else array.dtype)
        shape = first.layout.their_shape(tuple(array.shape[first.num_stacked :]))
        held: dict[int | None, np.ndarray] = {}
        for numbers in first.numbers(array.shape):
            tensor = Tensor(name=first.tensor_of(*numbers), shape=shape, dtype=kind)
            layer = numbers[0] if first.is_stacked else None
            expert = numbers[1] if first.num_stacked > 1 else None
            result.append(Outgoing(tensor, layer, tuple(group), expert, held))
    return result


def merging(description: Description, params: Mapping[str, Any], read: Read) -> Read:
    """Returns a `read` that adds the product of an adapter to its kernel."""
    adapters = adapted_kernels(params)

    def merged(name: str, layer: int | None) -> np.ndarray:
        values = read(name, layer)
        if name not in adapters:
            return values
        a, b = (read(part, layer) for part in adapters[name])
        return merged_kernel(values, a, b, description.scales[name])

    return merged
