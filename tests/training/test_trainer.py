"""The loop: what `train` does, in which order, and that it is only the five public calls."""

from __future__ import annotations

import functools
import json
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.support.small_models import UserText, WithStatistics, reference_model, regression_loss
from tests.support.trajectories import TOLERANCE, regression_batch, text_batch
from zerojax.config import CheckpointConfig, LogConfig
from zerojax.runtime.preemption import Interrupted
from zerojax.training import trainer as trainer_module

BATCHES = [text_batch(index) for index in range(4)]


def adam() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-5))


def options(**changes):
    return {"optimizer": adam(), "precision": "fp32", "run_dir": None, "steps": 6, **changes}


def losses_of(history):
    return [values["loss"] for values in history]


def recording(losses):
    return lambda trainer, values: losses.append(values["loss"])


@pytest.mark.thorough
def test_own_loop_and_train_give_the_same_bits():
    mesh_config = zerojax.MeshConfig(zero=2)
    mesh = zerojax.make_mesh(mesh_config)
    plan = zerojax.make_plan(
        reference_model("gpt2"),
        mesh,
        example_batch=BATCHES[0],
        optimizer=adam(),
        precision="fp32",
        zero=2,
    )
    state = zerojax.init_state(plan, seed=0)
    step = zerojax.build_step(plan)
    own = []
    for index in range(6):
        state, metrics = step(state, zerojax.shard_batch(plan, BATCHES[index % 4]))
        own.append(float(metrics["loss"]))
    log = LogConfig(every=1)
    trainer = zerojax.train(reference_model("gpt2"), mesh_config, BATCHES, log=log, **options())
    assert losses_of(trainer.history) == own
    assert trainer.num_steps == int(trainer.state["step"]) == 6


@pytest.mark.thorough
def test_two_arguments_train_on_the_text_in_the_package(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zerojax.training.entry.DEFAULT_STEPS", 3)
    trainer = zerojax.train(byte_model, {"zero": 1})
    assert trainer.num_steps == 3
    (run,) = (tmp_path / "runs").iterdir()
    names = {path.name for path in run.iterdir()}
    assert {"metrics.jsonl", "plan.txt", "plan.json", "config.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    screen = capsys.readouterr().out
    assert "the text inside the package" in screen
    assert "steps=3: the default" in screen
    assert "precision='fp32'" in screen


def byte_model(rngs: nnx.Rngs) -> nnx.Module:
    from zerojax.config import ModelConfig
    from zerojax.zoo import build_model

    tiny = ModelConfig(num_layers=1, num_heads=2, embed_dim=16, max_seq_len=32)
    return build_model(tiny, 256)(rngs)


def test_a_resumed_run_is_bit_equal_and_traces_nothing_twice(tmp_path, monkeypatch):
    """With statistics and dropout, so that what is carried besides parameters has to come back."""
    whole, first, second = [], [], []
    batches = [regression_batch(index) for index in range(4)]
    common = {"loss": regression_loss, "log": LogConfig(every=1, tensorboard=False)}
    model = lambda rngs: WithStatistics(rngs, rate=0.5)  # noqa: E731

    def train(losses, **changes):
        callbacks = [recording(losses)]
        given = options(**common, callbacks=callbacks, seed=3, **changes)
        return zerojax.train(model, {"zero": 2, "persistence_threshold": 20}, batches, **given)

    with train(whole, validation=batches[:2]) as trainer:
        expected = jax.device_get(trainer.state)
    folder = tmp_path / "run"
    with train(first, checkpoint=folder, steps=3):
        pass
    with train(second, checkpoint=folder) as trainer:
        assert trainer.num_steps == 6
        assert trainer.jitted_step.compiled._cache_size() == 1
        chex.assert_trees_all_equal(jax.device_get(trainer.state), expected, strict=True)
    assert first + second == whole
    assert len(whole) == 6
    assert expected["extras"]["dropout/rngs/count"] == 6
    # A run that is complete already takes no step, so there is none to compile for its peak.
    monkeypatch.setattr(trainer_module, "compare_peak", lambda *_: pytest.fail("compiles a step"))
    with train([], checkpoint=folder) as trainer:
        assert trainer.num_steps == 6


@pytest.mark.thorough
def test_resume_onto_another_stage_mesh_and_device_count(tmp_path):
    whole = zerojax.train(
        reference_model("llama"), None, BATCHES, log=LogConfig(every=1), **options(steps=12)
    )
    folder = tmp_path / "run"
    for steps, mesh in ((4, {"zero": 3}), (8, {"data": 4, "model": 2, "zero": 1})):
        common = options(steps=steps, checkpoint=folder)
        with zerojax.train(reference_model("llama"), mesh, BATCHES, **common):
            pass
    last = []
    one = zerojax.make_mesh({"data": 2}, devices=jax.devices()[:2])
    callbacks = [recording(last)]
    with zerojax.train(
        reference_model("llama"),
        one,
        BATCHES,
        callbacks=callbacks,
        log=LogConfig(every=1),
        **options(steps=12, checkpoint=folder),
    ) as trainer:
        assert trainer.plan.mesh.size == 2
    np.testing.assert_allclose(last, losses_of(whole.history)[8:], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_live_reshard_keeps_the_trajectory():
    whole = zerojax.train(
        UserText(nnx.Rngs(0)), {"zero": 1}, BATCHES, log=LogConfig(every=1), **options(steps=8)
    )
    rules = [["blocks/up/kernel", [None, "model"]], ["blocks/down/kernel", ["model", None]]]
    split = {"data": 4, "model": 2, "zero": 3, "rules": rules}
    plans = {2: {"zero": 3}, 4: split, 6: {"zero": 1}}
    losses, axes = [], []

    def reshard(trainer, values):
        losses.append(values["loss"])
        if trainer.num_steps - 1 in plans:
            trainer.reshard(plans.pop(trainer.num_steps - 1))
            axes.append(trainer.plan.placement.leaves["blocks/up/kernel"].stored_spec)

    trainer = zerojax.train(
        UserText(nnx.Rngs(0)),
        {"zero": 0},
        BATCHES,
        callbacks=[reshard],
        log=LogConfig(every=1),
        **options(steps=8),
    )
    assert not plans, "every reshard has to have happened"
    assert ["model" in spec for spec in axes] == [False, True, False]
    assert trainer.plan.zero == 1
    np.testing.assert_allclose(losses, losses_of(whole.history), rtol=0, atol=TOLERANCE)


@pytest.mark.thorough
def test_a_run_that_goes_on_otherwise_says_so(tmp_path, capsys):
    """Under another plan with its reasons, and for more steps than it began with."""
    batches = [regression_batch(0)]
    given = options(loss=regression_loss, run_dir=tmp_path, log=LogConfig(tensorboard=False))
    model = lambda rngs: nnx.Linear(12, 5, rngs=rngs)  # noqa: E731
    trainer = zerojax.train(model, {"zero": 1}, batches, **{**given, "steps": 1})
    assert "  - zero=1: " in capsys.readouterr().out
    trainer.reshard({"zero": 3}).fit(batches, 2)
    screen = capsys.readouterr().out
    assert "  - zero=3: " in screen
    assert "  - zero=1: " not in screen
    assert "resuming after step 1 of 2" in screen
    assert "- zero=3: " in (tmp_path / "plan.txt").read_text()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["list", "iterator", "iterable", "tuple"])
def test_without_steps_each_batch_is_taken_once(kind, tmp_path, capsys):
    batches = [regression_batch(i) for i in range(3)]

    class Loader:
        def __iter__(self):
            return iter(batches)

    given = {"list": batches, "tuple": tuple(batches), "iterator": iter(batches)}
    log = LogConfig(tensorboard=False)
    common = {"loss": regression_loss, "run_dir": tmp_path, "log": log}
    model = lambda rngs: nnx.Linear(12, 5, rngs=rngs)  # noqa: E731
    trainer = zerojax.train(model, None, given.get(kind) or Loader(), **common)
    screen = capsys.readouterr().out
    assert trainer.num_steps == 3
    if kind in ("list", "tuple"):
        assert "steps=3: the batches once; with more steps they are repeated" in screen
        assert trainer.fit(given[kind]).num_steps == 6, "once more"
        assert zerojax.train(model, None, given[kind], steps=5, **common).num_steps == 5


def test_batches_that_end_too_early_are_said(tmp_path, capsys):
    log = LogConfig(tensorboard=False)
    trainer = zerojax.train(
        lambda rngs: nnx.Linear(12, 5, rngs=rngs),
        None,
        iter([regression_batch(0)] * 2),
        loss=regression_loss,
        steps=9,
        run_dir=tmp_path,
        log=log,
    )
    assert trainer.num_steps == 2
    assert "the batches ended after 2 of 9 steps" in capsys.readouterr().out


def test_the_same_iterator_continues_where_the_run_stopped():
    """Batches that were read ahead are not lost."""
    batches = iter([regression_batch(0)] * 12)
    trainer = zerojax.train(
        lambda rngs: nnx.Linear(12, 5, rngs=rngs),
        None,
        batches,
        loss=regression_loss,
        steps=2,
        run_dir=None,
    )
    trainer.fit(batches)
    assert trainer.num_steps == 12


@pytest.mark.slow
def test_to_model_gives_the_trained_module():
    trainer = zerojax.train(UserText(nnx.Rngs(0)), {"zero": 3}, BATCHES, **options())
    model = trainer.to_model()
    batch = jax.tree.map(jnp.asarray, BATCHES[0])
    loss, weight = model.loss(batch)
    evaluated = trainer.evaluate([BATCHES[0]])["loss"]
    np.testing.assert_allclose(float(loss / weight), evaluated, rtol=0, atol=TOLERANCE)


@pytest.mark.thorough
def test_ctrl_c_saves_and_says_how_to_resume(tmp_path):
    def interrupt(trainer, values):
        if values["step"] == 3:
            signal.raise_signal(signal.SIGINT)

    common = {"log": LogConfig(every=1, tensorboard=False), "checkpoint": tmp_path / "run"}
    with pytest.raises(Interrupted, match=r"SIGINT after step \d: saved in .*resume"):
        zerojax.train(
            reference_model("gpt2"), None, BATCHES, callbacks=[interrupt], **options(**common)
        )
    handler = signal.getsignal(signal.SIGINT)
    assert handler is signal.default_int_handler, "the user's own handler has to be back"
    with zerojax.train(reference_model("gpt2"), None, BATCHES, **options(**common)) as trainer:
        assert trainer.num_steps == 6


@pytest.mark.thorough
def test_after_ctrl_c_without_checkpoints_the_trainer_goes_on():
    def interrupt(trainer, values):
        if values["step"] == 3:
            signal.raise_signal(signal.SIGINT)

    common = options(log=LogConfig(every=1, tensorboard=False))
    train = functools.partial(zerojax.train, reference_model("gpt2"), None, BATCHES)
    with pytest.raises(Interrupted, match="trainer") as caught:
        train(callbacks=[interrupt], **common)
    trainer = caught.value.trainer
    assert 3 <= trainer.num_steps < 6
    trainer.fit(BATCHES, 6)
    assert losses_of(trainer.history) == losses_of(train(**common).history)


@pytest.mark.slow
def test_an_error_of_the_data_loses_no_step(tmp_path):
    def batches():
        yield from BATCHES
        raise RuntimeError("the disk of the data is gone")

    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match="disk of the data"):
        zerojax.train(
            reference_model("gpt2"), None, batches(), **options(checkpoint=folder, steps=None)
        )
    with zerojax.train(
        reference_model("gpt2"), None, iter(BATCHES), **options(checkpoint=folder, steps=4)
    ) as trainer:
        assert trainer.num_steps == 4
        assert trainer.history == [], "all four steps were saved"


@pytest.mark.slow
def test_a_run_that_stays_non_finite_ends_with_its_last_good_parameters():
    def loss(model, batch):
        total, weight = model.loss(batch)
        return jnp.where(batch["bad"][0] > 0, jnp.nan, total), weight

    batches = [
        {**batch, "bad": np.full(len(batch["tokens"]), index >= 1, np.int32)}
        for index, batch in enumerate(BATCHES * 3)
    ]
    kept = []

    def watch(trainer, values):
        kept.append(np.asarray(trainer.state["params"]["final_norm/scale"]).tobytes())

    with pytest.raises(FloatingPointError, match="not finite at 5 reports in a row.*5 updates"):
        zerojax.train(
            reference_model("gpt2"),
            None,
            batches,
            loss=loss,
            callbacks=[watch],
            log=LogConfig(every=1),
            **options(steps=12),
        )
    assert len(kept) >= 4
    assert len(set(kept)) == 1, "skipped steps must not move a parameter"


@pytest.mark.parametrize(("precision", "ends"), [("fp32", True), ("fp16", False)])
def test_a_run_that_skips_all_of_its_steps_trains_nothing_and_says_so(capsys, precision, ends):
    def train(steps):
        return zerojax.train(
            (lambda key: {"w": np.ones((4, 1), np.float32)}, lambda params, x: x @ params["w"]),
            {"zero": 1},
            lambda step: {"x": np.ones((8, 4), np.float32)},
            loss=lambda model, batch: (model(batch["x"]) * np.float32(1e38)).mean() * 1e5,
            precision=precision,
            steps=steps,
        )

    if ends:
        with pytest.raises(FloatingPointError, match="all 2 steps were skipped.*look at the data"):
            train(2)
    else:
        train(2)
        assert "all 2 steps were skipped" in capsys.readouterr().out


@pytest.mark.slow
def test_a_callback_that_returns_true_ends_the_run():
    trainer = zerojax.train(
        reference_model("gpt2"),
        None,
        BATCHES,
        callbacks=[lambda trainer, values: values["step"] >= 2],
        log=LogConfig(every=1),
        **options(),
    )
    assert trainer.num_steps < 6


@pytest.mark.thorough
def test_no_host_transfer_in_the_loop():
    trainer = zerojax.train(reference_model("gpt2"), None, BATCHES, **options(steps=1))
    batch = zerojax.shard_batch(trainer.plan, BATCHES[0])
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            trainer._step_on_devices(batch)


@pytest.mark.slow
def test_checkpoints_are_listed_and_pruned(tmp_path):
    path = tmp_path / "saves"
    config = CheckpointConfig(path=str(path), every=2, keep=2)
    with zerojax.train(
        reference_model("gpt2"), None, BATCHES, **options(checkpoint=config, steps=6)
    ) as trainer:
        assert trainer._checkpointer.steps() == (4, 6)
        trainer.restore(4)
        assert trainer.num_steps == int(trainer.state["step"]) == 4


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"batches": []}, "batches is empty"),
        ({"batches": BATCHES, "data": "x.txt"}, "both batches and data"),
        ({"data": "no/such/file.txt"}, "no/such/file.txt"),
        ({"mesh_config": "ds_config.json"}, "ds_config.json"),
        ({"mesh_config": {"data": 3}}, "needs 3 devices, but found 8"),
        ({"mesh_config": {"zerro": 3}}, "zero"),
        ({"batches": BATCHES, "validation": iter(BATCHES)}, "read only once"),
        ({"batches": BATCHES, "num_microbatches": 3}, "use 24 or 48"),
        ({"batches": BATCHES, "optimizer": "adam"}, "optax.GradientTransformation"),
        ({"batches": BATCHES, "precision": "fp8"}, "fp32, bf16"),
        ({"batches": BATCHES, "freeze": ("nothing",)}, "matches none of"),
        ({"batches": BATCHES, "freeze": "nothing"}, "'nothing' matches none of"),
        ({"batches": BATCHES, "steps": "ten"}, "steps='ten' is a str; give a whole number"),
        ({"batches": BATCHES, "steps": -1}, "steps=-1 is below 0; give at least 0"),
        ({"batches": BATCHES, "num_microbatches": 2.0}, "num_microbatches=2.0 is a float; give"),
        ({"batches": BATCHES, "eval_every": 0}, "eval_every=0 is below 1"),
        ({"global_batch_size": "x"}, "global_batch_size='x' is a str"),
        ({"batches": BATCHES, "loss": "mse"}, "loss is a str; give a function"),
        ({"batches": BATCHES, "callbacks": print}, "callbacks is a builtin.*; give a list"),
        ({"batches": BATCHES, "log": {"every": 1}}, "log is a dict; give a zerojax.Log"),
        ({"batches": BATCHES, "watch": 3}, "watch is a int; give a zerojax.Watch"),
        ({"batches": BATCHES, "checkpoint": 3}, "checkpoint is a int; give a folder"),
    ],
)
def test_bad_arguments_are_refused_before_any_array(arguments, sentence):
    before = len(jax.live_arrays())
    rest = {key: value for key, value in arguments.items() if key not in ("mesh_config", "batches")}
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=sentence):
        zerojax.train(
            reference_model("gpt2"),
            arguments.get("mesh_config"),
            arguments.get("batches"),
            **{"run_dir": None, **rest},
        )
    assert len(jax.live_arrays()) <= before + 2, "no state may have been made"


def test_a_model_without_a_loss_is_told_what_to_pass():
    with pytest.raises(ValueError, match=r"no loss is given; .*losses.mean_squared_error"):
        zerojax.train(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), None, [{"x": np.ones((8, 4))}])


@pytest.mark.slow
def test_metrics_file_of_a_run(tmp_path):
    with zerojax.train(
        reference_model("gpt2"),
        None,
        BATCHES,
        validation=BATCHES[:1],
        **options(run_dir=tmp_path / "run", log=LogConfig(every=2, console="quiet")),
    ):
        pass
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row["step"] for row in rows if row["kind"] == "train"]
    assert steps == [1, 2, 4, 6]
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [6]


def test_a_state_of_data_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path):
    class Drawn:
        def __init__(self):
            self.random = np.random.RandomState(0)

        def __iter__(self):
            return self

        def __next__(self):
            return self.random.normal(size=(8, 3)).astype(np.float32)

        def get_state(self):
            return self.random.get_state()

        def set_state(self, state):
            self.random.set_state(state)

    steps = []

    def train(**more):
        own = (lambda _: {"w": jnp.ones(3)}, lambda params, x: x @ params["w"])
        count = {"callbacks": [lambda *_: steps.append(0)], "steps": 2, "run_dir": None}
        loss = lambda model, batch: jnp.mean(model(batch) ** 2)  # noqa: E731
        zerojax.train(own, {"zero": 1}, Drawn(), loss=loss, **count, **more)

    with pytest.raises(
        TypeError, match=r"the result of get_state\(\) of the data\[1\] is a ndarray"
    ):
        train(checkpoint=tmp_path / "steps")
    assert not steps
    train()  # nothing is saved, so any state will do
    assert len(steps) == 2
