"""What a refusal of options tells to write is written, and is taken.

Each row: what is given first, what of the sentence is read, and what is given then. No device
computes anything.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax import models
from zerojax.config.loader import load_dataclass
from zerojax.data import as_source


def sentence_of(function, *args, **options) -> str:
    with pytest.raises((ValueError, TypeError, OSError)) as caught:
        function(*args, **options)
    return str(caught.value)


# --- settings of a run ----------------------------------------------------------------------------

SETTINGS = [
    # given, what is read of the sentence, what replaces it
    (["zero=4"], r"use (0), (1), (2) or (3)", lambda *found: [[f"zero={n}"] for n in found]),
    (["zerro=3"], r"did you mean '(.*)'", lambda name: [[f"{name}=3"]]),
    (["name=llama"], r"write (\S+) or", lambda name: [[f"{name}=llama"]]),
    (["zero"], r"an example is (\S+)", lambda example: [[example]]),
    (["mesh=3"], r"write (\S+)=VALUE", lambda name: [[f"{name}=3"]]),
    (
        ["loss_scale.static=8", "precision=bf16"],
        r"leave it out or set (precision=fp16)",
        lambda word: [["loss_scale.static=8", word], ["precision=bf16"]],
    ),
    (
        ["seq_len=999"],
        r"model.max_seq_len \((\d+)\); lower it or raise (\S+)",
        lambda limit, name: [[f"seq_len={limit}"], ["seq_len=999", f"{name}=999"]],
    ),
    (
        ["warmup_steps=500", "steps=100"],
        r"above steps \((100)\); lower it or train longer",
        lambda steps: [[f"warmup_steps={steps}", "steps=100"], ["warmup_steps=500", "steps=500"]],
    ),
    (["precision=fp61"], r"did you mean '(.*)'", lambda name: [[f"precision={name}"]]),
    (
        ["mesh.virtual_shards=6"],
        r"use (\d) or (\d)",
        lambda *n: [[f"virtual_shards={x}"] for x in n],
    ),
    (["model.num_kv_heads=3"], r"use (1) or (\d)", lambda *n: [[f"num_kv_heads={x}"] for x in n]),
    (["num_heads=5"], r"use (\d+)", lambda width: [["num_heads=5", f"embed_dim={width}"]]),
    (
        ["elasticity.enabled=true", "global_batch_size=8"],
        r"set it to (\d+) or leave it out",
        lambda rows: [
            ["elasticity.enabled=true", f"global_batch_size={rows}"],
            ["elasticity.enabled=true"],
        ],
    ),
    (
        ["mesh.partition=even"],
        r"not one of (\w+), (\w+), (\w+), nor .* is written (\[.*\])",
        lambda *found: [[f"mesh.partition={one}"] for one in found],
    ),
    (
        ["mesh.offload.opt_state={host: 2}"],
        r"a number from (0 to 1)",
        lambda _: [["mesh.offload.opt_state={host: 1}"]],
    ),
    (
        ["mesh.rules={w: [modle]}"],
        r"use (model) or (null)",
        lambda *names: [[f"mesh.rules={{w: [{name}]}}"] for name in names],
    ),
    (
        ["model.pretrained=FOLDER", "model.num_layers=3"],
        r"(leave it out)",
        lambda _: [["model.pretrained=FOLDER"]],
    ),
    (
        ["model.lora.rank=4", "model.lora.targets=[]"],
        r"such as (\S+)",
        lambda regex: [["model.lora.rank=4", f"model.lora.targets=['{regex}']"]],
    ),
]


@pytest.mark.parametrize(
    ("given", "pattern", "then"), SETTINGS, ids=[" ".join(row[0]) for row in SETTINGS]
)
def test_settings_of_a_run(given, pattern, then):
    read = functools.partial(load_dataclass, zerojax.RunConfig, None)
    sentence = sentence_of(read, given)
    found = re.search(pattern, sentence)
    assert found, sentence
    for words in then(*found.groups()):
        read(words)


# --- plans ----------------------------------------------------------------------------------------


class Line(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = 8) -> None:
        self.out = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(x)


def line(mesh=None, **options: Any) -> zerojax.Plan:
    return zerojax.make_plan(
        Line,
        mesh or {},
        example_batch={"x": np.zeros((48, 8), np.float32)},
        loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        **options,
    )


@functools.cache
def gpt2(num_layers: int = 4) -> Any:
    sizes = {"vocab_size": 64, "num_heads": 2, "embed_dim": 16, "max_seq_len": 16}
    return models.GPT2(models.GPT2Config(num_layers=num_layers, **sizes), rngs=nnx.Rngs(0))


def text(mesh, num_layers: int = 4, **options: Any) -> zerojax.Plan:
    tokens = np.zeros((16, 8), np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    return zerojax.make_plan(gpt2(num_layers), mesh, example_batch=batch, **options)


def groups(value: dict, **options: Any):
    return zerojax.adamw(1e-3, groups=value, **options)


SPLIT = [["kernel", [None, "model"]]]
SLOW = {"learning_rate_factor": 0.1}
FIXED = {"deterministic": "mesh"}
HOST = {"opt_state": "host", "params": "host"}
BACKWARD = {**HOST, "update_in_backward": True}
BF16 = zerojax.Precision(param_dtype=jnp.bfloat16)
FILES = {"opt_state": "nvme", "durable": True, "folder": "files"}
OPTIMIZERS = {"adamw": zerojax.adamw, "lion": zerojax.lion, "sgd": zerojax.sgd}


def of(plan, mesh=None, **options):
    return functools.partial(plan, mesh or {}, **options)


def ours(plan, mesh=None, **options):
    """With each of our optimizers that a sentence names."""
    return lambda *names: [of(plan, mesh, optimizer=OPTIMIZERS[n](1e-3), **options) for n in names]


PLANS = {
    "devices": (
        of(line, {"data": 3}),
        r"use (data=-1) .*, or .*: (zerojax.make_mesh\(.*\))$",
        lambda _, mesh: [
            of(line, {"data": -1}),
            lambda: line(eval(mesh, {**globals(), "jax": jax})),
        ],
    ),
    "too many devices": (
        of(line, {"data": 16}),
        r"use data=(-1)",
        lambda n: [of(line, {"data": -1})],
    ),
    "virtual shards": (
        of(line, {**FIXED, "virtual_shards": 4}),
        r"use virtual_shards=(\d)",
        lambda n: [of(line, {**FIXED, "virtual_shards": int(n)})],
    ),
    "fixed order, microbatches": (
        of(line, FIXED, num_microbatches=2),
        r"leave num_microbatches out, or use virtual_shards=(\d+)",
        lambda n: [
            of(line, FIXED),
            of(line, {**FIXED, "virtual_shards": int(n)}, num_microbatches=2),
        ],
    ),
    "fixed order, optax": (
        of(line, FIXED, optimizer=optax.adamw(1e-3)),
        r"use zerojax\.(adamw), (lion) or (sgd)",
        ours(line, FIXED),
    ),
    "fixed order, bfloat16 sums": (
        of(line, FIXED, precision="bf16", accumulate_dtype="bf16"),
        r"use accumulate_dtype='(fp32)'",
        lambda name: [of(line, FIXED, precision="bf16", accumulate_dtype=name)],
    ),
    "fixed order, offload": (
        of(line, {**FIXED, "offload": {"opt_state": "host"}}),
        r"(leave offload or deterministic out)",
        lambda _: [of(line, FIXED), of(line, {"offload": {"opt_state": "host"}})],
    ),
    "model axis": (
        of(line, {"model": 8, "rules": SPLIT}),
        r"model size that divides (4)",
        lambda n: [of(line, {"model": int(n), "rules": SPLIT})],
    ),
    "bfloat16 parameters": (
        of(line, precision=BF16, optimizer=optax.adamw(1e-3)),
        r"use zerojax\.(adamw), (lion), lamb or (sgd)",
        ours(line, precision=BF16),
    ),
    "offload, optax": (
        of(line, {"offload": {"opt_state": "host"}}, optimizer=optax.adamw(1e-3)),
        r"use zerojax\.(adamw), (lion) or (sgd)",
        ours(line, {"offload": {"opt_state": "host"}}),
    ),
    "a group that matches nothing": (
        of(line, optimizer=groups({"biass": {"weight_decay": 0.0}})),
        r"near names are (\S+);",
        lambda name: [of(line, optimizer=groups({name: {"learning_rate_factor": 0.5}}))],
    ),
    "a group that another hides": (
        of(line, optimizer=groups({"out": SLOW, "bias": SLOW})),
        r"(put it before them)",
        lambda _: [
            of(
                line,
                optimizer=groups({"bias": SLOW, "out": SLOW}),
            )
        ],
    ),
    "a group without decay": (
        of(line, optimizer=groups({"bias": {"weight_decay": 0.1}})),
        r"or (mask=None) to let",
        lambda _: [of(line, optimizer=groups({"bias": {"weight_decay": 0.1}}, mask=None))],
    ),
    "a mask of other names": (
        of(line, optimizer=zerojax.adamw(1e-3, mask={"x": True})),
        r"such as (zerojax\.optim\.decay_mask), or (None)",
        lambda name, _: [
            of(line, optimizer=zerojax.adamw(1e-3, mask=eval(name))),
            of(line, optimizer=zerojax.adamw(1e-3, mask=None)),
        ],
    ),
    "a line search": (
        of(line, optimizer=optax.lbfgs(1e-3)),
        r"such as zerojax\.(adamw)",
        ours(line),
    ),
    "freeze": (
        of(line, freeze="."),
        r"(freeze fewer)",
        lambda _: [of(line, freeze="bias")],
    ),
    "stages of a Python loop": (
        of(line, {"stage": 2}),
        r"use (zerojax\.Stages)\(embed, block, head\)",
        lambda _: [stages],
    ),
    "parts": (
        of(text, {"stage": 2}, num_layers=3),
        r"partition=\"(flops)\", or a list such as partition=(\[.*\])",
        lambda name, rows: [
            of(text, {"stage": 2, "partition": name}, num_layers=3),
            of(text, {"stage": 2, "partition": json.loads(rows)}, num_layers=3),
        ],
    ),
    "a list of parts": (
        of(text, {"stage": 2, "partition": [1, 2]}),
        r"such as (\[.*\])",
        lambda rows: [of(text, {"stage": 2, "partition": json.loads(rows)})],
    ),
    "a schedule's name": (
        of(text, {"stage": 2, "pipeline_schedule": "1f2b"}),
        r"did you mean '(.*?)'",
        lambda name: [of(text, {"stage": 2, "pipeline_schedule": name})],
    ),
    "one chunk": (
        of(text, {"stage": 2, "pipeline_schedule": "interleaved(1)"}),
        r"use (\S+) or (1f1b)",
        lambda *names: [of(text, {"stage": 2, "pipeline_schedule": name}) for name in names],
    ),
    "few microbatches": (
        of(text, {"stage": 4, "pipeline_schedule": "interleaved(1)"}, num_microbatches=2),
        r"use (\S+) or (1f1b)",
        lambda _, name: [of(text, {"stage": 4, "pipeline_schedule": name}, num_microbatches=2)],
    ),
    "streamed layers and stages": (
        of(text, {"stage": 2, "offload": HOST}),
        r"use (stage=1), or leave offload.params on the device",
        lambda _: [
            of(text, {"offload": HOST}),
            of(text, {"stage": 2, "offload": {"opt_state": "host"}}),
        ],
    ),
    "update in backward, microbatches": (
        of(text, {"offload": BACKWARD}, num_microbatches=2),
        r"use num_microbatches=(1)",
        lambda n: [
            of(
                text,
                {"offload": BACKWARD},
                num_microbatches=1,
                optimizer=zerojax.sgd(1e-3, clip_norm=None),
            )
        ],
    ),
    "update in backward, clipping": (
        of(text, {"offload": BACKWARD}, optimizer=zerojax.adamw(1e-3, clip_norm=1.0)),
        r"use clip_norm=(None)",
        lambda _: [of(text, {"offload": BACKWARD}, optimizer=zerojax.adamw(1e-3, clip_norm=None))],
    ),
    "shares": (
        of(text, {"offload": {"opt_state": {"host": 0.5}}}),
        r"add up to (1)",
        lambda _: [of(text, {"offload": {"opt_state": {"host": 0.5, "device": 0.5}}})],
    ),
    "durable files, two memories": (
        of(text, {"offload": {**FILES, "opt_state": {"nvme": 0.5, "host": 0.5}}}),
        r"set opt_state: (nvme), or leave durable out",
        lambda name: [of(text, {"offload": {**FILES, "opt_state": name}})],
    ),
    "durable files, bfloat16": (
        of(text, {"offload": FILES}, precision=BF16),
        r"use param_dtype=(float32), or leave durable out",
        lambda _: [
            of(text, {"offload": FILES}, precision="bf16"),
            of(text, {"offload": {**FILES, "durable": False}}, precision=BF16),
        ],
    ),
}


def stages() -> zerojax.Plan:
    rngs = nnx.Rngs(0)
    model = zerojax.Stages(
        nnx.Linear(8, 8, rngs=rngs),
        lambda rngs: nnx.Linear(8, 8, rngs=rngs),
        nnx.Linear(8, 4, rngs=rngs),
        num_layers=2,
        rngs=rngs,
    )
    return zerojax.make_plan(
        model,
        {"stage": 2},
        example_batch={"x": np.zeros((16, 8), np.float32)},
        loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", PLANS)
def test_plans(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given, pattern, then = PLANS[row]
    sentence = sentence_of(given)
    found = re.search(pattern, sentence)
    assert found, sentence
    for plan in then(*found.groups()):
        assert isinstance(plan(), zerojax.Plan)


# --- models and data ------------------------------------------------------------------------------


def llama(**changes: Any) -> Any:
    sizes = {"vocab_size": 64, "num_layers": 1, "embed_dim": 16, "max_seq_len": 16}
    config = models.LlamaConfig(**{"num_heads": 4, "num_kv_heads": 2, **sizes, **changes})
    return nnx.eval_shape(lambda: models.Llama(config, rngs=nnx.Rngs(0)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "pattern", "then"),
    [
        ({"num_kv_heads": 3}, r"use num_kv_heads=(1) or (4)", "num_kv_heads"),
        ({"head_dim": 5}, r"use head_dim=(6)", "head_dim"),
        ({"embed_dim": 18}, r"use embed_dim=(24)", "embed_dim"),
        ({"embed_dim": 20}, r"use head_dim=(6)", "head_dim"),
        ({"remat": "ful"}, r"use one of (none), (full), (attention), (dots)", "remat"),
        ({"rope_theta": 0.5}, r"(10000)\.0 is usual", "rope_theta"),
    ],
    ids=str,
)
def test_sizes_of_a_model(changes, pattern, then):
    sentence = sentence_of(llama, **changes)
    found = re.search(pattern, sentence)
    assert found, sentence
    for value in found.groups():
        llama(**{**changes, then: int(value) if value.isdigit() else value})


@pytest.mark.thorough
def test_adapters():
    sentence = sentence_of(zerojax.add_lora, gpt2(), zerojax.LoraConfig())
    rank = int(re.search(r"such as rank=(\d+)", sentence)[1])
    adapted = zerojax.add_lora(gpt2(), zerojax.LoraConfig(rank=rank))
    again = sentence_of(zerojax.add_lora, adapted, zerojax.LoraConfig(rank=rank))
    merged = eval(re.search(r"call (\S+) first", again)[1], {"zerojax": zerojax, "model": adapted})
    zerojax.add_lora(merged, zerojax.LoraConfig(rank=rank))
    # A model of one's own, built with Flax's projection.
    own = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    sentence = sentence_of(zerojax.add_lora, own, zerojax.LoraConfig(rank=2))
    freeze = eval(re.search(r"freeze=(\(.*\))$", sentence)[1])

    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.LoRALinear(8, 4, lora_rank=2, rngs=rngs)

        def __call__(self, x):
            return self.out(x)

    plan = zerojax.make_plan(
        Adapted,
        {},
        example_batch={"x": np.zeros((16, 8), np.float32)},
        loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        freeze=freeze,
    )
    trained = [name for name, leaf in plan.placement.leaves.items() if not leaf.frozen]
    assert [name.rpartition("/")[2] for name in trained] == ["lora_a", "lora_b"]


def test_layers_of_a_pipeline():
    rngs, layer = nnx.Rngs(0), lambda rngs: nnx.Linear(8, 8, rngs=rngs)
    ends = layer(rngs), layer(rngs)
    build = lambda block, **options: zerojax.Stages(ends[0], block, ends[1], **options)  # noqa: E731
    sentence = sentence_of(build, layer(rngs))
    written = re.search(r"makes a layer, (lambda .*?\)), or (a list of layers)", sentence)
    block = eval(written[1].replace("...", "8, 8"), {"Linear": nnx.Linear})
    assert "pass num_layers and rngs, too" in sentence_of(build, block)
    build(block, num_layers=2, rngs=rngs)
    assert "leave them out" in sentence_of(build, [layer(rngs)], num_layers=1)
    build([layer(rngs), layer(rngs)])


def source(data, **options):
    return as_source(data, **{"seq_len": 8, "global_batch_size": 2, **options})


def test_token_data(tmp_path):
    sentence = sentence_of(source, np.arange(100), validation_fraction=0.01)
    found = re.search(
        r"set validation_fraction=([\d.]+), .*, or validation_fraction=(0) for", sentence
    )
    for value in found.groups():
        source(np.arange(100), validation_fraction=float(value))
    sentence = sentence_of(source, np.arange(10), validation_fraction=0)
    wanted = int(re.search(r"at least (\d+) tokens", sentence)[1])
    source(np.arange(wanted), validation_fraction=0)
    matrix = np.zeros((4, 300), int)
    sentence = sentence_of(source, matrix)
    source(eval(re.search(r"save (array.reshape\(-1\))", sentence)[1], {"array": matrix}))


def test_token_files(tmp_path):
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    sentence = sentence_of(source, tmp_path)
    text, path = re.search(r"write (\{.*?\}) .* into '(.*?)' if", sentence).groups()
    with open(path, "w") as file:
        file.write(text)
    source(tmp_path)


def test_text_data(tmp_path):
    (tmp_path / "story.doc").write_text("once upon a time " * 40)
    sentence = sentence_of(source, tmp_path)
    suffix = re.search(r"wanted one of (\.\w+)", sentence)[1]
    (tmp_path / "story.doc").rename(tmp_path / f"story{suffix}")
    source(tmp_path)
    (tmp_path / "lines.jsonl").write_text('{"txt": "once"}\n')
    sentence = sentence_of(source, tmp_path / "lines.jsonl")
    line = re.search(r"such as (\{.*\})", sentence)[1]
    (tmp_path / "lines.jsonl").write_text(f"{line}\n" * 400)
    source(tmp_path / "lines.jsonl")
    sentence = sentence_of(source, None, tokenizer="bpe")
    assert "for example 'bpe:4096'" in sentence


def test_masked_tokens():
    plain = source(np.arange(1000) % 50)[0]
    sentence = sentence_of(zerojax.data.as_masked_source, plain, mask_token=3)
    assert "pass vocab_size to as_source" in sentence
    zerojax.data.as_masked_source(source(np.arange(1000) % 50, vocab_size=50)[0], mask_token=3)
