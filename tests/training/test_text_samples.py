"""Texts of the current weights in the log of a run (`log.samples`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

import zerojax
from tests.support.refusals import refused
from tests.support.small_models import reference_model
from tests.support.trajectories import text_batch
from zerojax.config import ConfigError, ModelConfig, SamplesConfig
from zerojax.training import trainer as trainer_module
from zerojax.training.metrics.report import write_report

PROMPTS = ("To be", "What is the")
MODEL = {"num_layers": 1, "num_heads": 2, "embed_dim": 16, "max_seq_len": 32}


def train(folder: Any, **options: Any) -> zerojax.Trainer:
    samples = SamplesConfig(prompts=PROMPTS, num_tokens=8, seed=3)
    defaults: dict[str, Any] = {
        "steps": 4,
        "seq_len": 16,
        "global_batch_size": 8,
        "run_dir": folder,
        "log": zerojax.LogConfig(samples=samples, console="quiet"),
    }
    model = zerojax.zoo.build_model(ModelConfig(**MODEL), 256)
    return zerojax.train(model, {"zero": 3}, **{**defaults, **options})


def logged(folder: Any) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one.get("event") == "sample"]


@pytest.mark.thorough
def test_texts_of_the_current_weights_are_logged(tmp_path):
    folder = tmp_path / "run"
    trainer = train(folder, steps=2, eval_every=1)
    found = logged(folder)
    assert [(one["step"], one["prompt"]) for one in found] == [
        (step, prompt) for step in (0, 1, 2) for prompt in PROMPTS
    ]
    assert [one["sample"] for one in found[-2:]] == trainer.generate(PROMPTS, 8, seed=3)
    page = write_report(folder).read_text()
    assert "Samples" in page
    assert "What is the" in page


@pytest.mark.thorough
def test_samples_change_no_bit_of_a_run(tmp_path):
    plain = zerojax.LogConfig(console="quiet")
    runs = [train(tmp_path / "plain", log=plain), train(tmp_path / "run", eval_every=2)]
    assert runs[0].history[-1]["loss"] == runs[1].history[-1]["loss"]


@pytest.mark.thorough
def test_a_run_that_dies_while_it_writes_texts_loses_no_checkpoint(tmp_path, monkeypatch):
    """Each save is complete on disk before the texts of its step are drawn, the last one too."""
    on_disk: dict[int, Any] = {}
    real = trainer_module.log_samples

    def noting(trainer, *args):
        on_disk[trainer.num_steps] = max(trainer._checkpointer.steps(), default=None)
        return real(trainer, *args)

    monkeypatch.setattr(trainer_module, "log_samples", noting)
    saved = zerojax.CheckpointConfig(path=str(tmp_path / "run" / "checkpoints"), every=2)
    train(tmp_path / "run", steps=3, eval_every=2, checkpoint=saved)
    assert on_disk == {0: None, 2: 2, 3: 3}


@pytest.mark.thorough
def test_a_run_that_writes_no_text_is_refused_before_its_first_step(tmp_path):
    def without_tokenizer():
        batches = [text_batch(step) for step in range(4)]
        train_on = {"seq_len": None, "global_batch_size": None}
        log = zerojax.LogConfig(
            samples=SamplesConfig(prompts=PROMPTS, num_tokens=8), console="quiet"
        )
        options = {"steps": 4, "run_dir": tmp_path / "arrays", "log": log}
        return zerojax.train(reference_model("gpt2"), {}, batches, **train_on, **options)

    refused(without_tokenizer, "no tokenizer")
    long = SamplesConfig(prompts=("To be, or not to be, that is the question",), num_tokens=8)
    log = zerojax.LogConfig(samples=long, console="quiet")
    refused(lambda: train(tmp_path / "long", log=log), "41 tokens 32", "shorten")
    assert not logged(tmp_path / "long")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompts": ("To be", "")}, ("empty",)),
        ({"num_tokens": 0}, ("num_tokens", "1")),
        ({"temperature": -1.0}, ("temperature", "0")),
        ({"top_p": 1.5}, ("top_p", "1")),
        ({"top_k": 0}, ("top_k", "1")),
    ],
)
def test_values_out_of_range_are_refused(options, words):
    with pytest.raises(ConfigError) as error:
        SamplesConfig(**options)
    assert all(word in str(error.value) for word in words)
