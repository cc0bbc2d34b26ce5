"""Runs described by a file: trained from a `RunConfig`, and read back from their folder.

Knows run files and reference models; the loop is the trainer's.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import mesh as meshes
from zerojax.checkpoint import Checkpointer
from zerojax.config import RunConfig, from_dict, to_dict
from zerojax.data import as_feed, as_source, load_tokenizer, save_tokenizer
from zerojax.models import build_model
from zerojax.plan import Plan, make_plan
from zerojax.running import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    TOKENIZER_FILE,
    RunFiles,
    rows_of_process,
    start_run,
    tokens_per_step,
)
from zerojax.trainer import Habits, Trainer


def run_from_config(config: RunConfig) -> Trainer:
    """Trains as a run file says, and leaves everything in `config.run_dir`.

    Raises:
      ValueError, TypeError: bad input. CheckpointError: a checkpoint of another model is in the
        way.
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
    vocab_size = train_source.vocab_size
    if vocab_size is None:
        raise ValueError(
            f"{config.data.path} does not say how many different tokens it may hold; set "
            "model.vocab_size to that number"
        )
    factory = build_model(config.model, vocab_size)

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
    model_config = dataclasses.replace(config.model, vocab_size=vocab_size)
    resolved = dataclasses.replace(config, mesh=plan.settings, model=model_config)
    checkpoint = config.checkpoint
    if checkpoint.path is None:
        checkpoint = dataclasses.replace(checkpoint, path=str(folder / CHECKPOINT_FOLDER))
    run = RunFiles(
        folder=folder,
        log=config.log,
        checkpoint=checkpoint,
        config=to_dict(resolved),
        reasons=(train_source.describe(), *plan.reasons),
        steps=config.steps,
        tokens_per_step=tokens_per_step(plan),
    )
    habits = Habits(
        log_every=config.log.every,
        eval_every=config.eval_every,
        eval_batches=config.eval_batches,
        save_every=checkpoint.every,
        save_on_exit=checkpoint.save_on_exit,
        resume_hint="run the same command again to resume",
    )
    feed = as_feed(train_source, rows=rows_of_process(train_source))
    if tokenizer is not None and jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_tokenizer(tokenizer, folder / TOKENIZER_FILE)
    return start_run(run, plan, replan, habits, feed, config.seed, validation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A finished or interrupted run, read back on one device.

    Attributes:
      config: what it was told; model: an `nnx.Module` with the trained weights; tokenizer: None for
        token files that name none; step: of the checkpoint; plan_dict: the plan it was saved under.
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
    assert config.model.vocab_size is not None, "run_from_config wrote it"
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
