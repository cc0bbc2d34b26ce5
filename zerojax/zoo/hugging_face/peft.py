"""LoRA adapters in PEFT's format: adapter_model.safetensors and adapter_config.json.

Source: huggingface.co/docs/peft, "PEFT checkpoint format".

PEFT has one adapter per module of the base model. If a module holds several of zerojax's
projections (query, key and value in GPT-2's c_attn), their adapters are merged into one whose rank
is the sum of their ranks: A concatenates their rows, and B is block-diagonal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.zoo.hugging_face.architectures import architecture_of_config
from zerojax.zoo.hugging_face.config_reading import UnsupportedError
from zerojax.zoo.hugging_face.layouts import Leaf
from zerojax.zoo.hugging_face.safetensors import Tensor, write_file
from zerojax.zoo.lora import adapted_kernels

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_CAUSAL = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class _Module:
    """Module of the base model, with its projections (of zerojax) that have adapters.

    Attributes:
      name: name of the module; with "{layer}" if there is one per layer.
      leaves: kernels of these projections, in the order of the module's outputs.
      places: (first output, number of outputs) of each projection in the module.
      rank: rank of one adapter.
      inputs, outputs: numbers of features of the whole module.
      takes_first: whether the base model's weight is [inputs, outputs], as in GPT-2.
    """

    name: str
    leaves: tuple[Leaf, ...]
    places: tuple[tuple[int, int], ...]
    rank: int
    inputs: int
    outputs: int
    takes_first: bool

    @property
    def joined_rank(self) -> int:
        return self.rank * len(self.leaves)

    def shapes(self) -> dict[str, tuple[int, int]]:
        return {
            "lora_A": (self.joined_rank, self.inputs),
            "lora_B": (self.outputs, self.joined_rank),
        }


def write_adapter(
    folder: str | Path,
    sizes: Any,
    adapters: Mapping[str, Any],
    *,
    scales: Mapping[str, float],
    base: str | None = None,
) -> Path:
    """Writes the adapters of a model in the format of `peft.PeftModel.from_pretrained`.

    Args:
      folder: output folder; the two files must not exist in it.
      sizes: the model's configuration, such as a `LlamaConfig`.
      adapters: {parameter name: array} of all adapters; other parameters are ignored.
      scales: {kernel name: factor of the adapter's product}.
      base: folder or Hub name of the base model's weights; None writes no name.

    Raises:
      UnsupportedError: the model has no Hugging Face format or no adapters, or adapters have
        different ranks or scales.
      FileExistsError: one of the files exists.
    """
    folder = user_path(folder)
    for name in (ADAPTER_FILE, ADAPTER_CONFIG):
        if (folder / name).exists():
            raise FileExistsError(f"{folder / name} already exists; use another folder")
    row = architecture_of_config(sizes)
    names = adapted_kernels(adapters)
    modules = _modules(row.leaves(sizes), names, adapters)
    kinds = {(m.rank, scales[leaf.name]) for m in modules for leaf in m.leaves}
    if len(kinds) > 1:
        raise UnsupportedError(
            f"adapters have {len(kinds)} different pairs (rank, scale), {sorted(kinds)}, but "
            "PEFT's files hold one pair; add all adapters with one zerojax.LoraConfig"
        )
    ((rank, scale),) = kinds
    tensors, makers = [], {}
    for module in modules:
        stacked = module.leaves[0].is_stacked
        count = adapters[names[module.leaves[0].name][0]].shape[0] if stacked else 1
        for layer in range(count):
            own = module.name.replace("{layer}", str(layer))
            for part, shape in module.shapes().items():
                name = f"{_PREFIX}{own}.{part}.weight"
                tensors.append(Tensor(name=name, shape=shape, dtype=np.dtype(np.float32)))
                makers[name] = _maker(module, part, layer if stacked else None, names, adapters)
    folder.mkdir(parents=True, exist_ok=True)
    tensors.sort(key=lambda tensor: tensor.name)
    write_file(
        folder / ADAPTER_FILE,
        tensors,
        lambda tensor: makers[tensor.name](),
        metadata={"format": "pt"},
    )
    body = _config(modules, rank, scale * rank, row.class_name, base)
    text = json.dumps(body, indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    return folder


def _modules(
    leaves: Sequence[Leaf], names: Mapping[str, tuple[str, str]], adapters: Mapping[str, Any]
) -> list[_Module]:
    """Lists the modules of the base model that have adapters."""
    by_tensor: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.name in names:
            by_tensor.setdefault(leaf.tensor, []).append(leaf)
    unknown = set(names) - {leaf.name for leaf in leaves}
    if unknown or not names:
        problem, remedy = "the model has no adapters", "zerojax.add_lora adds them"
        if unknown:
            problem = f"Hugging Face's files have no tensor for {min(unknown)}"
            remedy = "add adapters to projections of the layers only"
        raise UnsupportedError(f"{problem}, so PEFT files cannot be written; {remedy}")
    return [_module(tensor, group, names, adapters) for tensor, group in by_tensor.items()]


def _module(
    tensor: str,
    leaves: Sequence[Leaf],
    names: Mapping[str, tuple[str, str]],
    adapters: Mapping[str, Any],
) -> _Module:
    first = leaves[0]
    a, b = (adapters[name].shape[int(first.is_stacked) :] for name in names[first.name])
    layout = first.layout
    ins = layout.ours[: len(a) - 1]
    takes_first = layout.theirs[0] == ins
    outs = layout.theirs[1 if takes_first else 0]
    # `_maker` requires features in zerojax's order, with parts outermost.
    assert takes_first or layout.theirs[1] == ins, (tensor, layout)
    assert outs[-len(b) + 1 :] == layout.ours[len(ins) :], (tensor, layout)
    places = sorted((_place(leaf, names, adapters), leaf.name) for leaf in leaves)
    by_name = {leaf.name: leaf for leaf in leaves}
    own = math.prod(b[1:])
    return _Module(
        name=tensor.removesuffix(".weight"),
        leaves=tuple(by_name[name] for _, name in places),
        places=tuple(place for place, _ in places),
        rank=a[-1],
        inputs=math.prod(a[:-1]),
        outputs=own * layout.parts if layout.rows is None else layout.rows.all,
        takes_first=takes_first,
    )


def _place(
    leaf: Leaf, names: Mapping[str, tuple[str, str]], adapters: Mapping[str, Any]
) -> tuple[int, int]:
    """Returns (first output, number of outputs) of a projection in its module."""
    own = math.prod(adapters[names[leaf.name][1]].shape[int(leaf.is_stacked) :][1:])
    return (own * leaf.part if leaf.rows is None else leaf.rows.first), own


def _maker(
    module: _Module,
    part: str,
    layer: int | None,
    names: Mapping[str, tuple[str, str]],
    adapters: Mapping[str, Any],
) -> Callable[[], np.ndarray]:
    """Returns a function that computes one of a module's two arrays, lora_A or lora_B."""

    def own(name: str) -> np.ndarray:
        array = adapters[name]
        return np.asarray(array if layer is None else array[layer], np.float32)

    def make_a() -> np.ndarray:
        rows = [own(names[leaf.name][0]).reshape(module.inputs, -1).T for leaf in module.leaves]
        return np.concatenate(rows)

    def make_b() -> np.ndarray:
        joined = np.zeros((module.outputs, len(module.leaves), module.rank), np.float32)
        for number, (leaf, (first, size)) in enumerate(
            zip(module.leaves, module.places, strict=True)
        ):
            mine = own(names[leaf.name][1]).reshape(module.rank, size)
            joined[first : first + size, number] = mine.T
        return joined.reshape(module.outputs, module.joined_rank)

    return make_a if part == "lora_A" else make_b


def _config(
    modules: Sequence[_Module], rank: int, alpha: float, class_name: str, base: str | None
) -> dict[str, Any]:
    """Builds the content of adapter_config.json."""
    targets = {_target(module.name): module for module in modules}
    joined = {name: m for name, m in targets.items() if len(m.leaves) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if class_name.endswith(_CAUSAL) else None,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        # Joined adapters have a larger rank; alpha is scaled to keep alpha / rank.
        "rank_pattern": {n: m.joined_rank for n, m in joined.items()},
        "alpha_pattern": {n: alpha * len(m.leaves) for n, m in joined.items()},
        "fan_in_fan_out": any(module.takes_first for module in modules),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _target(module: str) -> str:
    """Returns a module's name without its layer, the suffix by which PEFT matches modules."""
    return module.rpartition("{layer}.")[2]
