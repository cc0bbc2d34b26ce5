"""Exports a trained model, or its adapters, as Hugging Face files."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.checkpoint.agreement import failing_together
from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.export import (
    Exported,
    Layers,
    as_decoded,
    model_arrays,
    read_whole,
    saved_codes,
)
from zerojax.checkpoint.files import new_folder
from zerojax.checkpoint.inspection import SavedStep, find_step, open_arrays
from zerojax.checkpoint.metadata import as_abstract
from zerojax.config.checks import names_keywords
from zerojax.config.loader import user_path
from zerojax.config.mesh import HOST_KIND
from zerojax.data.chats.template_files import NAMED_TEMPLATES
from zerojax.data.tokenizer import TEMPLATE_FILE, hugging_face_json, load_tokenizer
from zerojax.optim import Weights, check_weights
from zerojax.optim.weight_codes import WeightCodes
from zerojax.step.reshard import model_parts
from zerojax.training.run_folder import DESCRIPTION_FILE, TOKENIZER_FILE
from zerojax.zoo.bit_widths import is_update_count
from zerojax.zoo.hugging_face.folder import CONFIG, GENERATION_CONFIG, read_json
from zerojax.zoo.hugging_face.peft import write_adapter
from zerojax.zoo.hugging_face.quantized_writing import CodedPart, quantization_config, with_codes
from zerojax.zoo.hugging_face.safetensors import SHARD_BYTES, write_files
from zerojax.zoo.hugging_face.writing import (
    Description,
    Outgoing,
    Read,
    describe_model,
    merging,
    outgoing,
)
from zerojax.zoo.lora import adapter_names

_TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    TEMPLATE_FILE,
)


class Trained(Protocol):
    """A run in memory: a `Trainer`, or an `Engine` that has had its first batch."""

    @property
    def plan(self) -> Any:
        """Plan of the state."""
        ...

    @property
    def state(self) -> Any:
        """Current `TrainState`."""
        ...

    @property
    def num_steps(self) -> int:
        """Number of batches consumed."""
        ...


@names_keywords()
def to_hugging_face(
    trained: Trained | str | Path,
    folder: str | Path,
    *,
    step: int | str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    weights: Weights = "trained",
    pretrained: str | Path | None = None,
    quantize: str | None = None,
) -> Exported:
    """Writes a model for transformers: config.json, safetensors, and the tokenizer if it is known.

    Host memory holds one output tensor at a time and the arrays from which it is computed. For
    checkpoints with small layers, or from before 2026-11-22, it holds the stacked tensors of all
    layers. Adapters are merged into their kernels.

    With several processes all of them must call it; process 0 writes. If process 0 fails, the other
    processes raise CheckpointError, and all of them may continue.

    Args:
      trained: a `Trainer` or `Engine`, or the folder of a run, of its checkpoints, or of one step.
      folder: new or empty folder; it gets this name once it is complete.
      step: number of a saved step of a run's folder, or the name of a protected step, such as
        "best"; None: the newest.
      dtype: dtype of all tensors, such as "bfloat16". None: the dtype of trained parameters
        (float32 unless param_dtype is set), also for frozen parameters stored in fewer bits.
      shard_bytes: maximum number of bytes of a file, unless a single tensor is larger.
      weights: "ema" exports the averaged weights (`zerojax.with_ema`), in float32.
      pretrained: Hugging Face folder of frozen weights that the checkpoint does not store; None:
        the folder recorded in the run.
      quantize: "int8", "int4" or "fp8" writes kernels of linear layers as quantization codes, in
        the format of compressed-tensors, which vLLM and transformers load. zerojax does not load
        such a folder. None: no quantization.

    Returns:
      The folder, and names and sizes of its files.

    Raises:
      UnsupportedError: a ValueError: the architecture has no Hugging Face format, or `quantize`
        does not support it.
      ValueError: the run keeps no EMA, `quantize` is unknown, weights are not finite, or `step` or
        `pretrained` was passed with a trainer or engine.
      FileExistsError: `folder` exists and is not empty.
      CheckpointError: the step does not exist or is damaged.
      OSError: writing fails.
    """
    out = user_path(folder).absolute()
    check_weights(weights)
    options: dict[str, Any] = {"dtype": dtype, "shard_bytes": shard_bytes}
    options |= {"weights": weights, "quantize": quantize}
    if not isinstance(trained, str | Path):
        _check_there(trained, step, pretrained)
        return _from_trainer(trained, out, **options)
    saved = find_step(trained, step, pretrained=pretrained)
    return export_step(saved, run_folders(trained, saved), out, **options)


@names_keywords()
def to_peft(
    trained: Trained | str | Path,
    folder: str | Path,
    *,
    step: int | str | None = None,
    weights: Weights = "trained",
) -> Path:
    """Writes a model's adapters for `peft.PeftModel.from_pretrained`, without the base model.

    All that was trained must be in these files: adapters, and what a folder of adapters or the head
    of a task trains whole. A run without `freeze=` is refused, because it has trained the base
    model, too.

    With several processes all of them must call it; process 0 writes.

    Args:
      trained: a `Trainer` or `Engine`, or the folder of a run, of its checkpoints, or of one step.
      folder: new or empty folder.
      step: number of a saved step of a run's folder, or the name of a protected step, such as
        "best"; None: the newest.
      weights: "ema" exports the averaged adapters instead of the trained ones.

    Returns:
      The folder; it contains adapter_model.safetensors and adapter_config.json.

    Raises:
      UnsupportedError: a ValueError: there are no adapters, or the architecture has no Hugging
        Face format.
      ValueError: the run has trained parameters that these files do not hold.
      FileExistsError: `folder` exists and is not empty.
      CheckpointError: the step does not exist or is damaged.
    """
    out = user_path(folder).absolute()
    check_weights(weights)
    if isinstance(trained, str | Path):
        saved = find_step(trained, step)
        return export_adapters(saved, run_folders(trained, saved), out, weights=weights)
    _check_there(trained, step)
    description = describe_model(trained.plan.model)
    parts = model_parts(trained.plan, trained.state, weights=weights)
    params = {**parts["params"], **parts["frozen"]}
    read = _reader(params, NamedSharding(trained.plan.mesh, P()))
    wanted = {*adapter_names(params), *description.saved}
    _check_rest_frozen(parts["params"], wanted)
    adapters = {name: read(name, None) for name in params if name in wanted}
    return _write_adapters(out, description, adapters)


def _check_rest_frozen(trained: Iterable[str], written: Collection[str]) -> None:
    """Raises a ValueError if parameters were trained that files of adapters do not hold."""
    lost = sorted(set(trained) - set(written))
    if lost and adapter_names(written):
        raise ValueError(
            f"files of adapters would lose what {len(lost)} other parameters learned, such as "
            f"{lost[0]}, because the run did not freeze them. Write the whole model with "
            "zerojax.to_hugging_face (--format hugging_face), or train with freeze=lora.freeze, "
            "which the LoraConfig gives; the model of a folder of adapters has the same attribute"
        )


def _check_there(
    trained: Trained, step: int | str | None, pretrained: str | Path | None = None
) -> None:
    for name, value in (("step", step), ("pretrained", pretrained)):
        if value is not None:
            raise ValueError(
                f"{name}={value} is not possible with a trainer or engine; pass the run's folder "
                "instead"
            )
    if trained.state is None:
        raise ValueError(
            "the engine has no state before its first batch; call engine.prepare(example_batch)"
        )


def export_adapters(
    saved: SavedStep, folders: Sequence[Path], out: Path, *, weights: Weights = "trained"
) -> Path:
    """Writes the adapters of a saved step in PEFT's format; returns the folder.

    Args:
      saved: the saved step.
      folders: folders that may hold the run's description.
      out: new or empty folder to write.
      weights: "ema" exports the averaged adapters instead of the trained ones.
    """
    metadata = saved.whole_metadata()
    description = _description_in(folders)
    names = _arrays_of_model(saved, weights)
    unread = open_arrays(saved.folder, metadata)
    wanted = {*adapter_names(names), *description.saved}
    trained = [name for name, full in names.items() if not full.startswith("frozen/")]
    _check_rest_frozen(trained, wanted)
    adapters = {
        name: read_whole(saved, full, unread[full], as_abstract(metadata.arrays[full]).shape)
        for name, full in names.items()
        if name in wanted
    }
    return _write_adapters(out, description, adapters)


def _arrays_of_model(saved: SavedStep, weights: Weights) -> dict[str, str]:
    """Returns {parameter: its name in the step}, without non-parameter state of the model."""
    found = model_arrays(saved, weights)
    return {name: full for full, name in found.items() if not full.startswith("extras/")}


def _write_adapters(
    out: Path, description: Description, adapters: Mapping[str, np.ndarray]
) -> Path:
    total = sum(array.nbytes for array in adapters.values())
    with failing_together():
        if jax.process_index() == 0:
            with new_folder(out, total, remedy=None) as draft:
                write_adapter(
                    draft,
                    description.config,
                    adapters,
                    scales=description.scales,
                    saved=description.saved,
                    base=description.source,
                )
    return out


def run_folders(run: str | Path, saved: SavedStep) -> Sequence[Path]:
    """Returns the folders that may hold a run's files other than checkpoints."""
    return user_path(run), saved.folder.parent, saved.folder.parent.parent


def export_step(
    saved: SavedStep,
    folders: Sequence[Path],
    out: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    weights: Weights = "trained",
    quantize: str | None = None,
) -> Exported:
    """Writes a saved step as a Hugging Face folder.

    Args:
      saved: the saved step.
      folders: folders that are searched for the run's description and tokenizer.
      out: new or empty folder to write.
      dtype: dtype of all tensors; None: the dtype of trained parameters.
      shard_bytes: maximum number of bytes of a file, unless a single tensor is larger.
      weights: "ema" exports the averaged weights instead of the trained ones.
      quantize: "int8", "int4" or "fp8": quantization of linear layers; None: none.
    """
    metadata = saved.whole_metadata()
    description = _description_in(folders)
    names = _arrays_of_model(saved, weights)
    params = {name: as_abstract(metadata.arrays[full]) for name, full in names.items()}
    unread = open_arrays(saved.folder, metadata)
    for name in _update_count(metadata.arrays):
        count = read_whole(saved, name, unread[name], as_abstract(metadata.arrays[name]).shape)
        description.check_width(quantize, int(np.max(count)))
    held: dict[str, Layers] = {}

    def read(name: str, layer: int | None) -> np.ndarray:
        full = names[name]
        if layer is None:
            return read_whole(saved, full, unread[full], params[name].shape)
        if name not in held:
            held[name] = Layers(saved, full, unread[full], params[name].shape)
        return held[name].layer(layer)

    def values(tensor: Outgoing | CodedPart) -> np.ndarray:
        wanted = {leaf.name for leaf in tensor.leaves}
        # Frees what earlier tensors needed: host memory holds the arrays of one tensor.
        for name in [name for name in held if not _belongs(name, wanted)]:
            del held[name]
        return tensor.values(merging(description, whole, raised))

    codes = saved_codes(saved)
    whole, decoded = _decoded(params, read, {n: codes[x] for n, x in names.items() if x in codes})
    raised, abstract = _raised(whole, decoded)
    tokenizer = next((x / TOKENIZER_FILE for x in folders if (x / TOKENIZER_FILE).is_file()), None)
    return _write(
        out,
        description,
        outgoing(description, abstract, dtype=dtype),
        values,
        shard_bytes,
        tokenizer=tokenizer,
        step=saved.step,
        quantize=quantize,
    )


def _belongs(name: str, kernels: set[str]) -> bool:
    """Returns True if an array is one of `kernels` or a part of the adapter of one of them."""
    # kernel[:-7] is the name without "/kernel".
    return any(name == kernel or name.startswith(f"{kernel[:-7]}/lora/") for kernel in kernels)


def _from_trainer(
    trainer: Trained,
    out: Path,
    *,
    dtype: str | None,
    shard_bytes: int,
    weights: Weights,
    quantize: str | None,
) -> Exported:
    plan = trainer.plan
    description = describe_model(plan.model)
    parts = model_parts(plan, trainer.state, weights=weights)
    params: Mapping[str, Any] = {**parts["params"], **parts["frozen"]}
    codes = {name: leaf.codes for name, leaf in plan.users_placement.leaves.items() if leaf.codes}
    for name in _update_count(parts["extras"]):
        count = _reader(parts["extras"], NamedSharding(plan.mesh, P()))(name, None)
        description.check_width(quantize, int(np.max(count)))
    read = _reader(params, NamedSharding(plan.mesh, P()))
    whole, decoded = _decoded(params, read, codes)
    raised, abstract = _raised(whole, decoded)
    read = merging(description, whole, raised)
    return _write(
        out,
        description,
        outgoing(description, abstract, dtype=dtype),
        lambda x: x.values(read),
        shard_bytes,
        step=trainer.num_steps,
        quantize=quantize,
    )


def _update_count(names: Iterable[str]) -> list[str]:
    """Returns the name of the first array that counts a layer's updates, in a list; [] if no kernel
    is rounded by schedule."""
    return [name for name in names if is_update_count(name)][:1]


def _decoded(
    params: Mapping[str, Any], read: Read, codes: Mapping[str, WeightCodes]
) -> tuple[dict[str, Any], Read]:
    """Returns parameters with quantized weights decoded to float32: (structs of all parameters,
    function that reads a parameter).
    """

    def decoded(name: str, layer: int | None) -> np.ndarray:
        values = read(name, layer)
        return codes[name].decode_on_host(values) if name in codes else values

    return {name: as_decoded(x, codes.get(name)) for name, x in params.items()}, decoded


def _raised(params: Mapping[str, Any], read: Read) -> tuple[Read, dict[str, Any]]:
    """Converts all floats to the widest dtype of the model: (function that reads a parameter,
    structs of all parameters).

    Frozen parameters may be stored in fewer bits than the adapters that are added to them.
    """
    floats = [np.dtype(x.dtype) for x in params.values() if jnp.issubdtype(x.dtype, jnp.floating)]
    widest = max(floats, key=lambda dtype: dtype.itemsize, default=np.dtype(np.float32))

    def dtype_of(x: np.ndarray | jax.Array) -> np.dtype:
        is_narrow = x.dtype.itemsize < widest.itemsize
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return widest if is_float and is_narrow else np.dtype(x.dtype)

    def raised(name: str, layer: int | None) -> np.ndarray:
        values = read(name, layer)
        return values.astype(dtype_of(values), copy=False)

    shapes = {name: jax.ShapeDtypeStruct(x.shape, dtype_of(x)) for name, x in params.items()}
    return raised, shapes


def _reader(params: Mapping[str, jax.Array], whole: NamedSharding) -> Read:
    """Returns a function that copies a parameter, or one layer of a stacked one, to the host.

    A single process fetches each shard. Several processes gather the array on the devices first.
    """
    gathered = whole if jax.process_count() > 1 else None

    def read(name: str, layer: int | None) -> np.ndarray:
        array = params[name]
        if array.sharding.memory_kind == HOST_KIND:
            array = jax.device_put(array, array.sharding.with_memory_kind("device"))
        taken = _take(gathered, layer is not None)(array, np.int32(layer or 0))
        return np.asarray(taken if gathered is None else taken.addressable_data(0))

    return read


@functools.lru_cache(maxsize=16)
def _take(gathered: NamedSharding | None, is_layer: bool) -> Callable[..., jax.Array]:
    """Builds a jitted function that copies an array, or one layer of it, on the devices.

    The copy is fetched instead of the state's own array, which would cache its values on the host.
    """

    def take(array: jax.Array, layer: jax.Array) -> jax.Array:
        if not is_layer:
            return array
        return lax.dynamic_index_in_dim(array, layer, 0, keepdims=False)

    return jax.jit(take, out_shardings=gathered)


def _write(
    out: Path,
    description: Description,
    whole: Sequence[Outgoing],
    values: Callable[[Any], np.ndarray],
    shard_bytes: int,
    *,
    tokenizer: Path | None = None,
    step: int,
    quantize: str | None,
) -> Exported:
    """Writes the folder; all processes compute the tensors together, one after the other. The
    result names the files on process 0 only."""
    found: Sequence[Outgoing | CodedPart] = whole
    if quantize is not None:
        found = with_codes(description.row.class_name, whole, quantize)
    with failing_together() as agree:

        def agreed(tensor: Outgoing | CodedPart) -> np.ndarray:
            # Before the collective of a tensor, which a process that has failed never enters.
            agree()
            return values(tensor)

        if jax.process_index() == 0:
            about = None if quantize is None else quantization_config(quantize)
            return _write_alone(
                out,
                description,
                found,
                agreed,
                shard_bytes,
                tokenizer=tokenizer,
                step=step,
                dtypes={one.tensor.dtype for one in whole},
                quantization=about,
            )
        for tensor in found:
            agreed(tensor)  # this process takes part in the all-gather
    total = sum(one.tensor.num_bytes for one in found)
    return Exported(folder=out, files=(), num_arrays=len(found), num_bytes=total)


def _write_alone(
    out: Path,
    description: Description,
    found: Sequence[Outgoing | CodedPart],
    values: Callable[[Any], np.ndarray],
    shard_bytes: int,
    *,
    tokenizer: Path | None,
    step: int,
    dtypes: set[np.dtype],
    quantization: Mapping[str, Any] | None,
) -> Exported:
    by_name = {one.tensor.name: one for one in found}
    tensors = [one.tensor for one in found]
    total = sum(tensor.num_bytes for tensor in tensors)
    is_wide = any(tensor.dtype in (np.float32, np.float64) for tensor in tensors)
    remedy = "or export fewer bytes with --dtype bf16 (in Python: dtype='bfloat16')"
    with new_folder(out, total, remedy=remedy if is_wide else None) as draft:
        names = write_files(
            draft,
            tensors,
            lambda tensor: values(by_name[tensor.name]),
            shard_bytes=shard_bytes,
            metadata={"format": "pt", "step": str(step)},
        )
        # config.json names one dtype, that of all tensors.
        about = description.config_json(dtypes.pop() if len(dtypes) == 1 else None)
        if quantization is not None:
            about["quantization_config"] = quantization
        (draft / CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        _copy_tokenizer(draft, description, tokenizer)
    return Exported(folder=out, files=tuple(names), num_arrays=len(tensors), num_bytes=total)


def _copy_tokenizer(draft: Path, description: Description, tokenizer: Path | None) -> None:
    """Copies the tokenizer files of the pretrained folder, or else those of the run.

    A chat template with which the run was trained replaces the folder's template. The generation
    settings are copied too.
    """
    source = None if description.source is None else Path(description.source)
    if source is not None and (source / GENERATION_CONFIG).is_file():
        shutil.copyfile(source / GENERATION_CONFIG, draft / GENERATION_CONFIG)
    bare = None if tokenizer is None else hugging_face_json(load_tokenizer(tokenizer))
    if source is not None and (source / TOKENIZER_FILE).is_file():
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, draft / name)
        if (source / NAMED_TEMPLATES).is_dir():
            shutil.copytree(source / NAMED_TEMPLATES, draft / NAMED_TEMPLATES)
    elif bare is not None:
        text = json.dumps(bare, ensure_ascii=False) + "\n"
        (draft / TOKENIZER_FILE).write_text(text, encoding="utf-8")
    own = None if tokenizer is None else tokenizer.with_name(TEMPLATE_FILE)
    if own is not None and own.is_file():
        shutil.copyfile(own, draft / TEMPLATE_FILE)


def _description_in(folders: Sequence[Path]) -> Description:
    for folder in folders:
        if (folder / DESCRIPTION_FILE).is_file():
            return Description.from_dict(read_json(folder / DESCRIPTION_FILE))
    raise CheckpointError(
        f"{folders[0]} has no {DESCRIPTION_FILE}, which a run writes only for models with "
        "a Hugging Face format; use `zerojax checkpoint export` without --format to write the "
        "parameters of any model under their own names"
    )
