"""Every model of the zoo trains with a run folder, resumes from it and is loaded from it."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

import zerojax
from zerojax.config.attention_layouts import BigBirdLayout, VariableLayout
from zerojax.config.compression import BitScheduleConfig
from zerojax.config.expert_settings import MoEConfig
from zerojax.zoo import (
    MODELS,
    BertConfig,
    DecoderConfig,
    GPT2Config,
    LayerKind,
    LlamaConfig,
    NormConfig,
    Rope,
    RopeScaling,
    Stages,
    T5Config,
    TaskConfig,
    add_lora,
)
from zerojax.zoo.config_values import config_of, values_of

SIZES = {"vocab_size": 38, "num_layers": 2, "num_heads": 2, "embed_dim": 16, "max_seq_len": 32}
EXPERTS = MoEConfig(num_experts=2, experts_per_token=1, expert_dim=8, bias_rate=0.001)
BITS = BitScheduleConfig(start_step=1, start_bits=8, period=2)
ROPE = Rope(
    scaling=RopeScaling(
        kind="longrope",
        short_factor=(1.0,) * 4,
        long_factor=(2.0,) * 4,
        original_max_seq_len=16,
        factor=2.0,
    )
)
TASK = TaskConfig(labels=("a", "b", "c"), problem="multi_label_classification", pad_token=1)
CONFIGS = {
    "gpt2": GPT2Config(
        **SIZES,
        dropout=np.float32(0.1),
        attention_layout=VariableLayout(block=16, local_window_blocks=(1, 2)),
    ),
    "llama": LlamaConfig(**SIZES, rope_scaling=RopeScaling(kind="linear", factor=2.0)),
    "llama experts": LlamaConfig(**SIZES, moe=EXPERTS),
    "llama bits": LlamaConfig(**SIZES, matmul_dtype="fake_int8", bit_schedule=BITS),
    "decoder": DecoderConfig(
        **SIZES,
        kinds=(LayerKind(window=4, rope=None), LayerKind(rope=ROPE)),
        pattern=(0, 1),
        norm=NormConfig(kind="layer"),
        qkv_bias=np.bool_(True),
    ),
    "bert": BertConfig(**SIZES, attention_layout=BigBirdLayout(block=8)),
    "gpt2 task": GPT2Config(**SIZES, task=TASK),
    "llama task": LlamaConfig(**SIZES, task=TASK),
    "decoder task": DecoderConfig(**SIZES, task=TASK),
    "bert task": BertConfig(**SIZES, task=TaskConfig(kind="token_classification")),
    "t5": T5Config(**SIZES, head_dim=8, mlp_dim=24, num_decoder_layers=1),
    "t5 1.1": T5Config(**SIZES, head_dim=8, mlp_dim=24, gated_gelu=True, tie_embeddings=False),
}
CLASSES = {type(config): MODELS[name.split()[0]] for name, config in CONFIGS.items()}
TRAINED = [*CONFIGS, "lora", "stages"]


def factory(name: str):
    """Returns a factory of a model."""
    if name == "lora":
        return add_lora(factory("llama"), zerojax.LoraConfig(rank=2, dropout=0.1))
    if name == "stages":
        return lambda rngs: Stages(
            nnx.Embed(38, 16, rngs=rngs),
            lambda rngs: nnx.Linear(16, 16, rngs=rngs),
            nnx.Linear(16, 38, rngs=rngs),
            num_layers=2,
            rngs=rngs,
        )
    config = CONFIGS[name]
    return lambda rngs: CLASSES[type(config)][1](config, rngs=rngs)


def batch(name: str) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, 38, (8, 32), np.int32)
    if name == "bert task":
        return {"tokens": tokens, "labels": tokens % 2}
    if name.endswith("task"):
        return {"tokens": tokens, "labels": tokens[:, :3] % 2}
    if name == "bert":
        return {"tokens": tokens, "targets": tokens, "weights": np.ones((8, 32), np.float32)}
    return {"tokens": tokens, "targets": tokens[:, :5] if name.startswith("t5") else tokens}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_read_back_from_json(name):
    config = CONFIGS[name]
    found = config_of(type(config), json.loads(json.dumps(values_of(config))))
    assert found == config
    assert hash(found) == hash(config)


def test_every_model_with_a_config_is_in_the_table():
    assert {cls for cls, _ in MODELS.values()} == {type(config) for config in CONFIGS.values()}
    for cls, _ in MODELS.values():
        varied = {
            field.name
            for config in CONFIGS.values()
            if type(config) is cls
            for field in dataclasses.fields(cls)
            if dataclasses.is_dataclass(getattr(config, field.name))
        }
        nested = {f.name for f in dataclasses.fields(cls) if "Config" in str(f.type)}
        assert nested <= varied


def next_token(model, batch):
    return zerojax.losses.next_token(model(batch["tokens"]), batch["targets"])


def own_loss(name: str):
    return next_token if name == "stages" else None


def run(name: str, model, steps: int, **options):
    quiet = zerojax.LogConfig(console="quiet")
    return zerojax.train(
        model,
        zerojax.make_mesh({"data": 2}, devices=jax.devices()[:2]),
        lambda step: batch(name),
        loss=own_loss(name),
        optimizer=zerojax.adamw(1e-3),
        steps=steps,
        log=quiet,
        **options,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("t5", "instance"),
        pytest.param("t5", "factory", marks=pytest.mark.thorough),
        *(
            pytest.param(name, "factory" if index % 2 else "instance", marks=pytest.mark.thorough)
            for index, name in enumerate(TRAINED)
            if name != "t5"
        ),
    ],
)
def test_a_model_of_the_zoo_is_recorded_resumed_and_loaded(name, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make = factory(name)

    def model():
        return make(nnx.Rngs(0)) if kind == "instance" else make

    run(name, model(), 1, checkpoint="saved").close()
    record = json.loads((tmp_path / "saved" / "run.json").read_text())
    assert bool(record["architecture"]) == (name != "stages")
    with run(name, model(), 2, checkpoint="saved") as trainer:
        assert len(trainer.history) == 1, "the second call resumes after step 1"
        expected = trainer.state["params"]
        given = {"model": model(), "loss": own_loss(name)} if name == "stages" else {}
        # Its mesh: vocabularies are padded to a multiple of the devices.
        loaded = zerojax.load_run("saved", mesh=trainer.plan.mesh, **given)
        assert loaded.step == 2
        for leaf, own in zip(
            jax.tree.leaves(loaded.state["params"]), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(own))
