"""Training with a curriculum of the row length: equal to training on rows that were cut before."""

from __future__ import annotations

import dataclasses
import threading

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.features.curriculum.curriculum_runs import (
    ROWS,
    TOKENS,
    VOCAB,
    Causal,
    batch_of,
    plain_training,
)
from tests.support.inputs_with_features import plan_inputs
from tests.support.marks import thorough
from tests.support.refusals import refused
from tests.support.trajectories import failing_at
from zerojax.config import ModelConfig, MoEConfig
from zerojax.plan.counts import model_flops
from zerojax.plan.make import plan_of
from zerojax.plan.rung_plans import with_rungs
from zerojax.training.metrics import read_metrics
from zerojax.training.step_programs import CountedWork, StepProgram
from zerojax.zoo import build_model

CURRICULUM = zerojax.CurriculumConfig(
    type="seqlen", min_length=6, length_step=1, total_steps=TOKENS - 6
)
"""Step t has 6 + t tokens; 18 lengths with 6 compiled: 9, 12, 15, 18, 21, 24."""
STEPS = 4
"""Steps 1 to 3 are computed with 9 tokens, the next three with 12."""


class Looking(Causal):
    """Its tokens see all others, also later ones."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        whole = jnp.mean(self.embed[...][tokens], 1, keepdims=True)
        return super().__call__(tokens) + whole @ self.head[...]


def trained(
    mesh: dict | None = None, *, steps: int = STEPS, model=None, batches=batch_of, **options
) -> zerojax.Trainer:
    settings = {
        "loss": zerojax.losses.next_token_of_call,
        "optimizer": optax.adamw(1e-2),
        "run_dir": None,
        "log": zerojax.LogConfig(every=1, console="quiet"),
        "curriculum": CURRICULUM,
    }
    model = Causal(nnx.Rngs(0)) if model is None else model
    return zerojax.train(model, mesh or {}, batches, steps=steps, **{**settings, **options})


def parameters(trainer: zerojax.Trainer) -> dict[str, np.ndarray]:
    model = trainer.to_model()
    return {name: np.asarray(getattr(model, name)[...]) for name in ("embed", "places", "head")}


@pytest.fixture
def compiled_steps():
    """Names of the step programs that XLA compiles or reads from a cache in the test."""
    names = []

    def listen(event: str, _: float, **facts) -> None:
        if event.endswith("backend_compile_duration") and facts.get("fun_name") == "jit(step)":
            names.append(facts["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.thorough
def test_settings_of_jax_in_a_context_hold_for_lengths_compiled_ahead(compiled_steps):
    with jax.default_matmul_precision("highest"):
        trained()
    assert len(compiled_steps) == 2


@pytest.mark.thorough
def test_a_step_whose_tokens_have_no_weight_is_said():
    def batches(step: int):
        weights = np.ones((ROWS, TOKENS), np.float32)
        weights[:, :8] = 0
        return {**batch_of(step), "weights": weights}

    with pytest.warns(UserWarning, match="min_length") as warned:
        trained(batches=batches)
    texts = [str(one.message) for one in warned if "min_length" in str(one.message)]
    assert [text.split(":")[0] for text in texts] == ["step 1", "step 2"]


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 3])
def test_steps_equal_those_of_one_device_on_short_rows(zero, compiled_steps):
    trainer = trained({"zero": zero, "persistence_threshold": 0})
    losses, expected = plain_training(STEPS, lambda step: 6 + step)

    # float32 sums over 8 shards instead of one, in another order, over 4 steps
    assert [one["loss"] for one in trainer.history] == pytest.approx(losses, rel=2e-6)
    for name, value in parameters(trainer).items():
        np.testing.assert_allclose(value, expected[name], atol=3e-6, err_msg=name)
    assert len(compiled_steps) == 2, "one program for each compiled length that a step has"
    assert trainer.plan.ladder.config.rungs == (9, 12, 15, 18, 21, 24)
    for rung, plan in trainer.plan.ladder.plans.items():
        assert plan.abstract_batch["weights"].shape == (ROWS, rung)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(2, id="inside a length", marks=pytest.mark.thorough),
        pytest.param(3, id="before a longer one"),
    ],
)
def test_a_resumed_run_has_the_same_bits(step, tmp_path, whole_run):
    with pytest.raises(OSError, match="gone"):
        trained({"zero": 1}, steps=5, batches=failing_at(step, batch_of), checkpoint=tmp_path)
    resumed = trained({"zero": 1}, steps=5, checkpoint=tmp_path)
    assert [one["step"] for one in resumed.history] == list(range(step + 1, 6))
    resumed.close()
    # a checkpoint is the same as without a curriculum
    read = trained({"zero": 1}, steps=5, checkpoint=tmp_path, curriculum=None)
    for run in (resumed, read):
        for (name, one), (_, other) in zip(*map(leaves, (run, whole_run)), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)


def leaves(trainer: zerojax.Trainer):
    state = jax.device_get(dict(trainer.state))
    return [(jax.tree_util.keystr(path), x) for path, x in jax.tree.leaves_with_path(state)]


@pytest.fixture(scope="module")
def whole_run():
    return trained({"zero": 1}, steps=5)


@pytest.mark.thorough
def test_lengths_and_tokens_are_logged(tmp_path):
    validation = [batch_of(100)]
    trainer = trained(steps=5, run_dir=tmp_path, validation=validation, eval_every=2)
    metrics = read_metrics(tmp_path)
    changes = [one for one in metrics.events if one["event"] == "sequence_length"]
    assert [(one["step"], one["length"]) for one in changes] == [(t, 6 + t) for t in range(1, 6)]
    seen = np.cumsum([ROWS * (6 + t) for t in range(1, 6)])
    assert [one["tokens_seen"] for one in metrics.train] == seen.tolist()
    assert metrics.starts[0]["tokens_per_step"] is None
    for one in metrics.train[1:]:
        rate = one["tokens_per_second_per_device"] * one["step_seconds"] * 8
        assert rate == pytest.approx(ROWS * (6 + one["step"]))
    assert all(one["weight"] == ROWS * (6 + one["step"]) for one in trainer.history)

    # evaluations have whole rows, with the parameters of the step
    assert trainer.evaluations[-1]["weight"] == ROWS * TOKENS
    graph, params = nnx.split(trainer.to_model())
    logits = nnx.merge(graph, params)(validation[0]["tokens"])
    targets = validation[0]["targets"]
    plain = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    # float32 sums in another order
    assert trainer.evaluations[-1]["loss"] == pytest.approx(float(plain), rel=2e-6)


def test_weights_of_the_batch_are_kept():
    def batches(step: int):
        weights = np.random.default_rng(step).integers(0, 3, (ROWS, TOKENS)).astype(np.float32)
        return {**batch_of(step), "weights": weights}

    trainer = trained(steps=2, batches=batches)
    expected = [batches(step)["weights"][:, : 7 + step].sum() for step in range(2)]
    assert [one["weight"] for one in trainer.history] == pytest.approx(expected)


@pytest.mark.thorough
def test_keys_name_the_arrays_of_any_loss():
    """A mean without weights: each length is compiled, and other arrays keep their shape."""

    def loss(model, batch):
        logits = model(batch["text"]) + batch["scale"][:, None, None]
        targets = batch["next"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def batches(step: int):
        batch = batch_of(step)
        scale = np.ones(ROWS, np.float32)
        return {"text": batch["tokens"], "next": batch["targets"], "scale": scale}

    curriculum = zerojax.CurriculumConfig(
        type="seqlen",
        schedule_type="fixed_discrete",
        lengths=(5, 24),
        until_steps=(2,),
        keys=("text", "next"),
    )
    trainer = trained(steps=3, loss=loss, batches=batches, curriculum=curriculum)
    losses, _ = plain_training(3, lambda step: 5 if step <= 2 else 24)
    # float32 sums over 8 shards instead of one, in another order
    assert [one["loss"] for one in trainer.history] == pytest.approx(losses, rel=2e-6)
    assert "weights" not in trainer.plan.ladder.plans[5].abstract_batch


FEW = zerojax.CurriculumConfig(
    type="seqlen", schedule_type="fixed_discrete", lengths=(8, 24), until_steps=(5,)
)


def mean_of(model, batch):
    return zerojax.losses.next_token_of_call(model, batch)[0] / ROWS


def without_weights(model, batch):
    logits, targets = model(batch["tokens"]), batch["targets"]
    values = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return values.sum(), values.size


def packed(step: int):
    return {**batch_of(step), "segments": np.zeros((ROWS, TOKENS), np.int32)}


class Fixed(Causal):
    """It takes rows of one length only."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return super().__call__(tokens) + self.places[...][:, :1][None] @ jnp.ones((1, VOCAB))


class Counting(Causal):
    """It counts tokens."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        self.seen[...] += jnp.sum(tokens > 0, dtype=jnp.int32)
        return super().__call__(tokens)


REFUSED = {
    "packed": ({"batches": packed, "loss": without_weights}, "segments", "packing"),
    "own loss": ({"loss": without_weights}, "next-token", "keys"),
    "no such key": ({"curriculum": dataclasses.replace(FEW, keys=("ids",))}, "ids", "tokens"),
    "too long": (
        {"curriculum": zerojax.CurriculumConfig(type="seqlen", max_length=32, total_steps=9)},
        "32 24",
        "lower",
    ),
    "too long at first": (
        {"curriculum": zerojax.CurriculumConfig(type="seqlen", min_length=32, total_steps=9)},
        "min_length 32 24",
        "lower",
    ),
    "one length only": ({"model": Fixed, "curriculum": FEW}, "8 24", "model"),
    "state": ({"model": Counting}, "seen", "fixed_discrete"),
    "1-bit": ({"optimizer": zerojax.optim.one_bit_adam(1e-2, freeze_step=2)}, "1-bit", "adamw"),
    "offload": ({"mesh": {"offload": {"opt_state": "host"}}}, "offload", "leave"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_curriculum_would_change_is_refused_before_arrays_exist(name, monkeypatch):
    options, value, remedy = REFUSED[name]
    options = {**options}
    if "model" in options:
        options["model"] = options["model"](nnx.Rngs(0))
    monkeypatch.setattr("zerojax.training.entry.open_run", lambda *_: pytest.fail("it was opened"))
    refused(lambda: trained(**options), value, remedy)


def weighted_by_hand(model, batch):
    logits, targets = model(batch["tokens"]), batch["targets"]
    values = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(values * batch["weights"]), batch["weights"].size


def divided_by_hand(model, batch):
    return weighted_by_hand(model, batch)[0], jnp.sum(batch["weights"])


def with_weights(step: int):
    return {**batch_of(step), "weights": np.ones((ROWS, TOKENS), np.float32)}


def with_prompts(step: int):
    """The first short rows have no token with weight in their first half."""
    weights = np.ones((ROWS, TOKENS), np.float32)
    weights[:, :4] = 0
    return {**batch_of(step), "weights": weights}


BY_HAND = {"loss": weighted_by_hand, "keys": ("tokens", "targets", "weights")}


@pytest.mark.parametrize(
    ("options", "value", "remedy", "other"),
    [
        thorough({"model": Looking}, "later", "fixed_discrete causal", {"model": Causal}),
        ({"model": Looking, "batches": with_prompts}, "later", "fixed_discrete causal", None),
        thorough(BY_HAND, "weights", "fixed_discrete divide", {"loss": divided_by_hand}),
    ],
    ids=["looks ahead", "looks ahead, prompts", "counts all tokens"],
)
def test_weights_that_do_not_replace_shorter_rows_are_refused(options, value, remedy, other):
    """Before the first step: nothing of it was taken."""
    steps = []

    def train(**changes):
        given = {"batches": with_weights, "model": Causal, "curriculum": CURRICULUM}
        given |= {**options, **changes}
        keys = given.pop("keys", ())
        given["curriculum"] = dataclasses.replace(given["curriculum"], keys=keys)
        given["model"] = given["model"](nnx.Rngs(0))
        trained(steps=1, callbacks=[lambda _, found: steps.append(found)], **given)

    refused(train, value, remedy)
    assert not steps
    if other is not None:
        train(curriculum=FEW)
        train(**other)
        assert len(steps) == 2


# --- other ways of computing a step ---------------------------------------------------------------

BY_TWO = zerojax.CurriculumConfig(type="seqlen", min_length=4, length_step=2, total_steps=10)
"""Steps 1 and 2 have 6 and 8 tokens, computed with 8."""


def decoder(**changes):
    sizes = {"num_layers": 2, "embed_dim": 16, "num_heads": 2, "max_seq_len": TOKENS}
    return build_model(ModelConfig(vocab_size=VOCAB, **sizes | changes), VOCAB)


def trained_decoder(mesh=None, model=None, **options) -> zerojax.Trainer:
    settings = {"loss": None, "optimizer": zerojax.adamw(1e-2), "curriculum": BY_TWO, "steps": 2}
    return trained(mesh, model=model or decoder(), **{**settings, **options})


@pytest.fixture(scope="module")
def decoder_losses():
    return [one["loss"] for one in trained_decoder({"zero": 0}).history]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"stage": 2, "zero": 1}, {"num_microbatches": 2}),
        ({"context": 2, "zero": 1}, {}),
        ({"model": 2, "zero": 3, "persistence_threshold": 0}, {}),
        ({"zero": 1}, {"model": decoder(attention="chunked", dropout=0.0, remat="full")}),
    ],
    ids=["stages", "context", "model", "chunked attention"],
)
def test_other_meshes_have_the_same_losses(mesh, options, decoder_losses):
    found = [one["loss"] for one in trained_decoder(mesh, **options).history]
    assert found == pytest.approx(decoder_losses, rel=1e-6)  # float32 sums in another order


@pytest.mark.slow
def test_deterministic_runs_have_the_same_bits_on_fewer_devices():
    few = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    runs = [trained_decoder(mesh, deterministic="mesh") for mesh in ({"zero": 1, "data": 8}, few)]
    assert runs[0].history[-1]["loss"] == runs[1].history[-1]["loss"]
    one, other = (jax.device_get(run.state["params"]) for run in runs)
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_parts_of_a_sequence_that_do_not_divide_a_length_are_refused():
    odd = zerojax.CurriculumConfig(type="seqlen", min_length=5, length_step=5, total_steps=10)
    refused(lambda: trained_decoder({"context": 2}, curriculum=odd), "5 context=2", "length_step")


def test_experts_count_all_tokens_so_every_length_is_compiled():
    model = decoder(name="llama", moe=MoEConfig(num_experts=4))
    refused(lambda: trained_decoder(model=model), "experts", "fixed_discrete length_step")
    plan = make_plan_with(FEW, model)
    assert plan.ladder.config.rungs == (8, 24)


def make_plan_with(curriculum, model):
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch_of(0).items()}
    inputs = plan_inputs(model=model, example_batch=batch, curriculum=curriculum)
    return with_rungs(plan_of(inputs, {"zero": 1}))


@pytest.mark.thorough
def test_dropout_is_taken_with_weights():
    plan = make_plan_with(BY_TWO, decoder(dropout=0.1))
    assert plan.ladder.adds_weights
    page = plan.table()
    for rung in plan.ladder.config.rungs:
        assert str(rung) in page


def test_the_next_length_is_compiled_while_this_one_runs(monkeypatch):
    """It is compiled in a thread; a length that the run does not reach is not compiled."""
    threads = []
    compile_program = StepProgram._compile

    def compile_in(program, lowered):
        threads.append((threading.current_thread() is threading.main_thread(), program))
        compile_program(program, lowered)

    monkeypatch.setattr(StepProgram, "_compile", compile_in)
    trained(steps=4)
    assert [is_main for is_main, _ in threads] == [False]
    assert threads[0][1].plan.abstract_batch["tokens"].shape == (ROWS, 12)
    assert threads[0][1].was_called


@pytest.mark.thorough
def test_the_mesh_changes_in_the_middle_of_a_curriculum(whole_run):
    def change(trainer, metrics):
        if trainer.num_steps == 2:
            trainer.reshard({"zero": 3, "persistence_threshold": 0})

    trainer = trained({"zero": 1}, steps=5, callbacks=[change])
    assert trainer.plan.zero == 3
    losses = [[one["loss"] for one in run.history] for run in (trainer, whole_run)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)  # float32 sums in another order
    for name, value in parameters(trainer).items():
        np.testing.assert_allclose(value, parameters(whole_run)[name], atol=3e-6, err_msg=name)


@pytest.mark.thorough
def test_the_work_of_deepspeeds_usual_schedule_is_four_fifths():
    """8 to 1024 tokens over 40 % of the steps, 12 layers of width 128."""
    model = decoder(num_layers=12, embed_dim=128, num_heads=4, max_seq_len=1024)
    tokens = jax.ShapeDtypeStruct((ROWS, 1024), np.int32)
    curriculum = zerojax.CurriculumConfig(type="seqlen", min_length=8, total_steps=400)
    inputs = plan_inputs(
        model=model, example_batch={"tokens": tokens, "targets": tokens}, curriculum=curriculum
    )
    plan = with_rungs(plan_of(inputs, {"zero": 1}))
    work = CountedWork(plan)
    assert work.flops(0, 1000) <= 0.80 * 1000 * model_flops(plan)
    assert work.tokens(0, 1000) == sum(
        ROWS * plan.ladder.config.length(step) for step in range(1, 1001)
    )
