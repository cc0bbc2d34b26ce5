"""What people bring, made into what the rooms below expect: `train`, and runs described by a file.

Normalises and explains defaults; decides nothing about places, programs or loops.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jax_core
from jax.sharding import Mesh

from zerojax import mesh as meshes
from zerojax import model as models
from zerojax import profile
from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.config import (
    CheckpointConfig,
    LogConfig,
    MeshConfig,
    RunConfig,
    as_mesh_config,
    from_dict,
    to_dict,
)
from zerojax.data import Feed, TokenSource, as_feed, as_source, load_tokenizer, save_tokenizer
from zerojax.losses import next_token
from zerojax.metrics import RunLog
from zerojax.models import build_model
from zerojax.plan import Plan, make_plan
from zerojax.precision import Precision
from zerojax.trainer import Callback, Habits, Trainer

CONFIG_FILE, TOKENIZER_FILE, CHECKPOINT_FOLDER = "config.json", "tokenizer.json", "checkpoints"
DEFAULT_STEPS = 200
DEFAULT_BATCH = 32


def train(
    model: models.ModelLike,
    mesh_config: MeshConfig | Mapping[str, Any] | Mesh | str | None = None,
    batches: Any = None,
    *,
    data: Any = None,
    loss: models.Loss | None = None,
    optimizer: Any = None,
    precision: Precision | str | None = None,
    reduce_dtype: str | None = None,
    accumulate_dtype: str | None = None,
    num_microbatches: int = 1,
    steps: int | None = None,
    global_batch_size: int | None = None,
    seq_len: int | None = None,
    freeze: Sequence[str] = (),
    checkpoint: CheckpointConfig | str | Path | None = None,
    run_dir: str | Path | None = "auto",
    log: LogConfig | None = None,
    validation: Any = None,
    eval_every: int | None = None,
    eval_batches: int = 8,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Trainer:
    """Trains a model and returns its `Trainer`.

    With two arguments it trains on the text inside the package; every default is reported with its reason.

    Args:
      model: an `nnx.Module`, a factory `rngs -> nnx.Module`, a `linen.Module`, or `(init, apply)`.
      mesh_config: a `MeshConfig`, its fields as a dict, or a `jax.sharding.Mesh` with an axis `data`.
        None: all devices on `data`, zero=1.
      batches: an iterable of batches (trees of arrays, dimension 0 the global batch), a function
        `step -> batch`, or a `TokenSource`.
      data: instead of `batches`: a text file, a folder of text files, or token files.
      loss: `loss(model, batch) -> scalar | (sum, weight)`. None: the model's method `loss(batch)`; for
        text, next-token cross-entropy of `model(tokens)`.
      optimizer: any optax transformation, or an `OptimizerConfig`. None: AdamW.
      precision: "bf16", "fp32" or a `Precision`. None: bf16, on CPU fp32.
      reduce_dtype, accumulate_dtype: "bf16" or "fp32", see `zerojax.precision.as_precision`.
      num_microbatches: pieces each device's rows are cut into so that activations fit.
      steps: batches of the whole run, those before a resume included. None: until `batches` end; for text
        and endless batches 200.
      global_batch_size, seq_len: of text data.
      freeze: regular expressions on parameter names that stay as they are.
      checkpoint: a folder: saves there, and resumes from there if it holds a checkpoint.
      run_dir: folder of metrics, plan and events. "auto": the checkpoint's folder, or runs/<date-time>.
        None: nothing is written.
      log: how often and where metrics go.
      validation: batches or a `TokenSource` to evaluate on; text brings its own.
      eval_every: steps between evaluations; None: at the end.
      eval_batches: batches per evaluation.
      callbacks: called with `(trainer, metrics)` at every report.
      seed: of parameters, dropout and the order of text.

    Raises:
      ValueError, TypeError: bad input, with value, limit and remedy, before device memory is taken.
      Interrupted: Ctrl-C or SIGTERM, after saving.
    """
    if isinstance(mesh_config, (str, Path)):
        raise ValueError(
            f"mesh_config={str(mesh_config)!r}: reading ds_config.json is not part of this version; "
            "pass a MeshConfig, such as MeshConfig(zero=2)"
        )
    internal = models.as_model(model)
    mesh = _as_mesh(mesh_config)
    unit = meshes.num_data_shards(mesh) * num_microbatches
    reasons: list[str] = []
    if batches is None:
        text = _TextDefaults(internal, data, global_batch_size, seq_len, unit, seed)
        batches, validation_source, reason = text.sources()
        validation = validation_source if validation is None else validation
        loss = loss or _token_loss(internal)
        reasons.append(reason)
    elif data is not None:
        raise ValueError("both batches and data were given; pass one of them")
    precision, reason = _default_precision(precision, mesh)
    reasons += [reason] if reason else []
    feed = as_feed(batches, rows=_rows_of_process(batches))
    example = _first_batch(feed)
    if steps is None and not _ends(batches):
        steps = DEFAULT_STEPS
        reasons.append(f"steps={steps}: the default where batches have no end")

    def replan(mesh_config: Any) -> Plan:
        return make_plan(
            internal,
            mesh_config,
            example_batch=example,
            loss=loss,
            optimizer=optimizer,
            precision=precision,
            reduce_dtype=reduce_dtype,
            accumulate_dtype=accumulate_dtype,
            num_microbatches=num_microbatches,
            freeze=tuple(freeze),
            steps=steps,
        )

    plan = replan(mesh_config if not isinstance(mesh_config, Mapping) else as_mesh_config(mesh_config))
    checkpoint_config = _as_checkpoint(checkpoint)
    folder = _run_folder(run_dir, checkpoint_config)
    run = _Run(
        folder=folder,
        log=log or LogConfig(),
        checkpoint=checkpoint_config,
        config={"seed": seed, "steps": steps, "zero": plan.zero, "mesh": to_dict(plan.settings)},
        reasons=(*reasons, *plan.reasons),
        steps=steps,
        tokens_per_step=_tokens_per_step(plan),
    )
    habits = Habits(
        log_every=run.log.every,
        eval_every=eval_every,
        eval_batches=eval_batches,
        save_every=checkpoint_config.every if checkpoint_config else 500,
        save_on_exit=checkpoint_config.save_on_exit if checkpoint_config else True,
        callbacks=tuple(callbacks),
    )
    return _start(run, plan, replan, habits, feed, seed, validation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """What a run writes and where."""

    folder: Path | None
    log: LogConfig
    checkpoint: CheckpointConfig | None
    config: dict[str, Any]
    reasons: Sequence[str]
    steps: int | None
    tokens_per_step: int | None


def _start(
    run: _Run,
    plan: Plan,
    replan: Callable[[Any], Plan],
    habits: Habits,
    feed: Feed,
    seed: int,
    validation: Any,
) -> Trainer:
    """Opens log and checkpoints, resumes if there is something to resume from, and trains."""
    checkpointer = _open_checkpoints(run, plan)
    log = _open_log(run, plan)
    try:
        latest = checkpointer.latest_step() if checkpointer is not None else None
        if log is not None:
            log.start(
                plan.describe(),
                run.reasons,
                plan.table(),
                plan.as_dict(),
                run.config,
                start_step=latest or 0,
            )
        trainer = Trainer(
            plan,
            replan=replan,
            seed=seed,
            habits=habits,
            log=log,
            checkpointer=checkpointer,
            config=run.config,
            validation=validation,
        )
        if latest is not None:
            trainer.restore()
        trainer.fit(feed, run.steps)
    except BaseException:
        _close_quietly(checkpointer, log)
        raise
    if checkpointer is not None:
        checkpointer.wait()
    return trainer


def _close_quietly(checkpointer: Checkpointer | None, log: RunLog | None) -> None:
    """Closes what is open while another error is on its way; that one matters more."""
    if log is not None:
        log.close()
    if checkpointer is not None:
        try:
            checkpointer.close()
        except CheckpointError:
            pass


def _open_checkpoints(run: _Run, plan: Plan) -> Checkpointer | None:
    if run.checkpoint is None or run.checkpoint.path is None:
        return None
    checkpointer = Checkpointer(
        run.checkpoint.path, keep=run.checkpoint.keep, asynchronous=run.checkpoint.asynchronous
    )
    leaves = jax.tree.leaves(plan.abstract_canonical)
    checkpointer.check_writable(sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves))
    return checkpointer


def _open_log(run: _Run, plan: Plan) -> RunLog | None:
    if run.folder is None:
        return None
    return RunLog(
        run.folder,
        run.log,
        total_steps=run.steps or 0,
        tokens_per_step=run.tokens_per_step,
        flops_per_step=flops_per_step(plan),
        num_devices=plan.mesh.size,
        device_kind=profile.device_kind(),
        precision="fp32" if plan.precision.compute_dtype == jnp.float32 else "bf16",
        read_memory=profile.device_memory,
        process_index=jax.process_index(),
    )


def flops_per_step(plan: Plan) -> float:
    """FLOPs of one step over all devices: three times the forward pass, without recomputation."""
    forward = profile.count_flops(jax_core.jaxpr_as_fun(plan.forward), *plan.forward.in_avals)
    return 3.0 * forward * plan.num_microbatches * meshes.num_data_shards(plan.mesh)


# --- defaults ---------------------------------------------------------------------------------------


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

    def sources(self) -> tuple[TokenSource, TokenSource | None, str]:
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
        return train_source, validation, reason


def _token_loss(model: models.Model) -> models.Loss | None:
    """For text: the model's own loss, or next-token cross-entropy of `model(tokens)`."""
    target = getattr(model, "template", None) or model.source
    if callable(getattr(target, "loss", None)):
        return None
    return lambda bound, batch: next_token(bound(batch["tokens"]), batch["targets"])


def _default_precision(precision: Any, mesh: Mesh) -> tuple[Any, str | None]:
    if precision is not None:
        return precision, None
    if mesh.devices.flat[0].platform == "cpu":
        return "fp32", "precision='fp32': CPUs have no fast bf16"
    return "bf16", "precision='bf16': the default on accelerators"


def _rows_of_process(batches: Any) -> tuple[int, int] | None:
    """Rows of a text batch that this process reads; other batches are cut by the user."""
    if not isinstance(batches, TokenSource) or jax.process_count() == 1:
        return None
    share = batches.global_batch_size // jax.process_count()
    return jax.process_index() * share, (jax.process_index() + 1) * share


def _first_batch(feed: Feed) -> Any:
    """The shapes of the first batch, globally; the batch itself stays in the feed."""
    before = feed.state()
    try:
        batch = next(feed)
    except StopIteration:
        raise ValueError("batches is empty: there is no first batch to plan with") from None
    feed.give_back([(batch, feed.state())], before)
    count = jax.process_count()

    def widen(leaf: Any) -> jax.ShapeDtypeStruct:
        struct = jax.eval_shape(lambda: jnp.asarray(leaf)) if not hasattr(leaf, "shape") else leaf
        dtype = jax.dtypes.canonicalize_dtype(struct.dtype)
        shape = (struct.shape[0] * count, *struct.shape[1:]) if struct.shape else ()
        return jax.ShapeDtypeStruct(shape, dtype)

    return jax.tree.map(widen, batch)


def _ends(batches: Any) -> bool:
    """Whether batches run out by themselves: an iterator does, everything else starts again."""
    return isinstance(batches, Iterable) and not isinstance(batches, (TokenSource, Sequence)) and (
        iter(batches) is batches
    )


def _tokens_per_step(plan: Plan) -> int | None:
    tokens = plan.abstract_batch.get("tokens") if isinstance(plan.abstract_batch, Mapping) else None
    return None if tokens is None else math.prod(tokens.shape)


def _as_checkpoint(checkpoint: CheckpointConfig | str | Path | None) -> CheckpointConfig | None:
    if checkpoint is None or isinstance(checkpoint, CheckpointConfig):
        return checkpoint
    return CheckpointConfig(path=str(Path(checkpoint) / CHECKPOINT_FOLDER))


def _run_folder(run_dir: Any, checkpoint: CheckpointConfig | None) -> Path | None:
    if run_dir is None:
        return None
    if run_dir != "auto":
        return Path(run_dir)
    if checkpoint is not None and checkpoint.path is not None:
        return Path(checkpoint.path).parent
    return Path("runs") / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")


# --- runs described by a file --------------------------------------------------------------------------


def run_from_config(config: RunConfig) -> Trainer:
    """Trains as a run file says, and leaves everything in `config.run_dir`.

    Raises:
      ValueError, TypeError: bad input. CheckpointError: a checkpoint of another model is in the way.
    """
    folder = Path(config.run_dir)
    train_source, validation, tokenizer = as_source(
        config.data.path,
        tokenizer=config.data.tokenizer,
        seq_len=config.data.seq_len,
        global_batch_size=config.global_batch_size,
        seed=config.seed if config.data.shuffle_seed is None else config.data.shuffle_seed,
        validation_fraction=config.data.validation_fraction,
        vocab_size=config.model.vocab_size,
    )
    factory = build_model(config.model, train_source.vocab_size)

    def replan(mesh_config: Any) -> Plan:
        return make_plan(
            factory,
            mesh_config,
            example_batch=train_source.batch(0),
            optimizer=config.optimizer,
            precision=config.precision,
            reduce_dtype=config.reduce_dtype,
            accumulate_dtype=config.accumulate_dtype,
            num_microbatches=config.num_microbatches,
            freeze=config.freeze,
            steps=config.steps,
        )

    plan = replan(config.mesh)
    model_config = dataclasses.replace(config.model, vocab_size=train_source.vocab_size)
    resolved = dataclasses.replace(config, mesh=plan.settings, model=model_config)
    checkpoint = config.checkpoint
    if checkpoint.path is None:
        checkpoint = dataclasses.replace(checkpoint, path=str(folder / CHECKPOINT_FOLDER))
    run = _Run(
        folder=folder,
        log=config.log,
        checkpoint=checkpoint,
        config=to_dict(resolved),
        reasons=(train_source.describe(), *plan.reasons),
        steps=config.steps,
        tokens_per_step=_tokens_per_step(plan),
    )
    habits = Habits(
        log_every=config.log.every,
        eval_every=config.eval_every,
        eval_batches=config.eval_batches,
        save_every=checkpoint.every,
        save_on_exit=checkpoint.save_on_exit,
        resume_hint="run the same command again to resume",
    )
    feed = as_feed(train_source, rows=_rows_of_process(train_source))
    if tokenizer is not None and jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_tokenizer(tokenizer, folder / TOKENIZER_FILE)
    return _start(run, plan, replan, habits, feed, config.seed, validation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A finished or interrupted run, read back on one device.

    Attributes:
      config: what it was told; model: an `nnx.Module` with the trained weights; tokenizer: None for token
      files that name none; step: of the checkpoint; plan_dict: the plan it was saved under.
    """

    config: RunConfig
    model: Any
    tokenizer: Any
    step: int
    plan_dict: dict[str, Any]


def load_run(run_dir: str | Path, step: int | None = None) -> LoadedRun:
    """Reads a run's model from its folder.

    Args:
      run_dir: folder of a `zerojax train` run.
      step: a saved step; None takes the newest.

    Raises:
      FileNotFoundError: no run there. CheckpointError: no such checkpoint.
    """
    folder = Path(run_dir)
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no run: there is no {CONFIG_FILE} in it; give the folder that "
            "`zerojax train` named at its end"
        )
    config = from_dict(RunConfig, json.loads(path.read_text(encoding="utf-8")))
    factory = build_model(config.model, config.model.vocab_size)
    batch = jax.ShapeDtypeStruct((1, config.data.seq_len), jnp.int32)
    plan = make_plan(
        factory,
        meshes.make_mesh(None, devices=jax.local_devices()[:1]),
        example_batch={"tokens": batch, "targets": batch},
        zero=0,
        precision="fp32",
        freeze=config.freeze,
    )
    wanted = {name: plan.abstract_canonical[name] for name in ("params", "frozen", "extras")}
    checkpoints = config.checkpoint.path or str(folder / CHECKPOINT_FOLDER)
    with Checkpointer(checkpoints) as checkpointer:
        restored = checkpointer.restore(wanted, step, subset=True)
    state = restored.state
    model = plan.model.to_source({**state["params"], **state["frozen"]}, state["extras"])
    tokenizer_path = folder / TOKENIZER_FILE
    tokenizer = load_tokenizer(tokenizer_path) if tokenizer_path.is_file() else None
    return LoadedRun(
        config=config,
        model=model,
        tokenizer=tokenizer,
        step=restored.step,
        plan_dict=restored.plan,
    )
