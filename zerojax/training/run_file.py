"""Defines `run_from_config`, which runs the training of a run file, and `plan_from_config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config import DataConfig, MeshConfig, ModelConfig, RunConfig, to_dict
from zerojax.config.batch_division import BatchDivision
from zerojax.config.checks import names_keywords
from zerojax.config.features import Features
from zerojax.config.loader import user_path
from zerojax.config.tree_types import Batch
from zerojax.data import RowSource, array_names, as_feed, as_source
from zerojax.data.text_set import is_text_set, read_text_sidecar
from zerojax.data.tokenizer import Tokenizer, as_tokenizer, bpe_size
from zerojax.data.tokens import is_token_path, open_tokens
from zerojax.hardware.gpus import Gpu, gpu_of_device
from zerojax.optim.precision import Precision, as_precision, default_precision
from zerojax.placement import device_mesh as meshes
from zerojax.placement.state import abstract
from zerojax.plan.inputs import PlanInputs
from zerojax.plan.make import Plan
from zerojax.runtime.distributed import join_processes
from zerojax.runtime.memory import SPARE, least_room
from zerojax.runtime.start_clock import phase
from zerojax.runtime.user_files import not_for_everybody
from zerojax.step.host_budget import check_host_memory, host_bytes
from zerojax.tracing.protocol import ModelLike
from zerojax.tracing.trees import format_bytes
from zerojax.training.run_folder import TOKENIZER_FILE
from zerojax.training.run_lifecycle import fit, open_run
from zerojax.training.run_record import RunNotes, TextData
from zerojax.training.run_spec import (
    CHECKPOINT_FOLDER,
    RunSpec,
    absolute,
    absolute_parts,
    external_checkpoints,
    plan_elsewhere,
    plan_run,
    rows_of_process,
)
from zerojax.training.train_arguments import LoopSettings
from zerojax.training.trainer import Trainer
from zerojax.zoo import add_lora, build_model
from zerojax.zoo.hugging_face import (
    Pretrained,
    config_from_hugging_face,
    factory_of,
    from_hugging_face,
)
from zerojax.zoo.hugging_face.folder import has_adapters
from zerojax.zoo.hugging_face.peft_settings import base_folder, read_settings

RESUME_HINT = "run the same command again to resume"


@names_keywords()
@not_for_everybody()
def run_from_config(config: RunConfig, *, resume_hint: str = RESUME_HINT) -> Trainer:
    """Runs the training that a run file describes; writes everything to `config.run_dir`.

    Args:
      config: settings of the run file.
      resume_hint: sentence part that says how to resume an interrupted run.

    Raises:
      ValueError, TypeError: a setting is invalid.
      CheckpointError: the folder holds checkpoints of another model.
    """
    if not isinstance(config, RunConfig):
        raise TypeError(
            f"run_from_config takes a RunConfig, not {type(config).__name__}; read a run file "
            'with zerojax.config.load(zerojax.RunConfig, "FILE.yaml")'
        )
    join_processes()
    spec = spec_on_devices(config, resume_hint)
    plan = plan_run(spec)
    make_folder(Path(config.run_dir))
    return fit(open_run(spec, plan))


def spec_on_devices(config: RunConfig, resume_hint: str = RESUME_HINT) -> RunSpec:
    """Returns the resolved description of a run on the devices of this machine, as
    `spec_from_config`, after `check_devices`."""
    mesh, config = config.mesh, config.on_devices(jax.device_count())
    check_devices(config)
    return spec_from_config(config, _why_other_mesh(mesh, config.mesh), resume_hint)


def spec_from_config(
    config: RunConfig, why_mesh: Sequence[str] = (), resume_hint: str = RESUME_HINT
) -> RunSpec:
    """Opens the data of a run file and returns the resolved description of the run.

    Args:
      config: settings of the run file, with a mesh that fits the devices of this machine.
      why_mesh: log lines about a mesh that differs from the mesh of the file.
      resume_hint: sentence part that says how to resume an interrupted run.
    """
    folder = Path(config.run_dir)
    with phase("data"):
        source, validation, tokenizer = open_data(config)
    vocab_size = _vocab_size_of_data(config, source)
    rows = rows_of_process(source, meshes.make_mesh(config.mesh))
    batch = abstract(source.batch(0))
    inputs = _inputs_of(config, batch, vocab_size, jax.devices()[0].platform)
    checkpoint = config.checkpoint
    if checkpoint.path is None:
        checkpoint = dataclasses.replace(checkpoint, path=str(folder / CHECKPOINT_FOLDER))
    model_config = dataclasses.replace(config.model, vocab_size=vocab_size)
    return RunSpec(
        inputs=inputs,
        mesh=config.mesh,
        feed=as_feed(source, rows=rows),
        validation=validation,
        seed=config.seed,
        loop=LoopSettings(
            log_every=config.log.report_every,
            eval_every=config.eval_every,
            eval_batches=config.eval_batches,
            save_every=checkpoint.every,
            save_on_exit=checkpoint.save_on_exit,
            resume_hint=resume_hint,
        ),
        folder=folder,
        offload_folder=folder,
        log=config.log,
        watch=config.watch,
        checkpoint=checkpoint,
        settings_of=lambda plan: to_dict(
            dataclasses.replace(config, mesh=plan.settings, model=model_config)
        ),
        reasons=(
            *_pretrained_reasons(config, inputs.model),
            source.describe(),
            *_elastic_reasons(config),
            *why_mesh,
        ),
        notes=RunNotes(
            loss="model",
            data=TextData(
                path=absolute(config.data.path),
                seq_len=config.data.seq_len,
                validation_fraction=config.data.validation_fraction,
                pack=config.data.pack,
                mixture=absolute_parts(config.data.mixture),
                long_texts=config.data.long_texts,
            ),
            eval_batches=config.eval_batches,
            checkpoints=external_checkpoints(checkpoint.path, folder),
            tokenizer=tokenizer,
            template=source.template,
        ),
    )


def open_data(config: RunConfig) -> tuple[RowSource, RowSource | None, Tokenizer | None]:
    """Opens the data of a run file; returns training source, validation source and tokenizer."""
    return as_source(
        config.data.mixture or config.data.path,
        tokenizer=tokenizer_spec(config),
        seq_len=config.data.seq_len,
        global_batch_size=config.global_batch_size,
        seed=config.seed if config.data.shuffle_seed is None else config.data.shuffle_seed,
        validation_fraction=config.data.validation_fraction,
        vocab_size=config.model.vocab_size,
        pack=config.data.pack,
        long_texts=config.data.long_texts,
    )


def check_devices(config: RunConfig) -> None:
    """Raises if the run needs more devices or memory than are available; opens no data.

    The size of the state is checked only if JAX fell back to CPUs. A GPU with too little memory
    raises an error of its own later.

    Raises:
      ValueError: the mesh needs more devices, or the state needs more memory, than available.
    """
    kinds = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    is_cpu = jax.devices()[0].platform == "cpu"
    where = f"JAX found {kinds}" + ", and no GPU" * is_cpu
    plan_it = "; `zerojax plan FILE --gpu h100 --devices N` plans for devices that are not here"
    try:
        meshes.make_mesh(config.mesh)
    except ValueError as error:
        raise ValueError(f"{error} ({where}){plan_it}") from None
    room = least_room()
    known = config.model.vocab_size is not None or config.model.sizes_file is not None
    if not is_cpu or config.cpu_devices is not None or room is None or not known:
        return
    plan = plan_from_config(config, jax.device_count(), is_here=True)
    if plan.offload is not None:
        check_host_memory(plan, room)
    needed, there = host_bytes(plan), int(room.free * SPARE)
    if needed > there:
        raise ValueError(
            f"the parameters and optimizer state of this run take {format_bytes(needed)}, but its "
            f"devices have {format_bytes(there)} of memory ({where}); start it on a machine with "
            f"enough GPUs{plan_it}"
        )


def _vocab_size_of_data(config: RunConfig, source: RowSource) -> int:
    """Returns the vocabulary size of a run from its opened data.

    Raises:
      ValueError: neither the data nor the settings have it.
    """
    vocab_size = source.vocab_size
    if vocab_size is None and config.model.sizes_file is not None:
        vocab_size = vocab_size_of(config)
    if vocab_size is None:
        raise ValueError(
            f"{source.describe()}: the vocabulary size (number of different tokens) is not known; "
            "set model.vocab_size to that number"
        )
    return vocab_size


def make_folder(folder: Path) -> None:
    """Creates the run folder; does nothing in processes other than 0."""
    if jax.process_index() != 0:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot create the run folder '{folder}' ({error.strerror}); choose another folder "
            "with run_dir=",
        ) from None


def _pretrained_reasons(config: RunConfig, model: ModelLike) -> list[str]:
    """Returns log lines about pretrained weights, if the run starts from pretrained weights."""
    if not isinstance(model, Pretrained):
        return []
    spec = tokenizer_spec(config)
    if spec == config.data.tokenizer == DataConfig.tokenizer:
        known = [f"data.tokenizer: {spec}, because the folder has no {TOKENIZER_FILE}"]
    else:
        known = [] if spec == config.data.tokenizer else [f"data.tokenizer: that of {spec}"]
    return [model.describe(), *known]


def tokenizer_spec(config: RunConfig) -> str:
    """Returns `data.tokenizer`, or if that is the default, a pretrained folder with a tokenizer;
    for adapters without one, the folder of their base model."""
    folder = config.model.sizes_file
    if folder is None or config.data.tokenizer != DataConfig.tokenizer:
        return config.data.tokenizer
    path = user_path(folder)
    path = path.parent if path.is_file() else path
    if not (path / TOKENIZER_FILE).is_file() and has_adapters(path):
        path = base_folder(read_settings(path), None)
    return str(path) if (path / TOKENIZER_FILE).is_file() else config.data.tokenizer


def _model_of(config: ModelConfig, vocab_size: int) -> Any:
    """Returns the model that a run trains: a model factory, or pretrained weights.

    Raises:
      ValueError: the data have more tokens than the model's embedding has rows, the model has a
        head for a task, or the pretrained folder cannot be used.
    """
    if config.sizes_file is None:
        return build_model(config, vocab_size)
    if config.pretrained is None:
        sizes = config_from_hugging_face(config.sizes_file)
        _check_no_task(config, sizes)
        sizes = dataclasses.replace(sizes, **_changes(config, sizes))
        model, lora = factory_of(sizes), config.lora
        model = add_lora(model, lora) if lora.rank else model
    else:
        pretrained = from_hugging_face(config.pretrained)
        _check_no_task(config, pretrained.config)
        pretrained = pretrained.with_changes(**_changes(config, pretrained.config))
        sizes = pretrained.config
        model = pretrained.with_lora(config.lora) if config.lora.rank else pretrained
    if vocab_size > sizes.vocab_size:
        raise ValueError(
            f"the data have {vocab_size} different tokens, but {config.sizes_file} has rows for "
            f"{sizes.vocab_size}; set data.tokenizer to the folder's tokenizer.json"
        )
    return model


def _check_no_task(config: ModelConfig, sizes: object) -> None:
    """Raises a ValueError if the model of a run file has a head for a task."""
    if getattr(sizes, "task", None) is not None:
        raise ValueError(
            f"{config.sizes_file} has a head for {sizes.task.kind}, which needs batches with "
            "labels, but a run file trains on text; train it in Python: "
            "zerojax.train(zerojax.from_hugging_face(FOLDER), ...)"
        )


def adapters_freeze(config: ModelConfig, model: ModelLike) -> tuple[str, ...]:
    """Returns patterns of the parameters that a run with adapters freezes; () without adapters.

    Args:
      config: model section of the run.
      model: the run's model, whose adapters may come from a PEFT folder.
    """
    return model.freeze if isinstance(model, Pretrained) else config.lora.freeze


def _changes(config: ModelConfig, sizes: Any) -> dict[str, Any]:
    """Returns {field: value} of the model settings of a run that override a Hugging Face config."""
    fields = {field.name for field in dataclasses.fields(sizes)}
    may_change = ("dropout", "remat", "loss_chunk", "mlp_chunk", "matmul_dtype", "bit_schedule")
    may_change = (*may_change, "attention")
    changes = {name: getattr(config, name) for name in may_change if name in fields}
    return {**changes, "attention_layout": config.attention_layout.layout}


def _elastic_reasons(config: RunConfig) -> list[str]:
    """Returns a log line about the batch size of an elastic run; none for other runs."""
    if not config.elasticity.enabled:
        return []
    counts = config.elasticity.choose_batch(config.mesh.devices_per_shard).device_counts
    return [
        f"elasticity: batch {config.global_batch_size} in {config.num_microbatches} microbatches "
        f"on {jax.device_count()} devices; valid on {len(counts)} numbers of devices from "
        f"{counts[0]} to {counts[-1]} (list: `zerojax elastic`)"
    ]


def _why_other_mesh(asked: MeshConfig, mesh: MeshConfig) -> list[str]:
    """Returns log lines if an elastic run uses fewer expert shards or no secondary shards.

    An elastic run does so if the available devices cannot be divided as the settings require.
    """
    lines = []
    if mesh.wire.secondary != asked.wire.secondary:
        lines.append(
            f"elasticity: wire.secondary=false, since {jax.device_count()} devices are not "
            f"several nodes of {asked.node}"
        )
    if mesh.expert == asked.expert:
        return lines
    return [
        *lines,
        f"elasticity: expert={mesh.expert} instead of {asked.expert}, which does not divide the "
        f"part of {jax.device_count()} devices that the other axes leave; the value used is the "
        "largest divisor that does",
    ]


def _inputs_of(
    config: RunConfig, batch: Batch, vocab_size: int, platform: str | None
) -> PlanInputs:
    """Returns the `PlanInputs` of a run file.

    Args:
      config: settings of the run file.
      batch: a global batch, as `ShapeDtypeStruct`s.
      vocab_size: vocabulary size of the data.
      platform: JAX platform of the devices; None if the devices are not on this machine.
    """
    precision, why_precision = _precision(config, platform)
    model = _model_of(config.model, vocab_size)
    return PlanInputs(
        model=model,
        example_batch=batch,
        optimizer=config.optimizer,
        precision=precision,
        num_microbatches=config.num_microbatches,
        freeze=(*config.freeze, *adapters_freeze(config.model, model)),
        steps=config.steps,
        features=Features.found_in(config),
        layer_norms=config.log.per_layer,
        reasons=tuple(why_precision),
    )


def _precision(config: RunConfig, platform: str | None) -> tuple[Precision, list[str]]:
    """Returns (dtypes of a run, reasons for dtypes that its file does not set)."""
    name, reasons = config.precision, []
    if name is None:
        name, why = default_precision(platform)
        reasons.append(why)
    scaled = "fp16" in (name, config.reduce_dtype)
    precision = as_precision(
        name,
        reduce_dtype=config.reduce_dtype,
        accumulate_dtype=config.accumulate_dtype,
        param_dtype=config.param_dtype,
        moments_dtype=config.moments_dtype,
        freeze_dtype=config.freeze_dtype,
        loss_scale=config.loss_scale if scaled else None,
    )
    return precision, reasons


def plan_from_config(
    config: RunConfig, num_devices: int, *, gpu: Gpu | None = None, is_here: bool = False
) -> Plan:
    """Returns the plan of `run_from_config` for `num_devices` devices, which may be absent.

    Reads only the headers of data files. A batch has `global_batch_size` rows of `seq_len` tokens
    and targets; for chats also weights, segments and positions.

    Args:
      config: settings of the run file; if `precision` is not set, the default of GPUs is used, with
        `is_here` that of JAX's devices.
      num_devices: number of devices.
      gpu: kind of GPU to plan for; None: not specified. Ignored with `is_here`.
      is_here: True: plan for the devices that JAX has on this machine.

    Raises:
      ValueError: sizes do not fit together, or only the data have the vocabulary size.
    """
    config = config.on_devices(num_devices)
    mesh: Any = meshes.make_mesh(config.mesh) if is_here else None
    mesh = mesh or meshes.make_abstract_mesh(config.mesh, num_devices, gpu=gpu)
    _check_pieces(config, meshes.num_data_shards(mesh))
    shape = config.global_batch_size, config.data.seq_len
    names = array_names(config.data.mixture or config.data.path, pack=config.data.pack)
    batch = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if name == "weights" else jnp.int32)
        for name in names
    }
    platform = jax.devices()[0].platform if is_here else None
    inputs = _inputs_of(config, batch, vocab_size_of(config), platform)
    card = gpu_of_device(jax.devices()[0].device_kind) if is_here else gpu
    return plan_elsewhere(inputs, config.mesh, mesh, gpu=card)


def _check_pieces(config: RunConfig, shards: int) -> None:
    """Raises ValueError if the batch is not divisible by data shards times microbatches."""
    why = BatchDivision(shards, config.num_microbatches or 1).why_not(
        config.global_batch_size, "global_batch_size"
    )
    if why is not None:
        raise ValueError(f"global_batch_size={config.global_batch_size} {why}")


def vocab_size_of(config: RunConfig) -> int:
    """Returns the vocabulary size of a run from its settings or the header of a data file.

    A tokenizer "bpe:SIZE" counts as SIZE, although a small corpus may give fewer merges.

    Raises:
      ValueError: the data would have to be read to find the vocabulary size.
      FileNotFoundError: the tokenizer file does not exist.
    """
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    if config.model.pretrained is not None:
        return from_hugging_face(config.model.pretrained).config.vocab_size
    if config.model.config is not None:
        return config_from_hugging_face(config.model.config).vocab_size
    if config.data.mixture:
        return max(_vocab_size_of_path(config, part.path) for part in config.data.mixture)
    return _vocab_size_of_path(config, config.data.path)


def _vocab_size_of_path(config: RunConfig, path: str | None) -> int:
    """Returns the vocabulary size of one dataset; path None means the text inside the package."""
    spec = config.data.tokenizer
    file = None if path is None else user_path(path)
    size = None
    if file is not None and is_text_set(file):
        size = read_text_sidecar(file).get("vocab_size")
    elif file is not None and file.exists() and is_token_path(file):  # has a tokenizer of its own
        parts = [part for part in open_tokens([file]) if part is not None]
        size = parts[0].vocab_size if parts else None
    elif bpe_size(spec) is not None:
        size = bpe_size(spec)
    elif spec != "bytes" or file is None or file.exists():
        size = as_tokenizer(spec).vocab_size
    if size is None:
        known = (
            "does not say"
            if file is not None and file.exists()
            else "does not exist, so it does not say"
        )
        raise ValueError(
            f"data.path={path} {known} how many different tokens there are (the vocabulary size); "
            "set model.vocab_size to that number"
        )
    return size
