"""Training with a batch ramp: equal to training on one device with batches of the same rows."""

from __future__ import annotations

import dataclasses
import threading

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.features.curriculum.curriculum_runs import TOKENS, VOCAB, Causal
from tests.support.refusals import refused
from tests.support.trajectories import failing_at
from zerojax.config import ModelConfig
from zerojax.data import DatasetSource, TokenSource, tokens_of_array
from zerojax.plan.counts import model_flops, tokens_per_step
from zerojax.training.metrics import read_metrics
from zerojax.training.step_programs import CountedWork, StepProgram
from zerojax.zoo import build_model

WHOLE = 24
RAMP = zerojax.BatchRampConfig(start=8, increment=8, ramp_rows=32)
SIZES = (8, 8, 16, 24)
"""Rows of steps 1 to 4; the batches of steps 3 and 4 cross those of the data."""
STEPS = len(SIZES)
TEXT = np.random.default_rng(0).integers(0, VOCAB, (2 * WHOLE * STEPS, TOKENS + 1), np.int32)


def batch_of(number: int) -> dict[str, np.ndarray]:
    """Full batches of `TEXT`, in order."""
    rows = TEXT[WHOLE * number : WHOLE * (number + 1)]
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def trained(mesh: dict | None = None, *, model=None, batches=batch_of, **options):
    settings = {
        "loss": zerojax.losses.next_token_of_call,
        "optimizer": optax.adamw(1e-2),
        "run_dir": None,
        "log": zerojax.LogConfig(every=1, console="quiet"),
        "steps": STEPS,
        "batch_ramp": RAMP,
    }
    model = Causal(nnx.Rngs(0)) if model is None else model
    return zerojax.train(model, mesh or {}, batches, **{**settings, **options})


def plain_training(sizes=SIZES, tx=None) -> tuple[list[float], dict[str, np.ndarray]]:
    """One device, the rows of `TEXT` in order: (loss of each step, parameters)."""
    graph, params = nnx.split(Causal(nnx.Rngs(0)))
    tx = tx or optax.adamw(1e-2)
    state = tx.init(params)

    @jax.jit
    @jax.value_and_grad
    def loss_of(params, tokens, targets):
        logits = nnx.merge(graph, params)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    @jax.jit
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    losses, row = [], 0
    for size in sizes:
        rows, row = TEXT[row : row + size], row + size
        loss, grads = loss_of(params, rows[:, :-1], rows[:, 1:])
        params, state = update(grads, state, params)
        losses.append(float(loss))
    return losses, {name: np.asarray(x[...]) for name, x in nnx.to_pure_dict(params).items()}


def losses(trainer: zerojax.Trainer) -> list[float]:
    return [one["loss"] for one in trainer.history]


def parameters(trainer: zerojax.Trainer) -> dict[str, np.ndarray]:
    model = trainer.to_model()
    return {name: np.asarray(getattr(model, name)[...]) for name in ("embed", "places", "head")}


@pytest.fixture(scope="module")
def one_device():
    return plain_training()


@pytest.fixture(scope="module")
def whole_run():
    return trained({"zero": 1})


def check_equal_to_one_device(trainer, plain):
    expected, values = plain
    # float32 sums over shards and microbatches instead of one, in another order, over 4 steps
    assert losses(trainer) == pytest.approx(expected, rel=2e-6)
    for name, value in parameters(trainer).items():
        np.testing.assert_allclose(value, values[name], atol=3e-6, err_msg=name)


def test_steps_equal_those_of_one_device(whole_run, one_device):
    check_equal_to_one_device(whole_run, one_device)
    plans = whole_run.plan.ladder.plans
    assert [(rows, one.num_microbatches) for rows, one in plans.items()] == [
        (8, 1),
        (16, 2),
        (24, 3),
    ]
    assert all(one.abstract_batch["tokens"].shape[0] == rows for rows, one in plans.items())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"zero": 3, "persistence_threshold": 0}, {}),
        ({"zero": 2, "data": 2, "model": 4}, {"num_microbatches": 6}),
        ({"zero": 1}, {"batches": [batch_of(number) for number in range(STEPS)]}),
    ],
    ids=["zero 3", "model", "list"],
)
def test_other_meshes_and_batches_equal_one_device(mesh, options, one_device):
    check_equal_to_one_device(trained(mesh, **options), one_device)


def leaves(trainer: zerojax.Trainer):
    state = jax.device_get(dict(trainer.state))
    return [(jax.tree_util.keystr(path), x) for path, x in jax.tree.leaves_with_path(state)]


def check_same_bits(one, other):
    for (name, value), (_, expected) in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_array_equal(value, expected, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_run_has_the_same_bits(step, tmp_path, whole_run):
    trained({"zero": 1}, checkpoint=tmp_path, steps=step).close()
    resumed = trained({"zero": 1}, checkpoint=tmp_path)
    assert [one["step"] for one in resumed.history] == list(range(step + 1, STEPS + 1))
    check_same_bits(resumed, whole_run)


@pytest.mark.thorough
def test_a_killed_run_continues_on_another_mesh(tmp_path, one_device):
    """The error is met by the thread that reads ahead: step 4 needs the second batch."""
    batches = failing_at(2, batch_of)
    with pytest.raises(OSError, match="gone"):
        trained({"zero": 1}, checkpoint=tmp_path, batches=batches)
    few = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    resumed = trained(few, checkpoint=tmp_path)
    assert resumed.history[0]["step"] == 4
    expected, _ = one_device
    # float32 sums over 4 shards instead of 1, in another order
    assert losses(resumed) == pytest.approx(expected[-len(resumed.history) :], rel=2e-6)


@pytest.mark.thorough
def test_the_mesh_changes_in_the_middle_of_a_ramp(one_device):
    def change(trainer, metrics):
        if trainer.num_steps == 2:
            trainer.reshard({"zero": 3, "persistence_threshold": 0})

    trainer = trained({"zero": 1}, callbacks=[change])
    assert trainer.plan.zero == 3
    check_equal_to_one_device(trainer, one_device)


@pytest.mark.thorough
def test_sources_read_the_same_rows(tmp_path, capsys):
    """Of tokens: each row once, as with a constant batch; the ramp may end between two runs."""
    seen = []

    class Noting(TokenSource):
        def rows_at(self, numbers):
            seen.append((int(numbers[0]), len(numbers)))
            return super().rows_at(numbers)

    tokens = tokens_of_array(TEXT[:, :-1].reshape(-1))
    noting = Noting(tokens=tokens, seq_len=TOKENS, global_batch_size=WHOLE, seed=3)
    trained(batches=noting, steps=3, checkpoint=tmp_path).close()
    # the first batch is read for the plan, and again; later batches are read ahead
    assert seen[:4] == [(0, WHOLE), (0, 8), (8, 8), (16, 16)]
    seen.clear()
    log = zerojax.LogConfig(every=1)
    trained(batches=noting, steps=4, checkpoint=tmp_path, batch_ramp=None, log=log)
    assert "batch_ramp of this call, none, is used from step 4" in capsys.readouterr().out
    assert seen[:2] == [(0, WHOLE), (32, WHOLE)]


@pytest.mark.thorough
def test_sizes_and_tokens_are_logged(tmp_path):
    validation = [batch_of(0)]
    trainer = trained(run_dir=tmp_path, validation=validation, eval_every=2)
    metrics = read_metrics(tmp_path)
    changes = [one for one in metrics.events if one["event"] == "batch_size"]
    assert [(one["step"], one["rows"]) for one in changes] == [(1, 8), (3, 16), (4, 24)]
    seen = (np.cumsum(SIZES) * TOKENS).tolist()
    assert [one["tokens_seen"] for one in metrics.train] == seen
    assert [one["weight"] for one in trainer.history] == [TOKENS * size for size in SIZES]
    assert trainer.evaluations[-1]["weight"] == TOKENS * WHOLE
    page = " ".join(trainer.plan.table().split())
    assert "8 from step 1, 16 from step 3, 24 from step 4" in page

    work, plan = CountedWork(trainer.plan), trainer.plan
    assert work.tokens(0, 7) == seen[-1] + 3 * tokens_per_step(plan)
    # every microbatch has the same FLOPs
    assert work.flops(0, 4) == pytest.approx(model_flops(plan) * sum(SIZES) / WHOLE)


@pytest.mark.thorough
def test_rates_follow_the_tokens_and_the_batch(tmp_path):
    """Also after a resume, with the same bits."""
    optimizer = zerojax.OptimizerConfig(
        learning_rate=0.1,
        schedule="linear",
        schedule_unit="tokens",
        warmup_steps=0,
        scaling="linear",
        base_batch=16,
    )
    whole = trained({"zero": 1}, optimizer=optimizer)
    seen = np.asarray([0, 8, 16, 32]) / sum(SIZES)
    expected = 0.1 * (1 - 0.9 * seen) * np.asarray(SIZES) / 16
    # float32 fractions of tokens
    assert [one["learning_rate"] for one in whole.history] == pytest.approx(expected, rel=1e-5)
    stop = lambda trainer, _: trainer.num_steps == 3  # noqa: E731
    options = {"optimizer": optimizer, "checkpoint": tmp_path}
    trained({"zero": 1}, callbacks=[stop], **options).close()
    check_same_bits(trained({"zero": 1}, **options), whole)


@pytest.mark.thorough
def test_the_next_size_is_compiled_while_this_one_runs(monkeypatch):
    threads = []
    compile_program = StepProgram._compile

    def compile_in(program, lowered):
        threads.append((threading.current_thread() is threading.main_thread(), program))
        compile_program(program, lowered)

    monkeypatch.setattr(StepProgram, "_compile", compile_in)
    trained(steps=3)
    assert [is_main for is_main, _ in threads] == [False]
    assert threads[0][1].plan.global_batch_size == 16
    assert threads[0][1].was_called


@pytest.mark.thorough
def test_activations_take_the_same_memory_at_every_size(whole_run):
    """A microbatch has the same rows at each size, so only the batch itself differs."""
    sizes = {}
    for rows in (16, 24):
        plan = whole_run.plan.ladder.plans[rows]
        step = zerojax.build_step(plan)
        compiled = step.lower(plan.abstract_state, plan.abstract_batch).compile()
        sizes[rows] = compiled.memory_analysis().temp_size_in_bytes
    batch = 2 * WHOLE * TOKENS * 4
    assert abs(sizes[24] - sizes[16]) <= batch


FULL_LENGTH = zerojax.CurriculumConfig(type="seqlen", length_step=6, total_steps=9)
REFUSED: dict[str, tuple[dict, str, str]] = {
    "curriculum": ({"curriculum": FULL_LENGTH}, "curriculum 8", "leave"),
    "microbatches": ({"num_microbatches": 2}, "num_microbatches=2 12", "num_microbatches=3"),
    "shards": (
        {"batch_ramp": dataclasses.replace(RAMP, start=4, increment=4)},
        "4 8",
        "start increment 8",
    ),
    "sizes": ({"batch_ramp": dataclasses.replace(RAMP, increment=7)}, "7 16 24", "8"),
    "steps": ({"batches": [batch_of(0)], "steps": None}, "start 8", "steps"),
    "1-bit": ({"optimizer": zerojax.optim.one_bit_adam(1e-2, freeze_step=2)}, "1-bit", "adamw"),
    "offload": ({"mesh": {"offload": {"opt_state": "host"}}}, "offload", "leave"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_ramp_would_change_is_refused_before_arrays_exist(name, monkeypatch):
    options, value, remedy = REFUSED[name]
    monkeypatch.setattr("zerojax.training.entry.open_run", lambda *_: pytest.fail("it was opened"))
    refused(lambda: trained(**options), value, remedy)


def test_batches_of_several_processes_are_read_by_index(monkeypatch):
    from zerojax.config.features import Features
    from zerojax.data import as_feed
    from zerojax.training.process_agreement import check_regrouping

    features = Features.of(batch_ramp=RAMP)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    refused(lambda: check_regrouping(as_feed(batch_of), features), "function 2", "dataset")
    check_regrouping(as_feed(DatasetSource(dataset=[1, 2], global_batch_size=1)), features)


# --- other ways of computing a step ---------------------------------------------------------------


def decoder(**changes):
    sizes = {"num_layers": 2, "embed_dim": 16, "num_heads": 2, "max_seq_len": TOKENS}
    return build_model(ModelConfig(vocab_size=VOCAB, **sizes | changes), VOCAB)


def trained_decoder(mesh=None, **options) -> zerojax.Trainer:
    settings = {"loss": None, "optimizer": zerojax.adamw(1e-2), "model": decoder()}
    return trained(mesh, **{**settings, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"stage": 2, "zero": 1}, {}),
        ({"context": 2, "zero": 3, "persistence_threshold": 0}, {}),
    ],
    ids=["stages", "context"],
)
def test_pipelines_and_split_sequences_have_the_same_losses(mesh, options):
    found, plain = (losses(trained_decoder(one, **options)) for one in (mesh, {"zero": 0}))
    assert found == pytest.approx(plain, rel=1e-6)  # float32 sums in another order


@pytest.mark.slow
def test_deterministic_runs_have_the_same_bits_on_fewer_devices():
    few = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    runs = [trained_decoder(mesh, deterministic="mesh") for mesh in ({"zero": 1, "data": 8}, few)]
    assert losses(runs[0]) == losses(runs[1])
    one, other = (jax.device_get(run.state["params"]) for run in runs)
    assert all(np.array_equal(one[name], other[name]) for name in one)
