"""The section `compression_training`: the same training as the run's own settings, or a refusal."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import zerojax
from tests.support.refusals import refused
from tests.support.small_models import reference_model
from tests.support.trajectories import text_batch
from zerojax import deepspeed_config as deepspeed
from zerojax.config import BitScheduleConfig, ConfigError, PruningConfig, PruningGroup

ROWS = 32


def file(**methods):
    return {
        "train_batch_size": ROWS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
        "compression_training": methods,
    }


def method(params, modules=("up/kernel",), **shared):
    group = {"params": params, "modules": list(modules), "related_modules": [["down"]]}
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"g1": group}}


PRUNED = file(
    sparse_pruning=method({"dense_ratio": 0.5}, ["mlp.down.kernel"], schedule_offset=1),
    row_pruning=method({"dense_ratio": 0.25}, method="l1"),
    head_pruning=method(
        {"dense_ratio": 0.5}, ["attention.output"], method="l1", num_heads=4, schedule_offset=0
    ),
)
PRUNING = PruningConfig(
    groups=(
        PruningGroup(pattern="mlp.down.kernel", dense_ratio=0.5, start_step=1),
        PruningGroup(pattern="up/kernel", dense_ratio=0.25, unit="row", start_step=1000),
        PruningGroup(pattern="attention.output", dense_ratio=0.5, unit="head", num_heads=4),
    )
)


def said(given) -> deepspeed.Translation:
    return deepspeed.translate(given, num_devices=8)


def trained(config, model, **options):
    quiet = zerojax.LogConfig(every=1, console="quiet")
    return zerojax.train(model, config, text_batch, steps=3, run_dir=None, log=quiet, **options)


def test_pruning_keys_are_groups_of_the_run():
    assert said(PRUNED).features.given == (PRUNING,)
    off = method({"dense_ratio": 0.5}, method="topk")
    off["shared_parameters"]["enabled"] = False
    assert not said(file(head_pruning=off)).features.given


@pytest.mark.thorough
def test_a_ds_config_prunes_as_the_runs_own_settings():
    model = reference_model("gpt2")
    without = {**PRUNED, "compression_training": {}}
    runs = trained(PRUNED, model), trained(without, model, pruning=PRUNING)
    for one, other in zip(*(jax.tree.leaves(run.state) for run in runs), strict=True):
        np.testing.assert_array_equal(one, other)
    kernel = np.asarray(runs[0].state["params"]["blocks/mlp/down/kernel"])
    assert (kernel == 0).sum() == kernel.size // 2
    engine = zerojax.initialize(model=model, config=PRUNED, example_batch=text_batch(0))
    assert engine.plan.inputs.features.given == (PRUNING,)
    other = PruningConfig(groups=PRUNING.groups[:1])
    refused(
        lambda: trained(PRUNED, model, pruning=other), "compression_training", error=ConfigError
    )


BITS = {"start_bits": 10, "target_bits": 8, "quantization_period": 2}


def test_widths_are_those_of_deepspeeds_two_ways_of_rounding():
    schedule_of = lambda **more: (  # noqa: E731
        said(file(weight_quantization=method(BITS, **more))).rounding.schedule
    )
    assert schedule_of() == BitScheduleConfig(start_bits=10, period=2)
    assert schedule_of(schedule_offset=3) == BitScheduleConfig(
        start_step=4, start_bits=10, period=2
    )
    in_forward = schedule_of(schedule_offset=3, quantize_weight_in_forward=True)
    assert in_forward == BitScheduleConfig(start_step=3)


@pytest.mark.thorough
def test_the_model_must_round_as_the_ds_config_says():
    given = file(weight_quantization=method(BITS, ["blocks/"]))
    right = {"matmul_dtype": "fake_int8", "bit_schedule": said(given).rounding.schedule}
    model = reference_model("gpt2", **right)
    without = {**given, "compression_training": {}}
    losses = [[x["loss"] for x in trained(each, model).history] for each in (given, without)]
    assert losses[0] == losses[1]
    wrong = {**right, "bit_schedule": BitScheduleConfig(start_bits=9, period=2)}
    for other in (reference_model("gpt2"), reference_model("gpt2", **wrong)):
        refused(lambda m=other: trained(given, m), "matmul_dtype", error=ConfigError)
    engine = lambda: zerojax.initialize(reference_model("gpt2"), given)  # noqa: E731
    refused(engine, "matmul_dtype", error=ConfigError)
    for modules in (["mlp"], ["blocks/", "embed"]):
        part = file(weight_quantization=method(BITS, modules))
        refused(lambda p=part: trained(p, model), "modules", error=ConfigError)


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"sparse_pruning": method({"dense_ratio": 0.5}, method="topk")}, ["topk", "l1"]),
        ({"head_pruning": method({"dense_ratio": 0.5}, num_heads=4)}, ["topk", "l1"]),
        ({"row_pruning": method({"dense_ratio": 1.5})}, ["dense_ratio", "1.5"]),
        ({"row_pruning": method({})}, ["dense_ratio", "required"]),
        ({"row_pruning": method({"dense_ratio": 0.5}, ["*"])}, ["modules", "regular"]),
        ({"row_pruning": method({"dense": 0.5})}, ["dense", "dense_ratio"]),
        ({"row_pruning": {"shared_parameters": {"enabled": True}}}, ["different_groups"]),
        ({"weight_quantization": method(BITS, quantization_type="asymmetric")}, ["symmetric"]),
        ({"weight_quantization": method(BITS, rounding="stochastic")}, ["nearest"]),
        ({"weight_quantization": method({**BITS, "target_bits": 2})}, ["target_bits", "fake_int4"]),
        ({"weight_quantization": method({**BITS, "start_bits": 6})}, ["8 bits"]),
        ({"activation_quantization": method({"bits": 8})}, ["activations", "fp8"]),
        ({"layer_reduction": {"enabled": True, "keep_number_layer": 5}}, ["keep_number_layer"]),
    ],
)
def test_what_would_train_otherwise_is_refused(methods, words):
    refused(lambda: said(file(**methods)), words, error=ConfigError)


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        (
            PRUNED,
            [
                "pruning    weights of 'mlp.down.kernel': 0.5 of them kept from step 2 on",
                "pruning    rows of 'up/kernel': 0.25 of them kept from step 1001 on",
                "pruning    heads of 'attention.output': 0.5 of them kept from step 1 on",
            ],
        ),
        (
            file(weight_quantization=method(BITS, ["blocks/"])),
            ["rounding   fake_int8, kernels of the layers: 10 bits from step 1 on"],
        ),
    ],
)
def test_the_explanation_shows_pruning_and_rounding_as_parts_of_the_run(given, lines):
    page = deepspeed.explanation(said(given))
    assert all(f"  {line}" in page for line in lines), page


def test_every_key_of_a_group_has_a_line():
    shown = {line.key: line.verdict for line in said(PRUNED).lines}
    key = "compression_training.row_pruning.different_groups.g1."
    assert shown[f"{key}params.dense_ratio"] == "honoured"
    assert shown[f"{key}related_modules"] == "not needed"
