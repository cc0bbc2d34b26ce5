"""Export of parameters as Hugging Face tensors, one at a time, with their config.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from zerojax.models.adapt import bound_attribute
from zerojax.tracing.protocol import Model
from zerojax.tracing.trees import path_name
from zerojax.zoo.decoder_config import DecoderConfig
from zerojax.zoo.hugging_face.architectures import architecture_of, architecture_of_config
from zerojax.zoo.hugging_face.config_reading import ConfigReading, UnsupportedError
from zerojax.zoo.hugging_face.layouts import Architecture, Leaf
from zerojax.zoo.hugging_face.moe_rows import as_mixtral
from zerojax.zoo.hugging_face.pretrained import Pretrained
from zerojax.zoo.hugging_face.safetensors import Tensor
from zerojax.zoo.layers import Projection
from zerojax.zoo.llama import LlamaConfig
from zerojax.zoo.lora import LowRank, adapted_kernels, merged_kernel

Read = Callable[[str, int | None], np.ndarray]
"""(name of a parameter, layer or None for all of it) -> values on the host."""

_REPLACED = ("rope_parameters", "dtype", "torch_dtype", "_name_or_path", "transformers_version")
"""Keys of the config.json that a model came from which are not kept."""
_OF_THE_RUN = (
    *("dropout", "family", "remat", "loss_chunk", "mlp_chunk"),
    *("matmul_dtype", "attention", "attention_layout"),
)
"""Fields of `DecoderConfig` that are no switches of a family."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What has to be known of a model, besides its arrays, to write it for Hugging Face.

    Attributes:
      row: of the table of architectures.
      config: sizes of our model.
      kept: further keys of config.json, of the folder that the model came from.
      scales: {kernel: factor of its adapter's product}.
      source: the folder that the model came from, or None.
    """

    row: Architecture
    config: Any
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scales: Mapping[str, float] = dataclasses.field(default_factory=dict)
    source: str | None = None

    def config_json(self, dtype: np.dtype | None = None) -> dict[str, Any]:
        """Their config.json, with the dtype of the files if there is one."""
        written = _written(self.row, self.config)
        # What the row reads it writes; the rest says nothing of what the model computes.
        own = {*_REPLACED, *written, *self.row.keys_read(written)}
        kept = {key: x for key, x in self.kept.items() if key not in own}
        return {**kept, **written, **({} if dtype is None else {"torch_dtype": dtype.name})}

    def to_dict(self) -> dict[str, Any]:
        """As JSON; `from_dict` undoes it, but for settings of ours that config.json lacks."""
        return {
            "config": self.config_json(),
            "scales": dict(self.scales),
            "source": self.source,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Description:
        """The inverse of `to_dict`."""
        config = values["config"]
        row = architecture_of(config)
        return cls(
            row=row,
            # Without a look at other keys: the run has been trained as the row reads it.
            config=row.config_class(**row.read(ConfigReading(config))),
            kept=config,
            scales=values["scales"],
            source=values["source"],
        )


def describe_model(model: Model) -> Description:
    """The description of a model that is going to be trained.

    A Llama with a window is written as a Mistral, and one with experts as a Mixtral, which are the
    same models.

    Raises:
      UnsupportedError: its class has no row in the table, or it has a setting which its config.json
        has no key for.
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
            f"attention_layout={layout.mode}: Hugging Face's {row.class_name} would compute the "
            "attention of all tokens; train with attention_layout=None, or use zerojax.load_run"
        )
    window = getattr(config, "attention_window", None)
    if window is not None:
        raise UnsupportedError(
            f"attention_window={window}: Hugging Face's {row.class_name} has no sliding window and "
            "would compute the attention of all tokens; train with attention_window=None, or use "
            "zerojax.load_run"
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
        return Description(row=row, config=config, kept=kept, scales=scales, source=source)
    return Description(row=row, config=config, scales=scales)


def _written(row: Architecture, config: Any) -> dict[str, Any]:
    """Their config.json without what is kept of another one."""
    return {
        "architectures": [row.class_name],
        "model_type": row.model_type,
        **row.write_config(config),
    }


def _check_family(row: Architecture, config: DecoderConfig) -> None:
    """Refuses switches that the family's config.json does not say.

    Raises:
      UnsupportedError: what is written is read as another model.
    """
    again = row.config_class(**row.read_config(_written(row, config)))
    if config.moe.bias_rate is not None and again.moe.bias_rate is None:
        raise UnsupportedError(
            f"moe.bias_rate={config.moe.bias_rate!r}: experts are chosen with biases, which "
            f"{row.class_name} has not, so that it would choose others; export the checkpoint "
            "under its own names, or use zerojax.load_run"
        )
    for field in dataclasses.fields(DecoderConfig):
        if field.name in _OF_THE_RUN:
            continue
        name = "features_per_head" if field.name == "head_dim" else field.name
        ours, theirs = getattr(config, name), getattr(again, name)
        if field.name == "moe":
            trained = ("balance", "balance_weight", "z_weight")  # what only training adds
            ours = dataclasses.replace(ours, **{name: getattr(theirs, name) for name in trained})
        if field.name == "norm":
            # Where a cast stands is rounding of narrow floats.
            ours = dataclasses.replace(ours, rounds_first=theirs.rounds_first)
        if field.name == "attention_scale":
            ours, theirs = (x or config.features_per_head**-0.5 for x in (ours, theirs))
        both_floats = isinstance(ours, float) and isinstance(theirs, float)
        if ours != theirs and not (both_floats and math.isclose(ours, theirs)):
            raise UnsupportedError(
                f"{field.name}={ours!r}: config.json of a {row.model_type} says {theirs!r}, and "
                f"{row.class_name} would compute that; set DecoderConfig.family to a family that "
                "has it, or use zerojax.load_run"
            )


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """A tensor on its way, and the arrays of ours that it holds, with their layouts.

    Attributes:
      tensor: name, shape and dtype.
      layer: of our arrays; None: they are no stacks.
      leaves: the arrays of ours.
      expert: of the layer; None: the tensor is of a whole layer.
      held: one for all experts of an array: the layer that was read last, so that each is read
        once for all of its experts.
    """

    tensor: Tensor
    layer: int | None
    leaves: tuple[Leaf, ...]
    expert: int | None = None
    held: dict[int | None, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)

    def values(self, read: Read) -> np.ndarray:
        """The tensor; each of our arrays is asked for once, and only for this layer."""
        first = self.leaves[0]
        if self.expert is not None:
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
    """Every tensor to be written: those of one array of ours, all its layers, one after the other.

    Args:
      description: of the model.
      params: {name: anything with a shape and a dtype} of all its parameters.
      dtype: of all tensors, such as "bfloat16"; None: that of our arrays.

    Raises:
      UnsupportedError: a parameter that has no place in their files.
    """
    leaves = list(description.row.leaves(description.config))
    adapters = {x for pair in adapted_kernels(params).values() for x in pair}
    rest = sorted(set(params) - adapters - {leaf.name for leaf in leaves})
    missing = sorted({leaf.name for leaf in leaves} - set(params))
    if rest or missing:
        name = (rest or missing)[0]
        problem = "has no place in" if rest else "is missing, but has a place in"
        raise UnsupportedError(
            f"parameter {name} {problem} the files of {description.row.model_type}; "
            "`zerojax checkpoint export` without --format writes parameters under their own names"
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
    """A `read` that adds the product of an adapter to the kernel it belongs to."""
    adapters = adapted_kernels(params)

    def merged(name: str, layer: int | None) -> np.ndarray:
        values = read(name, layer)
        if name not in adapters:
            return values
        a, b = (read(part, layer) for part in adapters[name])
        return merged_kernel(values, a, b, description.scales[name])

    return merged
