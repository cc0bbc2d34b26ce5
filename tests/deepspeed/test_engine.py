"""`zerojax.initialize`: a ported loop trains as optax does on one device, and goes on where it was.

The configuration is one of DeepSpeed's; what each key becomes is
tests/deepspeed/test_deepspeed.py's matter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import UserDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import zerojax
from tests.support.hugging_face_folders import write_folder
from tests.support.process_groups import ROOT, run_group
from zerojax.checkpoint import CheckpointError
from zerojax.deepspeed_config.translation import explanation
from zerojax.deepspeed_engine.engine_absent import ABSENT, sentence_for
from zerojax.deepspeed_engine.engine_tags import client_state_of, find_tag
from zerojax.optim import adamw

CONFIG = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95]}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 1e-3,
            "warmup_max_lr": 1e-2,
            "warmup_num_steps": 3,
            "warmup_type": "linear",
            "total_num_steps": 12,
        },
    },
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
    "steps_per_print": 3,
}
NUM_STEPS = 6
NAMES = ROOT / "tests" / "data" / "deepspeed_engine_names.json"
"""Public methods and attributes of DeepSpeed 0.19.8's `DeepSpeedEngine`."""
TOLERANCE = 4e-6
"""Of losses near 0.3 in float32, whose sums are taken in another order."""

pytestmark = pytest.mark.filterwarnings("ignore:scheduler WarmupDecayLR")


class Regression(nnx.Module):
    """Two layers; widths that 8 devices do not divide."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(12, 30, rngs=rngs), nnx.Linear(30, 5, rngs=rngs)

    def loss(self, batch):
        return jnp.mean((self.down(jnp.tanh(self.up(batch["x"]))) - batch["y"]) ** 2)


def batch(step, rows=32):
    x = np.random.default_rng(step).normal(size=(rows, 12)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, :5] - x[:, 5:10])}


def make_model():
    return Regression(nnx.Rngs(0))


def initialize(config=CONFIG, **changes):
    return zerojax.initialize(model=make_model(), config=config, **changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(engine after NUM_STEPS, losses, a folder with log and checkpoint of step 3, its rates)."""
    folder = tmp_path_factory.mktemp("run")
    engine = initialize(run_dir=folder / "log")
    losses, said = [], [engine.get_lr()]
    for step in range(NUM_STEPS):
        losses.append(float(engine.train_batch(batch(step))))
        said.append(engine.get_lr())
        if step == 2:
            engine.save_checkpoint(folder / "kept", client_state={"epoch": 4, "seen": [1, 2]})
    engine.close()
    return engine, losses, folder, said


@pytest.mark.parametrize("freeze", ["up/", ("up/",)])
def test_one_pattern_freezes_as_a_list_of_one_does(freeze):
    engine = initialize(freeze=freeze, example_batch=batch(0))
    assert engine.plan.abstract_state["frozen"].keys() == {"up/kernel", "up/bias"}


def expected_rate(count):
    """DeepSpeed's WarmupDecayLR of CONFIG."""
    if count <= 3:
        return 1e-3 + 9e-3 * max(count - 1, 0) / 3
    return 1e-3 + 9e-3 * max(0.0, (12 - (count - 1)) / 9)


def test_losses_are_those_of_optax_on_one_device(trained):
    graph, params = nnx.split(make_model(), nnx.Param)
    tx = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.scale_by_adam(0.9, 0.95, 1e-8),
        optax.scale_by_learning_rate(lambda count: jnp.asarray(RATES)[count]),
    )
    RATES = [expected_rate(count) for count in range(NUM_STEPS)]

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(lambda p: nnx.merge(graph, p).loss(batch))(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    state, plain = tx.init(params), []
    for number in range(NUM_STEPS):
        params, state, loss = step(params, state, batch(number))
        plain.append(float(loss))
    _, losses, *_ = trained
    np.testing.assert_allclose(losses, plain, atol=TOLERANCE)
    assert losses[-1] < losses[0] - 0.01, "it learns nothing, so the comparison says nothing"


def test_the_learning_rate_is_that_of_the_next_update(trained):
    *_, said = trained
    expected = [[expected_rate(count)] for count in range(NUM_STEPS + 1)]
    np.testing.assert_allclose(said, expected, rtol=1e-6)


def test_what_a_loop_asks(trained):
    engine, *_ = trained
    assert engine.get_batch_info() == (32, 2, 2)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (32, 2)
    assert engine.local_rows() == (0, 32)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (6, 12, 192)
    assert (engine.skipped_steps, engine.was_step_applied()) == (0, True)
    assert engine.get_global_grad_norm() == float(engine.metrics["grad_norm"]) > 0
    assert (engine.zero_optimization_stage(), engine.plan.zero) == (2, 2)
    assert (engine.gradient_clipping(), engine.steps_per_print()) == (0.5, 3)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, False)
    assert engine.is_gradient_accumulation_boundary()
    assert engine.global_rank == 0
    assert engine.train() is engine.eval() is engine


@pytest.mark.thorough
def test_evaluation_and_the_model_are_those_of_the_state(trained):
    engine, *_ = trained
    whole = engine.to_model().loss(batch(99))
    np.testing.assert_allclose(engine.eval_batch(batch(99)), whole, atol=TOLERANCE)


def test_the_log_has_every_due_step(trained):
    _, losses, folder, _ = trained
    rows = map(json.loads, (folder / "log" / "metrics.jsonl").read_text().splitlines())
    reported = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
    assert reported == pytest.approx({3: losses[2], 6: losses[5]})


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before the first batch", "after it"])
def test_it_goes_on_from_a_checkpoint_at_another_stage(trained, when):
    _, losses, folder, _ = trained
    engine = initialize(CONFIG | {"zero_optimization": {"stage": 3}})
    if when == "after it":
        engine.train_batch(batch(77))
    path, client_state = engine.load_checkpoint(folder / "kept")
    assert (path, client_state) == (
        str(folder / "kept" / "global_step3"),
        {"epoch": 4, "seen": [1, 2]},
    )
    assert engine.global_steps == 3
    for step in range(3, NUM_STEPS):
        assert float(engine.train_batch(batch(step))) == pytest.approx(losses[step], abs=TOLERANCE)
    assert engine.global_steps == NUM_STEPS


@pytest.mark.thorough
def test_tags(trained, tmp_path):
    engine, *_ = trained
    with pytest.warns(RuntimeWarning, match="there is no file .*latest"):
        assert initialize().load_checkpoint(tmp_path) == (None, {})
    assert engine.save_checkpoint(tmp_path, "best") is True
    assert engine.save_checkpoint(tmp_path, tag=7, save_latest=False)
    assert (tmp_path / "latest").read_text() == "best\n"
    assert engine.load_checkpoint(tmp_path, tag=7)[0] == str(tmp_path / "7")
    with pytest.raises(CheckpointError, match=r"no checkpoint 'worst'.*7, best$"):
        engine.load_checkpoint(tmp_path, "worst")
    engine.save_checkpoint(tmp_path, "best", client_state={"again": True})
    assert engine.load_checkpoint(tmp_path)[1] == {"again": True}
    there = sorted(path.name for path in tmp_path.iterdir())
    assert there == ["7", "best", "latest", "writer.lock"]
    (tmp_path / "best").rename(tmp_path / ".best.replaced")  # as a machine that stops leaves it
    assert engine.load_checkpoint(tmp_path)[1] == {"again": True}
    for tag in ("", "a/b", "..", "latest"):
        with pytest.raises(ValueError, match="must be a folder name"):
            engine.save_checkpoint(tmp_path, tag)
    with pytest.raises(TypeError, match="client_state"):
        engine.save_checkpoint(tmp_path, "other", client_state={"x": object()})
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="no state before the first batch"):
        initialize().save_checkpoint(tmp_path)


def test_a_checkpoint_of_deepspeed_is_named_as_such(tmp_path):
    (tmp_path / "global_step9").mkdir()
    (tmp_path / "global_step9" / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "latest").write_text("global_step9")
    with pytest.raises(CheckpointError, match=r"written by DeepSpeed; .*zero_to_fp32.py"):
        initialize().load_checkpoint(tmp_path)


def check_micro_batches(engine, as_tensor):
    whole = batch(5)
    halves = [{n: as_tensor(x[at : at + 16]) for n, x in whole.items()} for at in (0, 16)]
    source = iter([*halves, "untouched"])
    assert float(engine.eval_batch(data_iter=source)) == float(engine.eval_batch(whole))
    assert next(source) == "untouched"


def test_micro_batches_may_come_from_an_iterator(trained):
    check_micro_batches(trained[0], lambda x: x)


@pytest.mark.slow
def test_a_batch_of_a_tokenizer_of_hugging_face_is_a_dict(trained):
    engine, *_ = trained
    loss = engine.eval_batch(batch(7))
    np.testing.assert_array_equal(engine.eval_batch(UserDict(batch(7))), loss)


def test_micro_batches_may_be_torchs(trained):
    torch = pytest.importorskip("torch", reason="torch is an extra of the tests")
    check_micro_batches(trained[0], torch.from_numpy)


def test_a_step_that_is_not_finite_changes_no_rate_and_no_parameter():
    engine = initialize()
    engine.train_batch(batch(0))
    rate, before = engine.get_lr(), jax.device_get(engine.state["params"])
    engine.train_batch(jax.tree.map(lambda x: x * np.float32(1e30), batch(1)))
    assert (engine.was_step_applied(), engine.skipped_steps, engine.global_steps) == (False, 1, 2)
    assert engine.get_lr() == rate
    for name, array in jax.device_get(engine.state["params"]).items():
        np.testing.assert_array_equal(array, before[name])


def test_lines_are_printed_as_often_as_the_file_says(capsys):
    with initialize(CONFIG | {"steps_per_print": 2}) as engine:
        for step in range(4):
            engine.train_batch(batch(step))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0] for line in lines] == ["step=2", "step=4"]
    assert "skipped=0, lr=[0.001], loss=" in lines[0]


def test_skipped_steps_are_said_without_steps_per_print(capsys):
    config = {name: x for name, x in CONFIG.items() if name != "steps_per_print"}
    spoiled = jax.tree.map(lambda x: np.full_like(x, 1e30), batch(0))
    with initialize(config) as engine:
        for step in range(20):
            engine.train_batch(spoiled if step in (3, 5) else batch(step))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(lines) == 1
    assert lines[0].startswith("step 10: updates skipped")
    assert lines[0].endswith("not finite: 2 (2 in all)")
    assert "without steps_per_print the engine prints only" in explanation(engine.translation)


def test_offload_that_moves_nothing_is_said():
    stage = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    engine = initialize(CONFIG | {"zero_optimization": stage})
    with pytest.warns(UserWarning, match="offload.opt_state host has no effect: no parameter") as w:
        engine.prepare(batch(0))
    assert w[0].filename == __file__


def test_without_batch_size_in_the_file_the_first_batch_decides():
    engine = initialize({name: x for name, x in CONFIG.items() if name != "train_batch_size"})
    with pytest.raises(ValueError, match="no batch yet"):
        engine.train_batch_size()
    plan = engine.prepare(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(0, 48))
    )
    assert engine.get_batch_info() == (48, 3, 2)
    assert plan.num_microbatches == 2


@pytest.mark.slow
def test_weights_of_hugging_face_go_in_and_come_out(tmp_path):
    """The same bits through the shards of stage 3; and a batch changes them."""
    source = write_folder(tmp_path / "theirs", "llama")
    tokens = np.random.default_rng(0).integers(0, 20, (8, 8), np.int32)
    config = {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}}
    engine = zerojax.initialize(zerojax.from_hugging_face(source), config, optimizer=adamw(1e-2))
    with pytest.raises(ValueError, match=r"no state before its first batch; call engine.prepare"):
        zerojax.to_hugging_face(engine, tmp_path / "early")
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}
    engine.prepare(batch)
    zerojax.to_hugging_face(engine, tmp_path / "ours")
    theirs, ours = (load_file(x / "model.safetensors") for x in (source, tmp_path / "ours"))
    assert theirs.keys() == ours.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)

    engine.train_batch(batch)
    zerojax.to_hugging_face(engine, tmp_path / "trained")
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    assert not any(trained[name].tobytes() == theirs[name].tobytes() for name in theirs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e: e.stepp, AttributeError, "the engine has no 'stepp'$"),
        (
            lambda e: e.train_batch({key: rows.tolist() for key, rows in batch(0).items()}),
            TypeError,
            r"Python list of numbers, .* numpy.asarray\(batch\['x'\]\)",
        ),
        (lambda e: e.train_batch(batch(0) | {"text": ["a"] * 32}), TypeError, "holds text"),
        (lambda e: e.eval_batch(data_itr=iter([])), TypeError, "did you mean 'data_iter'"),
        (lambda e: e.train_batch({"x": batch(0)["x"]}), ValueError, "missing"),
        (lambda e: initialize(CONFIG | {"optimiser": {}}), zerojax.errors.ConfigError, "optimizer"),
        (lambda e: initialize(optimizer=optax.sgd(1.0)), zerojax.errors.ConfigError, "optimizer"),
    ],
)
def test_refused(trained, call, error, message):
    engine, *_ = trained
    with pytest.raises(error, match=message):
        call(engine)


def test_absent_names_are_absent(trained):
    engine, *_ = trained
    assert [name for name in ABSENT if hasattr(engine, name)] == []


INTERNAL = {
    "dont_change_device",
    "enable_backward_allreduce",
    "first_dataloader_check",
    "gas_boundary_ctr",
    "has_step",
    "inside_no_sync_ctxt",
    "module_forward_post_hook",
    "module_forward_pre_hook",
    "save_non_zero_checkpoint",
    "save_zero_checkpoint",
    "scale_wrt_gas",
    "use_ds_comm",
    "warn_unscaled_loss",
    "dist_backend",
}
"""Attributes of DeepSpeed's engine that only its own methods read."""


def test_every_name_of_deepspeeds_engine_is_there_or_says_what_to_write(trained):
    engine, *_ = trained
    names = set(json.loads(NAMES.read_text())) - INTERNAL
    assert len(names) > 200
    silent = [name for name in names if not hasattr(engine, name) and sentence_for(name) is None]
    assert silent == []
    for name in ("local_rank", "device", "zero_overlap_comm", "tput_timer", "state_dict"):
        with pytest.raises(AttributeError, match=f"the engine has no '{name}': .{{20,}}"):
            getattr(engine, name)


def test_a_loop_reads_the_configuration_from_the_engine(trained):
    engine, *_ = trained
    assert engine.optimizer_name() == "adamw"
    assert engine.optimizer_params() == CONFIG["optimizer"]["params"]
    assert engine.scheduler_name() == "WarmupDecayLR"
    assert engine.scheduler_params()["total_num_steps"] == 12
    assert engine.config["gradient_clipping"] == 0.5
    assert (engine.zero_optimization(), engine.elasticity_enabled()) == (True, False)
    assert (engine.dp_world_size, engine.mp_world_size) == (8, 1)


@pytest.mark.parametrize("way", ["args", "config_params", "text"])
def test_a_configuration_comes_as_deepspeeds_introductions_give_it(way, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    args = argparse.Namespace(local_rank=0, deepspeed=True, deepspeed_config=str(path))
    given = {"args": {"args": args}, "config_params": {"config_params": CONFIG}}
    engine = zerojax.initialize(
        model=make_model(),
        dist_init_required=True,
        **given.get(way, {"config": json.dumps(CONFIG)}),
    )
    assert engine.train_batch_size() == 32


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: initialize(model_parameters=[]), "'model_parameters'; all parameters .* freeze="),
        (lambda: initialize(collate_fn=len), "'collate_fn'; pass each batch"),
        (lambda: initialize(mpu=None), "'mpu'; set mesh axes in the configuration"),
        (lambda: initialize(optimiser=None), "did you mean 'optimizer'"),
    ],
)
def test_what_deepspeeds_initialize_takes_and_this_does_not(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_the_four_results_of_deepspeed_are_one():
    with pytest.raises(TypeError, match=r"write engine = zerojax.initialize\(\.\.\.\) in place of"):
        _engine, _optimizer, _loader, _scheduler = initialize()


@pytest.mark.thorough
def test_the_engine_changes_its_mesh_between_steps(trained):
    _, losses, *_ = trained
    engine = initialize()
    with pytest.raises(ValueError, match="no state before the first batch"):
        engine.reshard({"zero": 3})
    found = [float(engine.train_batch(batch(step))) for step in range(2)]
    assert engine.reshard({"zero": 3, "data": 4, "model": 2, "persistence_threshold": 0}) is engine
    assert (engine.zero_optimization_stage(), engine.dp_world_size) == (3, 4)
    assert engine.get_batch_info() == (32, 4, 2)
    found += [float(engine.train_batch(batch(step))) for step in range(2, NUM_STEPS)]
    np.testing.assert_allclose(found, losses, atol=TOLERANCE)
    assert engine.global_steps == NUM_STEPS


@pytest.mark.thorough
@pytest.mark.multihost
def test_two_processes_pass_their_rows_and_agree_on_tags(tmp_path):
    script = str(ROOT / "tests" / "support" / "engine_process.py")
    words = [[script, str(tmp_path / "two")]] * 2
    outputs = run_group(words, join=True, seconds=180)
    two = [json.loads(output.splitlines()[-1]) for output in outputs]
    (alone,) = run_group([[script, str(tmp_path / "one")]], seconds=180)
    one = json.loads(alone.splitlines()[-1])
    for rank, said in enumerate(two):
        assert (said["rank"], said["rows"]) == (rank, [8 * rank, 8 * rank + 8])
        np.testing.assert_allclose(said["losses"], one["losses"], atol=TOLERANCE)
        assert said["again"] == pytest.approx(one["losses"][2], abs=TOLERANCE)
        assert said["client_state"] == {"epoch": 1}
        assert "the tag of the checkpoint" in said["refused"]
        assert "32 rows" in said["whole"]
        assert "pass 8 rows from each process" in said["whole"]
    assert (tmp_path / "two" / "latest").read_text() == "global_step2\n"
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["global_step2", "latest"]


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.05, 0.2, 0.45])
def test_a_kill_while_a_tag_is_replaced_leaves_a_whole_checkpoint(delay, tmp_path):
    words = [
        sys.executable,
        str(ROOT / "tests" / "support" / "engine_process.py"),
        str(tmp_path),
        "forever",
    ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True)
    limit = threading.Timer(120, process.kill)
    limit.start()
    try:
        assert process.stdout.readline() == "saved\n"
        time.sleep(delay)
    finally:
        limit.cancel()
        process.kill()
        process.communicate()
    found = find_tag(tmp_path, None)
    with zerojax.Checkpointer(found) as checkpointer:
        assert checkpointer.verify().damages == ()
        assert client_state_of(checkpointer.metadata().config)["number"] >= 0
