"""Generation from the state of a run on its own mesh: the tokens of one device."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.hugging_face_folders import CASES, DECODERS, write_folder
from tests.support.refusals import refused
from tests.support.small_models import VOCAB, reference_model
from tests.support.trajectories import plan_for
from zerojax.config import MoEConfig
from zerojax.training.run_generation import end_tokens_of
from zerojax.training.trainer import Trainer
from zerojax.zoo import generation
from zerojax.zoo.hugging_face import end_tokens_in, from_hugging_face
from zerojax.zoo.sampling import Sampling

LENGTHS, NEW = (3, 9, 5, 6, 1), 6
"""Five prompts, which no mesh divides."""
LLAMAS = [case for case in CASES if "llama" in case]
MESHES: dict[str, dict[str, Any]] = {
    "data 8, zero 3": {"zero": 3, "mesh": {"data": 8}},
    "data 2 x model 4": {"zero": 1, "mesh": {"data": 2, "model": 4}},
    "stages": {"zero": 2, "mesh": {"data": 4, "stage": 2}, "num_microbatches": 2},
    "expert": {"zero": 3, "mesh": {"data": 2, "expert": 4}},
    "context": {"zero": 3, "mesh": {"data": 2, "context": 4}},
    "offload": {
        "zero": 3,
        "offload": {"params": "host", "opt_state": "host", "min_elements": 1},
        "optimizer": zerojax.adamw(1e-3),
    },
}


def prompts_below(vocab_size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(2)
    return [generator.integers(0, vocab_size, length) for length in LENGTHS]


def trainer_of(model: Any, *, devices: int = 8, **options: Any) -> Trainer:
    return Trainer(plan_for(model, devices=devices, persistence_threshold=0, **options))


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected) == len(LENGTHS)
    for row, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=f"row {row}")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("mesh", ["data 8, zero 3", "data 2 x model 4"])
def test_greedy_tokens_are_those_of_one_device(mesh, name):
    heads = {"num_kv_heads": 4} if name == "llama" else {}
    model, prompts = reference_model(name, **heads), prompts_below(VOCAB)
    expected = trainer_of(model, devices=1, zero=0).generate(prompts, NEW, temperature=0)
    found = trainer_of(model, **MESHES[mesh]).generate(prompts, NEW, temperature=0)
    assert_same(found, expected)
    assert [len(row) for row in found] == [length + NEW for length in LENGTHS]


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", ["data 8, zero 3", "data 2 x model 4", "stages", "offload"])
def test_so_they_are_with_layers_apart(mesh, monkeypatch):
    """As on GPUs. Layers that stages divide stay stacked."""
    model, prompts = reference_model("llama", num_kv_heads=4), prompts_below(VOCAB)
    expected = trainer_of(model, devices=1, zero=0).generate(prompts, NEW, temperature=0)
    monkeypatch.setattr("zerojax.training.run_generation.is_faster_apart", lambda *args: True)
    trainer = trainer_of(model, **MESHES[mesh])
    assert_same(trainer.generate(prompts, NEW, temperature=0), expected)
    model = trainer._reader.read(trainer.state, apart=True)
    assert isinstance(model.blocks, nnx.List) == (mesh != "stages")
    if mesh == "data 8, zero 3":
        kernel = model.blocks[1].mlp.up.kernel[...]
        assert kernel.addressable_shards[0].data.nbytes == kernel.nbytes // 8


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", ["stages", "expert", "context", "offload"])
def test_so_they_are_with_other_axes_and_offload(mesh):
    moe = {"num_experts": 4, "experts_per_token": 2} if mesh == "expert" else {}
    model = reference_model("llama", moe=MoEConfig(**moe))
    prompts = prompts_below(VOCAB)
    expected = trainer_of(model, devices=1, zero=0).generate(prompts, NEW, temperature=0)
    found = trainer_of(model, **MESHES[mesh]).generate(prompts, NEW, temperature=0)
    assert_same(found, expected)


@pytest.mark.slow  # three plans and six programs of each family
@pytest.mark.parametrize("case", [*LLAMAS, *DECODERS])
def test_so_they_are_in_every_family(case, tmp_path):
    model = from_hugging_face(write_folder(tmp_path / case, case))
    longest = model.config.max_seq_len - NEW
    prompts = [prompt[:longest] for prompt in prompts_below(19)]
    batch = lambda index: {  # noqa: E731
        name: np.full((8, 8), index, np.int32) for name in ("tokens", "targets")
    }
    heads = getattr(model.config, "num_kv_heads", None) or model.config.num_heads
    divided = np.gcd(heads, model.config.vocab_size)
    degree = next(degree for degree in (4, 2) if divided % degree == 0)
    options = {"batch": batch, "persistence_threshold": 0}
    expected = Trainer(plan_for(model, devices=1, **options)).generate(
        prompts, NEW, temperature=0, end_tokens=()
    )
    for mesh in (MESHES["data 8, zero 3"], {"zero": 1, "mesh": {"data": 2, "model": degree}}):
        devices = int(np.prod(list(mesh["mesh"].values())))
        trainer = Trainer(plan_for(model, devices=devices, **options, **mesh))
        assert_same(trainer.generate(prompts, NEW, temperature=0, end_tokens=()), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_row_does_not_depend_on_mesh_batch_or_neighbours(name):
    """Sampled tokens of rows with their numbers: in order on a device, in others on four."""
    model, prompts = reference_model(name), prompts_below(VOCAB)
    options = {"temperature": 1.2, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 3}
    one = trainer_of(model, devices=1, zero=0)
    expected = one.generate(prompts, NEW, **options)
    four = trainer_of(model, devices=4, zero=3, mesh={"data": 4})
    assert_same(four.generate(prompts, NEW, **options), expected)
    assert_same(four.generate(prompts, NEW, **options, batch_size=2), expected)
    order = [3, 0, 4]
    added = generation.continue_rows(
        four._reader.read(four.state),
        [*(prompts[row] for row in order), np.ones(8, int)],
        NEW,
        Sampling(**options),
        row_numbers=[*order, 11],
        row_sharding=four.plan.batch_sharding,
    )
    for new, row in zip(added.tokens, order, strict=False):
        np.testing.assert_array_equal(new, expected[row][len(prompts[row]) :])
    greedy = one.generate(prompts, NEW, temperature=0)
    assert any((x != y).any() for x, y in zip(greedy, expected, strict=True))


@pytest.mark.thorough
def test_two_programs_serve_a_run_while_it_trains():
    """The weights of each step are read; nothing compiles for other options or other weights."""
    trainer = trainer_of(reference_model("gpt2"), zero=3)
    prompts = prompts_below(VOCAB)
    programs = generation._prefill, generation._decode
    for program in programs:
        program.clear_cache()
    first = trainer.generate(prompts, NEW, temperature=0)
    batch = np.random.default_rng(0).integers(0, VOCAB, (32, 17), np.int32)
    for _ in range(2):
        trainer.step({"tokens": batch[:, :-1], "targets": batch[:, 1:]})
    again = trainer.generate(prompts[:4], NEW + 1, temperature=0, end_tokens=(5, 6))
    trainer.generate(prompts, NEW, top_k=4, top_p=0.8, seed=5)
    assert [program._cache_size() for program in programs] == [1, 1]
    assert any((x[: len(y)] != y[: len(x)]).any() for x, y in zip(first, again, strict=False))


@pytest.mark.thorough
def test_text_of_a_live_run_is_that_of_the_run_read_back(tmp_path):
    trainer = zerojax.train(
        reference_model("gpt2", vocab_size=256, max_seq_len=48),
        {"zero": 3, "persistence_threshold": 0},
        steps=2,
        global_batch_size=8,
        seq_len=16,
        checkpoint=tmp_path / "run",
    )
    loaded = zerojax.load_run(tmp_path / "run")
    prompts = ["to be", "question", "n"]
    live = trainer.generate(prompts, 8, seed=1)
    assert live == loaded.generate(prompts, 8, seed=1)
    assert all(
        new.startswith(old) and len(new) > len(old) for old, new in zip(prompts, live, strict=True)
    )
    assert trainer.generate("to be", 8, seed=1) == live[0]
    newest = ord(live[0][-1])
    ended = trainer.generate("to be", 8, seed=1, end_tokens=(newest,))
    assert live[0].startswith(ended)
    assert chr(newest) not in ended[5:]
    refused(lambda: trainer.generate([], 8), "0 prompts", "one")
    refused(lambda: trainer.generate("to be", 99), "num_tokens=99 48", "num_tokens=43")


def test_end_tokens_are_those_of_the_folder(tmp_path):
    folder = write_folder(tmp_path / "llama", "llama", eos_token_id=[3, 7])
    assert end_tokens_in(folder) == (3, 7)
    plan = plan_for(
        from_hugging_face(folder),
        batch=lambda _: {name: np.ones((8, 8), np.int32) for name in ("tokens", "targets")},
    )
    assert end_tokens_of(plan, None, vocab_size=20) == (3, 7)
    stated = {"eos_token_id": [5, 99], "bos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    assert end_tokens_in(folder) == (5, 99)
    assert end_tokens_of(plan, None, vocab_size=20) == (5,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert end_tokens_in(folder) == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert end_tokens_in(folder) == (3, 7)


def test_other_models_are_refused():
    def line(rngs):
        return nnx.Linear(4, 1, rngs=rngs)

    batch = {"x": np.ones((8, 4), np.float32)}
    trainer = Trainer(
        plan_for(line, batch=lambda _: batch, loss=lambda model, batch: model(batch["x"]).mean())
    )
    refused(lambda: trainer.generate([[1, 2]], 2), "Linear", "GPT2", error=TypeError)
