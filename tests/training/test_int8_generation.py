"""Generation with int8 weights and an int8 cache on the mesh of a run: the tokens of one device."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import zerojax
from tests.support.small_models import VOCAB, reference_model
from tests.training.test_run_generation import MESHES, NEW, assert_same, prompts_below, trainer_of
from zerojax.cli import main
from zerojax.models.losses import next_token
from zerojax.optim.precision import as_precision

SHAKESPEARE = Path(zerojax.data.__file__).with_name("shakespeare.txt")
INT8 = {"quantize": "int8", "cache": "int8"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "name", "kind"),
    [
        *((mesh, name, "int8") for mesh in list(MESHES)[:2] for name in ("gpt2", "llama")),
        *((mesh, "llama", "int8") for mesh in ("stages", "offload")),
        ("data 8, zero 3", "llama", "fp8"),
    ],
)
def test_greedy_tokens_are_those_of_one_device(mesh, name, kind):
    codes = {**INT8, "quantize": kind}
    heads = {"num_kv_heads": 4} if name == "llama" else {}
    model, prompts = reference_model(name, **heads), prompts_below(VOCAB)
    one = trainer_of(model, devices=1, zero=0)
    expected = one.generate(prompts, NEW, temperature=0, **codes)
    trainer = trainer_of(model, **MESHES[mesh])
    assert_same(trainer.generate(prompts, NEW, temperature=0, **codes), expected)
    if mesh == "data 8, zero 3":
        model = trainer._reader.read(trainer.state, quantize=kind)
        for kernel in (model.blocks[1].mlp.up.kernel[...], model.blocks[0].mlp.down.kernel[...]):
            assert kernel.dtype.itemsize == 1
            assert kernel.addressable_shards[0].data.nbytes == kernel.size // 8


@pytest.mark.thorough
def test_weights_that_the_run_rounds_give_its_own_tokens():
    """The codes of a run with matmul_dtype=fake_int8 are those that it computes with."""
    model, prompts = reference_model("llama", matmul_dtype="fake_int8"), prompts_below(VOCAB)
    trainer = trainer_of(model, devices=1, zero=0)
    expected = trainer.generate(prompts, NEW, temperature=0)
    assert_same(trainer.generate(prompts, NEW, temperature=0, quantize="int8"), expected)


@pytest.mark.slow  # trains a model for 300 steps
def test_perplexity_grows_by_less_than_half_a_percent():
    """On text that the model did not see, with int8 weights and an int8 cache."""
    text = np.frombuffer(SHAKESPEARE.read_bytes(), np.uint8).astype(np.int32)
    sizes = {"num_layers": 2, "num_heads": 4, "embed_dim": 64, "max_seq_len": 64}
    trainer = zerojax.train(
        reference_model("llama", vocab_size=256, **sizes),
        {"zero": 0},
        lambda step: windows(text[:-20_000], step, 16),
        optimizer=zerojax.adamw(3e-3),
        steps=300,
    )
    losses = {}
    held_out = windows(text[-20_000:], 0, 128)
    for quantize, cache in ((None, None), ("int8", None), ("int8", np.int8)):
        model = trainer._reader.read(trainer.state, quantize=quantize)

        @jax.jit
        def loss(tokens, targets, model=model, cache=cache):
            empty = model.init_cache(len(tokens), tokens.shape[1], cache)
            hidden, _ = model.extend(tokens, empty, 0)
            total, weight = next_token(model.head(hidden), targets)
            return total / weight

        losses[quantize, cache] = float(loss(**held_out))
    exact = losses.pop((None, None))
    assert exact < 2.6, losses  # 5.5 before training
    for each in losses.values():
        assert each != exact
        assert np.exp(each - exact) < 1.005, (losses, exact)


def windows(text, seed, count):
    starts = np.random.default_rng(seed).integers(0, len(text) - 65, count)
    rows = np.stack([text[start : start + 65] for start in starts])
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


@pytest.mark.thorough
def test_frozen_codes_are_decoded_first():
    lora = zerojax.LoraConfig(rank=2)
    model = reference_model("llama", embed_dim=64, mlp_dim=128, lora=lora)
    prompts, precision = prompts_below(VOCAB), as_precision("fp32", freeze_dtype="nf4")
    frozen = {"freeze": lora.freeze, "precision": precision}
    one = trainer_of(model, devices=1, zero=0, **frozen)
    assert any(x.dtype == np.uint8 for x in jax.tree.leaves(one.state["frozen"]))
    expected = one.generate(prompts, NEW, temperature=0, **INT8)
    eight = trainer_of(model, zero=3, **frozen)
    assert_same(eight.generate(prompts, NEW, temperature=0, **INT8), expected)


@pytest.mark.thorough
def test_a_live_run_its_folder_and_the_command_give_one_text(tmp_path, capsys):
    trainer = zerojax.train(
        reference_model("gpt2", vocab_size=256, max_seq_len=48),
        {"zero": 3, "persistence_threshold": 0},
        steps=2,
        global_batch_size=8,
        seq_len=16,
        checkpoint=tmp_path / "run",
    )
    prompts = ["to be", "question", "n"]
    live = trainer.generate(prompts, 8, temperature=0, **INT8)
    loaded = zerojax.load_run(tmp_path / "run")
    assert live == loaded.generate(prompts, 8, temperature=0, **INT8)
    capsys.readouterr()
    words = ["generate", str(tmp_path / "run"), "to be", "--tokens", "8", "--temperature", "0"]
    assert main([*words, "--quantize", "int8", "--cache", "int8"]) == 0
    assert capsys.readouterr().out == f"{live[0]}\n"
