"""The average of the weights in checkpoints: bit for bit on any mesh, tier and stage, and without.

A run goes on from a checkpoint that has none, and from one that has one without keeping it.
"""

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import zerojax
from tests.support import hugging_face_folders
from tests.support.ema_runs import DECAY, Followed, average_of, differing, weights_of
from tests.support.offload_disk_runs import SHARES, Regression, close, offload
from tests.support.offload_disk_runs import plan_of as regression_plan
from tests.support.recipe import RECIPE
from tests.support.saved_states import ABOUT, restore, save
from tests.support.trajectories import regression_batch
from tests.tracing.test_rolled_training import ZERO_3
from tests.tracing.test_rolled_training import batch as rolled_batch
from tests.tracing.test_rolled_training import plan_of as rolled_plan
from tests.training.test_loading import SETTINGS, gpt2
from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.cli import main

pytestmark = pytest.mark.thorough

BATCHES = [regression_batch(index) for index in range(4)]
averaged = functools.partial(zerojax.with_ema, decay=DECAY, warmup=False)
PLAIN = zerojax.adamw(1e-2, **RECIPE)
ADAMW = averaged(PLAIN)
SUMS = 2e-6  # relative; losses are sums over other numbers of devices


def planned(where: Any, optimizer: Any, folder: Path, **options: Any) -> Any:
    """A plan at a stage, with its state in a tier."""
    tier, zero, data = where
    config = None if tier is None else offload(folder, tier)
    return regression_plan(config, zero=zero, data=data, optimizer=optimizer, **options)


PLACES = {
    "stage 3": (None, 3, 8),
    "stage 1": (None, 1, 4),
    "one device": (None, 0, 1),
    "host": ("host", 2, 8),
    "shares": (SHARES, 3, 4),
    "nvme": ("nvme", 1, 8),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("stage 3", "one device"),
        ("one device", "stage 3"),
        ("stage 1", "nvme"),
        ("nvme", "host"),
        ("shares", "stage 3"),
        ("host", "shares"),
    ],
)
def test_another_mesh_stage_and_tier_restore_every_bit(first, second, tmp_path):
    run = Followed(planned(PLACES[first], ADAMW, tmp_path / "a"))(*BATCHES[:2])
    save(tmp_path / "saved", run.plan, run.state)
    plan = planned(PLACES[second], ADAMW, tmp_path / "b")
    state, said = restore(tmp_path / "saved", plan)
    assert said == []
    assert differing(average_of(plan, state), run.expected) == []
    again = run.on(plan, state)(*BATCHES[2:])
    again.check()
    for each in (run, again):
        close(each.state)


@pytest.mark.parametrize("where", ["stage 3", "host", "shares", "nvme"])
@pytest.mark.parametrize("saved_in", ["one device", "shares"])
def test_a_checkpoint_without_one_begins_it_as_its_weights(where, saved_in, tmp_path):
    before = planned(PLACES[saved_in], PLAIN, tmp_path / "a")
    state = zerojax.init_state(before)
    step = zerojax.build_step(before)
    for batch in BATCHES[:2]:
        state, _ = step(state, zerojax.shard_batch(before, batch))
    save(tmp_path / "saved", before, state)
    plan = planned(PLACES[where], ADAMW, tmp_path / "b")
    begun, said = restore(tmp_path / "saved", plan)
    assert said == ["step 3 was saved without an ema; the ema starts as a copy of the weights"]
    assert differing(average_of(plan, begun), weights_of(before, state)) == []
    run = Followed(plan, begun)(*BATCHES[2:])
    run.check()
    for each in (run.state, state):
        close(each)


@pytest.mark.parametrize("where", ["one device", "host", "shares", "nvme"])
def test_a_run_that_keeps_none_leaves_it_out(where, tmp_path):
    run = Followed(planned(PLACES["stage 3"], ADAMW, tmp_path / "a"))(*BATCHES[:2])
    save(tmp_path / "saved", run.plan, run.state)
    plan = planned(PLACES[where], PLAIN, tmp_path / "b")
    state, said = restore(tmp_path / "saved", plan)
    assert said == ["step 3 was saved with an ema; this run does not keep it"]
    assert differing(weights_of(plan, state), weights_of(run.plan, run.state)) == []
    step = zerojax.build_step(plan)
    for batch in BATCHES[2:]:
        state, _ = step(state, zerojax.shard_batch(plan, batch))
    on = run(*BATCHES[2:])
    found, expected = weights_of(plan, state), weights_of(on.plan, on.state)
    for name, x in expected.items():  # gradients are summed over other numbers of devices
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-4)
    close(state)


@pytest.mark.parametrize("plain", [PLAIN, optax.adamw(1e-2)], ids=["zerojax", "optax"])
def test_rolled_layers_are_saved_under_their_names_and_begin_as_their_weights(plain, tmp_path):
    without = rolled_plan(ZERO_3, optimizer=plain)
    state = zerojax.init_state(without)
    save(tmp_path / "without", without, state)
    plan = rolled_plan(ZERO_3, optimizer=averaged(plain))
    begun, said = restore(tmp_path / "without", plan)
    assert len(said) == 1
    run = Followed(plan, begun)(rolled_batch(), rolled_batch())
    run.check()
    save(tmp_path / "with", run.plan, run.state)
    with Checkpointer(tmp_path / "with") as checkpointer:
        names = checkpointer.metadata().arrays
    assert names["opt_state/ema/layers/3/up/kernel"] == names["params/layers/3/up/kernel"]
    unrolled = rolled_plan({"zero": 0, "roll": "off"}, optimizer=averaged(plain))
    found, _ = restore(tmp_path / "with", unrolled)
    assert differing(average_of(unrolled, found), run.expected) == []


def test_an_average_that_is_half_there_is_another_models(tmp_path):
    run = Followed(planned(PLACES["one device"], ADAMW, tmp_path / "a"))
    portable = zerojax.to_portable_state(run.plan, run.state)
    average = {n: x for n, x in portable["opt_state"].ema.items() if n != "up/kernel"}
    broken = zerojax.optim.EmaState(
        portable["opt_state"].inner, portable["opt_state"].count, average
    )
    with Checkpointer(tmp_path / "saved") as checkpointer:
        checkpointer.save(3, {**portable, "opt_state": broken}, **ABOUT)
    with pytest.raises(CheckpointError, match="'opt_state/ema/up/kernel' .* is not in the checkp"):
        restore(tmp_path / "saved", run.plan)


# --- runs -----------------------------------------------------------------------------------------


OPTIMIZER = zerojax.OptimizerConfig(learning_rate=1e-2, warmup_steps=0, ema_decay=DECAY)


class Trained:
    """A run with an average, the arrays of both weights, and what its trainer measures of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        mesh = {"zero": 3, "persistence_threshold": 0}
        options = {**SETTINGS, "steps": 4, "eval_every": 2}
        best = zerojax.KeepBest("validation/ema_loss")
        self.trainer = zerojax.train(
            gpt2, mesh, checkpoint=folder, optimizer=OPTIMIZER, callbacks=[best], **options
        )
        self.average = average_of(self.trainer.plan, self.trainer.state)
        self.weights = weights_of(self.trainer.plan, self.trainer.state)
        self.losses = {
            weights: self.trainer.evaluate(weights=weights)["loss"]
            for weights in ("trained", "ema")
        }


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Trained:
    return Trained(tmp_path_factory.mktemp("runs") / "mine")


def text_plan(model: Any, **options: Any) -> Any:
    tokens = jax.ShapeDtypeStruct((8, 8), "int32")
    batch, mesh = {"tokens": tokens, "targets": tokens}, zerojax.make_mesh({}, jax.devices())
    return zerojax.make_plan(model, mesh, example_batch=batch, precision="fp32", **options)


def named(model: Any) -> dict[str, np.ndarray]:
    values = zerojax.models.as_model(model).initial_arrays()[0]
    return {name: np.asarray(x) for name, x in values.items()}


def test_validation_measures_both_and_the_best_average_is_kept(run):
    first, last = run.trainer.evaluations
    assert last["loss"] == run.losses["trained"]
    assert last["ema_loss"] == run.losses["ema"] != last["loss"]
    kept = run.trainer.kept_steps()["best"]
    assert kept["value"] == min(first["ema_loss"], last["ema_loss"])
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    evals = [row for row in map(json.loads, lines) if row.get("kind") == "eval"]
    assert {row["ema_loss"] for row in evals} >= {first["ema_loss"], last["ema_loss"]}


def test_a_model_is_handed_over_with_either_weights(run):
    models = {w: named(run.trainer.to_model(weights=w)) for w in ("trained", "ema")}
    assert differing(models["ema"], run.average) == []
    assert differing(models["trained"], run.weights) == []
    assert differing(models["trained"], models["ema"]) != []


@pytest.mark.parametrize("mesh", [None, {"data": 1, "zero": 0}, {"data": 2, "zero": 1}])
def test_a_run_is_read_back_with_its_average(run, mesh):
    loaded = zerojax.load_run(run.folder, weights="ema", mesh=mesh)
    assert loaded.weights == "ema"
    assert ", step 4 (ema), GPT2 on " in repr(loaded)
    assert loaded.evaluate()["loss"] == pytest.approx(run.losses["ema"], rel=SUMS)
    assert differing(named(loaded.to_model()), run.average) == []
    with pytest.raises(ValueError, match="weights='ema', but the run stores no average"):
        zerojax.to_hugging_face(loaded, run.folder / "never", weights="ema")


def test_exports_have_the_average(run, tmp_path, capsys):
    export = ["checkpoint", "export", str(run.folder)]
    assert main([*export, str(tmp_path / "plain"), "--weights", "ema"]) == 0
    found = load_file(tmp_path / "plain" / "model.safetensors")
    expected = {name.replace("/", "."): x for name, x in run.average.items()}
    assert (
        differing({n: x for n, x in found.items() if not n.startswith("extras.")}, expected) == []
    )
    zerojax.to_hugging_face(run.trainer, tmp_path / "a", weights="ema")
    zerojax.to_hugging_face(run.folder, tmp_path / "b", weights="ema")
    for_transformers = [str(tmp_path / "c"), "--format", "hugging_face", "--weights", "ema"]
    assert main([*export, *for_transformers]) == 0
    folders = [load_file(tmp_path / name / "model.safetensors") for name in "abc"]
    assert differing(folders[0], folders[1]) == differing(folders[0], folders[2]) == []
    zerojax.to_hugging_face(run.trainer, tmp_path / "d")
    assert differing(load_file(tmp_path / "d" / "model.safetensors"), folders[0]) != []
    back = zerojax.from_hugging_face(tmp_path / "a")
    plan = text_plan(back)
    assert differing(weights_of(plan, zerojax.init_state(plan)), run.average) == []
    assert capsys.readouterr().out.count(" (ema): ") == 2


def test_commands_read_the_average(run, capsys):
    assert main(["eval", str(run.folder), "--weights", "ema"]) == 0
    said = capsys.readouterr().out
    assert f"step 4 (ema): loss {run.losses['ema']:.4f}" in said
    assert main(["eval", str(run.folder)]) == 0
    assert f"step 4: loss {run.losses['trained']:.4f}" in capsys.readouterr().out
    texts = []
    for weights in ("trained", "ema"):
        words = [str(run.folder), "To be", "--temperature", "0", "--tokens", "12"]
        assert main(["generate", *words, "--weights", weights]) == 0
        texts.append(capsys.readouterr().out)
    loaded = zerojax.load_run(run.folder, weights="ema")
    assert texts[1].strip() == loaded.generate("To be", 12, temperature=0).strip()


def test_a_run_that_is_resumed_says_where_its_average_begins(tmp_path, capsys):
    options = {**SETTINGS, "global_batch_size": 8}
    config = {"learning_rate": 1e-3, "warmup_steps": 0}
    for steps, ema_decay, said in [
        (1, None, ""),
        (2, 0.9, "step 1 was saved without an ema; the ema starts as a copy of the weights"),
        (3, 0.9, ""),
        (4, None, "step 3 was saved with an ema; this run does not keep it"),
    ]:
        optimizer = zerojax.OptimizerConfig(**config, ema_decay=ema_decay)
        trainer = zerojax.train(
            gpt2,
            {"zero": 1},
            checkpoint=tmp_path,
            optimizer=optimizer,
            **{**options, "steps": steps},
        )
        printed = capsys.readouterr().out
        assert trainer.num_steps == steps
        assert said in printed
        assert ("an ema" in printed) == bool(said)


def test_where_there_is_none_it_is_refused_with_what_to_write(tmp_path, capsys):
    trainer = zerojax.train(gpt2, {"zero": 1}, checkpoint=tmp_path / "run", **SETTINGS)
    message = r"weights='ema', but the run stores no average.*optimizer\.ema_decay"
    for ask in (
        lambda: trainer.evaluate(weights="ema"),
        lambda: trainer.to_model(weights="ema"),
        lambda: zerojax.to_hugging_face(trainer, tmp_path / "x", weights="ema"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()
    for ask in (
        lambda: zerojax.load_run(tmp_path / "run", weights="ema"),
        lambda: zerojax.to_hugging_face(tmp_path / "run", tmp_path / "x", weights="ema"),
    ):
        with pytest.raises(CheckpointError, match=r"has no ema: weights='ema' .*with_ema"):
            ask()
    for words in (
        ["eval", str(tmp_path / "run"), "--weights", "ema"],
        ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "x"), "--weights", "ema"],
    ):
        assert main(words) == 2
        assert "has no ema" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"weights='average' is not valid; use 'trained' or 'ema'"):
        trainer.evaluate(weights="average")
    best = zerojax.KeepBest("validation/ema_loss")
    with pytest.raises(ValueError, match=r"keeps no average of its weights; set optimizer\.ema_d"):
        best.on_start(trainer)
    with contextlib.suppress(SystemExit):
        main(["eval", str(tmp_path / "run"), "--weights", "average"])
    assert "invalid choice: 'average'" in capsys.readouterr().err


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_weights_of_a_folder_begin_it_in_slices(tier, tmp_path):
    """They are read one by one, straight into their slices."""
    folder = hugging_face_folders.write_folder(tmp_path / "folder", "llama")
    model = zerojax.from_hugging_face(folder)
    plan = text_plan(model, optimizer=ADAMW, zero=3, offload=offload(tmp_path / "store", tier))
    state = zerojax.init_state(plan)
    assert plan.offload.off_device
    assert differing(average_of(plan, state), weights_of(plan, state)) == []
    close(state)


def test_an_engine_keeps_one_and_says_where_it_begins(tmp_path, capsys):
    config = {"train_batch_size": 32, "zero_optimization": {"stage": 1}}

    def engine(optimizer: Any) -> Any:
        return zerojax.initialize(model=Regression(nnx.Rngs(0)), config=config, optimizer=optimizer)

    with engine(PLAIN) as plain:
        plain.train_batch(BATCHES[0])
        plain.save_checkpoint(tmp_path / "plain")
        with pytest.raises(ValueError, match="the run stores no average"):
            plain.to_model(weights="ema")
    with engine(ADAMW) as kept:
        kept.load_checkpoint(tmp_path / "plain")
        kept.train_batch(BATCHES[1])
        assert "was saved without an ema; the ema starts as a copy" in capsys.readouterr().out
        average = named(kept.to_model(weights="ema"))
        assert differing(average, average_of(kept.plan, kept.state)) == []
        assert differing(average, named(kept.to_model())) != []
        kept.save_checkpoint(tmp_path / "kept")
    with engine(ADAMW) as again:
        again.load_checkpoint(tmp_path / "kept")
        again.prepare(BATCHES[0])
        assert differing(average_of(again.plan, again.state), average) == []
