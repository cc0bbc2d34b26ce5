"""Refusals of optimizers and models.

No step is compiled, and where tokens would be drawn nothing draws them: shapes are enough.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import zerojax
from tests.config.test_remedies_of_options import gpt2, line
from tests.support.adam8bit_steps import context_of
from tests.support.hugging_face_folders import CASES, tensors_of, write_folder
from tests.support.refusals import Refusal, code_in, refused
from zerojax import zoo
from zerojax.config import ConfigError
from zerojax.models.adapt import as_model
from zerojax.operators.chunked_loss import head_next_token
from zerojax.optim import build_deepspeed_schedule, muon_dimensions
from zerojax.optim.precision import as_precision
from zerojax.tracing import trees
from zerojax.zoo.generation import generate, generate_from_source
from zerojax.zoo.hugging_face.architectures import ARCHITECTURES, architecture_of
from zerojax.zoo.hugging_face.folder import INDEX
from zerojax.zoo.hugging_face.peft import ADAPTER_FILE, write_adapter
from zerojax.zoo.hugging_face.safetensors import MAX_TABLE_BYTES, Tensor, read_table, write_file
from zerojax.zoo.lora import adapted_kernels
from zerojax.zoo.rope import RopeScaling
from zerojax.zoo.sampling import Sampling
from zerojax.zoo.text_generation import continue_texts

SIZES = {"vocab_size": 64, "num_layers": 1, "num_heads": 2, "embed_dim": 16, "max_seq_len": 16}
wrong_type = functools.partial(refused, error=TypeError)

# --- optimizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["param_dtype", "moments_dtype", "accumulate_dtype"])
def test_precisions(field):
    made = lambda changes: zerojax.Precision(**changes)  # noqa: E731
    half = {"compute_dtype": jnp.float16}
    good = [{"compute_dtype": jnp.float32}, {"compute_dtype": jnp.bfloat16}, half]
    Refusal(
        {"compute_dtype": jnp.int8},
        "compute_dtype=int8",
        "jnp.float32 jnp.bfloat16 jnp.float16",
        good,
    ).check(made)
    Refusal(
        {field: jnp.float16},
        [f"{field}=float16"],
        "float32 bfloat16 compute_dtype",
        [{field: jnp.float32}, {field: jnp.bfloat16}, half],
    ).check(made)
    scale = {"loss_scale": zerojax.LossScale()}
    value = "loss_scale compute_dtype=bfloat16"
    Refusal(scale, value, "float16", [{}, scale | half]).check(made)


def moments(dtype: Any, optimizer: Any) -> zerojax.Plan:
    return line(optimizer=optimizer, precision=zerojax.Precision(moments_dtype=dtype))


def test_moments_in_bfloat16():
    own = ["adamw", "lion", "lamb", "sgd"]
    plain, small = optax.adamw(1e-3), functools.partial(moments, jnp.bfloat16)
    good = [getattr(zerojax, name)(1e-3) for name in own]
    Refusal(plain, "moments_dtype=bfloat16 optax", [*own, "float32"], good).check(small)
    moments(jnp.float32, plain)


def test_moments_of_one_byte():
    eight = zerojax.adam8bit(1e-3)
    given = lambda: moments(jnp.bfloat16, eight)  # noqa: E731
    refused(given, "moments_dtype=bfloat16 adam8bit", "float32 adamw")
    moments(jnp.float32, eight)
    moments(jnp.bfloat16, zerojax.adamw(1e-3))


def test_kernels_for_muon():
    params = {"layers": {"kernel": jnp.ones((2, 3, 4)), "bias": jnp.ones((2, 4))}}
    refused(lambda: muon_dimensions(params), "kernel$ layers/bias", "kernels=")
    layers = lambda: muon_dimensions(params, kernels="layers")  # noqa: E731
    refused(layers, "layers/bias 2", "kernels=")
    found = muon_dimensions(params, kernels="kernel")
    assert found["layers"]["kernel"] is not None
    assert found["layers"]["bias"] is None


def scheduled(kind: str, params: dict[str, Any]) -> Any:
    return build_deepspeed_schedule(kind, params, learning_rate=1e-3)


@pytest.mark.parametrize("half", ["first", "second"])
def test_stairs_of_a_cycle(half):
    cycle = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 8}
    name = f"cycle_{half}_stair_count"
    bad, good = cycle | {name: 2**30}, cycle | {name: 0}
    Refusal(bad, [name, 2**30], [f"{name}=0"], [good], ConfigError).check(
        functools.partial(scheduled, "OneCycle")
    )


def test_options_of_optimizers():
    remedy = "'fp32' 'bf16' 'fp16' zerojax.Precision(...)"
    good = ["fp32", "bf16", "fp16", zerojax.Precision()]
    Refusal(1, "precision=1", remedy, good, TypeError).check(as_precision)
    refused(lambda: zerojax.sgd(1.0, nesterov=True), "nesterov=True None", "momentum 0.9")
    line(optimizer=zerojax.sgd(1.0, nesterov=True, momentum=0.9))
    decay = optax.linear_schedule(0.1, 0.0, 10)
    given = lambda: zerojax.adamw(1e-3, weight_decay=decay)  # noqa: E731
    wrong_type(given, "weight_decay function", "optax.add_decayed_weights")
    parts = optax.scale_by_adam(), optax.add_decayed_weights(decay), optax.scale(-1e-3)
    line(optimizer=optax.chain(*parts))
    bad, name = {"warmup_num_steps": 4, "last_batch_iteration": 7}, "last_batch_iteration"
    row = Refusal(bad, name, "checkpoint", [{"warmup_num_steps": 4}], ConfigError)
    row.check(functools.partial(scheduled, "WarmupLR"))


def test_eight_bit_moments_of_bfloat16_parameters():
    def update(tx: Any, dtype: Any = jnp.bfloat16) -> Any:
        own = {"w": jnp.ones((64, 64), dtype)}
        context = context_of(0, names=own)
        return jax.eval_shape(lambda: tx.apply(own, tx.init(own), own, context))

    tx = zerojax.adam8bit(1e-3)
    message = wrong_type(lambda: update(tx), "adam8bit w bfloat16", "float32")
    update(tx, jnp.float32)
    update(eval(code_in(message, "adam8bit(...)").replace("adam8bit(...)", "tx")))


# --- models ---------------------------------------------------------------------------------------


def test_a_module_of_pytorch(tmp_path):
    net = type("Net", (), {"__module__": "torch.nn", "__call__": lambda self, x: x})
    remedy = "zerojax.from_hugging_face(FOLDER) docs/hugging_face.md"
    for given in (net, net()):
        wrong_type(lambda given=given: as_model(given), "Net PyTorch", remedy)
    page = (Path(__file__).parents[2] / "docs" / "hugging_face.md").read_text()
    assert {name for name in ARCHITECTURES if f"`{name}`" in page} == set(ARCHITECTURES)
    as_model(zerojax.from_hugging_face(write_folder(tmp_path / "saved", "gpt2")))


@pytest.mark.parametrize("bad", ["mse", 3])
@pytest.mark.parametrize("names", [("x", "y"), ("x",), ()])
def test_what_is_no_loss(bad, names):
    rows = np.zeros((16, 8), np.float32)
    batch = dict.fromkeys(names, rows) if names else rows
    plan = lambda loss: zerojax.make_plan(  # noqa: E731
        lambda rngs: nnx.Linear(8, 8, rngs=rngs), {}, example_batch=batch, loss=loss
    )
    message = wrong_type(lambda: plan(bad), [f"loss={bad!r}"], "function")
    plan(eval(code_in(message, "lambda model, batch"), {"zerojax": zerojax, "jnp": jnp}))


def test_chunks_of_a_loss():
    def loss(options: dict[str, int]) -> Any:
        given = jnp.ones((2, 4)), jnp.ones((8, 4)), jnp.zeros(2, int)
        chunked = functools.partial(head_next_token, **{"vocab_dim": 0, "chunk": 2, **options})
        return jax.eval_shape(chunked, *given)

    Refusal({"chunk": 0}, "chunk=0", "1 1024", [{"chunk": 1}, {"chunk": 1024}]).check(loss)
    Refusal({"vocab_dim": 2}, "vocab_dim=2", "0 1", [{"vocab_dim": 0}]).check(loss)


def test_models_of_other_kinds():
    known = [*ARCHITECTURES]
    refused(lambda: architecture_of({"model_type": "mamba"}), "model_type='mamba'", [*known, "own"])
    assert [architecture_of({"model_type": name}).model_type for name in known]
    line()  # a module of one's own
    rules = zoo.tensor_parallel_rules
    Refusal("gpt3", "gpt3", "gpt2 llama", ["gpt2", "llama"]).check(rules)


def adapters(model: Any) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in state}


@pytest.mark.thorough
def test_adapters_for_peft(tmp_path):
    lora = zerojax.LoraConfig(rank=2, targets=("attention/(query|value)",))
    arrays = adapters(zerojax.add_lora(gpt2(), lora))
    one = dict.fromkeys(adapted_kernels(arrays), lora.scale)
    assert len(one) == 2

    def write(arrays: Any, scales: Any) -> Path:
        return write_adapter(tmp_path / str(len(arrays)), gpt2().config, arrays, scales=scales)

    mixed = {name: lora.scale + index for index, name in enumerate(one)}
    value = '2 "(2, 8.0)" "(2, 9.0)"'
    refused(lambda: write(arrays, mixed), value, "one zerojax.LoraConfig")
    assert (write(arrays, one) / ADAPTER_FILE).is_file()
    none = adapters(gpt2())
    refused(lambda: write(none, {}), "adapters", "zerojax.add_lora")
    refused(lambda: zerojax.merge_lora(gpt2()), "GPT2 adapters", "zerojax.add_lora")
    zerojax.merge_lora(zerojax.add_lora(gpt2(), lora))


def test_files_of_safetensors(tmp_path):
    whole, file = np.ones(4, np.float32), tmp_path / "x.safetensors"
    write = lambda array: write_file(  # noqa: E731
        file, [Tensor(name="x", shape=array.shape, dtype=array.dtype)], lambda _: array, metadata={}
    )
    Refusal(whole.astype(np.complex64), "x complex64", "dtype", [whole]).check(write)
    theirs = file.read_bytes()
    with file.open("wb") as hollow:  # no block of it is on the disk
        hollow.write(struct.pack("<Q", MAX_TABLE_BYTES + 1))
        hollow.truncate(MAX_TABLE_BYTES + 64)
    refused(lambda: read_table(file), [file, MAX_TABLE_BYTES + 1, MAX_TABLE_BYTES], "fetch")
    file.write_bytes(theirs)
    assert read_table(file)["x"].shape == (4,)


BERT = {"vocab_size": 20, "max_seq_len": 8, "num_layers": 1, "num_heads": 2, "embed_dim": 8}


@functools.cache
def bert(**changes: Any) -> Any:
    return abstract("Bert", **{**BERT, **changes})


def abstract(name: str, **sizes: Any) -> Any:
    """A model of shapes."""
    config = getattr(zoo, f"{name}Config")(**sizes)
    return nnx.eval_shape(lambda: getattr(zoo, name)(config, rngs=nnx.Rngs(0)))


def run(model: Any, method: str, *given: Any) -> Any:
    """What a method gives, in shapes."""
    graphdef, state = nnx.split(model)
    return nnx.eval_shape(
        lambda state, given: getattr(nnx.merge(graphdef, state), method)(*given), state, given
    )


def test_a_bert():
    types = lambda number: bert(num_types=number)  # noqa: E731
    Refusal(0, "num_types=0", "1 2", [1, 2]).check(types)
    pool = lambda **changes: run(bert(**changes), "pool", np.ones((1, 2, 8)))  # noqa: E731
    refused(pool, "pooler", "has_pooler=True")
    assert pool(has_pooler=True).shape == (1, 8)
    tokens = jnp.zeros((2, 4), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    loss = lambda batch: run(bert(), "loss", batch)  # noqa: E731
    remedy = "zerojax.data.as_masked_source weights 1"
    Refusal(batch, "targets tokens", remedy, [batch | {"weights": jnp.ones((2, 4))}]).check(loss)


def test_tokens_of_a_decoder():
    tokens, gpt2 = np.zeros((1, 4), np.float32), abstract("GPT2", **SIZES)
    look = lambda tokens: run(gpt2, "__call__", tokens)  # noqa: E731
    whole, long = tokens.astype("int32"), np.zeros((1, 99), int)
    Refusal(tokens, "float32", "tokens.astype('int32')", [whole], TypeError).check(look)
    Refusal(whole[0], '"(4,)"', "tokens[None]", [whole[0][None]]).check(look)
    Refusal(long, "99 16", "max_seq_len", [long[:, :16]]).check(look)
    drop = lambda rate: dataclasses.replace(gpt2.config, dropout=rate)  # noqa: E731
    Refusal(1.0, "dropout=1.0", "0.0", [0.0]).check(drop)


@pytest.fixture
def undrawn(monkeypatch):
    """Tokens are not drawn: they are zeros."""

    def drawn(model, slots, controls, **_):
        zeros, ended = np.zeros((slots.size, 64), np.int32), np.ones(slots.size, bool)
        batch, _ = slots.fill()
        while not slots.collect(zeros, batch.limits, ended):
            batch, _ = slots.fill()
        return slots.continued(0)

    monkeypatch.setattr("zerojax.zoo.generation._continue", drawn)


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "remedy", "good"),
    [
        (10, 9, "num_tokens=6 7", [(10, 6), (7, 9)]),
        (16, 4, "12", [(12, 4)]),
        (4, 30, "num_tokens=12", [(4, 12)]),
        (16, 16, "15 num_tokens=1", [(15, 1)]),
    ],
)
def test_a_text_that_is_too_long_to_go_on(prompt, num_tokens, remedy, good, undrawn):
    def draw(sizes: tuple[int, int]) -> None:
        model = abstract("GPT2", **SIZES)
        assert generate(model, np.zeros((1, sizes[0]), int), sizes[1]).shape == (1, sum(sizes))

    value = [prompt, f"num_tokens={num_tokens}", prompt + num_tokens, 16]
    Refusal((prompt, num_tokens), value, remedy, good).check(draw)


@pytest.mark.parametrize("bad", [10**12, 10**40, -(10**12), 0, 2.0, True, "8", math.nan])
def test_a_number_of_tokens_is_refused_whatever_its_size(bad, undrawn):
    def draw(num_tokens: Any) -> Any:
        return generate(abstract("GPT2", **SIZES), np.zeros((1, 4), int), num_tokens)

    refused(lambda: draw(bad), "num_tokens", error=(ValueError, TypeError))
    draw(12)


@pytest.mark.thorough
def test_how_tokens_are_drawn(undrawn):
    def draw(options: dict[str, Any] | None = None, model: Any = None) -> Any:
        model = model or abstract("GPT2", **SIZES)
        return generate(model, np.zeros((1, 4), int), 2, **options or {})

    for bad in (-1.0, math.inf, math.nan):
        good = [{"temperature": 1.0}, {"temperature": 0.0}]
        Refusal({"temperature": bad}, [f"temperature={bad}"], "1.0 0", good).check(draw)
    good = [{"top_k": value} for value in (1, 64, None)]
    Refusal({"top_k": 99}, "top_k=99", "1 64 None", good).check(draw)
    wrong_type(lambda: draw(model=bert()), "Bert", "Decoder GPT2 Llama")
    for name in ("Decoder", "GPT2", "Llama"):
        draw(model=abstract(name, **SIZES))
    wrong_type(lambda: draw(model=abstract("T5")), "T5", "generate_from_source")
    assert zoo.generate_from_source is generate_from_source


def test_kinds_of_models():
    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(4)(x)

    wrong_type(lambda: as_model(Dense), "Dense class", "Dense(...)")
    kinds = {
        "nnx.Module": nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        "callable": lambda rngs: nnx.Linear(2, 2, rngs=rngs),
        "linen.Module": Dense(),
        "(init, apply)": (lambda key, batch: {}, lambda params, x: x),
    }
    wrong_type(lambda: as_model({}), "dict", kinds)
    assert len({as_model(each).kind for each in kinds.values()}) == 4
    made = functools.partial(zerojax.add_lora, config=zerojax.LoraConfig(rank=2))
    wrong_type(lambda: made({}), "dict", "nnx.Module rngs")
    wrong_type(lambda: made(lambda rngs: {})(nnx.Rngs(0)), "dict", "nnx.Module rngs")
    config = zoo.GPT2Config(**SIZES)
    nnx.eval_shape(lambda: made(lambda rngs: zoo.GPT2(config, rngs=rngs))(nnx.Rngs(0)))


def test_a_name_twice():
    bad, good = {"a": {"b": 1}, "a/b": 2}, {"a": {"b": 1}, "a_b": 2}
    Refusal(bad, "a/b /", "rename", [good]).check(trees.flatten_names)
    assert set(trees.flatten_names(good)) == {"a/b", "a_b"}


@pytest.mark.thorough
def test_second_derivatives_of_a_chunked_loss():
    def second(chunk: int | None) -> Any:
        model = abstract("GPT2", **SIZES, tie_embeddings=False, loss_chunk=chunk)
        graphdef, state = nnx.split(model)
        tokens = jnp.zeros((1, 4), jnp.int32)

        def loss(state):
            total, _ = nnx.merge(graphdef, state).loss({"tokens": tokens, "targets": tokens})
            return total

        return jax.eval_shape(lambda s: jax.jvp(jax.grad(loss), (s,), (s,)), state)

    row = Refusal(2, '"second derivative"', "loss_chunk=None", [None], NotImplementedError)
    row.check(second)


def test_prompts(undrawn):
    gpt2, letters = abstract("GPT2", **{**SIZES, "vocab_size": 256}), zerojax.data.ByteTokenizer()

    def write(prompt: str, tokenizer: Any = letters) -> str:
        return continue_texts(gpt2, tokenizer, [prompt], None, Sampling())[0].text

    Refusal("x" * 16, "prompt 16", "15", ["x" * 15]).check(write)
    Refusal("", "prompt empty", "A", ["A"]).check(write)
    refused(lambda: write("a", None), "tokenizer", '"zerojax data prepare"')
    draw = lambda token: generate(  # noqa: E731
        abstract("GPT2", **SIZES), np.full((1, 2), token), 2
    )
    Refusal(99, "99 64", "tokenizer", [63]).check(draw)


def test_rotary_positions():
    factors = {"short_factor": (1.0,), "long_factor": (2.0,)}
    made = lambda given: RopeScaling(factor=2.0, **given)  # noqa: E731
    long = {"original_max_seq_len": 32, **factors}
    kinds = ["linear", "dynamic", "llama3", "yarn", "longrope"]
    good = [{"kind": kind, **long} for kind in kinds]
    Refusal({"kind": "bent"}, "rope_scaling.kind='bent'", kinds, good).check(made)
    good = [{"kind": "dynamic", "original_max_seq_len": 32}]
    Refusal({"kind": "dynamic"}, "dynamic", "original_max_seq_len", good).check(made)


def test_layers_that_differ():
    linear = lambda width, key: nnx.Linear(8, width, rngs=nnx.Rngs(key))  # noqa: E731
    norm = lambda: nnx.LayerNorm(8, rngs=nnx.Rngs(0))  # noqa: E731
    end = linear(8, 0)
    blocks = lambda layers: zerojax.Stages(end, list(layers), linear(4, 0))  # noqa: E731
    good = [nnx.Sequential(linear(8, key), norm()) for key in (0, 1)]
    Refusal([end, norm()], "0 1 kernel", "block", [good]).check(blocks)
    head = lambda head: zerojax.Stages(end, good, head)  # noqa: E731
    Refusal(3, "head int", "nnx.Module function", [jnp.tanh], TypeError).check(head)


def test_an_adapter_beside_the_head():
    config = zoo.GPT2Config(**SIZES, tie_embeddings=False)
    add = lambda target: nnx.eval_shape(  # noqa: E731
        lambda: zerojax.add_lora(
            lambda rngs: zoo.GPT2(config, rngs=rngs), zerojax.LoraConfig(rank=2, targets=(target,))
        )(nnx.Rngs(0))
    )
    Refusal("lm_head", "lm_head", "'blocks/.*'", ["blocks/.*"]).check(add)


def test_an_index_of_other_files(tmp_path):
    theirs = write_folder(tmp_path / "theirs", "llama_tied", shards=2)
    ours = Path(shutil.copytree(theirs, tmp_path / "ours"))
    index = json.loads((ours / INDEX).read_text())
    name, other = sorted(set(index["weight_map"].values()))
    swapped = {key: other if file == name else file for key, file in index["weight_map"].items()}
    swapped[max(swapped)] = name
    (ours / INDEX).write_text(json.dumps({**index, "weight_map": swapped}))
    refused(lambda: zerojax.from_hugging_face(ours), [ours / INDEX, other], "fetch")
    shutil.copytree(theirs, ours, dirs_exist_ok=True)
    zerojax.from_hugging_face(ours)


def test_tensors_of_another_class(tmp_path):
    known = tensors_of("llama_tied")
    more = {**known, "score.weight": np.ones((2, 8), np.float32)}
    folder = write_folder(tmp_path / "classes", "llama_tied", tensors=more)
    read = lambda: zerojax.from_hugging_face(folder).initial_arrays()  # noqa: E731
    (name,) = CASES["llama_tied"]["config"]["architectures"]
    refused(read, [folder, "score.weight"], [name, "transformers"])
    write_folder(folder, "llama_tied")
    read()
