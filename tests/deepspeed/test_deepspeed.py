"""Every key of a ds_config has one meaning here, or is refused with a reason."""

from __future__ import annotations

import base64
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import zerojax
from zerojax import deepspeed_config as deepspeed
from zerojax.config import (
    ConfigError,
    LogConfig,
    LossScale,
    MeshConfig,
    OptimizerConfig,
    WireConfig,
)
from zerojax.config.recognition import DEEPSPEED_KEYS, MESH_KEYS, OTHER_NAMES, is_deepspeed
from zerojax.deepspeed_config import CallerValues
from zerojax.deepspeed_config.ds_config import OLD_NAMES
from zerojax.deepspeed_config.key_schema import AbsentFeature, Key, paths
from zerojax.deepspeed_config.keys_table import TABLE
from zerojax.deepspeed_config.optimizer_keys import OPTIMIZERS
from zerojax.optim import Optimizer, matrices_by_shape
from zerojax.optim.precision import Precision, as_precision


def nested(path: str, value) -> dict:
    """{"a": {"b": value}} of "a.b"."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def entry_of(path: str):
    entry = TABLE
    for name in path.split("."):
        entry = entry[name]
    return entry


def line_of(translation, key: str):
    return {line.key: line for line in translation.lines}[key]


def refusal(values: dict, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        deepspeed.translate(values, **options)
    return str(caught.value)


# The table

ALL = [*paths(TABLE)]
KEYS = [path for path in ALL if isinstance(entry_of(path), Key)]
SECTIONS = sorted({path.rpartition(".")[0] for path in ALL} - {""})


def test_a_file_of_all_of_deepspeeds_defaults_is_taken_and_means_zero_0_in_float32():
    values: dict = {}
    for path in KEYS:
        if entry_of(path).default is None:
            continue
        *parents, name = path.split(".")
        node = values
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = entry_of(path).default
    translation = deepspeed.translate(values, num_devices=8)
    assert translation.mesh == MeshConfig(
        zero=0,
        reduce_bucket_size=500_000_000,
        allgather_bucket_size=500_000_000,
        persistence_threshold=100_001,
        partition="flops",
    )
    assert translation.precision == as_precision("fp32")
    assert len(translation.lines) > 120
    assert all(line.why for line in translation.lines)


@pytest.mark.parametrize("path", KEYS)
def test_a_verdict_says_whether_a_key_has_an_effect(path):
    entry = entry_of(path)
    without = entry.verdict in ("not needed", "compiler")
    assert entry.why.startswith("no effect") == without or path == "disable_allgather"


DEEPSPEEDS = json.loads((Path(__file__).parents[1] / "data" / "deepspeed_keys.json").read_text())
"""Keys and defaults of DeepSpeed's own classes (tests/oracles/deepspeed_keys.py)."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("section", DEEPSPEEDS["sections"])
def test_the_table_has_every_key_and_default_of_deepspeeds_classes(section):
    kind = section.removeprefix("optimizer ")
    table = OPTIMIZERS[kind] if section != kind else entry_of(section)
    if isinstance(table, AbsentFeature):
        assert set(table.known) == set(DEEPSPEEDS["sections"][section])
        return
    for name, default in DEEPSPEEDS["sections"][section].items():
        if name == "max_grad_norm":  # refused by name, see below
            continue
        assert name in table, f"{section}.{name}"
        entry = table[name]
        if default is not None and isinstance(entry, Key) and entry.kind != "any":
            known = entry.default if entry.default is not None else default
            assert known == default, f"{section}.{name}"


@pytest.mark.parametrize("path", ["amp", "nebula", "eigenvalue", "hybrid_engine", "comet"])
def test_it_is_taken_where_it_is_off(path):
    line = line_of(deepspeed.translate({path: {"enabled": False}}), path)
    assert (line.verdict, line.why) == ("honoured", "off, as here")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_key_is_refused_at_every_level(section):
    known = next(p.rpartition(".")[2] for p in ALL if p.rpartition(".")[0] == section)
    text = refusal(nested(f"{section}.{known}x", 1))
    assert f"{section}.{known}x" in text
    assert f"did you mean '{known}'" in text


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        ({"fp16": {"loss_scale_windows": 5}}, "loss_scale_window"),
        ({"bf16": {"check_overflow": True}}, "check_grad_overflow"),
        ({"elasticity": {"prefer_large_batch": True}}, "prefer_larger_batch"),
        ({"optimizer": {"type": "AdamW", "params": {"weight_decy": 1}}}, "weight_decay"),
        ({"optimizer": {"type": "AdmW"}}, "adamw"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}}, "warmup_num_steps"),
        ({"nebula": {"enabled": False, "load_path": ""}}, "nebula_load_path"),
    ],
)
def test_the_nearest_key_is_named(values, meant):
    assert meant in refusal(values)


IGNORED = [
    {"_comment": "supported models"},
    {"monitor_config": {"enabled": True, "tag": "here"}},
    {"comms_config": {"verbose": False}},
    {"log": {"steps_per_print": 50}},
    {"cuda_visible_devices": 0},
]


@pytest.mark.parametrize("values", IGNORED)
def test_unknown_keys_at_the_top_are_ignored_with_a_warning_as_in_deepspeed(values):
    translation = deepspeed.translate(values)
    (name,) = values
    assert line_of(translation, name).verdict == "ignored"
    assert any(f"{name}: unknown key, which has no effect" in w for w in translation.warnings)


@pytest.mark.parametrize("name", ["k" * 200_000, "\x1b[2J"])
def test_a_warning_of_an_unknown_key_shows_a_name_in_short(name):
    warning = deepspeed.translate({name: 1}).warnings[0]
    assert "has no effect" in warning
    assert len(warning) < 300
    assert "\x1b" not in warning


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        ({"zero": {"stage": 3}}, "zero_optimization"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimization"),
        ({"micro_batch_size": 4}, "train_micro_batch_size_per_gpu"),
        ({"offload_optimizer": {"device": "cpu"}}, "zero_optimization.offload_optimizer"),
        ({"fp_16": {"enabled": True}}, "fp16"),
        ({"grad_clipping": 1.0}, "gradient_clipping"),
    ],
)
def test_a_misspelt_key_at_the_top_is_refused_with_the_nearest(values, meant):
    assert f"did you mean '{meant}'" in refusal(values)


def test_a_dict_is_a_deepspeed_configuration_or_a_mesh_by_its_keys():
    assert {*TABLE, *OLD_NAMES} == DEEPSPEED_KEYS
    assert not DEEPSPEED_KEYS & MESH_KEYS
    assert is_deepspeed({"train_batch_size": 8, "_comment": ""})
    assert not is_deepspeed({})
    assert not is_deepspeed({"zero": 3, "dta": 2})
    assert {*OTHER_NAMES.values()} <= MESH_KEYS
    assert not {*OTHER_NAMES} & (DEEPSPEED_KEYS | MESH_KEYS)
    with pytest.raises(ConfigError, match=r"zero belongs to a MeshConfig, and train_batch_size to"):
        is_deepspeed({"zero": 3, "train_batch_size": 8})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("pipe", "'stage' (a field of MeshConfig)"),
        ("tensr", "'model' (a field of MeshConfig)"),
        ("stages", "'stage' (a field of MeshConfig)"),
        ("train_batchsize", "'train_batch_size' (a key of DeepSpeed)"),
        ("q", "fields of a MeshConfig (data, model, stage"),
    ],
)
def test_a_dict_without_a_known_key_is_refused(name, meant):
    with pytest.raises(ConfigError, match=re.escape(meant)):
        is_deepspeed({name: 2})


def test_make_plan_says_who_takes_a_deepspeed_configuration():
    with pytest.raises(TypeError, match=r"initialize\(model, config, example_batch=batch\)"):
        zerojax.make_plan(
            lambda: None, {"zero_optimization": {"stage": 3}}, example_batch=jnp.zeros(8)
        )


def test_several_refusals_come_at_once():
    text = refusal(
        {"amp": {"enabled": True}, "gradient_allreduce_op": "sum", "fp16": {"x": 1}, "fp_16": 1}
    )
    assert "amp" in text
    assert "gradient_allreduce_op" in text
    assert "and 1 more" in text


# Reading


def test_json_hjson_base64_and_dicts_say_the_same(tmp_path):
    text = '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7}}'
    pytest.importorskip("hjson", reason="the extra hjson is not installed")
    (tmp_path / "a.json").write_text(text)
    hjson_text = "# a comment\nzero_optimization: {\n  stage: 2\n  reduce_bucket_size: 5e7\n}\n"
    (tmp_path / "b.hjson").write_text(hjson_text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    sources = [tmp_path / "a.json", str(tmp_path / "b.hjson"), text, encoded, json.loads(text)]
    assert {deepspeed.translate(s).mesh for s in sources} == {
        MeshConfig(zero=2, reduce_bucket_size=50_000_000)
    }


@pytest.mark.parametrize("text", ['{"zero_optimization": {"stage": 1, "stage": 2}}', "a: 1\na: 2"])
def test_a_key_given_twice_is_refused_with_both_values(tmp_path, text):
    if not text.startswith("{"):
        pytest.importorskip("hjson", reason="the extra hjson is not installed")
    path = tmp_path / "twice.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"appears 2 times, with the values \[1, 2\]; keep one"):
        deepspeed.translate(path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('{"fp16": {', "JSON.*Expecting property name"),
        ('{"a": NaN}', "NaN"),
        (base64.urlsafe_b64encode(b"no config").decode(), "is not a file"),
    ],
)
def test_what_cannot_be_read_is_said(source, words):
    with pytest.raises(ConfigError, match=words):
        deepspeed.translate(source)


@pytest.mark.parametrize("size", [5e8, "5e8", 500_000_000])
def test_scientific_notation_is_an_integer(size):
    mesh = deepspeed.translate({"zero_optimization": {"reduce_bucket_size": size}}).mesh
    assert mesh.reduce_bucket_size == 500_000_000
    assert isinstance(mesh.reduce_bucket_size, int)


@pytest.mark.parametrize("size", [1.5, True, "many", [1]])
def test_what_is_no_integer_is_refused(size):
    text = refusal({"zero_optimization": {"reduce_bucket_size": size}})
    assert "expected an integer" in text


# Batches


@pytest.mark.parametrize(
    ("train", "micro", "parts", "expected"),
    [
        (64, 2, 4, (64, 2, 4)),
        (64, 2, None, (64, 2, 4)),
        (64, None, 4, (64, 2, 4)),
        (None, 2, 4, (64, 2, 4)),
        (64, None, None, (64, 8, 1)),
        (None, 2, None, (16, 2, 1)),
        (None, None, 4, (None, None, 4)),
        ("auto", "auto", "auto", (None, None, 1)),
    ],
)
def test_two_of_the_three_batch_sizes_give_the_third(train, micro, parts, expected):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = zip(names, (train, micro, parts), strict=True)
    translation = deepspeed.translate({k: v for k, v in given if v}, num_devices=8)
    found = (translation.train_batch_size, translation.micro_batch_size)
    assert (*found, translation.num_microbatches) == expected


def test_rows_and_microbatches_of_the_call_fill_auto_and_must_not_contradict():
    file = {"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}
    given = CallerValues(global_batch_size=32, num_microbatches=2)
    translation = deepspeed.translate(file, num_devices=8, given=given)
    assert (translation.train_batch_size, translation.num_microbatches) == (32, 2)
    assert translation.micro_batch_size == 2
    text = refusal({"train_batch_size": 16}, num_devices=8, given=given)
    assert "have 32" in text
    assert "batches of 16 rows" in text
    assert "num_microbatches is 2" in refusal({"gradient_accumulation_steps": 4}, given=given)


def test_an_elastic_file_has_deepspeeds_batch_and_refuses_another():
    elastic = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}
    file = {"elasticity": {**elastic, "min_gpus": 1, "max_gpus": 10000, "version": 0.1}}
    translation = deepspeed.translate(file, num_devices=8)
    assert translation.train_batch_size == translation.elasticity.choose_batch().global_batch_size
    rows = translation.micro_batch_size * translation.num_microbatches * 8
    assert rows == translation.train_batch_size
    # The section and the batch of DeepSpeed's own tests/unit/elasticity/test_elastic.py.
    theirs = {"max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17]}
    limits = {"enabled": True, "min_gpus": 32, "max_gpus": 1500, "version": 0.1}
    assert deepspeed.translate({"elasticity": theirs | limits}).train_batch_size == 9792
    assert "elasticity determines" in refusal({**file, "train_batch_size": 8}, num_devices=8)
    file["elasticity"]["ignore_non_elastic_batch_info"] = True
    deepspeed.translate({**file, "train_batch_size": 8}, num_devices=8)
    text = refusal(nested("elasticity.model_parallel_size", 2) | file, num_devices=7919)
    assert "7919 devices cannot divide" in text


# "auto"


def test_auto_takes_hugging_faces_defaults_and_formulas():
    file = {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
    }
    given = CallerValues(steps=500, hidden_size=64, precision="bf16")
    translation = deepspeed.translate(file, given=given)
    resolved = translation.resolved
    assert resolved["optimizer"]["params"] == {
        "lr": 5e-5,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert resolved["scheduler"]["params"] == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 5e-5,
        "warmup_num_steps": 1,
        "total_num_steps": 500,
    }
    assert resolved["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 4096,
        "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640,
    }
    assert (resolved["fp16"]["enabled"], resolved["bf16"]["enabled"]) == (False, True)
    assert translation.gradient_clipping == 1.0
    assert translation.total_steps == 500
    params = {"total_num_steps": 1e3}
    long = {"scheduler": {"type": "WarmupCosineLR", "params": params}}
    assert deepspeed.translate(long).total_steps == 1000
    assert translation.precision.compute_dtype == jnp.bfloat16
    assert file["optimizer"]["params"]["lr"] == "auto", "the caller's dict stays as it is"


def test_auto_takes_an_optimizer_config_of_the_call():
    params = {"lr": "auto", "betas": "auto", "weight_decay": 0.01}
    file = {
        "optimizer": {"type": "AdamW", "params": params},
        "gradient_clipping": "auto",
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    }
    config = OptimizerConfig(
        learning_rate=1e-3, beta2=0.99, weight_decay=0.01, clip_norm=None, warmup_steps=7
    )
    translation = deepspeed.translate(file, given=CallerValues(optimizer=config))
    assert translation.resolved["optimizer"]["params"] == {
        **params,
        "lr": 1e-3,
        "betas": [0.9, 0.99],
    }
    assert translation.resolved["scheduler"]["params"] == {"warmup_num_steps": 7}
    assert translation.gradient_clipping == 0
    other = CallerValues(optimizer=OptimizerConfig(weight_decay=0.1))
    assert "0.1, the value of the call (optimizer.weight_decay)" in refusal(file, given=other)


@pytest.mark.parametrize(
    ("file", "given", "words"),
    [
        (
            {"bf16": {"enabled": False}},
            CallerValues(precision="bf16"),
            "True, the value of the call (precision='bf16')",
        ),
        (
            {"data_types": {"grad_accum_dtype": "fp32"}},
            CallerValues(accumulate_dtype="bf16"),
            "accumulate_dtype",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}},
            CallerValues(steps=10),
            "differs from 10",
        ),
    ],
)
def test_a_call_that_contradicts_the_file_is_refused(file, given, words):
    assert words in refusal(file, given=given)


def test_a_log_without_an_interval_takes_that_of_the_file():
    given = CallerValues(log=LogConfig(console="quiet"))
    log = deepspeed.translate({"steps_per_print": 5}, given=given).log
    assert (log.console, log.every, log.report_every) == ("quiet", 5, 5)
    assert deepspeed.translate({}, given=given).log.report_every == 10


def test_a_run_may_be_shorter_than_the_schedule_of_its_file():
    file = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}}
    reasons = deepspeed.translate(file, given=CallerValues(steps=10)).reasons
    assert any("runs steps=10" in reason for reason in reasons)


@pytest.mark.parametrize("scheduler", [{}, {"scheduler": {"type": "Linear"}}])
def test_a_file_with_a_wrong_scheduler_is_not_said_to_have_none(scheduler):
    file = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, **scheduler}
    reasons = deepspeed.explain(file).reasons
    assert any("has no scheduler" in reason for reason in reasons) == (not scheduler)


def test_auto_elsewhere_counts_as_absent_as_in_deepspeed():
    file = {"zero_optimization": {"stage": 3, "sub_group_size": "auto", "overlap_comm": "auto"}}
    translation = deepspeed.translate(file)
    assert translation.mesh == MeshConfig(zero=3)
    assert "treated as absent" in line_of(translation, "zero_optimization.sub_group_size").why


# Precision


def test_bf16_fp16_and_their_loss_scale():
    bf16 = deepspeed.translate({"bf16": {"enabled": True}}).precision
    assert bf16 == as_precision("bf16")
    assert deepspeed.translate({"bfloat16": {"enabled": True}}).precision == bf16
    section = {
        "enabled": True,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "hysteresis": 4,
        "consecutive_hysteresis": True,
        "min_loss_scale": 2,
    }
    fp16 = deepspeed.translate({"fp16": section}).precision
    assert fp16.compute_dtype == fp16.reduce_dtype == jnp.float16
    assert fp16.loss_scale == LossScale(
        initial=4096, window=500, hysteresis=4, consecutive_hysteresis=True, minimum=2
    )
    static = deepspeed.translate({"fp16": {**section, "loss_scale": 128}}).precision
    assert static.loss_scale == LossScale(static=128)
    for stage in range(4):
        file = {"fp16": section, "zero_optimization": {"stage": stage}}
        told = any("stage 0 has no hyst" in each for each in deepspeed.translate(file).reasons)
        assert told == (stage == 0), "DeepSpeed's stage 0 has a scaler of its own"
    assert "bf16.enabled" in refusal({"fp16": {"enabled": True}, "bf16": {"enabled": True}})


def test_dtypes_of_sums_wire_masters_and_autocast():
    file = {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        "zero_optimization": {"stage": 1},
        "communication_data_type": "fp32",
    }
    file["bf16"]["bf16_optimizer_states"] = True
    assert deepspeed.translate(file).precision == Precision(
        param_dtype=jnp.bfloat16,
        accumulate_dtype=jnp.bfloat16,
        moments_dtype=jnp.bfloat16,
        reduce_dtype=jnp.float32,
    )
    assert "ZeRO stage 1" in refusal({**file, "zero_optimization": {"stage": 0}})
    summed = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    assert deepspeed.translate(summed).precision.accumulate_dtype == jnp.bfloat16
    cast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    assert deepspeed.translate(cast).precision == as_precision("bf16")
    # DeepSpeed's own example bf16_full.json enables both.
    both = {**cast, "bf16": {"enabled": True}}
    assert deepspeed.translate(both).precision == as_precision("bf16")
    assert "fp16 is enabled" in refusal({**cast, "fp16": {"enabled": True}})
    mixed = {"data_types": {"param_dtype": "fp16"}, "bf16": {"enabled": True}}
    assert "data_types.param_dtype" in refusal(mixed)


def test_the_calls_precision_holds_where_the_file_names_none():
    assert deepspeed.translate({}).precision == as_precision("fp32")
    assert deepspeed.translate({}, given=CallerValues(precision="bf16")).precision == as_precision(
        "bf16"
    )
    own = Precision(accumulate_dtype=jnp.bfloat16)
    assert deepspeed.translate({}, given=CallerValues(precision=own)).precision == own
    assert "precision=" in refusal({"bf16": {"enabled": True}}, given=CallerValues(precision=own))


# Placing


def test_buckets_are_in_elements_and_the_threshold_is_inclusive():
    zero = {
        "stage": 3,
        "reduce_bucket_size": 2e8,
        "allgather_bucket_size": 3e8,
        "stage3_param_persistence_threshold": 1e4,
    }
    mesh = deepspeed.translate({"zero_optimization": zero}).mesh
    assert (mesh.reduce_bucket_size, mesh.allgather_bucket_size) == (200_000_000, 300_000_000)
    assert mesh.persistence_threshold == 10_001
    short = {"stage": 3, "param_persistence_threshold": 1e4}
    assert deepspeed.translate({"zero_optimization": short}).mesh.persistence_threshold == 10_001
    zero["stage3_model_persistence_threshold"] = 0
    assert deepspeed.translate({"zero_optimization": zero}).mesh.persistence_threshold == 0
    zero["stage3_model_persistence_threshold"] = 10
    assert "stage3_model_persistence_threshold" in refusal({"zero_optimization": zero})


def test_offload_goes_to_the_tiers_of_the_same_meaning():
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/fast", "ratio": 0.75},
        "offload_param": {"device": "cpu", "pin_memory": False},
        "sub_group_size": 1e9,
    }
    file = {"zero_optimization": zero, "activation_checkpointing": {"cpu_checkpointing": True}}
    translation = deepspeed.translate(file)
    offload = translation.mesh.offload
    assert offload.shares == {"device": 0.25, "nvme": 0.75}
    assert (offload.params, offload.activations, offload.folder) == ("host", "host", "/fast")
    assert offload.slice_elements == 2**24, "DeepSpeed's tile is no size for device memory"
    assert any("pin_memory" in warning for warning in translation.warnings)
    zero["sub_group_size"] = 1e6
    assert deepspeed.translate(file).mesh.offload.slice_elements == 1_000_000


def test_parameters_go_to_files_and_the_state_with_them():
    param = {"device": "nvme", "nvme_path": "/fast", "buffer_count": 5, "buffer_size": 1e8}
    zero = {"stage": 3, "offload_param": {**param, "max_in_cpu": 1e9}}
    for optimizer in (None, {"device": "nvme", "nvme_path": "/fast"}, {"device": "cpu"}):
        if optimizer is not None:
            zero["offload_optimizer"] = optimizer
        translation = deepspeed.translate({"zero_optimization": zero})
        offload = translation.mesh.offload
        assert (offload.params, offload.opt_state, offload.folder) == ("nvme", "nvme", "/fast")
        told = [text for text in translation.warnings if "mesh.offload.opt_state=nvme" in text]
        assert len(told) == (optimizer is None or optimizer["device"] == "cpu")


@pytest.mark.parametrize("size", [0, 1, 8, 4000])
def test_a_sub_group_smaller_than_a_parameter_cuts_no_parameter(size):
    # Axolotl's zero3_bf16_cpuoffload_all.json says 0: one parameter per tile in DeepSpeed.
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": size}
    translation = deepspeed.translate({"zero_optimization": zero})
    assert translation.mesh.offload.slice_elements == 2**24
    assert "never splits" in line_of(translation, "zero_optimization.sub_group_size").why


def test_old_names_of_offload_and_zero_are_translated_with_a_warning():
    zero = {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}
    translation = deepspeed.translate({"zero_optimization": zero})
    assert translation.mesh.offload.opt_state == "host"
    assert translation.mesh.offload.params == "host"
    assert sum("old name" in warning for warning in translation.warnings) == 2
    both = {**zero, "offload_optimizer": {"device": "cpu"}}
    assert "remove this old name" in refusal({"zero_optimization": both})
    old = deepspeed.translate({"zero_optimization": True, "allgather_size": 2e8})
    assert (old.mesh.zero, old.mesh.allgather_bucket_size) == (1, 200_000_000)
    assert "an old form" in old.warnings[0]


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        (
            {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/a"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
            },
            "use the same path",
        ),
        (
            {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/a"},
                "offload_optimizer": {"device": "nvme", "ratio": 0.5},
            },
            "set ratio to 1",
        ),
    ],
)
def test_what_zero_cannot_do_is_refused(zero, words):
    assert words in refusal({"zero_optimization": zero})


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 0, "offload_optimizer": {"device": "cpu"}},
        {"stage": 2, "offload_param": {"device": "cpu"}},
    ],
)
def test_offload_that_deepspeed_ignores_at_a_stage_is_a_warning(zero):
    translation = deepspeed.translate({"zero_optimization": zero})
    assert translation.mesh.offload.is_off
    assert any("DeepSpeed ignores this key" in text for text in translation.warnings)
    assert "ignored" in {line.verdict for line in translation.lines}


def test_axes_of_the_mesh():
    file = {
        "pipeline": {"stages": 2, "partition": "parameters"},
        "tensor_parallel": {"autotp_size": 2},
        "activation_checkpointing": {"partition_activations": True},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
    }
    translation = deepspeed.translate(file, num_devices=8)
    assert translation.mesh == MeshConfig(
        stage=2, model=2, zero=0, partition="parameters", sequence_sharding=True
    )
    assert (translation.num_data_shards, translation.train_batch_size) == (2, 8)
    assert "not a multiple of" in refusal(file, num_devices=6)
    assert deepspeed.translate({"pipeline": {"stages": "auto"}}).mesh.stage == 1
    lonely = deepspeed.translate({"pipeline": {"stages": 2}}, num_devices=8)
    assert any("one microbatch" in warning for warning in lonely.warnings)


def test_mics_shards_in_groups_and_copies_across():
    file = {"zero_optimization": {"stage": 3, "mics_shard_size": 4}, "train_batch_size": 16}
    translation = deepspeed.translate(file, num_devices=16)
    assert (translation.mesh.data, translation.mesh.replica) == (4, 4)
    assert translation.micro_batch_size == 1
    assert "not a multiple of 4" in refusal(file, num_devices=6)


def test_quantized_weights_are_codes_on_the_wire():
    file = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}
    assert deepspeed.translate(file).mesh == MeshConfig(zero=3, wire=WireConfig(weights="int8"))
    file["zero_optimization"] |= {"zero_quantized_gradients": True, "zero_hpz_partition_size": 8}
    wire = WireConfig(weights="int8", gradients="int8", secondary=True)
    assert deepspeed.translate(file, num_devices=64).mesh == MeshConfig(zero=3, node=8, wire=wire)
    file["zero_optimization"] = {"stage": 2, "zero_quantized_weights": True}
    ignored = deepspeed.translate(file)
    assert ignored.mesh == MeshConfig(zero=2)
    assert any("zero_quantized_weights=true needs stage 3" in x for x in ignored.warnings)
    frozen = {"stage": 3, "zero_quantized_nontrainable_weights": True}
    assert "freeze_dtype (int8, nf4)" in refusal({"zero_optimization": frozen})


def test_hpz_is_a_node_that_gathers_by_itself():
    file = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    for devices in (64, None):
        mesh = deepspeed.translate(file, num_devices=devices).mesh
        assert (mesh.node, mesh.wire.secondary, mesh.replica) == (8, True, 1)
    assert deepspeed.translate(file, num_devices=8).mesh == MeshConfig(zero=3)
    said = refusal(file, num_devices=12)
    assert "zero_hpz_partition_size" in said
    assert "does not divide the 12 devices; use 6" in said
    file["zero_optimization"]["stage"] = 2
    ignored = deepspeed.translate(file, num_devices=64)
    assert ignored.mesh == MeshConfig(zero=2)
    assert any("needs stage 3, but the stage is 2" in text for text in ignored.warnings)


def test_layer_specs_become_rules_on_the_names_of_flax():
    specs = [
        {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r"\.[qkv]_proj\.weight$"], "partition_type": "column"},
    ]
    key = "tensor_parallel.partition_config.layer_specs"
    mesh = deepspeed.translate(nested(key, specs)).mesh
    assert mesh.rules == (
        (".*/o_proj/kernel$", ("model", None)),
        ("/[qkv]_proj/kernel$", (None, "model")),
    )
    assert "shape" in refusal(nested(key, [{**specs[1], "shape": [2, -1]}]))


# Reports


def test_reports_go_where_the_monitors_say():
    file = {
        "steps_per_print": 50,
        "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "mine"},
        "wandb": {"enabled": True, "project": "p"},
        "log_level": "error",
    }
    translation = deepspeed.translate(file)
    assert translation.log == LogConfig(every=50, tensorboard=True, wandb="p", console="quiet")
    assert str(translation.run_dir) == "logs/mine"
    assert "WANDB_ENTITY" in refusal({"wandb": {"enabled": True, "team": "t"}})
    assert "vocabulary_size=50257" in deepspeed.translate({"vocabulary_size": 50257}).warnings[-1]
    assert deepspeed.translate({"checkpoint": {"tag_validation": "Fail"}}).tag_validation == "FAIL"


# Updates

PARAMS = {
    "kernel": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "bias": np.asarray([0.5, -0.25, 2.0, 0.0], np.float32),
}


def gradients(step: int) -> dict:
    return {name: np.cos(x * (step + 1)) * (1 + step) for name, x in PARAMS.items()}


def after_steps(optimizer, steps: int = 5) -> dict:
    """The parameters after some updates by an optax transformation."""

    def run(params: dict, grads: list[dict]) -> dict:
        state = optimizer.init(params)
        for each in grads:
            updates, state = optimizer.update(each, state, params)
            params = optax.apply_updates(params, updates)
        return params

    return jax.jit(run)(PARAMS, [gradients(step) for step in range(steps)])


def assert_close(found: dict, wanted: dict) -> None:
    for name, value in found.items():
        # A few updates of size 1e-2 to numbers near 1, in float32.
        np.testing.assert_allclose(value, wanted[name], rtol=2e-6, atol=2e-7)


def tx_of(kind: str, clip: float = 0, scheduler: dict | None = None, **params):
    file = {"optimizer": {"type": kind, "params": params}, "gradient_clipping": clip}
    return deepspeed.translate(file | ({"scheduler": scheduler} if scheduler else {})).optimizer


def test_adam_means_adamw_with_decay_on_every_parameter():
    """The trap of a name: DeepSpeed's Adam is AdamW unless adam_w_mode is false."""
    tx = tx_of("Adam", lr=1e-2, weight_decay=0.1)
    assert isinstance(tx, Optimizer)
    assert tx.kernel == "adamw"
    assert_close(after_steps(tx), after_steps(optax.adamw(1e-2, weight_decay=0.1)))
    assert_close(after_steps(tx_of("AdamW", lr=1e-2, weight_decay=0.1)), after_steps(tx))


def test_without_a_scheduler_the_rate_is_constant_and_betas_are_pytorchs():
    translation = deepspeed.translate({"optimizer": {"type": "Adam"}})
    rates = [float(translation.learning_rate(count)) for count in (0, 1, 10_000)]
    np.testing.assert_allclose(rates, 1e-3, rtol=1e-6)  # float32's 1e-3
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0))
    assert_close(after_steps(translation.optimizer), after_steps(clipped))


def test_clipping_is_one_where_the_file_is_silent_and_that_is_said():
    translation = deepspeed.translate({})
    assert translation.gradient_clipping == 1.0
    assert "gradient_clipping is not in the file: 1.0 is used" in translation.warnings[0]
    assert deepspeed.translate({"gradient_clipping": 0}).optimizer.clip_norm is None
    assert not deepspeed.translate({"gradient_clipping": 0.5}).warnings


@pytest.mark.parametrize(
    "path", ["gradient_clipping", "zero_optimization.reduce_bucket_size", "fp16.loss_scale"]
)
def test_numbers_below_zero_are_refused(path):
    assert f"{path}=-1: must be at least 0" in refusal(nested(path, -1)).replace("-1.0", "-1")


def test_the_warm_up_is_logarithmic_unless_the_file_says_linear():
    params = {"warmup_num_steps": 100, "warmup_max_lr": 1.0}
    file = {"scheduler": {"type": "WarmupLR", "params": params}, "optimizer": {"type": "Adam"}}
    translation = deepspeed.translate(file)
    assert float(translation.learning_rate(10)) == pytest.approx(0.5, rel=1e-5)
    assert any("warmup_type is log" in warning for warning in translation.warnings)
    params["warmup_type"] = "linear"
    translation = deepspeed.translate(file)
    assert float(translation.learning_rate(11)) == pytest.approx(0.1, rel=1e-5)
    assert not any("warmup_type" in warning for warning in translation.warnings)


def test_one_cycle_moves_the_first_beta_too():
    cycle = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}
    scheduler = {"type": "OneCycle", "params": cycle}
    moved = after_steps(tx_of("Adam", scheduler=scheduler))
    fixed = after_steps(
        tx_of("Adam", scheduler={**scheduler, "params": {**cycle, "cycle_momentum": False}})
    )
    assert float(jnp.abs(moved["kernel"] - fixed["kernel"]).max()) > 1e-4
    file = {"optimizer": {"type": "SGD"}, "scheduler": scheduler}
    assert any("SGD has no betas" in warning for warning in deepspeed.translate(file).warnings)


UPDATES = json.loads((Path(__file__).parents[1] / "data" / "deepspeed_updates.json").read_text())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", UPDATES["cases"], ids=range(len(UPDATES["cases"])))
def test_updates_are_those_of_deepspeeds_engine(case):
    """Optimizers, decay, clipping (also where the file is silent) and a schedule, in one run each.

    The numbers are of tests/oracles/deepspeed_updates.py.
    """
    found = after_steps(deepspeed.translate(case["file"]).optimizer)
    for name, value in found.items():
        # 1e-6: what DeepSpeed adds to the norm before it divides by it.
        np.testing.assert_allclose(value, case["params"][name], rtol=3e-6, atol=1e-6)


def reference_adam(l2: float, decay: float, corrected: bool) -> dict:
    """DeepSpeed's Adam in NumPy: `csrc/adam/multi_tensor_adam.cu`, both modes."""
    params = {name: np.asarray(x, np.float64) for name, x in PARAMS.items()}
    m, v = ({name: np.zeros_like(x) for name, x in params.items()} for _ in range(2))
    for step in range(5):
        for name, g in gradients(step).items():
            g = np.asarray(g, np.float64) + l2 * params[name]
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.99 * v[name] + 0.01 * g * g
            first, second = (1 - 0.9 ** (step + 1), 1 - 0.99 ** (step + 1)) if corrected else (1, 1)
            moved = m[name] / first / (np.sqrt(v[name] / second) + 1e-8)
            params[name] = params[name] - 1e-2 * (moved + decay * params[name])
    return params


@pytest.mark.sampled(2)
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_adam_without_bias_correction_and_with_decay_in_the_gradient(adam_w_mode, corrected):
    numbers = {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1, "bias_correction": corrected}
    tx = tx_of("Adam", adam_w_mode=adam_w_mode, **numbers)
    l2, decay = (0.0, 0.1) if adam_w_mode else (0.1, 0.0)
    assert_close(after_steps(tx), reference_adam(l2, decay, corrected))


def reference_lamb(low: float, high: float) -> dict:
    """DeepSpeed's LAMB in NumPy: `csrc/lamb/fused_lamb_cuda_kernel.cu`."""
    params = {name: np.asarray(x, np.float64) for name, x in PARAMS.items()}
    m, v = ({name: np.zeros_like(x) for name, x in params.items()} for _ in range(2))
    for step in range(5):
        rate = 1e-2 * np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        for name, g in gradients(step).items():
            g = np.asarray(g, np.float64)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            moved = m[name] / (np.sqrt(v[name]) + 1e-8) + 0.1 * params[name]
            ratio = np.linalg.norm(params[name]) / np.linalg.norm(moved)
            params[name] = params[name] - rate * np.clip(ratio, low, high) * moved
    return params


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("low", "high"), [(0.01, 10.0), (0.01, 0.05), (2.0, 3.0)])
def test_lamb_bounds_the_ratio_of_norms_as_deepspeed_does(low, high):
    numbers = {"min_coeff": low, "max_coeff": high}
    tx = tx_of("Lamb", lr=1e-2, weight_decay=0.1, **numbers)
    assert_close(after_steps(tx), reference_lamb(low, high))


def test_sgd_and_lion():
    sgd = tx_of("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    decay = optax.add_decayed_weights(0.01)
    wanted = optax.chain(decay, optax.sgd(0.1, momentum=0.9, nesterov=True))
    assert_close(after_steps(sgd), after_steps(wanted))
    lion = tx_of("Lion", lr=1e-2, weight_decay=0.1)
    wanted = optax.lion(1e-2, b1=0.9, b2=0.999, weight_decay=0.1)
    assert_close(after_steps(lion), after_steps(wanted))


def newton_schulz(x: np.ndarray, rounds: int = 5) -> np.ndarray:
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(rounds):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x


def authors_muon(muon_lr: float, adam_lr: float, decay: float, parts=(1,) * 5) -> dict:
    """Matrices by Muon and vectors by Adam as DeepSpeed's `original_muon.py` has them: no
    correction of the momentum's bias, no look ahead in Adam. In float64; rates are multiplied by
    `parts`, one for each step."""
    params = {name: np.asarray(x, np.float64) for name, x in PARAMS.items()}
    momentum, first, second = (dict.fromkeys(params, 0.0) for _ in range(3))
    for step, part in enumerate(parts, 1):
        for name, grad in gradients(step - 1).items():
            grad = np.asarray(grad, np.float64)
            if grad.ndim == 2:
                momentum[name] = 0.9 * momentum[name] + 0.1 * grad
                update = newton_schulz(0.1 * grad + 0.9 * momentum[name])
                update, rate = update * max(1, grad.shape[1] / grad.shape[0]) ** 0.5, muon_lr
            else:
                first[name] = 0.8 * first[name] + 0.2 * grad
                second[name] = 0.95 * second[name] + 0.05 * grad**2
                root = np.sqrt(second[name] / (1 - 0.95**step)) + 1e-10
                update, rate = first[name] / (1 - 0.8**step) / root, adam_lr
            params[name] = params[name] * (1 - part * rate * decay) - part * rate * update
    return params


MUON = {"momentum": 0.9, "betas": [0.8, 0.95], "weight_decay": 0.1, "ns_method": "standard"}


def assert_authors(found: dict, *rates: float, **more) -> None:
    wanted = authors_muon(*rates, 0.1, **more)
    for name, value in found.items():
        # Five rounds multiply the rounding of float32 by up to 3.4445^5, times the rate.
        np.testing.assert_allclose(value, wanted[name], atol=2e-5)


@pytest.mark.thorough
def test_muon_is_its_authors():
    both = tx_of("Muon", muon_lr=0.02, adam_lr=1e-3, **MUON)
    assert isinstance(both, Optimizer)
    assert_authors(after_steps(both), 0.02, 1e-3)
    assert_authors(after_steps(tx_of("Muon", lr=5e-3, **MUON)), 5e-3, 5e-3)
    assert_authors(after_steps(tx_of("Muon", **MUON)), 0.02, 3e-4)


@pytest.mark.thorough
def test_a_scheduler_drives_both_rates_of_muon():
    numbers = {"total_num_steps": 10, "warmup_num_steps": 2}
    cosine = {"type": "WarmupCosineLR", "params": numbers}
    tx = tx_of("Muon", scheduler=cosine, muon_lr=0.02, adam_lr=1e-3, **MUON)
    parts = [float(tx.learning_rate(step)) / 0.02 for step in range(5)]
    assert len({*parts}) > 3
    assert_authors(after_steps(tx), 0.02, 1e-3, parts=parts)
    cycle = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
    file = {"optimizer": {"type": "Muon"}, "scheduler": {"type": "OneCycle", "params": cycle}}
    assert "set scheduler.params.cycle_momentum: false" in refusal(file)
    cycle["cycle_momentum"] = False
    assert isinstance(deepspeed.translate(file).optimizer, Optimizer)


def test_matrices_of_muon_are_those_that_deepspeed_takes():
    shapes = {
        "blocks/attention/output/kernel": (2, 3, 4, 5),
        "blocks/attention/output/bias": (2, 5),
        "dense/kernel": (3, 4),
        "embedding/table": (7, 5),
        "lm_head/kernel": (5, 7),
        "norm/scale": (5,),
    }
    found = matrices_by_shape({name: np.zeros(shape) for name, shape in shapes.items()})
    assert {name: dims for name, dims in found.items() if dims is not None} == {
        "blocks/attention/output/kernel": MuonDimensionNumbers((1, 2), 3),
        "dense/kernel": MuonDimensionNumbers(),
    }
    with pytest.raises(ValueError, match="conv/kernel has 4 dim.*pass optimizer=zerojax.muon"):
        matrices_by_shape({"conv/kernel": np.zeros((3, 3, 2, 4))})


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_numbers_out_of_range_are_refused(kind):
    assert "optimizer.params" in refusal(
        {"optimizer": {"type": kind, "params": {"weight_decay": -1}}}
    )


def test_the_callers_transformation_is_clipped_as_the_file_says():
    given = CallerValues(optimizer=optax.sgd(0.1))
    tx = deepspeed.translate({"gradient_clipping": 0.5}, given=given).optimizer
    wanted = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    assert_close(after_steps(tx), after_steps(wanted))
    off = deepspeed.translate({"gradient_clipping": 0}, given=given).optimizer
    assert off is given.optimizer


@pytest.mark.parametrize(
    "make",
    [zerojax.adamw, zerojax.adam8bit, functools.partial(zerojax.muon, dimensions=None)],
    ids=["adamw", "adam8bit", "muon"],
)
def test_an_optimizer_of_ours_without_clipping_is_clipped_as_the_file_says(make):
    """As one of optax is, so that either may take the other's place; the update stays in place."""
    given = CallerValues(optimizer=make(0.1))
    translation = deepspeed.translate({"gradient_clipping": 0.5}, given=given)
    assert translation.optimizer.clip_norm == 0.5
    assert translation.optimizer.learning_rate(0) == 0.1
    wanted = make(0.1, clip_norm=0.5)
    assert_close(after_steps(translation.optimizer), after_steps(wanted))
    assert "gradients are clipped to 0.5 before the update of optimizer=" in translation.reasons
    default = deepspeed.translate({}, given=given)
    assert default.optimizer.clip_norm == 1.0
    assert "gradient_clipping is not in the file: 1.0 is used" in default.warnings[0]
    off = deepspeed.translate({"gradient_clipping": 0}, given=given).optimizer
    assert off is given.optimizer


def test_a_scheduler_alone_drives_zerojaxs_own_adamw():
    file = {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-4}}}
    translation = deepspeed.translate(file)
    assert float(translation.learning_rate(0)) == pytest.approx(1e-4)
    assert isinstance(translation.optimizer, Optimizer)
