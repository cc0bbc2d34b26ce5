"""Export of parameters as Hugging Face tensors, one at a time, with their config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from zerojax.models.adapt import bound_attribute
from zerojax.models.hugging_face.architectures import architecture_of, architecture_of_config
from zerojax.models.hugging_face.layouts import Architecture, Leaf, UnsupportedError
from zerojax.models.hugging_face.pretrained import Pretrained
from zerojax.models.hugging_face.safetensors import Tensor
from zerojax.models.protocol import Model
from zerojax.models.trees import path_name
from zerojax.models.zoo.layers import Projection
from zerojax.models.zoo.lora import LowRank, adapted_kernels, merged_kernel

Read = Callable[[str, int | None], np.ndarray]
"""(name of a parameter, layer or None for all of it) -> values on the host."""

_REPLACED = ("rope_parameters", "dtype", "torch_dtype", "_name_or_path", "transformers_version")
"""Keys of the config.json that a model came from which are not kept."""


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
        written = {
            "architectures": [self.row.class_name],
            "model_type": self.row.model_type,
            **self.row.write_config(self.config),
        }
        kept = {key: x for key, x in self.kept.items() if key not in (*_REPLACED, *written)}
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
            config=row.config_class(**row.read_config(config)),
            kept=config,
            scales=values["scales"],
            source=values["source"],
        )


def describe_model(model: Model) -> Description:
    """The description of a model that is going to be trained.

    Raises:
      UnsupportedError: its class has no row in the table, or its attention has a layout or a
        window, which its config.json has no key for.
    """
    config = bound_attribute(model, "config")
    row = architecture_of_config(config)
    layout = config.attention_layout
    if layout is not None:
        raise UnsupportedError(
            f"attention_layout={layout.mode}: Hugging Face's {row.class_name} would compute the "
            "attention of all tokens; train with attention_layout=None, or use zerojax.load_run"
        )
    window = config.attention_window
    if window is not None:
        raise UnsupportedError(
            f"attention_window={window}: Hugging Face's {row.class_name} has no sliding window and "
            "would compute the attention of all tokens; train with attention_window=None, or use "
            "zerojax.load_run"
        )
    scales = {
        f"{path_name(path)}/kernel": float(node.lora.scale)
        for path, node in nnx.iter_graph(getattr(model, "template", None) or model.source)
        if isinstance(node, Projection) and isinstance(node.lora, LowRank)
    }
    if isinstance(model, Pretrained):
        kept, source = model.folder.config, str(model.folder.path)
        return Description(row=row, config=config, kept=kept, scales=scales, source=source)
    return Description(row=row, config=config, scales=scales)


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """A tensor on its way, and the arrays of ours that it holds, with their layouts."""

    tensor: Tensor
    layer: int | None
    leaves: tuple[Leaf, ...]

    def values(self, read: Read) -> np.ndarray:
        """The tensor; each of our arrays is asked for once, and only for this layer."""
        first = self.leaves[0]
        if first.layout.parts == 1:
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
        own = tuple(array.shape[1:]) if first.is_stacked else tuple(array.shape)
        shape = first.layout.their_shape(own)
        for layer in range(array.shape[0]) if first.is_stacked else [None]:
            tensor = Tensor(name=first.tensor_of(layer or 0), shape=shape, dtype=kind)
            result.append(Outgoing(tensor, layer, tuple(group)))
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
