"""Loads targets of `zerojax check`: the model, batches and optimizer to check.

A target is a run file, a function or a script. For a script, the arguments of its first call of
zerojax provide model, batches and optimizer. Imports JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from zerojax import deepspeed_config
from zerojax.cli.script_calls import End, as_script, first_call
from zerojax.cli.script_errors import told_as_the_scripts
from zerojax.config import MeshConfig, RunConfig, load
from zerojax.config.recognition import is_deepspeed
from zerojax.config.tree_types import Batch
from zerojax.data import as_feed, as_source
from zerojax.deepspeed_engine.first_batch import EngineUntilBatch
from zerojax.deepspeed_engine.ported_run import PortedRun
from zerojax.equality import make_request
from zerojax.models.adapt import as_model, bound_attribute, default_loss, width_of
from zerojax.models.given_arrays import as_arrays
from zerojax.models.losses import next_token_of_call
from zerojax.placement.device_mesh import make_mesh
from zerojax.tracing.protocol import ModelLike
from zerojax.training.auto_settings import AUTO
from zerojax.training.entry import tokenizer_of_model
from zerojax.training.run_file import adapters_freeze, plan_from_config, tokenizer_spec

ROWS = 16
"""Default number of rows of a batch of text, and the maximum for a run file."""
MOST_ROWS = 32
"""Maximum number of rows used of a script's batches, which are sized for accelerators."""

_NAME_A_FUNCTION = "name a function that returns what to check"

Parts = dict[str, Any]
"""Keyword arguments of `zerojax.equality.make_request`."""


def read_target(target: str, name: str, *, overrides: list[str], steps: int) -> Parts:
    """Loads the model, batches and optimizer of a target of `zerojax check`.

    Args:
      target: path of a run file or script, or the dotted name of a module.
      name: name of a function or mapping in `target`; "" for a run file or a whole script.
      overrides: KEY=VALUE words that override settings of a run file.
      steps: number of training steps of each compared run.

    Raises:
      ValueError: the target provides no model.
    """
    if target.endswith((".yaml", ".yml")):
        return parts_of_run_file(target, overrides, steps)
    if name:
        return parts_by_name(target, name)
    parts = parts_of_script(target, steps)
    return {**parts, "batch": _fewer_rows(parts["batch"])}


def _fewer_rows(batch: Batch) -> Any:
    def cut(batch: Batch) -> Any:
        arrays = jax.tree.map(np.asarray, as_arrays(batch))
        return jax.tree.map(lambda x: x[:MOST_ROWS] if x.ndim else x, arrays)

    return (lambda step: cut(batch(step))) if callable(batch) else cut(batch)


def parts_of_run_file(path: str, overrides: list[str], steps: int) -> Parts:
    """Builds model, batches of text (with few rows) and optimizer from the settings of a run
    file."""
    config = load(RunConfig, path, overrides)
    config = dataclasses.replace(config, mesh=MeshConfig(), num_microbatches=1)
    plan = plan_from_config(config, 1)
    source, _, _ = as_source(
        config.data.mixture or config.data.path,
        tokenizer=tokenizer_spec(config),
        seq_len=config.data.seq_len,
        global_batch_size=min(config.global_batch_size, ROWS),
        seed=config.seed,
        validation_fraction=config.data.validation_fraction,
        vocab_size=config.model.vocab_size,
        pack=config.data.pack,
        long_texts=config.data.long_texts,
    )
    return {
        "model": plan.model,
        "batch": source.batch,
        "optimizer": config.optimizer,
        "freeze": (*config.freeze, *adapters_freeze(config.model, plan.users_model)),
        "seed": config.seed,
    }


def parts_by_name(target: str, name: str) -> Parts:
    """Returns model, batches and optimizer from a function or a mapping in a script or module.

    Raises:
      ValueError: the name does not exist, or does not provide a model and a batch.
    """
    with told_as_the_scripts(f"{target}:{name}"):
        if target.endswith(".py"):
            with as_script(target):
                found = runpy.run_path(target, run_name=Path(target).stem)
        else:
            # The installed command, unlike `python -m`, does not search the current folder.
            sys.path.insert(0, str(Path.cwd()))
            found = vars(importlib.import_module(target))
        if name not in found:
            raise ValueError(f"{target} has no {name!r}; name a function or dict of this file")
        parts = found[name]() if callable(found[name]) else found[name]
    allowed = {*inspect.signature(make_request).parameters} - {"devices", "thorough", "strict"}
    allowed -= {"steps"}
    if not isinstance(parts, Mapping) or not {"model", "batch"} <= set(parts) <= allowed:
        keys = sorted(parts) if isinstance(parts, Mapping) else type(parts).__name__
        raise ValueError(
            f"{target}:{name} returns {keys}, but must return a dict with model and batch, and "
            f"optionally with {', '.join(sorted(allowed - {'model', 'batch'}))}"
        )
    return dict(parts)


def parts_of_script(path: str, steps: int) -> Parts:
    """Runs a script until its first `train`, `make_plan` or engine step, and returns the model,
    batches and optimizer that this call received.

    Args:
      path: path of the script, which runs as with `python SCRIPT`.
      steps: number of batches to take.

    Raises:
      ValueError: the script ended without such a call, or raised an error before it.
    """
    readers = {
        "train": functools.partial(_of_train, steps=steps),
        "make_plan": _of_plan,
        "initialize": _of_engine,
    }
    return first_call(path, readers, f"{_NAME_A_FUNCTION}: zerojax check {path}:NAME")


def _of_train(given: Mapping[str, Any], end: End, *, steps: int) -> Any:
    model, batches, loss = as_model(given["model"]), given["batches"], given["loss"]
    optimizer = given["optimizer"]
    mesh = None if given["mesh_config"] == AUTO else given["mesh_config"]
    if isinstance(mesh, str | Path) or (isinstance(mesh, Mapping) and is_deepspeed(mesh)):
        optimizer = _optimizer_of(mesh, given)
    if batches is None:
        config = bound_attribute(model, "config")
        source, _, _ = as_source(
            given["data"],
            tokenizer=tokenizer_of_model(model, given["data"]),
            seq_len=given["seq_len"] or getattr(config, "max_seq_len", None) or 128,
            global_batch_size=ROWS,
            seed=given["seed"],
            vocab_size=getattr(config, "vocab_size", None),
        )
        batches, loss = source, loss or _loss_of_text(model)
    made = list(_first(batches, steps))
    end(
        {
            "model": given["model"],
            "batch": lambda step: made[step % len(made)],
            "loss": loss,
            "optimizer": optimizer,
            "freeze": given["freeze"],
            "seed": given["seed"],
        }
    )


def _first(batches: object, steps: int) -> Iterator[Any]:
    feed = as_feed(batches)
    for _ in range(steps):
        try:
            yield next(feed)
        except StopIteration:
            return


def _loss_of_text(model: ModelLike) -> Any:
    try:
        return default_loss(model)
    except ValueError:
        return next_token_of_call


def _of_plan(given: Mapping[str, Any], end: End) -> Any:
    names = ("model", "loss", "optimizer", "freeze")
    end({"batch": _of_arrays(given["example_batch"]), **{name: given[name] for name in names}})


def _of_arrays(batch: Batch) -> Any:
    """Returns a batch of arrays as it is.

    Raises:
      ValueError: the batch has shapes in place of arrays.
    """
    if _has_shapes(batch):
        raise ValueError(
            "the script passes shapes (ShapeDtypeStruct), and a check needs a batch of arrays; "
            "name a function that returns one: zerojax check FILE.py:NAME"
        )
    return batch


def _has_shapes(batch: Batch) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch))


def _of_engine(given: Mapping[str, Any], end: End) -> Any:
    run = PortedRun.of_call(given, jax.device_count())
    parts = {
        "model": given["model"],
        "loss": run.loss,
        "optimizer": run.translation.optimizer,
        "freeze": run.freeze,
        "seed": given["seed"],
    }

    def check_with(batch: Batch) -> NoReturn:
        end({**parts, "batch": _of_arrays(batch)})

    engine = EngineUntilBatch(run, make_mesh(run.translation.mesh), check_with)
    example = given["example_batch"]
    if example is not None and not _has_shapes(example):
        engine.prepare(example)
    return engine  # of shapes the first batch of arrays is checked


def _optimizer_of(config: Any, given: Mapping[str, Any]) -> Any:
    """Returns the optimizer that a DeepSpeed configuration sets, else the one passed to the
    call."""
    says = deepspeed_config.CallerValues(
        optimizer=given["optimizer"],
        steps=given["steps"],
        hidden_size=width_of(as_model(given["model"])),
    )
    return deepspeed_config.DsConfig(config, jax.device_count(), says).translate().optimizer
