"""`zerojax plan SCRIPT` and `zerojax train SCRIPT`: a user's script in place of a run file."""

import dataclasses
import json
import subprocess
import sys

import jax
import optax
import pytest

import zerojax
from tests.support.forecast_samples import sample_forecast
from tests.support.refusals import check_words
from zerojax import forecasting
from zerojax.cli import main
from zerojax.cli.check_targets import parts_of_script
from zerojax.cli.script_runs import plan_of_script
from zerojax.hardware import compile_client
from zerojax.placement.device_mesh import make_abstract_mesh

MODEL = """
import numpy as np
import optax
import zerojax

def init(key):
    return {"w": np.ones((64, 32), np.float32)}

def apply(params, x):
    return x @ params["w"]

def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()

batch = {"x": np.ones((64, 64), np.float32), "y": np.ones((64, 32), np.float32)}
print("a line of the script")
"""
TRAIN = "zerojax.train((init, apply), MESH, [batch], loss=loss, optimizer=optax.adam(0.1), steps=1)"


def write(folder, text, mesh="{'zero': 1, 'persistence_threshold': 0}"):
    path = folder / "script.py"
    path.write_text(f"{MODEL}\nMESH = {mesh}\n{text}\n")
    return str(path)


def expected(settings, devices):
    """The plan that the script's arguments have on devices that are not here."""
    space = {}
    exec(MODEL, space)
    return zerojax.make_plan(
        (space["init"], space["apply"]),
        make_abstract_mesh({}, devices),
        example_batch=space["batch"],
        loss=space["loss"],
        optimizer=optax.adam(0.1),
        steps=1,
        zero=settings["zero"],
        persistence_threshold=0,
    )


@pytest.mark.parametrize(("words", "zero"), [((), 1), (("zero=3",), 3), (("mesh.zero=2",), 2)])
def test_a_script_is_planned_for_devices_that_are_not_here(words, zero, tmp_path, capsys):
    plan = plan_of_script(write(tmp_path, TRAIN), words, 64)
    assert capsys.readouterr().out == "", "the script's own lines go to standard error"
    assert plan.as_dict() == expected({"zero": zero}, 64).as_dict()
    assert plan.mesh.shape["data"] == 64


def test_of_make_plan_the_mesh_is_that_of_the_devices_to_plan_for(tmp_path):
    text = (
        "zerojax.make_plan((init, apply), MESH, example_batch=batch, loss=loss, "
        "optimizer=optax.adam(0.1), steps=1, zero=1)"
    )
    plan = plan_of_script(write(tmp_path, text), ["zero=3"], 16)
    assert plan.as_dict() == expected({"zero": 3}, 16).as_dict()


def test_of_an_engine_the_batch_has_the_rows_that_the_configuration_says(tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    }
    text = (
        f"engine = zerojax.initialize((init, apply), {config}, loss=loss)\n"
        "engine.train_batch(batch)"
    )
    plan = plan_of_script(write(tmp_path, text), [], 32)
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(plan.abstract_batch)}
    assert (rows, plan.num_microbatches, plan.zero) == ({2 * 3 * 32}, 3, 3)
    with pytest.raises(ValueError, match="zero=2"):
        plan_of_script(write(tmp_path, text), ["zero=2"], 32)


def test_of_an_engine_layer_drop_and_curriculum_are_planned(tmp_path):
    config = {
        "train_batch_size": 64,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "progressive_layer_drop": {"enabled": True, "theta": 0.5},
        "curriculum_learning": {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": 8,
            "max_difficulty": 16,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
        },
    }
    text = (
        "from zerojax.config import ModelConfig\n"
        "size = ModelConfig(num_layers=2, num_heads=2, embed_dim=8, max_seq_len=16)\n"
        "model = zerojax.zoo.build_model(size, 32)\n"
        "tokens = np.zeros((64, 16), np.int32)\n"
        f"engine = zerojax.initialize(model, {config})\n"
        "engine.train_batch({'tokens': tokens, 'targets': tokens})"
    )
    plan = plan_of_script(write(tmp_path, text), [], 8)
    assert plan.features["layer_drop"].config == zerojax.LayerDropConfig(theta=0.5)
    assert plan.inputs.features.get(zerojax.CurriculumConfig).min_length == 8


def test_of_an_engine_what_initialize_refuses_is_refused(tmp_path):
    config = {"train_batch_size": 8, "expert_parallel": {"enabled": True, "top_k": 2}}
    text = (
        "from zerojax.config import ModelConfig, MoEConfig\n"
        "moe = MoEConfig(num_experts=4, experts_per_token=1)\n"
        "size = ModelConfig(name='llama', num_layers=2, num_heads=2, embed_dim=8, moe=moe)\n"
        f"zerojax.initialize(zerojax.zoo.build_model(size, 32), {config})"
    )
    with pytest.raises(ValueError, match="experts_per_token=1"):
        plan_of_script(write(tmp_path, text), [], 2)


def test_before_its_first_batch_an_engine_that_is_planned_answers_as_one_that_runs(tmp_path):
    """Rows of an iterator's micro-batches, and a checkpoint to resume from."""
    config = {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
    text = (
        f"engine = zerojax.initialize((init, apply), {config}, loss=loss, "
        "optimizer=optax.adam(0.1))\n"
        "assert engine.zero_optimization_stage() == 2 and engine.mesh.size == 4\n"
        "assert engine.load_checkpoint('nowhere') == (None, {})\n"
        "engine.train()\n"
        "with engine:\n"
        "    while engine.global_steps + engine.skipped_steps < 3 and engine.plan is None:\n"
        "        engine.train_batch(data_iter=iter([batch, batch, batch]))"
    )
    plan = plan_of_script(write(tmp_path, text), [], 4)
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(plan.abstract_batch)}
    assert (rows, plan.num_microbatches) == ({2 * 64}, 2)


def test_of_an_engine_an_example_batch_is_planned_and_checked(tmp_path):
    config = {"train_batch_size": 64, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    text = (
        f"engine = zerojax.initialize((init, apply), {config}, loss=loss, example_batch=batch)\n"
        "raise SystemExit('the example batch ends the script')"
    )
    path = write(tmp_path, text)
    assert plan_of_script(path, [], 4).abstract_batch["x"].shape == (64, 64)
    assert parts_of_script(path, 1)["batch"]["x"].shape == (64, 64)


def test_a_ds_config_in_train_is_translated_for_the_devices_to_plan_for(tmp_path):
    mesh = {"train_batch_size": 64, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    text = TRAIN.replace("optimizer=optax.adam(0.1), ", "")
    plan = plan_of_script(write(tmp_path, text, mesh=repr(mesh)), [], 32)
    assert (plan.mesh.shape["data"], plan.zero) == (32, 2)


def test_the_command_prints_the_forecast(tmp_path, capsys):
    words = ["--gpu", "h100", "--devices", "8", "--no-compile", "zero=3"]
    assert main(["plan", write(tmp_path, TRAIN), *words]) == 3
    assert "zero=3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        ("1 / 0", [], "ZeroDivisionError"),
        ("", [], "call one of them"),
        (TRAIN, ["zeroo=3"], "zeroo"),
        (TRAIN, ["data=4"], "data=4"),
    ],
)
def test_bad_input_is_refused(text, words, sentence, tmp_path, capsys):
    command = ["plan", write(tmp_path, text), "--gpu", "h100", "--devices", "8", "--no-compile"]
    assert main([*command, *words]) == 2
    out, err = capsys.readouterr()
    assert (out, sentence in err.splitlines()[-1]) == ("", True)


def test_a_search_with_a_deepspeed_configuration_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compile_client, "missing", lambda: None)
    mesh = {"train_batch_size": 64, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    text = TRAIN.replace("optimizer=optax.adam(0.1), ", "")
    script = write(tmp_path, text, mesh=repr(mesh))
    assert main(["plan", script, "--gpu", "h100", "--devices", "8", "--search"]) == 2
    assert "DeepSpeed configuration" in capsys.readouterr().err


def test_a_search_prints_the_words_that_plan_and_train_a_script(tmp_path, monkeypatch, capsys):
    """The forecast of a plan with 4 microbatches is the fastest here."""

    def forecast(plan, *, gpu, **_):
        found = sample_forecast(plan, gpu)
        seconds = 1.0 / plan.num_microbatches
        return dataclasses.replace(
            found, estimate=dataclasses.replace(found.estimate, step_seconds=seconds)
        )

    monkeypatch.setattr(compile_client, "missing", lambda: None)
    monkeypatch.setattr(forecasting, "forecast", forecast)
    script = write(tmp_path, TRAIN)
    where = ["--gpu", "h100", "--devices", "8"]
    assert main(["plan", script, *where, "--search"]) == 0
    page = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("its plan page: "))
    words = [word for word in page.split() if "=" in word]
    plan = plan_of_script(script, words, 8)
    assert f"num_microbatches={plan.num_microbatches}" in words
    assert f"mesh.zero={plan.zero}" in words
    assert not any("remat" in word or "unroll" in word for word in words), "there are no layers"


@pytest.mark.thorough
def test_train_runs_a_script_with_other_mesh_options(tmp_path):
    text = (
        f"trainer = {TRAIN}\n"
        "print(trainer.plan.zero, trainer.plan.mesh.size, trainer.plan.num_microbatches)"
    )
    command = [sys.executable, "-m", "zerojax", "train", write(tmp_path, text)]
    result = subprocess.run(
        [*command, "zero=2", "cpu_devices=4", "num_microbatches=2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "2 4 2"
    failing = write(tmp_path, "raise RuntimeError('of the script')")
    result = subprocess.run([*command[:-1], failing], capture_output=True, text=True)
    assert (result.returncode, "of the script" in result.stderr) == (1, True)


CONFIGURED = TRAIN.replace("optax.adam(0.1)", "zerojax.OptimizerConfig()")


def test_the_rate_and_the_profile_of_a_script_are_those_of_its_call(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, CONFIGURED)
    assert main(["lr-test", path, "zero=3", "--steps", "20", "--low", "1e-2", "--high", "1e3"]) == 0
    assert "optimizer.learning_rate=" in capsys.readouterr().out
    assert main(["profile", path, "--steps", "2", "--no-save", "--out", "measured"]) == 0
    assert "w" in capsys.readouterr().out
    assert json.loads((tmp_path / "measured/profile.json").read_text())["steps"] == 2
    assert not (tmp_path / "runs").exists(), "nothing of the script's own run is written"


def test_the_profile_of_a_script_leaves_its_files_of_offload_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    offload = {"opt_state": "nvme", "folder": "disk", "min_elements": 1}
    path = write(tmp_path, CONFIGURED, {"zero": 1, "offload": offload})
    mine = tmp_path / "disk" / "mine"
    mine.parent.mkdir()
    mine.touch()
    assert main(["profile", path, "--steps", "2", "--no-save"]) == 0
    assert list(mine.parent.iterdir()) == [mine]


WHY_NOT = {
    "lr-test": (TRAIN, [], "optimizer=zerojax.OptimizerConfig(...)"),
    "sweep": (CONFIGURED, [], "CONFIG.yaml"),
    "tune": (CONFIGURED, ["--search"], "--search"),
    "profile": (CONFIGURED, ["--start"], "leave"),
}


@pytest.mark.parametrize("command", WHY_NOT)
def test_what_a_command_cannot_do_with_a_script_is_said(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, more, remedy = WHY_NOT[command]
    assert main([command, write(tmp_path, text), *more]) == 2
    check_words(capsys.readouterr().err, [remedy])
