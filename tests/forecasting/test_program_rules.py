"""Rules of compiled steps: each finds the fault it is for, and a sound step keeps all of them."""

import dataclasses
import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.marks import gathers_twice
from tests.support.small_models import reference_model
from zerojax.config import ConfigError
from zerojax.errors import ExpectationError
from zerojax.forecasting.program_rules import (
    check_golden,
    check_rules,
    check_step,
    compare_records,
    plan_record,
)
from zerojax.forecasting.step_contents import read_layers
from zerojax.step.build import build_step
from zerojax.tracing.flops import without_waste

TOKENS = np.zeros((16, 16), np.int32)
BATCH = {"tokens": TOKENS, "targets": TOKENS}
SOUND = {
    "max_gather_mb": 0.0,
    "max_wire_gb": 1.0,
    "gradients_in": "fp32",
    "max_replicated_mb": 0.001,
    "max_peak_gib": 1.0,
    "layer_loops": 1,
}
MB = 1e6
EXPERTS = {"num_experts": 4, "experts_per_token": 2}


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def loss(self, batch: Any) -> jax.Array:
        hidden = nnx.gelu(self.up(batch["x"]))
        predicted = self.down(hidden)
        return zerojax.losses.mean_squared_error(predicted, batch["x"])


MLP_BATCH = {"x": np.zeros((32, 64), np.float32)}
COLUMN, ROW = (None, "model"), ("model", None)
GOOD_RULES = (("up/kernel", COLUMN), ("up/bias", ("model",)), ("down/kernel", ROW))
WRONG_RULES = (("up/kernel", COLUMN), ("up/bias", ("model",)), ("down/kernel", COLUMN))


class Stacked(nnx.Module):
    """Layers in one loop, each with a gather and a reduction of its own at stage 3."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.vmap(lambda r: nnx.Linear(64, 64, rngs=r), in_axes=0, out_axes=0)(
            rngs.split(3)
        )

    def loss(self, batch: Any) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def apply(layer: nnx.Linear, x: jax.Array) -> jax.Array:
            return nnx.relu(layer(x))

        return jnp.mean(jnp.square(apply(self.layers, batch["x"])))


class Listed(nnx.Module):
    """The same as a Python list."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(64, 8, rngs=rngs)

    def loss(self, batch: Any) -> jax.Array:
        x = batch["x"]
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return jnp.mean(jnp.square(self.head(x)))


class Gathering(nnx.Module):
    """Sums products of the rows of all devices, as a loss over the whole batch does."""

    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.Linear(64, 64, rngs=rngs)

    def loss(self, batch: Any) -> jax.Array:
        z = self.layer(batch["x"])
        seen = zerojax.batch_sum(z.T @ z)
        return jnp.mean(jnp.square(z @ seen))


def plan_of(model=Mlp, rules=None, precision="fp32", reduce_dtype=None, **options):
    mesh = {"data": 2, "model": 4, "rules": rules} if rules else {"data": 8}
    return zerojax.make_plan(
        model,
        {**mesh, "persistence_threshold": 0, **options},
        example_batch=MLP_BATCH,
        precision=precision,
        reduce_dtype=reduce_dtype,
    )


def text_plan(zero, family="gpt2", optimizer=None, **options):
    return zerojax.make_plan(
        reference_model(family, **options.pop("changes", {})),
        {"zero": zero, "persistence_threshold": 0, **options},
        example_batch=BATCH,
        optimizer=optimizer,
        precision="fp32",
    )


PARTIAL = {"max_gather_mb": 0.001}
"""The loss in chunks reduces a vocabulary that is split over `model` by one reduction of several
arrays, whose parts XLA gathers: 4 bytes for each token and device."""


@functools.cache
def step_of(**options):
    """A compiled step whose rules are still to be checked."""
    return check_step(plan_of(**options), zerojax.ExpectConfig())


def violations(step, **rules):
    """The violations of a compiled step, or of a plan for rules that need no more."""
    config = zerojax.ExpectConfig(**rules)
    checked = check_rules(getattr(step, "contents", None), getattr(step, "plan", step), config)
    assert tuple(rule.rule for rule in checked) == config.names
    return [one for rule in checked for one in rule.violations]


# --- no false alarm -------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [3, 2, 1, 0])
def test_a_sound_step_keeps_every_rule(zero):
    step = step_of(model=Stacked, zero=zero)
    assert not violations(step, **SOUND)
    gathered = [one for one in step.contents.sent if one.kind == "all-gather"]
    assert bool(gathered) == (zero > 0)
    assert {one.role for one in gathered} <= {"gathered weights"}


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"model": 2}, {"changes": {"remat": "full"}}])
@pytest.mark.parametrize("zero", [3, 2, 1, 0])
def test_a_sound_step_of_a_decoder_keeps_every_rule(zero, options):
    plan = text_plan(zero, **{"data": -1, **options})
    rules = {**SOUND, **PARTIAL, "rules_split": True} if "model" in options else SOUND
    assert zerojax.expect(plan, **rules)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"zero": 1, "data": 4, "stage": 2},
        {"zero": 2, "data": 2, "stage": 2, "model": 2},
        {"zero": 3, "data": 4, "context": 2, "context_parallel": "ring"},
        {"zero": 3, "data": 4, "context": 2, "context_parallel": "ulysses"},
        {"zero": 3, "data": 4, "replica": 2},
        {"zero": 3, "data": 8, "offload": {"opt_state": "host"}},
        {"zero": 3, "data": 4, "expert": 2, "changes": {"moe": EXPERTS}},
        {"zero": 2, "data": 4, "model": 2, "changes": {"moe": EXPERTS}},
        {"zero": 3, "data": 8, "wire": {"weights": "int8"}},
        {"zero": 3, "data": 8, "optimizer": zerojax.muon(1e-2)},
    ],
    ids=lambda options: "-".join(options),
)
def test_a_sound_step_with_other_axes_and_codes_keeps_every_rule(options):
    """Codes of weights on the wire are computed, but from weights alone."""
    rules = SOUND | PARTIAL if "model" in options else SOUND
    assert zerojax.expect(text_plan(family="llama", **options), **rules)


@pytest.mark.thorough
def test_keys_and_values_that_context_gathers_are_replicated():
    plan = text_plan(zero=3, data=4, context=2, context_parallel="allgather")
    with pytest.raises(ExpectationError, match="context_parallel"):
        zerojax.expect(plan, **SOUND)


# --- one fault for each rule ----------------------------------------------------------------------


def test_gradients_that_are_summed_in_16_bits():
    """Reported as jax #27496 and pytorch #190626: unnoticed until a loss differs."""
    step = step_of(precision="bf16", zero=2)
    (found,) = violations(step, gradients_in="fp32")
    assert "bfloat16" in found.found
    assert "float32" in found.limit
    assert "reduce-scatter" in str(found.collective)
    assert "self." in str(found.line)
    assert "reduce_dtype=fp32" in found.remedy
    assert not violations(step, gradients_in="bf16")
    wide = plan_of(precision="bf16", reduce_dtype="fp32", zero=2)
    assert not violations(dataclasses.replace(step, plan=wide), gradients_in="fp32")


@pytest.mark.thorough
def test_a_rule_that_leaves_activations_whole_between_two_products():
    """The second matrix is split like the first: the hidden units are gathered on every device.

    Reported as marin #6304 (58 GiB) and xla #15207.
    """
    limits = {"max_gather_mb": 0.01, "max_replicated_mb": 0.01}
    found = violations(step_of(rules=WRONG_RULES, zero=3), **limits)
    assert {one.rule for one in found} == {*limits}  # forward, and again in the backward pass
    for one in found:
        assert "all-gather over model" in str(one.collective)
        assert re.search(r"test_program_rules\.py:\d+: (hidden|predicted) = ", str(one.line))
        assert f"{16 * 256 * 4 / MB:.4g} MB" in one.found
        assert "0.01" in one.limit
    assert not violations(
        step_of(rules=GOOD_RULES, zero=3), max_gather_mb=0, max_replicated_mb=0.01
    )


def test_a_value_of_the_batch_that_every_device_holds_whole():
    step = step_of(model=Gathering)
    found = violations(step, max_replicated_mb=0.01)
    assert len(found) == 2  # forward and backward
    for one in found:
        assert f"{64 * 64 * 4 / MB:.4g} MB" in one.found
        assert "all-reduce over data" in str(one.collective)
        assert "batch_sum" in str(one.line)
    assert not violations(step, max_replicated_mb=0.02)


@pytest.mark.thorough
def test_a_parameter_that_must_not_be_gathered():
    step = step_of(zero=3)
    found = violations(step, no_gather=("^up/kernel",))
    assert len(found) == 1
    assert "up/kernel" in found[0].found
    assert f"{64 * 256 * 4 / MB:.4g} MB" in found[0].found
    assert "self.up" in str(found[0].line)
    split = step_of(rules=GOOD_RULES, zero=3)
    assert not violations(split, no_gather=("up/kernel", "down/kernel"))
    assert violations(split, no_gather=("down/bias",))
    with pytest.raises(ValueError, match=r"'upper'.*matches no parameter"):
        violations(split, no_gather=("upper",))


@gathers_twice
def test_parameters_that_are_gathered_more_often_than_planned():
    """The plan of stage 1 gathers once, and the step of stage 3 twice."""
    step = dataclasses.replace(step_of(zero=3), plan=plan_of(zero=1))
    found = violations(step, max_gather_mb=0)
    assert len(found) == 2  # each of the two gathers, with its line
    for one in found:
        assert "down/kernel gathered 2 times per step, 1 times by the plan" in one.found
        assert "self.down(hidden)" in str(one.line)


@gathers_twice
def test_limits_of_bytes():
    step = step_of(zero=3)
    assert violations(step, max_wire_gb=1, max_peak_gib=1) == []
    wire, peak = violations(step, max_wire_gb=1e-5, max_peak_gib=1e-5)
    kernel = 7 / 8 * 64 * 256 * 4 / 1e9
    # Two gathers of `down` and one of `up`, whose input needs no gradient; two reductions.
    assert float(re.search(r"sends (\S+) GB", wire.found)[1]) == pytest.approx(5 * kernel, rel=0.03)
    assert wire.collective
    assert f"{step.contents.peak / 2**30:.4g} GiB" in peak.found
    with pytest.raises(ValueError, match=r"max_network_gb.*gpu="):
        violations(step, max_network_gb=1)


def test_an_error_lists_every_violation_with_its_line():
    with pytest.raises(AssertionError) as caught:
        zerojax.expect(plan_of(zero=3), {"max_peak_gib": 1e-5}, no_gather="kernel", max_wire_gb=1)
    assert isinstance(caught.value, ExpectationError)
    assert {one.rule for one in caught.value.violations} == {"no_gather", "max_peak_gib"}
    assert all(one.describe() in str(caught.value) for one in caught.value.violations)
    assert "self.down(hidden)" in str(caught.value)


# --- sharding rules -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "number", "words"),
    [
        ((("kernel", COLUMN), ("down/kernel", ROW)), 1, ["comes too late", "'kernel'"]),
        ((*GOOD_RULES, ("down/bias", (None,))), 3, ["splits none"]),
    ],
)
def test_sharding_rules_without_effect(rules, number, words):
    """Reported as maxtext #5060 (2.7 times slower), maxtext #4205 and jax #18591."""
    (found,) = violations(plan_of(rules=rules), rules_split=True)
    assert all(word in found.found for word in (repr(rules[number][0]), *words))
    assert re.search(r"test_program_rules\.py:\d+: .*self\.down\(hidden\)", str(found.line))


def test_a_rule_that_exempts_from_a_later_one_has_an_effect():
    rules = (("down/kernel", (None, None)), ("kernel", COLUMN))
    assert not violations(plan_of(rules=rules), rules_split=True)


def test_rules_of_a_mesh_that_does_not_split_them():
    plan = plan_of()
    plan = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, rules=GOOD_RULES))
    found = violations(plan, rules_split=True)
    assert len(found) == 3
    assert "model=1" in found[0].found


def test_a_rule_of_a_model_whose_pattern_matches_nothing():
    """Those of mesh.rules are refused by the plan itself."""

    class Ruled(Mlp):
        tensor_parallel_rules = (*GOOD_RULES, ("gate/kernel", COLUMN))

    mesh = {"data": 2, "model": 4}
    plan = zerojax.make_plan(Ruled, mesh, example_batch=MLP_BATCH, precision="fp32")
    (found,) = violations(plan, rules_split=True)
    assert "'gate/kernel' matches no parameter" in found.found
    with pytest.raises(ValueError, match="gate/kernel"):
        plan_of(rules=Ruled.tensor_parallel_rules)


# --- layers ---------------------------------------------------------------------------------------


def with_layers(plan):
    """A step of which only the layers were read."""
    traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    contents = types.SimpleNamespace(layers=read_layers(plan, without_waste(traced.jaxpr)))
    return types.SimpleNamespace(contents=contents, plan=plan)


@pytest.mark.parametrize("roll", ["auto", False])
def test_layers_of_a_list(roll):
    step = with_layers(plan_of(Listed, zero=3, roll=roll))
    (layers,) = step.contents.layers
    assert layers.num_layers == 3
    assert layers.is_loop == bool(step.plan.stacks)
    found = violations(step, layer_loops=1)
    assert bool(found) == (not step.plan.stacks)
    for one in found:
        assert "3 layers (layers/0..2)" in one.found
        assert "layer(x)" in str(one.line)


def test_loops_over_layers():
    assert not violations(with_layers(plan_of(Stacked)), layer_loops=1)
    (found,) = violations(with_layers(plan_of(Stacked, unroll=True)), layer_loops=1)
    assert "3 layers" in found.found
    assert "unroll" in found.found
    (found,) = violations(with_layers(plan_of()), layer_loops=1)
    assert "no loop" in found.found


# --- settings and errors --------------------------------------------------------------------------


def test_settings_of_rules():
    plan = plan_of()
    with pytest.raises(ValueError, match="set one of no_gather, max_gather_mb"):
        zerojax.expect(plan)
    with pytest.raises(TypeError, match="max_peak_gib"):
        zerojax.expect(plan, max_peak_gb=1)
    with pytest.raises(ConfigError, match="is not a regular expression"):
        zerojax.ExpectConfig(no_gather=("(",))
    with pytest.raises(ConfigError, match=">= 1"):
        zerojax.ExpectConfig(layer_loops=0)
    with pytest.raises(ValueError, match=r"devices=4.*gpu="):
        zerojax.expect(plan, max_peak_gib=1, devices=4)
    abstract = plan.remake(zerojax.make_abstract_mesh({"data": 8}))
    with pytest.raises(ValueError, match="gpu="):
        zerojax.expect(abstract, max_peak_gib=1)
    on_cpus = types.SimpleNamespace(plan=plan, contents=types.SimpleNamespace(on_gpus=False))
    with pytest.raises(ValueError, match=r"fused_attention.*gpu="):
        violations(on_cpus, fused_attention=True)
    assert zerojax.ExpectConfig(max_gather_mb=0, layer_loops=1).names == (
        "max_gather_mb",
        "layer_loops",
    )


# --- golden files ---------------------------------------------------------------------------------


@gathers_twice
def test_a_golden_file_names_what_differs(tmp_path):
    path = tmp_path / "plan.json"
    before = plan_record(step_of(rules=GOOD_RULES, zero=3))
    assert check_golden(before, path) is None
    assert check_golden(before, path) == []
    differences = check_golden(plan_record(step_of(zero=3)), path)
    assert "mesh: data 8, was data 2 x model 4" in differences
    assert "up/kernel: layout [None, 'data'], was ['data', 'model']" in differences
    assert any(line.startswith("peak: ") for line in differences)
    assert any(line.startswith("all-gather over data, f32: 5 times") for line in differences)
    assert any(line.startswith("down/kernel: reduce-scatter over data") for line in differences)
    path.write_text("[]")
    with pytest.raises(ValueError, match="format"):
        check_golden(before, path)


def test_a_golden_file_names_a_parameter_that_is_gathered_again():
    """A layer in a loop counts as its share."""
    once = plan_record(step_of(model=Stacked, zero=2))
    twice = plan_record(step_of(model=Stacked, zero=3))
    assert once["parameters"]["layers/kernel"]["gathered"]["f32"]["times"] == 1
    differences = compare_records(twice, once)
    assert "layers/kernel: gathered 2 times per step, was 1" in differences


def test_differences_of_parameters():
    one = {
        "shape": [8],
        "layout": ["data"],
        "gathered": {"bf16": {"times": 1.0, "bytes": 16}},
        "summed": {"all-reduce over data, float32": {"times": 1.0, "bytes": 56}},
    }
    other = {
        **one,
        "layout": [None],
        "gathered": {"f32": {"times": 1.0, "bytes": 32}},
        "summed": {},
    }
    old = {"collectives": {}, "parameters": {"a": one, "b": one}}
    new = {"collectives": {}, "parameters": {"a": other, "c": one}}
    assert compare_records(new, old) == [
        "a: layout [None], was ['data']",
        "a: gathered in f32: 1 times per step, 32 B, was none",
        "a: gathered in bf16: none, was 1 times per step, 16 B",
        "a: all-reduce over data, float32: none, was 1 times per step, 56 B",
        "c: new parameter [8]",
        "b: no such parameter, was [8]",
    ]
