"""Experts that biases keep equally busy: the choice, the rule, equal bits on any devices."""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.models.test_step_count import extras_of, noted
from tests.support.small_models import VOCAB
from tests.support.trajectories import ROWS, advance, plan_for, text_batch
from tests.zoo.test_moe import by_hand, llama
from zerojax.cli import main
from zerojax.config import ConfigError, MoEConfig
from zerojax.models import StepCount
from zerojax.models.losses import next_token
from zerojax.step.build import build_evaluation
from zerojax.step.initialization import init_state
from zerojax.step.reshard import reshard_state
from zerojax.zoo import MoE, Routing, balance_losses
from zerojax.zoo.moe import Router, TowardsMean

STEPS = 4
EXPERTS = 8
RATE = 0.01
BIASED = MoEConfig(num_experts=EXPERTS, bias_rate=RATE, z_weight=0.01)


class Mixture(nnx.Module):
    """A user's own model: a list of mixtures with biases, and a note of the loads of each step."""

    expert_parameters: ClassVar[tuple[str, ...]] = MoE.expert_parameters

    def __init__(self, rngs, *, rate=RATE, layers=2, width=16, skew=0.5):
        self.config = MoEConfig(num_experts=EXPERTS, expert_dim=12, bias_rate=rate)
        self.skew = skew  # of all tokens alike, so that routers prefer some experts
        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        make = functools.partial(MoE, width, self.config, stddev=0.3)
        self.layers = nnx.List([make(rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, VOCAB, rngs=rngs)
        self.loads = nnx.Variable(jnp.zeros((STEPS, layers, EXPERTS), jnp.int32))
        zeros = jnp.zeros((layers, EXPERTS), jnp.int32)
        self.load = StepCount(zeros, changes="loads", rule=noted)

    def loss(self, batch):
        x = self.embed(batch["tokens"]) + self.skew
        seen = Routing.empty(len(self.layers), EXPERTS)
        for layer in self.layers:
            y, routing = layer(x)
            x, seen = x + y, seen.push(routing)
        self.load[...] += seen.chosen.astype(jnp.int32)
        added, metrics = balance_losses(seen, self.config)
        total, weight = next_token(self.head(x), batch["targets"])
        return total + added * weight, weight, metrics


def mixture(**changes):
    return lambda rngs: Mixture(rngs, **changes)


def run(model, *, steps=STEPS, **options):
    plan = plan_for(model, **{"optimizer": optax.sgd(0.1), **options})
    return advance(plan, init_state(plan, 0), range(steps))


@functools.cache
def on_one_device(**changes):
    return extras_of(run(mixture(**changes), devices=1).state)


# --- the choice and the rule ----------------------------------------------------------------------


def with_bias(module, bias):
    module.router.bias[...] = jnp.asarray(bias, jnp.float32)
    return module


@pytest.mark.thorough
def test_biases_choose_and_are_no_part_of_the_result():
    """Scores of the chosen experts are without them; no gradient goes to them or to the choice."""
    config = MoEConfig(num_experts=5, expert_dim=7, scores="sigmoid", scale=2.0, bias_rate=0.1)
    module = MoE(12, config, rngs=nnx.Rngs(3), stddev=0.5, output_stddev=0.5)
    x = np.random.default_rng(0).normal(size=(18, 12))
    given = jnp.asarray(x, jnp.float32)
    before = np.asarray(module.router(given)[1])
    bias = np.array([0.0, 0.4, -0.2, 0.0, 3.0])
    gates, ids, _ = with_bias(module, bias).router(given)
    assert (np.asarray(ids)[:, 0] == 4).all()
    assert not np.array_equal(np.sort(ids, -1), np.sort(before, -1))
    scores = 1 / (1 + np.exp(-x @ np.asarray(module.router.kernel[...], np.float64)))
    wanted = np.argsort(-(scores + bias), -1)[:, :2]
    np.testing.assert_array_equal(ids, wanted)
    kept = np.take_along_axis(scores, wanted, -1)
    kept = 2 * kept / kept.sum(-1, keepdims=True)
    np.testing.assert_allclose(gates, kept, rtol=2e-6)
    y = by_hand(module, x)
    np.testing.assert_allclose(module(given)[0], y, rtol=0, atol=2e-6 * np.abs(y).max())

    graphdef, state = nnx.split(module)

    def total(state):
        return jnp.sum(nnx.merge(graphdef, state).router(given)[0] ** 2)

    slopes = jax.grad(total, allow_int=True)(state)["router"]
    assert slopes["kernel"][...].any()
    assert not slopes["bias"][...].any()


@pytest.mark.thorough
def test_groups_are_chosen_with_biases_too():
    """A group whose scores are the lowest is chosen for its biases, which may be below -1."""
    groups = {"num_groups": 3, "groups_per_token": 1}
    config = MoEConfig(num_experts=6, expert_dim=7, scores="sigmoid", bias_rate=0.1, **groups)
    module = MoE(12, config, rngs=nnx.Rngs(0))
    bias = [-9.0, -9.0, -5.0, -5.0, -9.0, -9.0]
    ids = with_bias(module, bias).router(jnp.ones((4, 12)))[1]
    assert np.sort(ids, -1).tolist() == [[2, 3]] * 4


@pytest.mark.parametrize("largest", [7, 2**24 + 9, 2**31 - 1])
def test_the_rule_is_exact_in_integers(largest):
    """Against Python's integers; sums beyond 2^31, means that are no integer, equal loads."""
    random = np.random.default_rng(largest)
    near = largest - random.integers(0, 3, (40, 6))
    wide = random.integers(0, largest, (40, 6), endpoint=True)
    for load in [*near, *wide, np.full(6, largest)]:
        exact = [int(x) for x in load]
        signs = [(sum(exact) > 6 * x) - (sum(exact) < 6 * x) for x in exact]
        bias = TowardsMean(0.5)(jnp.ones(6), jnp.asarray(load, jnp.int32))
        assert bias.tolist() == [1 + 0.5 * sign for sign in signs]


def test_a_rate_of_0_keeps_the_biases():
    bias = jnp.asarray([0.25, -0.5])
    assert TowardsMean(0.0)(bias, jnp.asarray([3, 5])).tolist() == bias.tolist()


@pytest.mark.thorough
def test_nothing_is_counted_in_evaluation_and_of_padding():
    router = Router(12, BIASED, stddev=0.02, rngs=nnx.Rngs(0))
    counts = jnp.arange(10) < 7
    router(jnp.ones((10, 12)), counts)
    assert router.load[...].sum() == 7 * BIASED.experts_per_token
    assert router.load[...].dtype == jnp.int32
    router.eval()
    router(jnp.ones((10, 12)))
    assert router.load[...].sum() == 7 * BIASED.experts_per_token


# --- equal bits -----------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"devices": 1, "num_microbatches": 4},
        {"devices": 2, "zero": 1, "num_microbatches": 4},
        {"zero": 0},
        {"zero": 1},
        {"mesh": {"data": 2, "expert": 4}, "zero": 3, "persistence_threshold": 1},
        {"zero": 2, "num_microbatches": 4},
        {"zero": 3, "persistence_threshold": 1},
        {"mesh": {"data": 4, "expert": 2}, "zero": 0},
        {"mesh": {"data": 1, "expert": 8}, "zero": 2, "num_microbatches": 4},
    ],
    ids=str,
)
def test_loads_and_biases_are_those_of_one_device_bit_for_bit(options):
    """Of four steps, in which parameters learn; a choice differs only where rounding decides it."""
    one, many = on_one_device(), extras_of(run(mixture(), **options).state)
    tokens = ROWS * 16 * 2
    assert one["loads"].sum(-1).tolist() == [[tokens] * 2] * STEPS
    assert len({row.tobytes() for row in one["loads"]}) == STEPS
    for name in ("loads", "layers/0/router/bias", "layers/1/router/bias"):
        assert many[name].tobytes() == one[name].tobytes(), name
        assert one[name].any()
    assert not many["layers/0/router/load"].any()


def by_definition(loads, rate=RATE):
    """float32 biases after steps with these loads [steps, experts]."""
    bias = np.zeros(loads.shape[-1], np.float32)
    for load in loads.astype(np.int64):
        bias = bias + np.float32(rate) * np.sign(load.sum() - load.size * load).astype(np.float32)
    return bias


@pytest.mark.thorough
def test_biases_follow_the_loads_of_whole_steps():
    """Not of microbatches, one after the other."""
    for options in ({}, {"num_microbatches": 4}):
        found = extras_of(run(mixture(), devices=1, **options).state)
        for layer in range(2):
            wanted = by_definition(found["loads"][:, layer])
            assert found[f"layers/{layer}/router/bias"].tobytes() == wanted.tobytes()


STREAMED = {"opt_state": "host", "params": "host", "min_elements": 1}
PLAIN_SGD = zerojax.sgd(0.1, clip_norm=None)


@functools.cache
def decoder_on_one_device():
    return extras_of(run(llama(BIASED), devices=1, num_microbatches=4).state)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"zero": 3, "persistence_threshold": 1},
        {"mesh": {"stage": 2}, "zero": 1, "num_microbatches": 4},
        {"mesh": {"model": 2}, "zero": 2},
        {"mesh": {"data": 2, "expert": 4}, "zero": 3, "persistence_threshold": 1},
        {"zero": 3, "offload": STREAMED, "num_microbatches": 2, "optimizer": PLAIN_SGD},
    ],
    ids=["zero 3", "pipeline", "model", "experts", "offload"],
)
def test_stacked_layers(options):
    """Of a decoder, whose layers run in one loop; through a pipeline and with offload, too."""
    one, many = decoder_on_one_device(), extras_of(run(llama(BIASED), **options).state)
    name = "blocks/mlp/router/bias"
    assert one[name].shape == (2, EXPERTS)
    assert one[name].any()
    assert many[name].tobytes() == one[name].tobytes()
    assert not many["blocks/mlp/router/load"].any()


@pytest.mark.thorough
def test_layers_of_a_list_that_are_rolled():
    many = run(mixture(layers=4), zero=3, persistence_threshold=1)
    assert many.plan.stacks
    one, found = on_one_device(layers=4), extras_of(many.state)
    for name in ("loads", *(f"layers/{i}/router/bias" for i in range(4))):
        assert found[name].tobytes() == one[name].tobytes(), name


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_biases_balance_a_router_that_is_not():
    """Parameters stay as they are. There are 61 tokens, and all of one kind move at once."""

    def fullest(rate):
        plan = plan_for(mixture(rate=rate, layers=1), devices=1, optimizer=optax.sgd(0.0))
        state, step, found = init_state(plan, 0), zerojax.build_step(plan), []
        batch = jax.device_put(text_batch(0), plan.batch_sharding)
        for _ in range(20):
            state, metrics = step(state, batch)
            found.append(float(metrics["moe_fullest"]))
        return found

    found, kept = fullest(0.01), fullest(0.0)
    assert kept[0] == kept[-1] == found[0] > 3
    assert 1 < max(found[-8:]) < 0.6 * kept[0]


@pytest.mark.thorough
def test_evaluation_uses_biases_and_keeps_them():
    plan = plan_for(mixture(), zero=1)
    batch = jax.device_put(text_batch(0), plan.batch_sharding)
    evaluate = build_evaluation(plan)

    def loss(bias):
        state = init_state(plan, 0)
        name = "layers/0/router/bias"
        state["extras"][name] = jax.device_put(bias, state["extras"][name].sharding)
        total = evaluate(state, batch)["loss"]
        found = extras_of(state)
        assert found[name].tobytes() == bias.tobytes()
        assert not found["layers/0/router/load"].any()
        return float(total)

    assert loss(np.zeros(EXPERTS, np.float32)) != loss(np.arange(EXPERTS, dtype=np.float32))


@pytest.mark.thorough
def test_a_state_goes_to_another_degree_bit_by_bit():
    """Of experts, in a run that goes on as the one that stayed."""
    wide = plan_for(mixture(), mesh={"expert": 8, "data": 1}, optimizer=optax.sgd(0.1))
    narrow = plan_for(mixture(), mesh={"expert": 2, "data": 4}, optimizer=optax.sgd(0.1))
    state = advance(wide, init_state(wide, 0), range(2)).state
    state = advance(narrow, reshard_state(wide, narrow, state), range(2, 4)).state
    assert extras_of(state)["loads"].tobytes() == on_one_device()["loads"].tobytes()


def train(tmp_path, name, steps, *more):
    sizes = ("num_layers=2", "embed_dim=32", "num_heads=4", "max_seq_len=16", "name=llama")
    moe = ("moe.num_experts=8", "moe.expert_dim=24", "moe.bias_rate=0.01")
    options = [
        *(f"model.{each}" for each in (*sizes, *moe)),
        *("data.seq_len=16", "global_batch_size=8", f"steps={steps}", "checkpoint.every=2"),
        *("mesh.zero=2", "precision=fp32", f"run_dir={tmp_path / name}", "log.every=1"),
        *("optimizer.schedule=constant", "optimizer.warmup_steps=0", *more),
    ]
    assert main(["train", *options]) == 0
    return zerojax.load_run(tmp_path / name)


@pytest.mark.thorough
def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path, capsys):
    """Two steps and two more are the four of a run that nothing interrupts; export is refused."""
    train(tmp_path, "cut", 2)
    cut, whole = train(tmp_path, "cut", 4), train(tmp_path, "whole", 4)
    assert "moe rounds" in capsys.readouterr().out
    found, wanted = (nnx.to_flat_state(nnx.state(run.to_model())) for run in (cut, whole))
    for (path, one), (_, other) in zip(found, wanted, strict=True):
        assert np.asarray(one[...]).tobytes() == np.asarray(other[...]).tobytes(), path
    bias = dict(wanted)["blocks", "mlp", "router", "bias"][...]
    assert bias.shape == (2, 8)
    assert 0 < np.abs(bias).max() <= 0.04001
    command = ["checkpoint", "export", str(tmp_path / "whole"), str(tmp_path / "folder")]
    assert main([*command, "--format", "hugging_face"]) != 0


# --- settings and metrics -------------------------------------------------------------------------


def test_settings():
    """A bias takes the place of the loss, unless that is asked for as well."""
    weights = [
        MoEConfig(num_experts=2, **changes).weight_of_balance
        for changes in (
            {},
            {"bias_rate": 0.001},
            {"bias_rate": 0.0},
            {"bias_rate": 0.001, "balance_weight": 1e-4},
            {"balance_weight": 0.0},
        )
    ]
    assert weights == [0.01, 0, 0, 1e-4, 0]
    with pytest.raises(ConfigError, match=r"bias_rate.*-0\.1"):
        MoEConfig(num_experts=2, bias_rate=-0.1)
    with pytest.raises(ConfigError, match="num_experts is 0"):
        MoEConfig(bias_rate=0.1)


class Pulled(Mixture):
    """All tokens go to the same two experts, by biases."""

    def __init__(self, rngs):
        super().__init__(rngs, rate=0.0)
        bias = jnp.where(jnp.arange(EXPERTS) < 2, 100.0, 0.0)
        self.layers[1].router.bias[...] = bias


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [{"devices": 1}, {"mesh": {"data": 2, "expert": 4}}, {"num_microbatches": 2}],
    ids=str,
)
def test_a_step_reports_the_rounds_of_the_layer_with_most(options):
    """64 tokens of a device, 20 slots of an expert, then 5: 64 rows take 1 + 9 rounds."""
    plan = plan_for(lambda rngs: Pulled(rngs), **options)
    batch = jax.device_put(text_batch(0), plan.batch_sharding)
    metrics = zerojax.build_step(plan)(init_state(plan, 0), batch)[1]
    tokens = ROWS * 16 // options.get("devices", 8) // options.get("num_microbatches", 1)
    slots = -(-tokens * 2 * 5 // (4 * EXPERTS))
    rounds = 1 + -(-(tokens - slots) // -(-slots // 4))
    assert float(metrics["moe_rounds"]) == rounds
    assert rounds > 8


@pytest.mark.thorough
def test_rounds_are_those_of_the_device_with_most():
    """Rows of one device have one token alone, whose experts get all; others take fewer rounds."""
    batch = {name: x.copy() for name, x in text_batch(0).items()}
    batch["tokens"][:4] = 3
    model = Mixture(nnx.Rngs(0))
    plan = plan_for(model)
    by_device = [
        float(model.loss({name: x[i : i + 4] for name, x in batch.items()})[2]["moe_rounds"])
        for i in range(0, ROWS, 4)
    ]
    given = jax.device_put(batch, plan.batch_sharding)
    metrics = zerojax.build_step(plan)(init_state(plan, 0), given)[1]
    assert float(metrics["moe_rounds"]) == max(by_device) == by_device[0] > max(by_device[1:])
