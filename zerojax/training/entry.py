"""Defines `zerojax.train`: normalises its arguments, plans, opens the run and trains."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from zerojax import models, tracing
from zerojax.config import (
    BatchRampConfig,
    CheckpointConfig,
    CurriculumConfig,
    LayerDropConfig,
    LogConfig,
    MeshConfig,
    OptimizerConfig,
    PruningConfig,
    WatchConfig,
    as_mesh_config,
    to_dict,
)
from zerojax.config.checks import check_folder, names_keywords
from zerojax.config.features import FEATURES_OF_MODELS, Features
from zerojax.config.loader import user_path
from zerojax.config.tree_types import Batch
from zerojax.data import (
    DatasetSource,
    RowSource,
    TokenSource,
    as_dataset_source,
    as_feed,
    as_source,
    has_no_end,
    is_dataset,
    mixture_parts,
    one_pass,
)
from zerojax.data.tokenizer import TOKENIZER_FILE, Tokenizer
from zerojax.models.losses import NATS_PER_TOKEN, LossWithUnit, next_token_of_call
from zerojax.optim.precision import Precision
from zerojax.placement import device_mesh as meshes
from zerojax.plan.inputs import PlanInputs
from zerojax.plan.make import Plan
from zerojax.runtime.distributed import join_processes
from zerojax.training.auto_settings import AUTO, with_found_settings
from zerojax.training.ds_config_arguments import DsConfigArguments, batch_size_of
from zerojax.training.process_agreement import divide_batches
from zerojax.training.run_lifecycle import fit, open_run
from zerojax.training.run_record import LossKind, RunNotes, TextData
from zerojax.training.run_spec import (
    CHECKPOINT_FOLDER,
    RunSpec,
    absolute,
    absolute_parts,
    external_checkpoints,
    plan_run,
    rows_of_process,
)
from zerojax.training.train_arguments import Arguments, LoopSettings, checked
from zerojax.training.trainer import Callback, Trainer
from zerojax.training.validation import check_validation, in_batches
from zerojax.zoo.hugging_face import Pretrained

DEFAULT_STEPS = 200
DEFAULT_BATCH = 32


_ELSEWHERE = {
    **{
        field.name: "it is a field of the optimizer: "
        f"optimizer=zerojax.OptimizerConfig({field.name}=...)"
        for field in dataclasses.fields(OptimizerConfig)
    },
    **{
        field.name: f"it is a field of the mesh: zerojax.train(model, {{{field.name!r}: ...}}, ...)"
        for field in dataclasses.fields(MeshConfig)
        if field.name not in ("data", "model", "deterministic")
    },
    "lr": "it is a field of the optimizer: optimizer=zerojax.OptimizerConfig(learning_rate=...)",
    "epochs": "the length of a run is steps=...",
    "num_epochs": "the length of a run is steps=...",
    "batch_size": "batches have the rows that you give them; for text: global_batch_size=...",
    "tokenizer": "text is encoded by the tokenizer.json of the model's folder, else by bytes; for "
    "another one: data=zerojax.data.as_source(PATH, tokenizer=..., ...)[0]",
    "gradient_accumulation_steps": "it is num_microbatches=... here",
}
"""Keywords that users may expect in `train` but that belong elsewhere: {name: remedy}."""


@names_keywords(elsewhere=_ELSEWHERE)
def train(
    model: tracing.ModelLike,
    mesh_config: MeshConfig | Mapping[str, Any] | Mesh | str | Path | None = None,
    batches: Any = None,
    *,
    data: Any = None,
    loss: tracing.Loss | None = None,
    optimizer: optax.GradientTransformation | OptimizerConfig | None = None,
    precision: Precision | str | None = None,
    reduce_dtype: str | None = None,
    accumulate_dtype: str | None = None,
    num_microbatches: int | None = None,
    deterministic: Literal["mesh"] | None = None,
    steps: int | None = None,
    global_batch_size: int | None = None,
    seq_len: int | None = None,
    freeze: str | Sequence[str] = (),
    curriculum: CurriculumConfig | None = None,
    batch_ramp: BatchRampConfig | None = None,
    layer_drop: LayerDropConfig | None = None,
    pruning: PruningConfig | None = None,
    checkpoint: CheckpointConfig | str | Path | None = None,
    run_dir: str | Path | None = "auto",
    log: LogConfig | None = None,
    watch: WatchConfig | None = None,
    validation: Any = None,
    eval_every: int | None = None,
    eval_batches: int | None = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Trainer:
    """Trains a model and returns its `Trainer`.

    With two arguments it trains on the text inside the package; every default is reported with its
    reason. If the environment names other processes (Slurm, Open MPI, Kubernetes, torchrun,
    `zerojax launch`), `train` joins them first. A model that already has arrays must be created
    after a call of `zerojax.join_processes()`.

    Args:
      model: an `nnx.Module`, a factory `rngs -> nnx.Module`, a `linen.Module`, or `(init, apply)`.
      mesh_config: mesh options, as one of
        - a `MeshConfig`, or its fields as a dict;
        - a `jax.sharding.Mesh` with an axis `data`;
        - a DeepSpeed configuration: the path of a ds_config.json, its base64, or its content as a
          dict. It also sets optimizer, precision and batch. A keyword sets a value that is "auto"
          there; a keyword that contradicts another value is an error;
        - "auto": on GPUs with a description, a search for the options that fit and cost the least
          time per step, for two minutes at most (`zerojax.search`); elsewhere the defaults. The
          search keeps `num_microbatches`, if given;
        - None: all devices on `data`, zero=1.
        The keys of a dict decide between `MeshConfig` and DeepSpeed, which share no key; a dict
        without a key of either is refused.
      batches: an iterable of batches (trees of arrays, dimension 0 is the global batch; torch CPU
        tensors are accepted), a function `step -> batch`, a `TokenSource`, or a dataset of rows (a
        `datasets.Dataset` or a `torch.utils.data.Dataset` with a length; `global_batch_size` rows
        make a batch, shuffled by `seed`). With several processes, each gives either the global
        batch or only its own rows; the first batches show which, and the run logs it. None: the
        text in `data`.
      data: instead of `batches`: a text file, a folder of text files, token files, a folder of
        chats (`zerojax data prepare --format chat`), or several of these, {path: weight}. Text is
        encoded by the tokenizer.json of a model of `from_hugging_face`, else by bytes.
      loss: `loss(model, batch) -> scalar | (sum, weight)`, called for each piece of a batch: the
        rows of one microbatch on one device. A scalar must be the mean over these rows. For pairs,
        the sums are added and divided once by the total weight, which must not depend on
        parameters. A plain sum over rows is refused where there are several pieces, on whose number
        it would depend, as does a loss that couples rows. A mapping `{name: metric}` may follow,
        with means or pairs `(sum, weight)`: metrics are averaged in the same way and logged. None:
        the model's method `loss(batch)`; for text, next-token cross-entropy of `model(tokens)`.
      optimizer: any optax transformation, or an `OptimizerConfig`. None: `OptimizerConfig()`, which
        is AdamW with clipping and decay on matrices.
      precision: "bf16", "fp32" or a `Precision`. None: bf16, on CPU fp32.
      reduce_dtype, accumulate_dtype: "bf16" or "fp32", see `zerojax.optim.precision.as_precision`.
      num_microbatches: number of pieces that each device's rows are split into so that activations
        fit; None: see `make_plan`.
      deterministic: "mesh": bit-identical results on any number of devices that divides
        `MeshConfig.virtual_shards` (8). None: as `mesh_config` says.
      steps: batches of the whole run, including those before a resume; a list or another
        re-iterable is repeated as often as needed. None: each batch once; 200 for text and for a
        function of the step.
      global_batch_size: rows of a batch of text data, or of a dataset of rows. Batches of your own
        must have so many rows.
      seq_len: number of tokens of a row of text data; None: the model's `max_seq_len`, else 128.
      freeze: regular expressions; parameters whose names match are not trained.
      curriculum: shorter rows in early steps, see `CurriculumConfig`; evaluations have whole rows.
      batch_ramp: fewer rows in early steps, see `BatchRampConfig`; `steps` is then required.
      layer_drop: steps that leave out layers, see `LayerDropConfig`; evaluations have all layers.
      pruning: weights that become 0, see `PruningConfig`.
      checkpoint: folder of the run, which holds its checkpoints and resumes from them; or a
        `CheckpointConfig`, whose `path` is the folder of the checkpoints themselves, by default
        `checkpoints` in `run_dir`.
      run_dir: folder of metrics, plan and events. "auto": the checkpoint's folder, or
        runs/<date-time>. None: nothing is written.
      log: how often metrics are reported, and where they are written.
      watch: how long the run may make no progress before it is ended.
      validation: data to evaluate on: batches as a list or an iterable, one batch, a function
        `number -> batch`, a dataset of rows, or a `TokenSource`; text has its own validation part.
        The first batch is evaluated before the first step.
      eval_every: steps between evaluations; None: at the end.
      eval_batches: maximum number of batches per evaluation of a dataset, a text or a function.
        None: all rows of a dataset, 8 batches of a text or a function. A list is evaluated whole.
      callbacks: called with `(trainer, metrics)` at every report; one that returns True ends the
        run, and `train` returns. `EarlyStopping` and `KeepBest` are available.
      seed: seed of initialisation, dropout and shuffling.

    Raises:
      ValueError, TypeError: bad input, with value, limit and remedy, before device memory is
        allocated.
      Interrupted: Ctrl-C or SIGTERM, after saving.
    """
    arguments = Arguments.of_call(locals())  # before any other name is set
    if mesh_config == AUTO:
        arguments = dataclasses.replace(arguments, mesh_config=None)
    join_processes()
    spec = spec_of(arguments)
    # The search traces the model, so it needs the resolved run. Until here, its mesh is the
    # default.
    if mesh_config == AUTO:
        spec = with_found_settings(spec)
    is_given = arguments.batches is not None or arguments.data is not None
    with _saying_where_batches_come_from(is_given=is_given):
        plan = plan_run(spec)
    return fit(open_run(spec, plan))


def spec_of(arguments: Arguments, mesh: Mesh | AbstractMesh | None = None) -> RunSpec:
    """Returns the resolved description of a run from the arguments of `train`.

    Args:
      arguments: arguments of `train`, unchecked.
      mesh: mesh of absent devices, for a plan; None: a mesh of JAX's devices is made.

    Raises:
      ValueError, TypeError: an argument is invalid, or arguments contradict each other.
    """
    arguments = dataclasses.replace(arguments, model=models.as_model(arguments.model))
    arguments = _with_dataset(checked(arguments))
    default_steps, why_steps = None, ""
    if arguments.steps is None:
        batches, default_steps, why_steps = _default_steps(arguments.batches)
        arguments = dataclasses.replace(arguments, batches=batches)
    num_devices = jax.device_count() if mesh is None else mesh.size
    ds_config = DsConfigArguments.of(
        arguments, default_steps=default_steps, num_devices=num_devices
    )
    if ds_config is not None:
        arguments = ds_config.fill(arguments)
    if mesh is None:
        mesh = _as_mesh(arguments.mesh_config)
    loss, loss_kind = _loss(
        arguments.model, arguments.loss, is_text=arguments.batches is None, ds_config=ds_config
    )
    text, tokenizer = None, None
    if arguments.batches is None:
        unit = _rows_that_divide(mesh, arguments)
        arguments, text, tokenizer = _with_text(arguments, unit)
    elif arguments.data is not None:
        raise ValueError("both batches and data were passed; pass only one of them")
    check_validation(arguments.validation)
    feed = as_feed(arguments.batches, rows=rows_of_process(arguments.batches, mesh))
    example, why_rows = divide_batches(feed, mesh)
    # With a ds_config, `with_rows` below compares the rows with its batch sizes.
    if ds_config is None:
        _check_batch_size(arguments.global_batch_size, example)
    about = [arguments.batches.describe()] if isinstance(arguments.batches, DatasetSource) else []
    arguments = dataclasses.replace(arguments, reasons=(*arguments.reasons, *about, *why_rows))
    rows = next((leaf.shape[0] for leaf in jax.tree.leaves(example) if leaf.shape), None)
    if ds_config is not None:
        arguments = ds_config.with_rows(arguments, rows)
    arguments = _with_default_steps(arguments, default_steps, why_steps)
    steps = arguments.steps
    checkpoint = _as_checkpoint(arguments.checkpoint)
    folder = _run_folder(arguments.run_dir, checkpoint)
    if checkpoint is not None and checkpoint.path is None and folder is not None:
        checkpoint = dataclasses.replace(checkpoint, path=str(folder / CHECKPOINT_FOLDER))
    log, mesh_config = arguments.log or LogConfig(), arguments.mesh_config
    exact, batches = arguments.deterministic, arguments.batches
    return RunSpec(
        inputs=PlanInputs(
            model=arguments.model,
            example_batch=example,
            loss=loss,
            optimizer=arguments.optimizer,
            precision=arguments.precision,
            reduce_dtype=arguments.reduce_dtype,
            accumulate_dtype=arguments.accumulate_dtype,
            num_microbatches=arguments.num_microbatches,
            freeze=arguments.freeze,
            steps=steps,
            features=arguments.features,
        ),
        mesh=mesh_config if isinstance(mesh_config, Mesh) else as_mesh_config(mesh_config),
        mesh_options={} if exact is None else {"deterministic": exact},
        feed=feed,
        validation=in_batches(arguments.validation, rows or 1),
        seed=arguments.seed,
        loop=_loop_settings(arguments, log, checkpoint),
        folder=folder,
        offload_folder=folder if folder is not None else _beside_checkpoints(checkpoint),
        log=log,
        watch=arguments.watch,
        checkpoint=checkpoint,
        settings_of=functools.partial(_settings_in_folder, arguments.seed, steps),
        reasons=arguments.reasons,
        notes=RunNotes(
            loss=loss_kind,
            data=text,
            eval_batches=arguments.eval_batches,
            checkpoints=external_checkpoints(checkpoint.path if checkpoint else None, folder),
            tokenizer=tokenizer,
            template=batches.template if isinstance(batches, RowSource) else None,
        ),
    )


def _settings_in_folder(seed: int, steps: int | None, plan: Plan) -> dict[str, Any]:
    of_model = Features.found_in(models.bound_attribute(plan.model, "config"), FEATURES_OF_MODELS)
    return {
        "seed": seed,
        "steps": steps,
        "zero": plan.zero,
        "mesh": to_dict(plan.settings),
        **plan.inputs.features.as_dict(),
        **of_model.as_dict(),
    }


def _loop_settings(
    arguments: Arguments, log: LogConfig, checkpoint: CheckpointConfig | None
) -> LoopSettings:
    return LoopSettings(
        log_every=log.report_every,
        eval_every=arguments.eval_every,
        eval_batches=arguments.eval_batches,
        save_every=checkpoint.every if checkpoint else 500,
        save_on_exit=checkpoint.save_on_exit if checkpoint else True,
        callbacks=arguments.callbacks,
    )


def _rows_that_divide(mesh: Mesh | AbstractMesh, arguments: Arguments) -> int:
    """Returns the number that the rows of a global batch must be a multiple of."""
    given = arguments.mesh_config
    settings = MeshConfig() if isinstance(given, Mesh) else as_mesh_config(given)
    if arguments.deterministic or settings.deterministic:
        return settings.virtual_shards
    num_microbatches = arguments.num_microbatches or mesh.shape[meshes.STAGE]
    return meshes.num_data_shards(mesh) * num_microbatches


def _as_mesh(mesh_config: Any) -> Mesh:
    if isinstance(mesh_config, Mesh):
        return meshes.normalise_mesh(mesh_config)
    return meshes.make_mesh(as_mesh_config(mesh_config))


def tokenizer_of_model(model: tracing.Model, data: Any) -> str:
    """Returns the folder of the tokenizer.json of pretrained weights; "bytes" if there is none.

    A source has a tokenizer already.
    """
    if not isinstance(model, Pretrained) or isinstance(data, RowSource):
        return "bytes"
    folders = [model.adapter_folder, model.folder.path]
    return next((str(x) for x in folders if x and (x / TOKENIZER_FILE).is_file()), "bytes")


def _with_text(
    arguments: Arguments, unit: int
) -> tuple[Arguments, TextData | None, Tokenizer | None]:
    """Returns (arguments with text batches, description for the record, tokenizer).

    The description is None for text given as an array or a source.

    Args:
      unit: the rows of the global batch must be a multiple of this.

    Raises:
      ValueError: the model has a head for a task, which needs labels.
    """
    data, validation = arguments.data, arguments.validation
    config = models.bound_attribute(arguments.model, "config")
    if arguments.loss is None and (task := getattr(config, "task", None)) is not None:
        what = "no batches were passed" if data is None else f"data={str(data)!r} is text"
        raise ValueError(
            f"{what}, but the model has a head for {task.kind}, which needs batches with tokens "
            "and labels; pass them: zerojax.train(model, mesh_config, batches)"
        )
    seq_len = arguments.seq_len or getattr(config, "max_seq_len", None) or 128
    # Rounded up, so that shards and microbatches divide the default evenly.
    size = arguments.global_batch_size or -(-DEFAULT_BATCH // unit) * unit
    spec = tokenizer_of_model(arguments.model, data)
    batches, rest, tokenizer = as_source(
        data,
        tokenizer=spec,
        seq_len=seq_len,
        global_batch_size=size,
        seed=arguments.seed,
        vocab_size=getattr(config, "vocab_size", None),
    )
    origin = "the text inside the package" if data is None else str(data)
    if not isinstance(batches, TokenSource):
        origin = batches.describe()
    kind = "" if tokenizer is None else f" of {tokenizer!r}" + f" from {spec}" * (spec != "bytes")
    reason = f"data: {origin}, batches of {size} x {seq_len} tokens{kind}"
    text, parts = None, mixture_parts(data)
    if parts:
        text = TextData(mixture=absolute_parts(parts), seq_len=seq_len)
    elif data is None or isinstance(data, str | Path):
        text = TextData(path=absolute(data), seq_len=seq_len)
    with_text = dataclasses.replace(
        arguments,
        batches=batches,
        validation=rest if validation is None else validation,
        reasons=(*arguments.reasons, reason),
    )
    return with_text, text, tokenizer


@contextlib.contextmanager
def _saying_where_batches_come_from(*, is_given: bool) -> Iterator[None]:
    """Explains planning errors that occur because no batches were passed and the default text was
    used.

    Raises:
      ValueError: no batches were given, and the model cannot be traced with that text.
    """
    try:
        yield
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
        if is_given or where.partition(".")[0] == "zerojax":  # zerojax's own errors explain it
            raise
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(
            "no batches were passed, so the model was traced with the text inside the package "
            f"(tokens and targets, int32 [rows, seq]) and failed ({type(error).__name__}: "
            f"{first}); pass batches: zerojax.train(model, mesh_config, batches, loss=...)"
        ) from error


def _loss(
    model: tracing.Model,
    loss: tracing.Loss | None,
    *,
    is_text: bool,
    ds_config: DsConfigArguments | None,
) -> tuple[tracing.Loss | None, LossKind]:
    """Returns (loss to minimise, its kind for the record: "own", "model" or "next_token"). The loss
    is None for the model's own loss method.

    For text and a model without a loss method: next-token cross-entropy of `model(tokens)`.
    """
    kind: LossKind = "own"
    if loss is None:
        target = getattr(model, "template", None) or model.source
        kind = "model" if callable(getattr(target, "loss", None)) or not is_text else "next_token"
        if kind == "next_token":
            loss = LossWithUnit(next_token_of_call, NATS_PER_TOKEN)
    if ds_config is None:
        return loss, kind
    with_layout = ds_config.with_layout(model, loss)
    # The run folder does not record the layout.
    return with_layout, kind if with_layout is loss else "own"


def _with_dataset(arguments: Arguments) -> Arguments:
    """Replaces a dataset of rows in the arguments by a source of batches."""
    batches, size = arguments.batches, arguments.global_batch_size
    if size is None and is_dataset(batches):
        size = batch_size_of(arguments.mesh_config, num_devices=jax.device_count())
    source = as_dataset_source(batches, global_batch_size=size, seed=arguments.seed)
    return dataclasses.replace(arguments, batches=source)


def _check_batch_size(size: int | None, example: Batch) -> None:
    """Raises if batches do not have the number of rows that the user asks for.

    Args:
      size: `global_batch_size`; None: not given.
      example: the global batch.

    Raises:
      ValueError: the first batch has another number of rows.
    """
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(example) if leaf.shape}
    if size is None or not rows or rows == {size}:
        return
    raise ValueError(
        f"global_batch_size={size}, but the first batch has {min(rows)} rows; batches of your own "
        f"keep their size: leave out global_batch_size, or give batches of {size} rows. If the "
        "object holds rows and no batches, pass "
        f"zerojax.data.DatasetSource(dataset=..., global_batch_size={size})"
    )


def _default_steps(batches: Any) -> tuple[Any, int | None, str]:
    """Returns (batches, default steps, reason); steps are None for an iterator: until its end."""
    if isinstance(batches, DatasetSource):
        return batches, math.ceil(batches.steps_per_epoch), "every row of the dataset once"
    if has_no_end(batches):
        return batches, DEFAULT_STEPS, "the default where batches have no end"
    batches, count = one_pass(batches)
    return batches, count, "the batches once; with more steps they are repeated"


def _with_default_steps(arguments: Arguments, steps: int | None, why: str) -> Arguments:
    """Returns the arguments with the default number of steps, if the user has set none.

    Raises:
      ConfigError: with a batch ramp the number of batches is not the number of steps.
    """
    if arguments.steps is not None or steps is None:
        return arguments
    arguments.features.check_steps(None)
    reasons = (*arguments.reasons, f"steps={steps}: {why}")
    return dataclasses.replace(arguments, steps=steps, reasons=reasons)


def _as_checkpoint(checkpoint: CheckpointConfig | str | Path | None) -> CheckpointConfig | None:
    if checkpoint is None or isinstance(checkpoint, CheckpointConfig):
        return checkpoint
    check_folder("checkpoint", str(checkpoint))
    return CheckpointConfig(path=str(user_path(checkpoint) / CHECKPOINT_FOLDER))


def _beside_checkpoints(checkpoint: CheckpointConfig | None) -> Path | None:
    return None if checkpoint is None or checkpoint.path is None else Path(checkpoint.path).parent


def _run_folder(run_dir: str | Path | None, checkpoint: CheckpointConfig | None) -> Path | None:
    if run_dir is None:
        return None
    if run_dir != "auto":
        check_folder("run_dir", str(run_dir))
        return user_path(run_dir)
    beside = _beside_checkpoints(checkpoint)
    if beside is not None:
        return beside
    return Path("runs") / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
