"""Runs with experts on several devices, read back or taken up on another number of devices."""

import json

import jax
import numpy as np
import pytest

import zerojax
from tests.config.test_elasticity import TINY
from tests.processes.test_processes import losses_of
from tests.support.trajectories import TOLERANCE
from tests.training.test_loading import SUMS
from zerojax.cli import main
from zerojax.config import MeshConfig, MoEConfig, RunConfig, load
from zerojax.training import run_file
from zerojax.zoo import Llama, LlamaConfig
from zerojax.zoo.generation import generate

MIXTURE = ("model.name=llama", "model.moe.num_experts=8", "model.moe.expert_dim=24")


def use_devices(monkeypatch, count):
    """This process finds so many devices."""
    devices = jax.devices()[:count]
    monkeypatch.setattr(jax, "device_count", lambda: count)
    monkeypatch.setattr(jax, "devices", lambda: devices)


class Trained:
    """A run at `expert=8`, and the loss that its trainer measures."""

    def __init__(self, folder):
        config = LlamaConfig(
            vocab_size=256,
            num_layers=2,
            num_heads=2,
            embed_dim=32,
            max_seq_len=48,
            moe=MoEConfig(num_experts=8, expert_dim=24),
        )
        mesh = {"data": 1, "expert": 8, "zero": 3, "persistence_threshold": 0}
        settings = {"steps": 2, "global_batch_size": 8, "seq_len": 16, "eval_batches": 2}
        model = lambda rngs: Llama(config, rngs=rngs)  # noqa: E731
        self.folder = folder
        self.trainer = zerojax.train(model, mesh, checkpoint=folder, **settings)
        self.loss = self.trainer.evaluate()["loss"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Trained(tmp_path_factory.mktemp("runs") / "mixture")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("there", "used", "expert"), [(8, 8, 8), (4, 4, 4), (6, 4, 4), (2, 2, 2), (1, 1, 1)]
)
def test_experts_lie_over_what_divides_the_devices_that_are_there(
    run, monkeypatch, there, used, expert
):
    use_devices(monkeypatch, there)
    loaded = zerojax.load_run(run.folder)
    assert loaded.plan.mesh.shape["expert"] == expert
    assert loaded.plan.mesh.size == used
    np.testing.assert_allclose(loaded.evaluate()["loss"], run.loss, rtol=SUMS)


@pytest.mark.thorough
def test_text_is_that_of_the_whole_model(run, monkeypatch):
    use_devices(monkeypatch, 4)
    loaded = zerojax.load_run(run.folder)
    prompt = np.asarray(loaded.tokenizer.encode("To be"))[None]
    whole = generate(run.trainer.to_model(), prompt, 8, temperature=0)
    found = loaded.generate("To be", 8, temperature=0)
    assert found == loaded.tokenizer.decode(np.asarray(whole[0]))


@pytest.mark.thorough
def test_the_commands_read_it_on_one_device(run, monkeypatch, capsys):
    use_devices(monkeypatch, 1)
    assert main(["eval", str(run.folder)]) == 0
    assert f"step 2: loss {run.loss:.4f}, perplexity" in capsys.readouterr().out
    assert main(["generate", str(run.folder), "To be", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("To be")


@pytest.mark.parametrize(
    ("count", "others", "expert"),
    [(8, {}, 8), (16, {}, 8), (12, {}, 4), (6, {}, 2), (7, {}, 1), (8, {"model": 2}, 4)],
)
def test_an_elastic_run_keeps_the_largest_divisor_of_expert(count, others, expert):
    words = ["elasticity.enabled=true", "elasticity.max_global_batch_size=2000", "mesh.expert=8"]
    words += [f"mesh.{axis}={size}" for axis, size in others.items()]
    config = load(RunConfig, None, [*words, "elasticity.micro_batch_sizes=[1,2,3,7]"])
    assert config.mesh_on(count).expert == expert
    assert load(RunConfig, None, ["mesh.expert=8"]).mesh_on(count) == MeshConfig(expert=8)
    fixed = load(RunConfig, None, [*words, "mesh.data=2"])
    assert fixed.mesh_on(count) == fixed.mesh


@pytest.mark.slow
def test_an_elastic_run_goes_on_at_a_lower_degree_and_says_so(tmp_path, monkeypatch):
    """expert=4 on 8 devices, then on 6, of which 4 is no divisor; 2 is."""

    def losses(run, counts):
        for steps, count in zip((2, 4), counts, strict=True):
            with monkeypatch.context() as patch:
                use_devices(patch, count)
                words = [*TINY, *MIXTURE, "mesh.expert=4", f"run_dir={tmp_path / run}"]
                config = load(RunConfig, None, [*words, f"steps={steps}"])
                with run_file.run_from_config(config) as trainer:
                    assert trainer.plan.global_batch_size == 24
                    assert trainer.plan.mesh.shape["expert"] == (4 if count == 8 else 2)
                    assert trainer.plan.mesh.size == count
        return losses_of(tmp_path / run)

    same, moved = losses("same", [8, 8]), losses("moved", [8, 6])
    assert len(same) == len(moved) == 4
    assert moved[:2] == same[:2]
    # Sums over 6 shards are rounded otherwise than over 8.
    np.testing.assert_allclose(moved[2:], same[2:], rtol=0, atol=TOLERANCE)
    settings = json.loads((tmp_path / "moved" / "config.json").read_text(encoding="utf-8"))
    assert settings["mesh"]["expert"] == 2
