"""`zerojax.train`: normalises its arguments, plans, opens the run and trains."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from zerojax import models, optim
from zerojax.config import (
    CheckpointConfig,
    LogConfig,
    MeshConfig,
    OptimizerConfig,
    WatchConfig,
    as_mesh_config,
    to_dict,
)
from zerojax.config.checks import check_folder, check_kind, check_whole_number
from zerojax.config.keywords import names_keywords
from zerojax.config.recognition import is_deepspeed
from zerojax.data import (
    Feed,
    TokenSource,
    abstract_global,
    as_feed,
    as_source,
    has_no_end,
    one_pass,
)
from zerojax.data.tokenizer import Tokenizer
from zerojax.models.losses import NATS_PER_TOKEN, LossWithUnit, next_token
from zerojax.optim.precision import Precision
from zerojax.plan import mesh as meshes
from zerojax.plan.counts import tokens_per_step
from zerojax.plan.make import make_plan
from zerojax.plan.plan import Plan
from zerojax.runtime.distributed import join_processes
from zerojax.training import deepspeed
from zerojax.training.cadence import Habits
from zerojax.training.run import (
    CHECKPOINT_FOLDER,
    PLANNING,
    RunFiles,
    absolute,
    apart,
    rows_of_process,
    saying_if_slow,
    start_run,
    with_disk_folder,
)
from zerojax.training.run_record import LossKind, Notes, TextData
from zerojax.training.trainer import Callback, Trainer

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
    "gradient_accumulation_steps": "it is num_microbatches=... here",
}
"""Keywords of `train` that belong to something else: {name: what to write}."""


@names_keywords(elsewhere=_ELSEWHERE)
def train(
    model: models.ModelLike,
    mesh_config: MeshConfig | Mapping[str, Any] | Mesh | str | Path | None = None,
    batches: Any = None,
    *,
    data: Any = None,
    loss: models.Loss | None = None,
    optimizer: Any = None,
    precision: Precision | str | None = None,
    reduce_dtype: str | None = None,
    accumulate_dtype: str | None = None,
    num_microbatches: int | None = None,
    deterministic: Literal["mesh"] | None = None,
    steps: int | None = None,
    global_batch_size: int | None = None,
    seq_len: int | None = None,
    freeze: str | Sequence[str] = (),
    checkpoint: CheckpointConfig | str | Path | None = None,
    run_dir: str | Path | None = "auto",
    log: LogConfig | None = None,
    watch: WatchConfig | None = None,
    validation: Any = None,
    eval_every: int | None = None,
    eval_batches: int = 8,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Trainer:
    """Trains a model and returns its `Trainer`.

    With two arguments it trains on the text inside the package; every default is reported with its
    reason. Where the environment names other processes (Slurm, Open MPI, Kubernetes, torchrun,
    `zerojax launch`) it joins them first; a model that is made before, with arrays, needs
    `zerojax.join_processes()` before that.

    Args:
      model: an `nnx.Module`, a factory `rngs -> nnx.Module`, a `linen.Module`, or `(init, apply)`.
      mesh_config: a `MeshConfig`, its fields as a dict, or a `jax.sharding.Mesh` with an axis
        `data`; or a DeepSpeed configuration: the path of a ds_config.json (or its base64), or its
        content as a dict, which also says optimizer, precision and batch. A keyword that it says
        otherwise is an error, one that it has as "auto" fills it. A dict is one or the other by its
        keys, of which none is in both. None: all devices on `data`, zero=1.
      batches: an iterable of batches (trees of arrays, dimension 0 the global batch), a function
        `step -> batch`, or a `TokenSource`. None: the text in `data`.
      data: instead of `batches`: a text file, a folder of text files, or token files.
      loss: `loss(model, batch) -> scalar | (sum, weight)`, called for each piece of a batch: the
        rows of one microbatch on one device. A scalar has to be the mean over these rows; of pairs
        the sums are added up and divided once by all weights, which no parameter may change. What
        is neither, as a plain `jnp.sum`, or couples rows, depends on the number of pieces. A
        mapping `{name: metric}` may follow either, of means or pairs `(sum, weight)`: they are
        averaged likewise and logged. None: the model's method `loss(batch)`; for text, next-token
        cross-entropy of `model(tokens)`.
      optimizer: any optax transformation, or an `OptimizerConfig`. None: AdamW.
      precision: "bf16", "fp32" or a `Precision`. None: bf16, on CPU fp32.
      reduce_dtype, accumulate_dtype: "bf16" or "fp32", see `zerojax.optim.precision.as_precision`.
      num_microbatches: pieces each device's rows are cut into so that activations fit; None: see
        `make_plan`.
      deterministic: "mesh": the same bits on any number of devices that divides
        `MeshConfig.virtual_shards` (8). None: what `mesh_config` says.
      steps: batches of the whole run, those before a resume included; a list, or what can be
        iterated anew, is repeated as often as it takes. None: each batch once; for text and for a
        function of the step 200.
      global_batch_size, seq_len: of text data.
      freeze: regular expressions on parameter names that stay as they are.
      checkpoint: a folder: saves there, and resumes from there if it holds a checkpoint.
      run_dir: folder of metrics, plan and events. "auto": the checkpoint's folder, or
        runs/<date-time>. None: nothing is written.
      log: how often and where metrics go.
      watch: how long the run may stand still before it is ended.
      validation: batches or a `TokenSource` to evaluate on; text brings its own.
      eval_every: steps between evaluations; None: at the end.
      eval_batches: batches per evaluation.
      callbacks: called with `(trainer, metrics)` at every report; one that returns True ends the
        run, and its trainer is returned. `EarlyStopping` and `KeepBest` are ready ones.
      seed: for initialisation, dropout and shuffling.

    Raises:
      ValueError, TypeError: bad input, with value, limit and remedy, before device memory is taken.
      Interrupted: Ctrl-C or SIGTERM, after saving.
    """
    join_processes()
    internal = models.as_model(model)
    for name, number, limit in (
        ("steps", steps, 0),
        ("num_microbatches", num_microbatches, 1),
        ("global_batch_size", global_batch_size, 1),
        ("seq_len", seq_len, 1),
        ("eval_every", eval_every, 1),
        ("eval_batches", eval_batches, 1),
    ):
        check_whole_number(name, number, limit)
    check_kind("loss", loss, Callable, "a function loss(model, batch) -> scalar | (sum, weight)")
    callbacks = _as_callbacks(callbacks)
    check_kind("seed", seed, numbers.Integral, "a whole number")
    check_kind("log", log, LogConfig, "a zerojax.config.LogConfig")
    check_kind("watch", watch, WatchConfig, "a zerojax.config.WatchConfig")
    kinds = CheckpointConfig, str, os.PathLike
    check_kind("checkpoint", checkpoint, kinds, "a folder, or a zerojax.config.CheckpointConfig")
    reasons: list[str] = []
    default_steps, why_steps = None, ""
    if steps is None:
        batches, default_steps, why_steps = _default_steps(batches)
    ported = None
    source = _deepspeed_source(mesh_config)
    if source is not None:
        optim.check_optimizer(optimizer)
        ported = deepspeed.Ported(
            source,
            jax.device_count(),
            deepspeed.Given(
                optimizer=optimizer,
                precision=precision,
                reduce_dtype=reduce_dtype,
                accumulate_dtype=accumulate_dtype,
                num_microbatches=num_microbatches,
                global_batch_size=global_batch_size,
                steps=steps,
                default_steps=default_steps,
                log=log,
                hidden_size=models.width_of(internal),
            ),
        )
        says = ported.translate()
        mesh_config, num_microbatches = says.mesh, says.num_microbatches
        global_batch_size = says.train_batch_size
        if steps is None and says.total_steps is not None:
            steps = says.total_steps
            reasons.append(f"steps={steps}: the schedule of {says.source} is made for so many")
        if run_dir == "auto" and checkpoint is None:
            run_dir = says.run_dir or run_dir
    mesh = _as_mesh(mesh_config)
    exact: dict[str, Any] = {} if deterministic is None else {"deterministic": deterministic}
    unit = _rows_that_divide(mesh, mesh_config, num_microbatches, deterministic)
    loss, loss_kind = _loss(internal, loss, is_text=batches is None)
    text_data, tokenizer = None, None
    if batches is None:
        text = _TextDefaults(internal, data, global_batch_size, seq_len, unit, seed)
        batches, validation_source, tokenizer, text_data, reason = text.sources()
        validation = validation_source if validation is None else validation
        reasons.append(reason)
    elif data is not None:
        raise ValueError("both batches and data were given; pass one of them")
    check_validation(validation)
    feed = as_feed(batches, rows=rows_of_process(batches, mesh))
    example = _first_batch(feed, mesh)
    if ported is not None:
        rows = [leaf.shape[0] for leaf in jax.tree.leaves(example) if leaf.shape]
        says = ported.with_rows(rows[0] if rows else None)
        deepspeed.warn_of(says, stacklevel=3)
        optimizer, precision, num_microbatches = (
            says.optimizer,
            says.precision,
            says.num_microbatches,
        )
        reduce_dtype = accumulate_dtype = None
        log = says.log
        reasons += [*says.warnings, *says.reasons]
    if steps is None and default_steps is not None:
        steps = default_steps
        reasons.append(f"steps={steps}: {why_steps}")

    checkpoint_config = _as_checkpoint(checkpoint)
    folder = _run_folder(run_dir, checkpoint_config)
    files = folder if folder is not None else _beside_checkpoints(checkpoint_config)

    def replan(mesh_config: Any) -> Plan:
        return make_plan(
            internal,
            with_disk_folder(mesh_config, files),
            example_batch=example,
            loss=loss,
            optimizer=optimizer,
            precision=precision,
            reduce_dtype=reduce_dtype,
            accumulate_dtype=accumulate_dtype,
            num_microbatches=num_microbatches,
            freeze=freeze,
            steps=steps,
            **exact,
        )

    is_given = text_data is None or data is not None
    with _saying_where_batches_come_from(is_given=is_given), saying_if_slow(folder, log, PLANNING):
        plan = replan(
            mesh_config if not isinstance(mesh_config, Mapping) else as_mesh_config(mesh_config)
        )
    if ported is not None:
        deepspeed.check_rules(plan.settings, plan.placement.leaves)
    run = RunFiles(
        folder=folder,
        log=log or LogConfig(),
        watch=watch or WatchConfig(),
        checkpoint=checkpoint_config,
        config={"seed": seed, "steps": steps, "zero": plan.zero, "mesh": to_dict(plan.settings)},
        reasons=tuple(reasons),
        steps=steps,
        tokens_per_step=tokens_per_step(plan),
        notes=Notes(
            loss=loss_kind,
            data=text_data,
            eval_batches=eval_batches,
            checkpoints=apart(checkpoint_config.path if checkpoint_config else None, folder),
            tokenizer=tokenizer,
        ),
    )
    habits = Habits(
        log_every=run.log.every,
        eval_every=eval_every,
        eval_batches=eval_batches,
        save_every=checkpoint_config.every if checkpoint_config else 500,
        save_on_exit=checkpoint_config.save_on_exit if checkpoint_config else True,
        callbacks=callbacks,
    )
    return start_run(run, plan, replan, habits, feed, seed, validation)


def _deepspeed_source(mesh_config: Any) -> deepspeed.Source | None:
    """The second argument of `train` where it is a DeepSpeed configuration: a path, or a dict."""
    if isinstance(mesh_config, Mapping):
        return mesh_config if is_deepspeed(mesh_config) else None
    return mesh_config if isinstance(mesh_config, (str, Path)) else None


def _rows_that_divide(
    mesh: Mesh, mesh_config: Any, num_microbatches: int | None, deterministic: str | None
) -> int:
    """The number of rows of which a global batch has to be a multiple."""
    settings = MeshConfig() if isinstance(mesh_config, Mesh) else as_mesh_config(mesh_config)
    if deterministic or settings.deterministic:
        return settings.virtual_shards
    return meshes.num_data_shards(mesh) * (num_microbatches or mesh.shape[meshes.STAGE])


def _as_mesh(mesh_config: Any) -> Mesh:
    if isinstance(mesh_config, Mesh):
        return meshes.normalise_mesh(mesh_config)
    return meshes.make_mesh(as_mesh_config(mesh_config))


@dataclasses.dataclass(frozen=True)
class _TextDefaults:
    """Sizes of text batches that the user left open."""

    model: models.Model
    data: Any
    global_batch_size: int | None
    seq_len: int | None
    unit: int

    seed: int

    def sources(
        self,
    ) -> tuple[TokenSource, TokenSource | None, Tokenizer | None, TextData | None, str]:
        """(to train on, to validate on, the tokenizer, what a record says of the text, a reason).

        A record says nothing of text that came as an array or a source.
        """
        config = models.bound_attribute(self.model, "config")
        vocab = getattr(config, "vocab_size", None)
        seq_len = self.seq_len or getattr(config, "max_seq_len", None) or 128
        size = self.global_batch_size or -(-DEFAULT_BATCH // self.unit) * self.unit
        train_source, validation, tokenizer = as_source(
            self.data,
            seq_len=seq_len,
            global_batch_size=size,
            seed=self.seed,
            vocab_size=vocab,
        )
        origin = "the text inside the package" if self.data is None else str(self.data)
        reason = f"data: {origin}, batches of {size} x {seq_len} tokens"
        known = None
        if self.data is None or isinstance(self.data, str | Path):
            known = TextData(path=absolute(self.data), seq_len=seq_len)
        return train_source, validation, tokenizer, known, reason


@contextlib.contextmanager
def _saying_where_batches_come_from(*, is_given: bool) -> Iterator[None]:
    """Around planning: a model that fails on the text inside the package may want other batches.

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
        if is_given or where.partition(".")[0] == "zerojax":  # which has its own sentence
            raise
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(
            "no batches were given, so that this model got the text inside the package (tokens and "
            f"targets, int32 [rows, seq]), with which it fails ({type(error).__name__}: {first}); "
            "give its own: zerojax.train(model, mesh_config, batches, loss=...)"
        ) from error


def _loss(
    model: models.Model, loss: models.Loss | None, *, is_text: bool
) -> tuple[models.Loss | None, LossKind]:
    """What is minimised, and how a record calls it; None: the model's own loss.

    Of text, for a model without one, next-token cross-entropy of `model(tokens)`.
    """
    if loss is not None:
        return loss, "own"
    target = getattr(model, "template", None) or model.source
    if callable(getattr(target, "loss", None)) or not is_text:
        return None, "model"
    return LossWithUnit(_next_token_loss, NATS_PER_TOKEN), "next_token"


def _next_token_loss(bound: Any, batch: Any) -> Any:
    return next_token(bound(batch["tokens"]), batch["targets"])


def check_validation(validation: Any) -> None:
    """Refuses validation data that can be read only once: every evaluation reads them anew.

    Raises:
      TypeError: an iterator.
    """
    if isinstance(validation, Iterator):
        raise TypeError(
            f"validation is a {type(validation).__name__}, which can be read only once, but every "
            "evaluation reads it anew; give a list of batches or a TokenSource"
        )


def _first_batch(feed: Feed, mesh: Mesh) -> Any:
    """The shapes of the first batch, globally; the batch itself stays in the feed."""
    before = feed.state()
    try:
        batch = next(feed)
    except StopIteration:
        raise ValueError("batches is empty: there is no first batch to plan with") from None
    feed.give_back([(batch, feed.state())], before)
    return abstract_global(batch, mesh)


def _default_steps(batches: Any) -> tuple[Any, int | None, str]:
    """(batches, steps where nothing says how many, why); None: until an iterator ends."""
    if has_no_end(batches):
        return batches, DEFAULT_STEPS, "the default where batches have no end"
    batches, count = one_pass(batches)
    return batches, count, "the batches once; with more steps they are repeated"


def _as_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    check_kind("callbacks", callbacks, Iterable, "a list of functions (trainer, metrics)")
    callbacks = tuple(callbacks)
    for number, callback in enumerate(callbacks):
        check_kind(f"callbacks[{number}]", callback, Callable, "a function (trainer, metrics)")
    return callbacks


def _as_checkpoint(checkpoint: CheckpointConfig | str | Path | None) -> CheckpointConfig | None:
    if checkpoint is None or isinstance(checkpoint, CheckpointConfig):
        return checkpoint
    check_folder("checkpoint", str(checkpoint))
    return CheckpointConfig(path=str(Path(checkpoint) / CHECKPOINT_FOLDER))


def _beside_checkpoints(checkpoint: CheckpointConfig | None) -> Path | None:
    return None if checkpoint is None or checkpoint.path is None else Path(checkpoint.path).parent


def _run_folder(run_dir: Any, checkpoint: CheckpointConfig | None) -> Path | None:
    if run_dir is None:
        return None
    if run_dir != "auto":
        check_folder("run_dir", str(run_dir))
        return Path(run_dir)
    beside = _beside_checkpoints(checkpoint)
    if beside is not None:
        return beside
    return Path("runs") / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
