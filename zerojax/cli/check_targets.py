"""Targets of `zerojax check`: model, batches and optimizer of a run file, a function or a script.

Of a script they are the arguments of its first call of zerojax. Imports JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import zerojax
from zerojax.config import MeshConfig, RunConfig, load
from zerojax.config.recognition import is_deepspeed
from zerojax.data import as_feed, as_source
from zerojax.models.adapt import as_model, bound_attribute, default_loss, width_of
from zerojax.models.losses import next_token_of_call
from zerojax.plan import make
from zerojax.training import deepspeed, entry
from zerojax.training.deepspeed import engine
from zerojax.training.equality import make_request
from zerojax.training.run_file import plan_from_config, tokenizer_spec

ROWS = 16
"""Of a text batch that a target leaves open, and the most that is taken of a run file's."""
MOST_ROWS = 32
"""The most that is taken of a script's batches, which are made for accelerators."""

Parts = dict[str, Any]
"""Keyword arguments of `zerojax.training.equality.make_request`."""


def read_target(target: str, name: str, *, overrides: list[str], steps: int) -> Parts:
    """What a target gives to a check.

    Args:
      target: path of a run file or script, or the dotted name of a module.
      name: of a function or mapping in it; "" for a run file and for a script that is run.
      overrides: KEY=VALUE laid over a run file.
      steps: of each run of the check.

    Raises:
      ValueError: the target gives no model.
    """
    if target.endswith((".yaml", ".yml")):
        return parts_of_run_file(target, overrides, steps)
    if name:
        return parts_by_name(target, name)
    parts = parts_of_script(target, steps)
    return {**parts, "batch": _fewer_rows(parts["batch"])}


def _fewer_rows(batch: Any) -> Any:
    def cut(batch: Any) -> Any:
        return jax.tree.map(lambda x: np.asarray(x)[:MOST_ROWS], batch)

    return (lambda step: cut(batch(step))) if callable(batch) else cut(batch)


def parts_of_run_file(path: str, overrides: list[str], steps: int) -> Parts:
    """Model, text and optimizer of a run file, in batches of a few rows."""
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
        "freeze": (*config.freeze, *config.model.lora.freeze),
        "seed": config.seed,
    }


def parts_by_name(target: str, name: str) -> Parts:
    """What a function or a mapping of a script or module gives.

    Raises:
      ValueError: no such name, or it gives something else.
    """
    if target.endswith(".py"):
        with _run_as_script(target):
            found = runpy.run_path(target, run_name=Path(target).stem)
    else:
        sys.path.insert(0, str(Path.cwd()))
        found = vars(importlib.import_module(target))
    if name not in found:
        raise ValueError(f"{target} has no {name!r}")
    parts = found[name]() if callable(found[name]) else found[name]
    allowed = {*inspect.signature(make_request).parameters} - {"devices", "thorough", "strict"}
    allowed -= {"steps"}
    if not isinstance(parts, Mapping) or not {"model", "batch"} <= set(parts) <= allowed:
        keys = sorted(parts) if isinstance(parts, Mapping) else type(parts).__name__
        raise ValueError(
            f"{target}:{name} gives {keys}; it has to give a dict with model and batch, and may "
            f"have {', '.join(sorted(allowed - {'model', 'batch'}))}"
        )
    return dict(parts)


class _Captured(BaseException):
    """Ends a script at its first call of zerojax; no `except Exception` in it may catch this."""

    def __init__(self, parts: Parts):
        self.parts = parts


def parts_of_script(path: str, steps: int) -> Parts:
    """What a script gives to its first `train`, `make_plan` or engine step, where it is stopped.

    Args:
      path: of the script, which runs as `python SCRIPT` would run it.
      steps: so many batches are taken.

    Raises:
      ValueError: the script ended without such a call.
    """

    def captured(function: Callable[..., Any], read: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def stand_in(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            return read(bound.arguments, steps)

        return stand_in

    readers = {
        "train": (entry, captured(entry.train, _of_train)),
        "make_plan": (make, captured(make.make_plan, _of_plan)),
        "initialize": (engine, captured(engine.initialize, _of_engine)),
    }
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_run_as_script(path))
            for name, (module, stand_in) in readers.items():
                # This one first: it is undone last, when `zerojax` finds the function itself again.
                stack.enter_context(mock.patch.object(zerojax, name, stand_in))
                stack.enter_context(mock.patch.object(module, name, stand_in))
            runpy.run_path(path, run_name="__main__")
    except SyntaxError as error:
        place = "" if error.lineno is None else f":{error.lineno}"
        raise ValueError(f"{path}{place} is not Python: {error.msg}") from error
    except _Captured as captured_call:
        return captured_call.parts
    except SystemExit as ended:
        raise ValueError(f"{path} ended ({ended.code}) before it gave zerojax a model") from None
    raise ValueError(
        f"{path} calls none of {', '.join(f'zerojax.{name}' for name in readers)}; name a function "
        f"of it that gives what is to be checked: zerojax check {path}:NAME"
    )


@contextlib.contextmanager
def _run_as_script(path: str) -> Iterator[None]:
    """`sys.argv` and `sys.path` as Python sets them for a script."""
    folder = str(Path(path).resolve().parent)
    with mock.patch.object(sys, "argv", [path]), mock.patch.object(sys, "path", [*sys.path]):
        sys.path.insert(0, folder)
        yield


def _of_train(given: Mapping[str, Any], steps: int) -> Any:
    model, batches, loss = as_model(given["model"]), given["batches"], given["loss"]
    optimizer = given["optimizer"]
    mesh = given["mesh_config"]
    if isinstance(mesh, str | Path) or (isinstance(mesh, Mapping) and is_deepspeed(mesh)):
        optimizer = _optimizer_of(mesh, given)
    if batches is None:
        config = bound_attribute(model, "config")
        source, _, _ = as_source(
            given["data"],
            seq_len=given["seq_len"] or getattr(config, "max_seq_len", None) or 128,
            global_batch_size=ROWS,
            seed=given["seed"],
            vocab_size=getattr(config, "vocab_size", None),
        )
        batches, loss = source, loss or _loss_of_text(model)
    made = list(_first(batches, steps))
    raise _Captured(
        {
            "model": given["model"],
            "batch": lambda step: made[step % len(made)],
            "loss": loss,
            "optimizer": optimizer,
            "freeze": given["freeze"],
            "seed": given["seed"],
        }
    )


def _first(batches: Any, steps: int) -> Iterator[Any]:
    feed = as_feed(batches)
    for _ in range(steps):
        try:
            yield next(feed)
        except StopIteration:
            return


def _loss_of_text(model: Any) -> Any:
    try:
        return default_loss(model)
    except ValueError:
        return next_token_of_call


def _of_plan(given: Mapping[str, Any], steps: int) -> Any:
    batch = given["example_batch"]
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)):
        raise ValueError(
            "the script plans with shapes, and a check needs real rows; name a function that gives "
            "them: zerojax check FILE.py:NAME"
        )
    names = ("model", "loss", "optimizer", "freeze")
    raise _Captured({"batch": batch, **{name: given[name] for name in names}})


def _of_engine(given: Mapping[str, Any], steps: int) -> Any:
    names = ("model", "loss", "freeze", "seed")
    parts = {name: given[name] for name in names}
    args = getattr(given["args"], "deepspeed_config", None)
    config = next(x for x in (given["config"], given["config_params"], args) if x is not None)
    parts["optimizer"] = _optimizer_of(config, given)
    return _Engine(parts)


class _Engine:
    """Stands for an engine until its first step, which brings a batch."""

    def __init__(self, parts: Parts):
        self._parts = parts

    def train_batch(self, batch: Any = None, *, data_iter: Any = None) -> Any:
        raise _Captured({**self._parts, "batch": next(data_iter) if batch is None else batch})

    def prepare(self, example_batch: Any) -> Any:
        raise _Captured({**self._parts, "batch": example_batch})


def _optimizer_of(config: Any, given: Mapping[str, Any]) -> Any:
    """The optimizer of a DeepSpeed configuration, or the one that a call was given."""
    says = deepspeed.Given(
        optimizer=given["optimizer"],
        steps=given["steps"],
        hidden_size=width_of(as_model(given["model"])),
    )
    return deepspeed.Ported(config, jax.device_count(), says).translate().optimizer
