"""LoRA adapters in PEFT's format: adapter_model.safetensors and adapter_config.json.

Source: huggingface.co/docs/peft, "PEFT checkpoint format".

PEFT has one adapter per module of the base model. If a module holds several of zerojax's
projections (query, key and value in GPT-2's c_attn), their adapters are merged into one whose rank
is the sum of their ranks: A concatenates their rows, and B is block-diagonal. Ranks and scales that
differ between modules are patterns of names. `peft_reading` reads these files.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.zoo.hugging_face.architectures import architecture_of_config
from zerojax.zoo.hugging_face.config_reading import UnsupportedError
from zerojax.zoo.hugging_face.folder import ADAPTER_CONFIG
from zerojax.zoo.hugging_face.layouts import Leaf
from zerojax.zoo.hugging_face.peft_reading import ADAPTER_FILE
from zerojax.zoo.hugging_face.peft_settings import TASK_TYPES
from zerojax.zoo.hugging_face.safetensors import Tensor, write_file
from zerojax.zoo.lora import adapted_kernels

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
      scale: factor of the product of each adapter.
      inputs, outputs: numbers of features of the whole module.
      takes_first: whether the base model's weight is [inputs, outputs], as in GPT-2.
    """

    name: str
    leaves: tuple[Leaf, ...]
    places: tuple[tuple[int, int], ...]
    rank: int
    scale: float
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
    saved: Sequence[str] = (),
    base: str | None = None,
) -> Path:
    """Writes the adapters of a model in the format of `peft.PeftModel.from_pretrained`.

    Args:
      folder: output folder; the two files must not exist in it.
      sizes: the model's configuration, such as a `LlamaConfig`.
      adapters: {parameter name: array} of all adapters, and of the parameters in `saved`; other
        parameters are ignored.
      scales: {kernel name: factor of the adapter's product}.
      saved: names of parameters to write whole, such as the head of a task.
      base: folder or Hub name of the base model's weights; None writes no name.

    Raises:
      UnsupportedError: the model has no Hugging Face format or no adapters, or adapters of one
        module have different ranks or scales.
      FileExistsError: one of the files exists.
    """
    folder = user_path(folder)
    for name in (ADAPTER_FILE, ADAPTER_CONFIG):
        if (folder / name).exists():
            raise FileExistsError(f"{folder / name} already exists; use another folder")
    row = architecture_of_config(sizes)
    names = adapted_kernels(adapters)
    leaves = row.leaves(sizes)
    modules = _modules(leaves, names, adapters, scales)
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
    whole = [leaf for leaf in leaves if leaf.name in saved]
    for tensor, make in _whole_tensors(whole, {m.name for m in modules}, adapters):
        tensors.append(tensor)
        makers[tensor.name] = make
    folder.mkdir(parents=True, exist_ok=True)
    tensors.sort(key=lambda tensor: tensor.name)
    write_file(
        folder / ADAPTER_FILE,
        tensors,
        lambda tensor: makers[tensor.name](),
        metadata={"format": "pt"},
    )
    body = _config(modules, whole, base)
    task = getattr(sizes, "task", None)
    if task is not None:
        body["task_type"] = next(name for name, kind in TASK_TYPES.items() if kind == task.kind)
    elif row.class_name.endswith(_CAUSAL):
        body["task_type"] = "CAUSAL_LM"
    text = json.dumps(body, indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    return folder


def _modules(
    leaves: Sequence[Leaf],
    names: Mapping[str, tuple[str, str]],
    adapters: Mapping[str, Any],
    scales: Mapping[str, float],
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
    return [_module(tensor, group, names, adapters, scales) for tensor, group in by_tensor.items()]


def _module(
    tensor: str,
    leaves: Sequence[Leaf],
    names: Mapping[str, tuple[str, str]],
    adapters: Mapping[str, Any],
    scales: Mapping[str, float],
) -> _Module:
    first = leaves[0]
    kinds = {(adapters[names[leaf.name][0]].shape[-1], scales[leaf.name]) for leaf in leaves}
    if len(kinds) > 1:
        raise UnsupportedError(
            f"adapters of the module {tensor} have {len(kinds)} different pairs (rank, scale), "
            f"{sorted(kinds)}, but PEFT's files hold one pair for a module; add all adapters with "
            "one zerojax.LoraConfig"
        )
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
        scale=scales[first.name],
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


def _whole_tensors(
    leaves: Sequence[Leaf], adapted: set[str], arrays: Mapping[str, Any]
) -> Iterator[tuple[Tensor, Callable[[], np.ndarray]]]:
    """Yields (tensor, function that computes it) of the parameters that are written whole.

    Args:
      leaves: these parameters.
      adapted: names of the modules that have adapters, whose biases have other names.
      arrays: {parameter name: array}.
    """
    together: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        together.setdefault(leaf.tensor, []).append(leaf)
    for pattern, group in together.items():
        first = group[0]
        shape = arrays[first.name].shape
        theirs = first.layout.their_shape(shape[first.num_stacked :])
        module, _, part = pattern.rpartition(".")
        inner = ".base_layer." if module in adapted else "."
        for layer, expert in first.numbers(shape):
            at = (layer, expert)[: first.num_stacked]
            name = f"{_PREFIX}{module}{inner}{part}".replace("{layer}", str(layer))
            name = name.replace("{expert}", str(expert))
            tensor = Tensor(name=name, shape=theirs, dtype=np.dtype(np.float32))
            yield tensor, functools.partial(_whole, group, arrays, at, theirs)


def _whole(
    group: Sequence[Leaf], arrays: Mapping[str, Any], at: tuple[int, ...], shape: tuple[int, ...]
) -> np.ndarray:
    out = np.zeros(shape, np.float32)
    for leaf in group:
        values = np.asarray(arrays[leaf.name][at], np.float32)
        if leaf.layout.is_whole:
            return leaf.layout.as_theirs(values)
        leaf.layout.to_theirs(values, out)
    return out


def _config(modules: Sequence[_Module], whole: Sequence[Leaf], base: str | None) -> dict[str, Any]:
    """Builds the content of adapter_config.json, without the type of the task.

    Args:
      modules: modules with adapters.
      whole: parameters that are written whole.
      base: folder or name of the base model, or None.
    """
    targets = {_target(module.name): module for module in modules}
    kinds = Counter((m.rank, m.scale) for m in modules for _ in m.leaves)
    # The pair of the most adapters is the default; patterns name the others.
    ((rank, scale), _) = max(kinds.items(), key=lambda x: (x[1], x[0]))
    alpha = scale * rank
    # Joined adapters have a larger rank; alpha is scaled to keep alpha / rank.
    ranks = _patterns({name: m.joined_rank for name, m in targets.items()}, rank)
    alphas = _patterns({name: m.scale * m.joined_rank for name, m in targets.items()}, alpha)
    biases = [x for x in whole if x.tensor.endswith(".bias") and x.is_stacked]
    saved = {_target(x.tensor.rpartition(".")[0]) for x in whole if x not in biases}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "fan_in_fan_out": any(module.takes_first for module in modules),
        "bias": "all" if biases else "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": sorted(saved) or None,
        "use_dora": False,
        "use_rslora": False,
    }


def _patterns(values: Mapping[str, Any], default: object) -> dict[str, Any]:
    """Returns the values that differ from the default, and those of names that end with their name,
    which PEFT would otherwise match too (it takes the first match; JSON is written sorted)."""
    others = {name: value for name, value in values.items() if value != default}
    ends = tuple(f".{name}" for name in others)
    return {name: value for name, value in values.items() if name in others or name.endswith(ends)}


def _target(module: str) -> str:
    """Returns a module's name without its layer, the suffix by which PEFT matches modules."""
    return module.rpartition("{layer}.")[2]
