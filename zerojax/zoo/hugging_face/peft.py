"""LoRA adapters in PEFT's format: adapter_model.safetensors and adapter_config.json.

Source: huggingface.co/docs/peft, "PEFT checkpoint format".

PEFT has one adapter beside each of the base model's modules. Where such a module holds several of
our projections (query, key and value in GPT-2's c_attn) their adapters become one whose rank is the
sum of theirs: each has rows of A of its own, and in B its own rows and columns, zero elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.config.loader import user_path
from zerojax.zoo.hugging_face.architectures import architecture_of_config
from zerojax.zoo.hugging_face.config_reading import UnsupportedError
from zerojax.zoo.hugging_face.layouts import Leaf
from zerojax.zoo.hugging_face.safetensors import Tensor, write_file
from zerojax.zoo.lora import adapted_kernels

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_CAUSAL = ("ForCausalLM", "LMHeadModel")


@dataclasses.dataclass(frozen=True)
class _Module:
    """A module of the base model and those of our projections in it that have adapters.

    Attributes:
      name: with "{layer}" in it where there is one per layer.
      leaves: our kernels in it, in the order of its parts.
      places: where each of them begins among the module's outputs, and how many it has.
      rank: of one adapter; inputs, outputs: features of the whole module.
      takes_first: the base's weight is [inputs, outputs], as GPT-2's are.
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
    """Writes the adapters of a model, which `peft.PeftModel.from_pretrained` then reads.

    Args:
      folder: gets the two files, which must not be there.
      sizes: the model's configuration, such as a `LlamaConfig`.
      adapters: {name of our parameter: array} of all adapters; more names do no harm.
      scales: {name of our kernel: what its adapter's product is multiplied by}.
      base: where the base model's weights are, a folder or a name on the hub; None: not said.

    Raises:
      UnsupportedError: a model that Hugging Face does not have, no adapters, or adapters of several
        ranks or scales.
      FileExistsError: one of the files is there.
    """
    folder = user_path(folder)
    for name in (ADAPTER_FILE, ADAPTER_CONFIG):
        if (folder / name).exists():
            raise FileExistsError(f"{folder / name} is there already; name another folder")
    row = architecture_of_config(sizes)
    names = adapted_kernels(adapters)
    modules = _modules(row.leaves(sizes), names, adapters)
    kinds = {(m.rank, scales[leaf.name]) for m in modules for leaf in m.leaves}
    if len(kinds) > 1:
        raise UnsupportedError(
            f"adapters of {len(kinds)} kinds, (rank, scale) being {sorted(kinds)}; PEFT's "
            "files have one of each: add all adapters with one zerojax.LoraConfig"
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
    """The base model's modules that have adapters."""
    by_tensor: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.name in names:
            by_tensor.setdefault(leaf.tensor, []).append(leaf)
    unknown = set(names) - {leaf.name for leaf in leaves}
    if unknown or not names:
        what, remedy = "the model has no adapters", "zerojax.add_lora adds them"
        if unknown:
            what = f"Hugging Face's files have no tensor for {min(unknown)}"
            remedy = "add adapters to projections of the layers only"
        raise UnsupportedError(f"{what}, so there is nothing for PEFT to read; {remedy}")
    return [_module(tensor, found, names, adapters) for tensor, found in by_tensor.items()]


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
    # What `_maker` relies on: features in our order, parts outermost.
    assert takes_first or layout.theirs[1] == ins, (tensor, layout)
    assert outs[-len(b) + 1 :] == layout.ours[len(ins) :], (tensor, layout)
    found = sorted((_place(leaf, names, adapters), leaf.name) for leaf in leaves)
    by_name = {leaf.name: leaf for leaf in leaves}
    own = math.prod(b[1:])
    return _Module(
        name=tensor.removesuffix(".weight"),
        leaves=tuple(by_name[name] for _, name in found),
        places=tuple(place for place, _ in found),
        rank=a[-1],
        inputs=math.prod(a[:-1]),
        outputs=own * layout.parts if layout.rows is None else layout.rows.all,
        takes_first=takes_first,
    )


def _place(
    leaf: Leaf, names: Mapping[str, tuple[str, str]], adapters: Mapping[str, Any]
) -> tuple[int, int]:
    """(first output of a projection of ours in its module, how many it has)."""
    own = math.prod(adapters[names[leaf.name][1]].shape[int(leaf.is_stacked) :][1:])
    return (own * leaf.part if leaf.rows is None else leaf.rows.first), own


def _maker(
    module: _Module,
    part: str,
    layer: int | None,
    names: Mapping[str, tuple[str, str]],
    adapters: Mapping[str, Any],
) -> Callable[[], np.ndarray]:
    """A function that makes one of a module's two arrays."""

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
    """What PEFT has to know to build the same adapters."""
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
        # The same factor alpha / rank for a rank that is a sum.
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
    """A module's name without its layer: the ending by which PEFT finds it."""
    return module.rpartition("{layer}.")[2]
