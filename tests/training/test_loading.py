"""Runs are read back in shards: with the loss of their trainer, on their mesh and on others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support import equal_trees, hugging_face_folders
from tests.support.small_models import regression_loss
from zerojax.checkpoint import CheckpointError
from zerojax.cli import main
from zerojax.zoo import GPT2, GPT2Config, generation
from zerojax.zoo.generation import generate

ROOT = Path(__file__).resolve().parents[2]
SIZES = GPT2Config(vocab_size=256, num_layers=2, num_heads=2, embed_dim=32, max_seq_len=48)
SHARDED = {"zero": 3, "persistence_threshold": 0}
SETTINGS = {"steps": 2, "global_batch_size": 8, "seq_len": 16, "eval_batches": 2}
CACHE = 1 << 20
"""Bytes of the cache of a row, 32 positions of 8 layers and 256 features, and of the prompt."""
SUMS = 2e-6  # sums over other numbers of devices


def gpt2(rngs: nnx.Rngs) -> GPT2:
    return GPT2(SIZES, rngs=rngs)


class Line(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(4, 16, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x)))


def rows(seed: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(16, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(1, keepdims=True)}


class Trained:
    """A run of `train` and the loss that its trainer measures."""

    def __init__(self, folder: Path, model=gpt2, mesh=SHARDED, **options) -> None:
        self.folder = folder
        self.trainer = zerojax.train(model, mesh, checkpoint=folder, **SETTINGS, **options)
        self.loss = self.trainer.evaluate()["loss"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Trained:
    return Trained(tmp_path_factory.mktemp("runs") / "mine")


def bytes_per_device(arrays) -> dict[int, int]:
    found: dict[int, int] = {}
    for leaf in jax.tree.leaves(arrays):
        for shard in leaf.addressable_shards:
            found[shard.device.id] = found.get(shard.device.id, 0) + shard.data.nbytes
    return found


@pytest.mark.thorough
def test_a_run_of_train_is_read_back_onto_its_own_mesh_in_shards(run):
    loaded = zerojax.load_run(run.folder)
    assert loaded.plan.mesh == run.trainer.plan.mesh
    assert loaded.plan.zero == 3
    assert loaded.step == loaded.num_steps == 2
    assert loaded.evaluate()["loss"] == run.loss
    parts = loaded.state["params"]
    whole = sum(x.nbytes for x in parts.values())
    # Padding is what a device holds above an eighth.
    assert max(bytes_per_device(parts).values()) < whole / 8 + 2048
    used = {name: loaded.state[name] for name in ("params", "frozen", "extras")}
    assert max(bytes_per_device(used).values()) < whole / 8 + 2048
    model = nnx.state(loaded.model)
    assert max(bytes_per_device(model).values()) < whole / 8 + 2048
    assert "opt_state" not in loaded.state
    assert repr(loaded) == f"LoadedRun({str(run.folder)!r}, step 2, GPT2 on data 8, zero=3)"


@pytest.mark.thorough
def test_parameters_that_waited_on_the_host_are_read_onto_the_devices_and_it_is_said(tmp_path):
    mesh = {**SHARDED, "offload": {"params": "host", "opt_state": "host", "min_elements": 1}}
    trained = Trained(tmp_path / "streamed", mesh=mesh)
    with pytest.warns(UserWarning, match=r"offload.params: host.* ([\d.]+) KiB") as w:
        loaded = zerojax.load_run(tmp_path / "streamed")
    said = float(str(w[0].message).split(" KiB")[0].split()[-1]) * 1024
    assert said == pytest.approx(max(bytes_per_device(loaded.state["params"]).values()), abs=60)
    assert w[0].filename == __file__
    assert all(x.sharding.memory_kind == "device" for x in loaded.state["params"].values())
    np.testing.assert_allclose(loaded.evaluate()["loss"], trained.loss, rtol=SUMS)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"data": 2}, {"zero": 0}, {"data": 2, "model": 2}])
def test_and_onto_another_mesh(run, mesh):
    loaded = zerojax.load_run(run.folder, mesh=mesh)
    assert loaded.plan.zero == mesh.get("zero", 3)
    assert loaded.plan.mesh.size == (mesh.get("data", 8) * mesh.get("model", 1))
    np.testing.assert_allclose(loaded.evaluate()["loss"], run.loss, rtol=SUMS)


@pytest.mark.thorough
def test_text_from_shards_is_that_of_the_whole_model(run):
    loaded = zerojax.load_run(run.folder)
    prompt = np.asarray(loaded.tokenizer.encode("To be"))[None]
    whole = generate(run.trainer.to_model(), prompt, 8, temperature=0)
    assert loaded.generate("To be", 8, temperature=0) == loaded.tokenizer.decode(
        np.asarray(whole[0])
    )
    ours, theirs = (nnx.state(x.to_model()) for x in (loaded, run.trainer))
    equal_trees.assert_same(ours, theirs)


@pytest.mark.thorough
def test_the_commands_read_it_too(run, capsys):
    assert main(["eval", str(run.folder)]) == 0
    assert f"step 2: loss {run.loss:.4f}, perplexity" in capsys.readouterr().out
    words = ["generate", str(run.folder), "To be", "mesh.data=4", "--tokens", "3"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("To be")
    assert main(["eval", str(run.folder), "mesh.zerro=3"]) == 2
    assert "mesh.zero" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_model_of_the_users_own_is_asked_for_and_the_remedy_works(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer = zerojax.train(
        Line,
        SHARDED,
        [rows(0)],
        loss=regression_loss,
        steps=2,
        checkpoint="runs/own",
        validation=[rows(1)],
    )
    assert main(["eval", "runs/own"]) == 2
    sentence = capsys.readouterr().err
    assert "a model of your own (Line)" in sentence
    remedy = re.search(r"zerojax\.load_run\(.*?\)", sentence)[0]
    assert remedy == "zerojax.load_run('runs/own', model=MODEL, loss=LOSS)"
    names = {"zerojax": zerojax, "MODEL": Line, "LOSS": regression_loss}
    loaded = eval(remedy, names)
    assert loaded.evaluate([rows(1)])["loss"] == trainer.evaluate()["loss"]
    # Batches of another size, too.
    half = {name: value[:8] for name, value in rows(1).items()}
    assert np.isfinite(loaded.evaluate(iter([half]))["loss"])
    with pytest.raises(ValueError, match=r"batches that came from Python.*evaluate\(batches\)"):
        loaded.evaluate()
    with pytest.raises(ValueError, match=r"loss function of your own.*loss=LOSS"):
        zerojax.load_run("runs/own", model=Line)


@pytest.mark.thorough
def test_a_run_that_saved_nothing_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zerojax.train(Line, None, [rows(0)], loss=regression_loss, steps=1, run_dir="runs/none")
    with pytest.raises(CheckpointError, match=r"no saved weights; train with checkpoint='runs/no"):
        zerojax.load_run("runs/none", model=Line, loss=regression_loss)
    again = zerojax.train(
        Line, None, [rows(0)], loss=regression_loss, steps=1, checkpoint="runs/none"
    )
    assert (
        zerojax.load_run("runs/none", model=Line, loss=regression_loss).step == again.num_steps == 1
    )


@pytest.mark.thorough
def test_an_old_folder_is_described_by_going_on(run, tmp_path):
    record = (run.folder / "run.json").read_text()
    (run.folder / "run.json").unlink()
    try:
        with pytest.raises(ValueError, match=r"no run\.json.*the same command or call"):
            zerojax.load_run(run.folder)
        zerojax.train(gpt2, SHARDED, checkpoint=run.folder, **SETTINGS).close()
        assert json.loads((run.folder / "run.json").read_text()) == json.loads(record)
    finally:
        (run.folder / "run.json").write_text(record)
    with pytest.raises(FileNotFoundError, match="holds no run"):
        zerojax.load_run(tmp_path)


class Louder(GPT2):
    """Has the names and shapes of a GPT-2, and computes something else."""

    def __call__(self, tokens):
        return 2 * super().__call__(tokens)


@pytest.mark.thorough
def test_a_subclass_of_ours_counts_as_the_users_own(tmp_path):
    zerojax.train(
        lambda rngs: Louder(SIZES, rngs=rngs), None, checkpoint=tmp_path / "run", **SETTINGS
    )
    with pytest.raises(ValueError, match=r"a model of your own \(Louder\)"):
        zerojax.load_run(tmp_path / "run")


@pytest.mark.slow
def test_the_commands_in_processes_of_their_own(tmp_path):
    """Also the number of devices: these processes start with one."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = tmp_path / "train.py"
    script.write_text(
        "import jax\n"
        "jax.config.update('jax_num_cpu_devices', 4)\n"
        "jax.config.update('jax_cpu_enable_async_dispatch', False)\n"
        "import zerojax\n"
        "from zerojax.config import BitScheduleConfig\n"
        "from zerojax.zoo import GPT2, GPT2Config\n"
        f"model = lambda rngs: GPT2({SIZES!r}, rngs=rngs)\n"
        f"t = zerojax.train(model, {SHARDED!r}, checkpoint='runs/mine', **{SETTINGS!r})\n"
        "print('LOSS', t.evaluate()['loss'])\n"
    )

    def call(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    loss = float(call(str(script)).split("LOSS ")[1])
    for words in ([], ["mesh.data=2", "cpu_devices=2"], ["cpu_devices=1"]):
        line = call("-m", "zerojax", "eval", "runs/mine", *words)
        assert float(line.split()[3].rstrip(",")) == pytest.approx(loss, abs=1e-4)
    assert call("-m", "zerojax", "generate", "runs/mine", "To be").startswith("To be")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bf16", "lora", "llama dropout", "stages", "ds_config", "fp8"])
def test_other_runs_are_read_back(case, tmp_path):
    mesh, options = SHARDED, {}
    model = gpt2
    if case == "bf16":
        options["precision"] = "bf16"
    elif case == "lora":
        lora = zerojax.LoraConfig(rank=3, alpha=5.0, targets=("attention/(query|value)",))
        module = zerojax.add_lora(GPT2(SIZES, rngs=nnx.Rngs(0)), lora)
        model, options["freeze"] = module, lora.freeze
    elif case == "llama dropout":
        sizes = zerojax.zoo.LlamaConfig(
            vocab_size=256, num_layers=2, num_heads=2, embed_dim=32, max_seq_len=48, dropout=0.1
        )
        model = zerojax.zoo.Llama(sizes, rngs=nnx.Rngs(params=0, dropout=1))
    elif case == "stages":
        mesh = {"stage": 2, "zero": 2}
    elif case == "ds_config":
        mesh = tmp_path / "ds_config.json"
        config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_clipping": 1}
        mesh.write_text(json.dumps({**config, "bf16": {"enabled": True}}))
    elif case == "fp8":
        sizes = GPT2Config(
            vocab_size=256, num_layers=1, num_heads=2, embed_dim=32, matmul_dtype="fp8"
        )
        model = lambda rngs: GPT2(sizes, rngs=rngs)  # noqa: E731
    trained = Trained(tmp_path / "run", model, mesh, **options)
    loaded = zerojax.load_run(tmp_path / "run")
    assert loaded.plan.precision.compute_dtype == trained.trainer.plan.precision.compute_dtype
    assert loaded.plan.mesh == trained.trainer.plan.mesh
    assert loaded.evaluate()["loss"] == trained.loss
    assert loaded.generate("To be", 4).startswith("To be")
    ours, theirs = (
        dict(nnx.to_flat_state(nnx.state(x.to_model(), nnx.Param)))
        for x in (loaded, trained.trainer)
    )
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name][...], value[...])


@pytest.mark.slow
def test_a_model_with_weights_of_hugging_face_is_read_back_without_them(tmp_path):
    folder = hugging_face_folders.write_folder(tmp_path / "theirs", "llama")
    model = zerojax.from_hugging_face(folder).with_changes(loss_chunk=None)
    tokens = np.arange(8 * 9).reshape(8, 9).astype(np.int32) % 20
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    trainer = zerojax.train(
        model, SHARDED, [batch], steps=2, checkpoint=tmp_path / "run", validation=[batch]
    )
    for file in folder.iterdir():
        file.unlink()
    loaded = zerojax.load_run(tmp_path / "run")
    assert loaded.evaluate([batch])["loss"] == trainer.evaluate()["loss"]


@pytest.mark.slow
def test_no_device_holds_the_model_while_it_generates(tmp_path, monkeypatch):
    """Temporaries of a device stay below the whole weights, which eight devices share."""
    sizes = GPT2Config(vocab_size=256, num_layers=8, num_heads=4, embed_dim=256, max_seq_len=32)
    Trained(tmp_path / "run", lambda rngs: GPT2(sizes, rngs=rngs))
    loaded = zerojax.load_run(tmp_path / "run")
    whole = sum(x.nbytes for x in loaded.state["params"].values())
    sizes: dict[str, tuple[int, int]] = {}
    for name in ("_prefill", "_decode"):
        program = getattr(generation, name)

        def measure(*operands, name=name, program=program, **options):
            memory = program.lower(*operands, **options).compile().memory_analysis()
            sizes[name] = memory.argument_size_in_bytes, memory.temp_size_in_bytes
            return program(*operands, **options)

        monkeypatch.setattr(generation, name, measure)
    loaded.generate("To be", 4)
    assert sizes.keys() == {"_prefill", "_decode"}
    for name, (arguments, temporaries) in sizes.items():
        assert arguments < whole / 8 + CACHE, name
        assert temporaries < whole / (8 if name == "_decode" else 2), name  # 8: one layer
