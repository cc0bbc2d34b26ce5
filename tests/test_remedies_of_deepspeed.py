"""What a refused key of a DeepSpeed file or call of its engine tells to write works.

Each row: what is refused, what of its sentence is read, and what is written then.
"""

from __future__ import annotations

import base64
import copy
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax.config import ConfigError, LogConfig, MeshConfig, OptimizerConfig
from zerojax.config.recognition import is_deepspeed
from zerojax.training import deepspeed
from zerojax.training.deepspeed import Given
from zerojax.training.deepspeed.engine_absent import ABSENT
from zerojax.training.deepspeed.key_schema import AbsentFeature, Key, paths
from zerojax.training.deepspeed.keys_table import TABLE
from zerojax.training.deepspeed.mesh_keys import check_rules
from zerojax.training.deepspeed.optimizer_keys import OPTIMIZERS

REFUSALS = (ConfigError, ValueError, TypeError, AttributeError, OSError, RuntimeError)


class Line(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(x)


def squared(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def rows(count: int = 16) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(count, 8)).astype(np.float32)
    return {"x": x, "y": x.sum(1, keepdims=True)}


def sentence_of(action: Callable[[], Any]) -> str:
    with pytest.raises(REFUSALS) as caught:
        action()
    return str(caught.value)


def remedies_of(action: Callable[[], Any], pattern: str) -> tuple[str, ...]:
    """The groups of a pattern in the sentence with which something is refused."""
    sentence = sentence_of(action)
    found = re.search(pattern, sentence)
    assert found, sentence
    return found.groups()


def put(values: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The file with a.b.c set, or taken out where the value is None."""
    result = copy.deepcopy(dict(values))
    *parents, name = path.split(".")
    node = result
    for parent in parents:
        node = node.setdefault(parent, {})
    if value is None:
        node.pop(name, None)
    else:
        node[name] = value
    return result


def file(**keys: Any) -> dict[str, Any]:
    """A file of these keys, written a__b for a.b."""
    values: dict[str, Any] = {"gradient_clipping": 1.0}
    for name, value in keys.items():
        values = put(values, name.replace("__", "."), value)
    return values


def translated(values: Any, *, num_devices: int | None = None, **given: Any) -> Any:
    return deepspeed.translate(values, num_devices=num_devices, given=Given(**given))


# --- the table of keys ----------------------------------------------------------------------------


def entry_of(path: str) -> Any:
    entry: Any = TABLE
    for name in path.split("."):
        entry = entry[name]
    return entry


def keys_with(text: str) -> list[str]:
    """Keys of the table that refuse a value with a sentence that holds this."""
    found = []
    for path in paths(TABLE):
        entry = entry_of(path)
        if text in (entry.otherwise if isinstance(entry, Key) else entry.why):
            found.append(path)
    return found


def wrong_value(entry: Key) -> Any:
    kinds = {"bool": True not in (entry.only or ()), "int": 7, "float": 7.0, "text": "nvme"}
    return kinds[entry.kind]


def as_written(text: str) -> Any:
    """true, 2 or cpu, as it would stand in the file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@pytest.mark.parametrize("path", [p for p in keys_with("set it to") if "float16" not in p])
def test_a_value_that_is_named(path):
    entry = entry_of(path)
    given = put(file(train_batch_size=8), path, wrong_value(entry))
    (value,) = remedies_of(lambda: translated(given), r"set\s+it\s+to (\w+)")
    translated(put(given, path, as_written(value)))


@pytest.mark.parametrize("path", keys_with("take "))
def test_what_is_to_be_taken_out(path):
    """Of sections that are not built; and the model's loop goes on without them."""
    entry = entry_of(path)
    assert isinstance(entry, AbsentFeature)
    candidates: tuple[Any, ...] = (
        {"enabled": True},
        {"mode": "fixed"},
        {"part": {"enabled": True}},
        True,
    )
    value = next(value for value in candidates if entry.is_on(value))
    given = put(file(train_batch_size=8), path, value)
    remedies_of(lambda: translated(given), r"(take (?:it|the section) out)")
    translated(put(given, path, None))


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("amp", r"use (bf16) or (fp16)"),
        ("comet", r"(tensorboard) and (wandb) are"),
    ],
)
def test_another_section_in_place_of_one(path, pattern):
    given = put(file(train_batch_size=8), path, {"enabled": True})
    names = remedies_of(lambda: translated(given), pattern)
    for name in names:
        translated(put(put(given, path, None), f"{name}.enabled", True))


FILES: dict[str, tuple[dict[str, Any], str, Callable[..., list[dict[str, Any]]]]] = {
    "stage": (
        file(zero_optimization__stage=5),
        r"use (0), (1), (2) or (3)",
        lambda *found: [file(zero_optimization__stage=int(stage)) for stage in found],
    ),
    "float16 masters": (
        file(fp16={"enabled": True, "fp16_master_weights_and_grads": True}),
        r"set it to (false), or use (bf16) with (\w+)",
        lambda value, name, key: [
            file(fp16={"enabled": True, "fp16_master_weights_and_grads": json.loads(value)}),
            file(**{name: {"enabled": True, key: True}}, zero_optimization__stage=1),
        ],
    ),
    "weights in files": (
        file(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}}),
        r"use (cpu), and (nvme) for (offload_optimizer)",
        lambda cpu, nvme, section: [
            file(
                zero_optimization={
                    "stage": 3,
                    "offload_param": {"device": cpu},
                    section: {"device": nvme, "nvme_path": "files"},
                }
            )
        ],
    ),
    "tiers": (
        file(zero_optimization={"stage": 2, "offload_optimizer": {"device": "disk"}}),
        r"not one of (none), (cpu), (nvme)",
        lambda *found: [
            file(zero_optimization={"stage": 2, "offload_optimizer": {"device": device}})
            for device in found
        ],
    ),
    "elastic arithmetic": (
        file(elasticity__enabled=True, elasticity__version=0.3),
        r"is not (0\.1) or (0\.2)",
        lambda *found: [
            file(elasticity__enabled=True, elasticity__version=float(x)) for x in found
        ],
    ),
    "nodes in old arithmetic": (
        file(elasticity={"enabled": True, "version": 0.1, "num_gpus_per_node": 2}),
        r"set (0\.2)",
        lambda version: [
            file(elasticity={"enabled": True, "version": float(version), "num_gpus_per_node": 2})
        ],
    ),
    "batch keys beside elasticity": (
        file(elasticity__enabled=True, train_batch_size=8),
        r"(take the key out), or set elasticity\.(\w+)",
        lambda _, name: [
            file(elasticity__enabled=True),
            file(elasticity={"enabled": True, name: True}, train_batch_size=8),
        ],
    ),
    "a misspelt key": (
        file(train_batch_sizes=8),
        r"did you mean '(\w+)'",
        lambda name: [file(**{name: 8})],
    ),
    "a misspelt key of a section": (
        file(zero_optimization__stag=2),
        r"did you mean '([\w.]+)'",
        lambda name: [file(zero_optimization={name: 2})],
    ),
    "Adam of another name": (
        file(optimizer={"type": "adamx", "params": {}}),
        r"did you mean '(\w+)'",
        lambda name: [file(optimizer={"type": name, "params": {}})],
    ),
    "a norm among an optimizer's numbers": (
        file(gradient_clipping=None, optimizer={"type": "Adam", "params": {"max_grad_norm": 0.5}}),
        r"write (\"gradient_clipping\": [\d.]+)",
        lambda line: [json.loads(f"{{{line}}}") | {"optimizer": {"type": "Adam", "params": {}}}],
    ),
    "betas": (
        file(optimizer={"type": "Adam", "params": {"betas": [0.9, 1.5]}}),
        r"such as (\[.*?\])",
        lambda betas: [file(optimizer={"type": "Adam", "params": {"betas": json.loads(betas)}})],
    ),
    "eps": (
        file(optimizer={"type": "Adam", "params": {"eps": 0}}),
        r"(1e-8) is usual",
        lambda eps: [file(optimizer={"type": "Adam", "params": {"eps": float(eps)}})],
    ),
    "moments in bfloat16": (
        file(optimizer={"type": "Adam", "params": {"fp32_optimizer_states": False}}),
        r"set (bf16)\.(\w+)",
        lambda section, name: [
            file(
                optimizer={"type": "Adam", "params": {}},
                zero_optimization__stage=1,
                **{section: {"enabled": True, "bf16_master_weights_and_grads": True, name: True}},
            )
        ],
    ),
    "moments without masters in bfloat16": (
        file(bf16={"enabled": True, "bf16_optimizer_states": True}, zero_optimization__stage=1),
        r"needs (\w+), as in DeepSpeed",
        lambda name: [
            file(
                bf16={"enabled": True, "bf16_optimizer_states": True, name: True},
                zero_optimization__stage=1,
            )
        ],
    ),
    "masters in bfloat16 without a stage": (
        file(bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
        r"ZeRO stage (1), (2) or (3)",
        lambda *stages: [
            file(
                bf16={"enabled": True, "bf16_master_weights_and_grads": True},
                zero_optimization__stage=int(stage),
            )
            for stage in stages
        ],
    ),
    "dampening": (
        file(optimizer={"type": "SGD", "params": {"dampening": 0.1}}),
        r"set (0)",
        lambda zero: [file(optimizer={"type": "SGD", "params": {"dampening": int(zero)}})],
    ),
    "two precisions": (
        file(fp16__enabled=True, bf16__enabled=True),
        r"(keep one)",
        lambda _: [file(fp16__enabled=True), file(bf16__enabled=True)],
    ),
    "autocast beside a precision": (
        file(bf16__enabled=True, torch_autocast={"enabled": True, "dtype": "float16"}),
        r"write the dtype of (bf16), or (take torch_autocast out)",
        lambda *_: [
            file(bf16__enabled=True, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
            file(bf16__enabled=True),
        ],
    ),
    "autocast of another dtype": (
        file(torch_autocast={"enabled": True, "dtype": "float64"}),
        r"is not (bfloat16) or (float16)",
        lambda *names: [file(torch_autocast={"enabled": True, "dtype": name}) for name in names],
    ),
    "scattered gradients": (
        file(zero_optimization={"stage": 2, "reduce_scatter": False}),
        r"set it to (true)",
        lambda value: [file(zero_optimization={"stage": 2, "reduce_scatter": json.loads(value)})],
    ),
    "a limit of what stays whole": (
        file(zero_optimization={"stage": 3, "stage3_model_persistence_threshold": 1000}),
        r"lower (\w+), or (take this out)",
        lambda name, _: [file(zero_optimization={"stage": 3, name: 10})],
    ),
    "parts of a pipeline": (
        file(pipeline__partition="type:Block"),
        r"is not one of (.*): layers of one",
        lambda names: [file(pipeline__partition=name) for name in names.split(", ")],
    ),
    "shards in groups": (
        file(zero_optimization={"stage": 2, "mics_shard_size": 4}),
        r"needs stage (3)",
        lambda stage: [file(zero_optimization={"stage": int(stage), "mics_shard_size": 4})],
    ),
    "kinds of a split": (
        file(tensor_parallel__partition_config__layer_specs=[{"partition_type": "both"}]),
        r"not one of (\w+), (\w+), (\w+)",
        lambda *kinds: [
            file(
                tensor_parallel__partition_config__layer_specs=[
                    {"patterns": ["x"], "partition_type": kind}
                ]
            )
            for kind in kinds
        ],
    ),
    "an old name beside the new one": (
        file(
            zero_optimization={
                "stage": 2,
                "cpu_offload": True,
                "offload_optimizer": {"device": "cpu"},
            }
        ),
        r"(take this old name out)",
        lambda _: [file(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})],
    ),
    "a share of the state": (
        file(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
        r"needs stage (3)",
        lambda stage: [
            file(
                zero_optimization={
                    "stage": int(stage),
                    "offload_optimizer": {"device": "cpu", "ratio": 0.5},
                }
            )
        ],
    ),
    "a share above all": (
        file(zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 2}}),
        r"between (0) and (1)",
        lambda *ends: [
            file(
                zero_optimization={
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu", "ratio": int(end)},
                }
            )
            for end in ends
        ],
    ),
    "tags": (
        file(checkpoint__tag_validation="maybe"),
        r"not one of (\w+), (\w+), (\w+)",
        lambda *names: [file(checkpoint__tag_validation=name) for name in names],
    ),
    "levels of a log": (
        file(log_level="loud"),
        r"not one of (\w+(?:, \w+)*)",
        lambda names: [file(log_level=name) for name in names.split(", ")],
    ),
    "lines of no step": (
        file(steps_per_print=0),
        r"at least (1)",
        lambda least: [file(steps_per_print=int(least))],
    ),
    "a group of a monitor": (
        file(wandb={"enabled": True, "group": "mine"}),
        r"set (WANDB_RUN_GROUP), and (take this out)",
        lambda *_: [file(wandb={"enabled": True})],
    ),
    "no row": (
        file(train_batch_size=0),
        r"at least (1)",
        lambda least: [file(train_batch_size=int(least))],
    ),
    "a number below 0": (
        file(zero_optimization={"stage": 1, "reduce_bucket_size": -5}),
        r"at least (0)",
        lambda least: [file(zero_optimization={"stage": 1, "reduce_bucket_size": int(least)})],
    ),
    "a misspelt key of what is not built": (
        file(hybrid_engine={"enabled": False, "max_out_token": 3}),
        r"did you mean '(\w+)'",
        lambda name: [file(hybrid_engine={"enabled": False, name: 3})],
    ),
    "a number of too many digits": (
        file(train_batch_size="8" * 400),
        r"(expected an integer)",
        lambda _: [file(train_batch_size="8")],
    ),
    "a schedule without its name": (
        file(scheduler__params={"warmup_num_steps": 3}),
        r"no scheduler\.(type) beside it",
        lambda name: [file(scheduler={name: "WarmupLR", "params": {"warmup_num_steps": 3}})],
    ),
}


@pytest.mark.parametrize("row", FILES)
def test_keys(row):
    given, pattern, then = FILES[row]
    for values in then(*remedies_of(lambda: translated(given), pattern)):
        translated(values)


SCHEDULE = {"type": "WarmupLR", "params": {"warmup_type": "linear"}}
DECAY = {"type": "WarmupDecayLR", "params": {"warmup_type": "linear", "total_num_steps": "auto"}}
ADAM = {"type": "Adam", "params": {"lr": 1e-3}}

CALLS: dict[str, tuple[Any, dict[str, Any], str, Callable[..., list[tuple[Any, dict]]]]] = {
    "batch sizes": (
        file(
            train_batch_size=30,
            train_micro_batch_size_per_gpu=2,
            gradient_accumulation_steps=2,
        ),
        {"num_devices": 8},
        r"data shards = (\d+); write that, or (leave one of the three out)",
        lambda rows, _: [
            (
                file(
                    train_batch_size=int(rows),
                    train_micro_batch_size_per_gpu=2,
                    gradient_accumulation_steps=2,
                ),
                {"num_devices": 8},
            ),
            (
                file(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2),
                {"num_devices": 8},
            ),
        ],
    ),
    "rows that shards do not divide": (
        file(train_batch_size=30),
        {"num_devices": 8},
        r"use (\d+) or (\d+)",
        lambda *found: [(file(train_batch_size=int(n)), {"num_devices": 8}) for n in found],
    ),
    "rows of the call": (
        file(train_batch_size=32),
        {"global_batch_size": 16},
        r"give batches of (\d+) rows, or write \"(auto)\"",
        lambda rows, auto: [
            (file(train_batch_size=32), {"global_batch_size": int(rows)}),
            (file(train_batch_size=auto), {"global_batch_size": 16}),
        ],
    ),
    "microbatches of the call": (
        file(gradient_accumulation_steps=2),
        {"num_microbatches": 4},
        r"is 4, or write \"(auto)\"",
        lambda auto: [(file(gradient_accumulation_steps=auto), {"num_microbatches": 4})],
    ),
    "rows of an elastic batch": (
        file(elasticity={"enabled": True, "max_train_batch_size": 100}),
        {"global_batch_size": 16},
        r"give batches of (\d+) rows",
        lambda rows: [
            (
                file(elasticity={"enabled": True, "max_train_batch_size": 100}),
                {"global_batch_size": int(rows)},
            )
        ],
    ),
    "the length of the run": (
        file(scheduler=DECAY, optimizer=ADAM),
        {},
        r"pass (steps)=N, or (write the number)",
        lambda name, _: [
            (file(scheduler=DECAY, optimizer=ADAM), {name: 100}),
            (put(file(scheduler=DECAY, optimizer=ADAM), "scheduler.params.total_num_steps", 9), {}),
        ],
    ),
    "a width that is not known": (
        file(zero_optimization={"stage": 1, "reduce_bucket_size": "auto"}),
        {},
        r"(write the number)",
        lambda _: [(file(zero_optimization={"stage": 1, "reduce_bucket_size": 1000}), {})],
    ),
    "a precision of the call": (
        file(bf16__enabled=True),
        {"precision": "fp16"},
        r"set it in one place; the file may say \"(auto)\"",
        lambda auto: [
            (file(bf16__enabled=True), {}),
            (file(bf16__enabled=auto), {"precision": "fp16"}),
        ],
    ),
    "a rate of the call": (
        file(optimizer={"type": "Adam", "params": {"lr": 1e-3}}),
        {"optimizer": OptimizerConfig(learning_rate=1e-4)},
        r"the file may say \"(auto)\"",
        lambda auto: [
            (
                file(optimizer={"type": "Adam", "params": {"lr": auto}}),
                {"optimizer": OptimizerConfig(learning_rate=1e-4)},
            )
        ],
    ),
    "the wire of the call": (
        file(communication_data_type="bf16", bf16__enabled=True),
        {"reduce_dtype": "fp32"},
        r"(set it in one place)",
        lambda _: [
            (file(bf16__enabled=True), {"reduce_dtype": "fp32"}),
            (file(communication_data_type="bf16", bf16__enabled=True), {}),
        ],
    ),
    "two optimizers": (
        file(optimizer=ADAM),
        {"optimizer": optax.sgd(1e-3)},
        r"(take one of them out)",
        lambda _: [(file(optimizer=ADAM), {}), (file(), {"optimizer": optax.sgd(1e-3)})],
    ),
    "a clipping of the call": (
        file(gradient_clipping=0.5),
        {"optimizer": zerojax.adamw(1e-3, clip_norm=1.0)},
        r"give it clip_norm=([\d.]+)",
        lambda norm: [
            (
                file(gradient_clipping=0.5),
                {"optimizer": zerojax.adamw(1e-3, clip_norm=float(norm))},
            )
        ],
    ),
    "no clipping in the file": (
        file(gradient_clipping=0.0),
        {"optimizer": zerojax.adamw(1e-3, clip_norm=1.0)},
        r"give it clip_norm=(None)",
        lambda _: [
            (file(gradient_clipping=0.0), {"optimizer": zerojax.adamw(1e-3, clip_norm=None)})
        ],
    ),
    "a schedule beside a transformation": (
        file(scheduler=SCHEDULE),
        {"optimizer": optax.sgd(1e-3)},
        r"write an (optimizer) section, or (take the scheduler out)",
        lambda name, _: [
            (file(scheduler=SCHEDULE, **{name: ADAM}), {}),
            (file(), {"optimizer": optax.sgd(1e-3)}),
        ],
    ),
    "a schedule beside another optimizer": (
        file(scheduler=SCHEDULE),
        {"optimizer": OptimizerConfig(name="lion")},
        r"needs an (optimizer) section, or an OptimizerConfig of (adamw)",
        lambda name, adamw: [
            (file(scheduler=SCHEDULE, **{name: ADAM}), {}),
            (file(scheduler=SCHEDULE), {"optimizer": OptimizerConfig(name=adamw)}),
        ],
    ),
    "lines of the call": (
        file(steps_per_print=5),
        {"log": LogConfig(every=2)},
        r"log\.every is (\d): (set it in one place)",
        lambda every, _: [
            (file(steps_per_print=int(every)), {"log": LogConfig(every=2)}),
            (file(), {"log": LogConfig(every=2)}),
        ],
    ),
    "devices of the data": (
        file(data_parallel_size=4),
        {"num_devices": 8},
        r"leave (\d); write that, or (take it out)",
        lambda shards, _: [
            (file(data_parallel_size=int(shards)), {"num_devices": 8}),
            (file(), {"num_devices": 8}),
        ],
    ),
    "devices of an elastic batch": (
        file(elasticity={"enabled": True, "max_train_batch_size": 100}),
        {"num_devices": 11},
        r"use (\d+), or one of (\d+)",
        lambda *found: [
            (
                file(elasticity={"enabled": True, "max_train_batch_size": 100}),
                {"num_devices": int(n)},
            )
            for n in found
        ],
    ),
}


@pytest.mark.parametrize("row", CALLS)
def test_calls(row):
    values, given, pattern, then = CALLS[row]
    for again, options in then(*remedies_of(lambda: translated(values, **given), pattern)):
        translated(again, **options)


@pytest.mark.parametrize("kind", ["Adagrad", "ZeroOneAdam", "MuAdam", "MuSGD"])
def test_an_optimizer_that_is_not_here(kind):
    given = file(optimizer={"type": kind, "params": {"lr": 1e-3}})
    sentence = sentence_of(lambda: translated(given))
    if found := re.search(r"use (\w+)", sentence):
        assert found[1].lower() in OPTIMIZERS
        translated(file(optimizer={"type": found[1], "params": {"lr": 1e-3}}))
        return
    passed = r"take the section out and pass optimizer=((?:optax|zerojax).*\)) \(`"
    written = re.search(passed, sentence)
    tx = eval(written[1], {"optax": optax, "zerojax": zerojax, "lr": 1e-3})
    assert isinstance(tx, optax.GradientTransformation)
    translated(file(), optimizer=tx)


def test_patterns_on_names_of_torch():
    """What is on names of torch finds nothing here; the names that the sentence has do."""
    with initialize() as engine:
        names = [*engine.prepare(rows()).placement.leaves]
    wrong = MeshConfig(rules=((r"layers/\d+/kernel", (None, "model")),))
    shown, _ = remedies_of(
        lambda: check_rules(wrong, names), r"\(such as (.*)\); (write patterns for these names)"
    )
    for name in shown.split(", "):
        check_rules(MeshConfig(rules=((name, ()),)), names)


# --- files ----------------------------------------------------------------------------------------


def test_what_is_no_file(tmp_path):
    remedies_of(lambda: translated("no_such_file"), r"give the path of a (ds_config\.json), or a")
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 8, "gradient_clipping": 1.0}')
    translated(path)
    translated(base64.urlsafe_b64encode(path.read_bytes()).decode())


@pytest.mark.parametrize(
    ("text", "pattern", "then"),
    [
        ("[1]", r"begins like (\{.*\}) ?", lambda text: text),
        ('{"steps_per_print": NaN}', r"(write a finite one)", lambda _: '{"steps_per_print": 3}'),
        (
            '{"train_batch_size": 8, "train_batch_size": 9}',
            r"(keep one)",
            lambda _: '{"train_batch_size": 8}',
        ),
        ('{"a": ' * 500 + "1" + "}" * 500, r"(write it flat)", lambda _: '{"train_batch_size": 8}'),
    ],
)
def test_text_of_a_file(text, pattern, then, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    (found,) = remedies_of(lambda: translated(path), pattern)
    path.write_text(then(found))
    translated(path)


def test_a_file_of_hjson(tmp_path, monkeypatch):
    path = tmp_path / "ds_config.json"
    path.write_text("{\n  # rows of a step\n  train_batch_size: 8\n}")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "hjson", None)
        (extra,) = remedies_of(lambda: translated(path), r"pip install 'zerojax\[(\w+)\]'")
    pytest.importorskip(extra, reason="the extra has the name of its package")
    translated(path)


def test_keys_of_a_mesh_and_of_a_file():
    given = {"zero": 2, "train_batch_size": 8}
    out, written = remedies_of(
        lambda: is_deepspeed(given),
        r"take (\w+) out \(zero=N is written as (zero_optimization: \{stage: N\})\), or give the",
    )
    assert written == "zero_optimization: {stage: N}"
    del given[out]
    assert is_deepspeed(given)
    translated({**given, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}})


# --- the engine -----------------------------------------------------------------------------------

CONFIG = file(train_batch_size=16, fp16__enabled=True, optimizer=ADAM)


def initialize(config: Any = None, **options: Any) -> Any:
    return zerojax.initialize(Line, config or CONFIG, **{"loss": squared, **options})


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with initialize() as engine:
        engine.train_batch(rows())
        yield engine


def test_how_an_engine_is_given_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    names = {"zerojax": zerojax, "model": Line}
    for refused in (
        lambda: zerojax.initialize(Line, loss=squared),
        lambda: initialize(config_params=CONFIG),
    ):
        (call,) = remedies_of(refused, r"pass one: (zerojax\.initialize\(.*\))$")
        eval(call.replace(")", ", loss=squared)"), {**names, "squared": squared}).close()
    args = type("Args", (), {"deepspeed_config": "ds_config.json"})()
    (written,) = remedies_of(lambda: zerojax.initialize(args, Line), r"as (args=args)$")
    call = f"zerojax.initialize(model, {written}, loss=squared)"
    eval(call, {**names, "args": args, "squared": squared}).close()


@pytest.mark.thorough
def test_an_engine_without_a_batch(tmp_path):
    with initialize(put(CONFIG, "train_batch_size", None)) as engine:
        (key,) = remedies_of(engine.train_batch_size, r"set (\w+) in it, or ask later")
        with initialize(put(CONFIG, key, 16)) as other:
            assert other.train_batch_size() == 16
        engine.prepare(rows())
        assert engine.train_batch_size() == 16  # later
    with initialize() as engine:
        (name,) = remedies_of(lambda: engine.save_checkpoint(tmp_path), r"initialize an (\w+)$")
        remedies_of(lambda: engine.reshard({"zero": 3}), r"(change the configuration)$")
    with initialize(**{name: rows()}) as engine:
        assert engine.save_checkpoint(tmp_path)
    with initialize(put(CONFIG, "zero_optimization.stage", 3)) as engine:
        assert engine.zero_optimization_stage() == 3


def test_a_rate_that_only_the_schedule_knows():
    schedule = optax.constant_schedule(1e-3)
    with initialize(put(CONFIG, "optimizer", None), optimizer=optax.sgd(schedule)) as engine:
        engine.prepare(rows())
        remedies_of(engine.get_lr, r"ask the (schedule) that it was made of")
        assert schedule(engine.global_steps) == pytest.approx(1e-3)


def test_what_stands_in_place_of_one_batch(engine):
    loader = [rows()]
    (rest,) = remedies_of(lambda: engine.train_batch(rows(8)), r"pass (\d+) rows from each")
    engine.train_batch(rows(int(rest)))
    remedies_of(engine.train_batch, r"pass a (batch) or (data_iter=), one of them")
    wrong = (
        lambda: engine.train_batch(iter(loader)),
        lambda: engine.train_batch(data_iter=loader),
    )
    for given in wrong:
        made, passed = remedies_of(given, r"(it = iter\(loader\)), and pass (data_iter=it)$")
        names = {"loader": loader, "engine": engine}
        exec(f"{made}; loss = engine.train_batch({passed})", names)
        assert np.isfinite(float(names["loss"]))


def test_a_loop_of_deepspeed(engine):
    names = {"engine": engine, "batch": rows()}
    for given in (lambda: engine(rows()), lambda: engine.backward, lambda: engine.step):
        (line,) = remedies_of(given, r"write (loss = engine\.train_batch\(batch\)) in place")
        exec(line, names)
        assert np.isfinite(float(names["loss"]))
    for given in (lambda: [*engine], lambda: engine[0]):
        remedies_of(given, r"write (engine = zerojax\.initialize\(\.\.\.\)) in place of")


def test_what_the_engine_has_in_place_of_a_name(engine):
    """Each expression in the sentences about names of DeepSpeed that are not here."""
    written: set[str] = set()
    for name in (*ABSENT, "get_data_parallel_rank", "zero_allow_untested_optimizer"):
        sentence = sentence_of(functools.partial(getattr, engine, name))
        written |= {*re.findall(r"\b(?:engine|jax)(?:\.\w+)+(?:\(\)|\['\w+'\])?", sentence)}
    absent = ("engine.backward", "engine.step", "engine.train_batch")
    written = {text for text in written if not text.startswith(absent)}
    assert len(written) > 12
    for text in sorted(written):
        assert eval(text, {"engine": engine, "jax": jax}) is not None, text


def test_tags_of_checkpoints(engine, tmp_path):
    (tag,) = remedies_of(lambda: engine.save_checkpoint(tmp_path, "a/b"), r"for example '(\w+)'$")
    engine.save_checkpoint(tmp_path, tag, save_latest=False)
    (there,) = remedies_of(lambda: engine.load_checkpoint(tmp_path, "other"), r"which has (\w+)$")
    assert engine.load_checkpoint(tmp_path, there)[0] is not None
    with pytest.warns(RuntimeWarning, match="unless load_checkpoint gets a tag"):
        assert engine.load_checkpoint(tmp_path) == (None, {})


@pytest.mark.thorough
def test_the_state_in_durable_files_stays_on_its_mesh(tmp_path):
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "files")}
    given = file(train_batch_size=16, optimizer=ADAM)
    given = put(given, "zero_optimization", {"stage": 2, "offload_optimizer": offload})
    durable = {"opt_state": "nvme", "durable": True, "folder": str(tmp_path / "durable")}
    with initialize(given, example_batch=rows()) as engine:
        engine.reshard({"zero": 2, "offload": durable | {"min_elements": 1}})
        calls = remedies_of(
            lambda: engine.reshard({"zero": 3}),
            r"; (save_checkpoint), (initialize) another engine .*, and (load_checkpoint)$",
        )
        assert len(calls) == 3
        engine.save_checkpoint(tmp_path / "kept")
    other = put(given, "zero_optimization", {"stage": 3})
    with initialize(other) as engine:
        assert engine.load_checkpoint(tmp_path / "kept")[0] is not None
        engine.prepare(rows())
        assert engine.state is not None
