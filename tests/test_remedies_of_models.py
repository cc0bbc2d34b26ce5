"""What a refusal of an optimizer or model tells to write is written, and is taken.

Each remedy is read from the sentence where it can be, so that another sentence is another deed. No
step is compiled: plans and shapes are enough, and where tokens would be drawn nothing draws them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
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
from tests.adam8bit_steps import context_of
from tests.hugging_face_folders import CASES, tensors_of, write_folder
from tests.remedies import told
from tests.test_remedies_of_options import gpt2, line
from tests.test_remedies_of_plans import SIZES
from zerojax import models
from zerojax.models import trees
from zerojax.models.adapt import as_model
from zerojax.models.chunked_loss import head_next_token
from zerojax.models.hugging_face.architectures import ARCHITECTURES, architecture_of
from zerojax.models.hugging_face.folder import INDEX
from zerojax.models.hugging_face.peft import ADAPTER_FILE, write_adapter
from zerojax.models.hugging_face.safetensors import MAX_TABLE_BYTES, Tensor, read_table, write_file
from zerojax.models.zoo.generation import continue_text, generate, generate_from_source
from zerojax.models.zoo.lora import adapted_kernels
from zerojax.models.zoo.rope import RopeScaling
from zerojax.optim import build_deepspeed_schedule, muon_dimensions
from zerojax.optim.precision import as_precision

# --- optimizers -----------------------------------------------------------------------------------


def test_precisions():
    made = zerojax.Precision
    eight = {"compute_dtype": jnp.int8}
    for name in told(lambda: made(**eight), r"; use (jnp\.\w+), (jnp\.\w+) or (jnp\.\w+)$"):
        made(compute_dtype=eval(name))
    for field in ("param_dtype", "moments_dtype", "accumulate_dtype"):
        *names, other = told(
            lambda field=field: made(**{field: jnp.float16}),
            r"is (float32) or (bfloat16); lower precision belongs in (compute_dtype)$",
        )
        for name in names:
            made(**{field: getattr(jnp, name)})
        made(**{other: jnp.float16})
    scale = zerojax.LossScale()
    (name,) = told(lambda: made(loss_scale=scale), r"; drop it or use (float16)$")
    made()
    made(loss_scale=scale, compute_dtype=getattr(jnp, name))


@pytest.mark.parametrize("own", ["adamw", "lion", "lamb", "sgd"])
def test_moments_in_bfloat16(own):
    small = zerojax.Precision(moments_dtype=jnp.bfloat16)
    *names, wide = told(
        lambda: line(optimizer=optax.adamw(1e-3), precision=small),
        r"use zerojax\.(\w+), (\w+), (\w+) or (\w+) \(not inside optax\.chain\), or (float32)$",
    )
    assert own in names
    line(optimizer=getattr(zerojax, own)(1e-3), precision=small)
    moments = zerojax.Precision(moments_dtype=getattr(jnp, wide))
    line(optimizer=optax.adamw(1e-3), precision=moments)


def test_moments_of_one_byte():
    plan = lambda name, dtype: line(  # noqa: E731
        optimizer=getattr(zerojax, name)(1e-3), precision=zerojax.Precision(moments_dtype=dtype)
    )
    dtype, other = told(
        lambda: plan("adam8bit", jnp.bfloat16), r"leave moments_dtype at (\w+), or take (\w+)$"
    )
    plan("adam8bit", getattr(jnp, dtype))
    plan(other, jnp.bfloat16)


def test_kernels_for_muon():
    params = {"layers": {"kernel": jnp.ones((2, 3, 4)), "bias": jnp.ones((2, 4))}}
    (example,) = told(lambda: muon_dimensions(params), r", such as (\S+),.*; give kernels= a reg")
    told(
        lambda: muon_dimensions(params, kernels="layers"),
        r"layers/bias has 2 .*; give kernels= an expression without it$",
    )
    found = muon_dimensions(params, kernels="kernel")
    assert found["layers"]["kernel"] is not None
    assert found["layers"]["bias"] is None
    assert example.startswith("layers/")


@pytest.mark.parametrize("half", ["first", "second"])
def test_stairs_of_a_cycle(half):
    cycle = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 8}
    build = lambda **more: build_deepspeed_schedule(  # noqa: E731
        "OneCycle", {**cycle, **more}, learning_rate=1e-3
    )
    given = {f"cycle_{half}_stair_count": 2**30}
    name, value = told(lambda: build(**given), r"; use (\w+)=(\d) for a rate that changes at every")
    assert name in given
    build(**{name: int(value)})


def test_names_of_precisions():
    *names, own = told(
        lambda: as_precision(1),
        r"; use '(\w+)', '(\w+)', '(\w+)' or (zerojax\.Precision)\(\.\.\.\)$",
    )
    for given in (*names, eval(own)()):
        as_precision(given)


def test_options_of_optimizers():
    (momentum,) = told(lambda: zerojax.sgd(1.0, nesterov=True), r"momentum.*; ([\d.]+) is usual$")
    line(optimizer=zerojax.sgd(1.0, nesterov=True, momentum=float(momentum)))
    decay = optax.linear_schedule(0.1, 0.0, 10)
    (part,) = told(
        lambda: zerojax.adamw(1e-3, weight_decay=decay),
        r"works in a chain of optax's own parts \((optax\.\w+) takes it\), which the step takes as",
    )
    chain = optax.chain(optax.scale_by_adam(), eval(part)(decay), optax.scale(-1e-3))
    line(optimizer=chain)
    cycle = {"warmup_num_steps": 4, "last_batch_iteration": 7}
    build = lambda given: build_deepspeed_schedule("WarmupLR", given, learning_rate=1)  # noqa: E731
    told(
        lambda: build(cycle), r"^last_batch_iteration: .*; leave this out and load the checkpoint$"
    )
    build({"warmup_num_steps": 4})


def test_eight_bit_moments_of_bfloat16_parameters():
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}

    def update(tx: Any, dtype: Any = jnp.bfloat16) -> Any:
        own = jax.tree.map(lambda x: x.astype(dtype), params)
        context = context_of(0, names=own)
        return jax.eval_shape(lambda: tx.apply(own, tx.init(own), own, context))

    tx = zerojax.adam8bit(1e-3)
    dtype, call = told(
        lambda: update(tx), r"; keep parameters in (\w+), or .*: adam8bit\(\.\.\.\)(\..*)$"
    )
    update(tx, getattr(jnp, dtype))
    update(eval(f"tx{call}", {"tx": tx, "jnp": jnp}))


# --- models ---------------------------------------------------------------------------------------


def test_a_module_of_pytorch(tmp_path):
    net = type("Net", (), {"__module__": "torch.nn", "__call__": lambda self, x: x})
    function, *known = told(
        lambda: as_model(net),
        r"zerojax\.(\w+)\(FOLDER\), which knows ([\w-]+), (\w+), (\w+) and the families of",
    )
    assert {name.lower().replace("-", "") for name in known} <= set(ARCHITECTURES)
    page = (Path(__file__).parent.parent / "docs" / "hugging_face.md").read_text()
    assert {name for name in ARCHITECTURES if f"`{name}`" in page} == set(ARCHITECTURES)
    as_model(getattr(zerojax, function)(write_folder(tmp_path / "saved", "gpt2")))


@pytest.mark.parametrize("given", ["mse", 3])
@pytest.mark.parametrize("names", [("x", "y"), ("x",), ()])
def test_what_is_no_loss(given, names):
    rows = np.zeros((16, 8), np.float32)
    batch = dict.fromkeys(names, rows) if names else rows
    plan = lambda loss: zerojax.make_plan(  # noqa: E731
        lambda rngs: nnx.Linear(8, 8, rngs=rngs), {}, example_batch=batch, loss=loss
    )
    (loss,) = told(lambda: plan(given), r"; use a function, such as loss=(lambda .*)$")
    plan(eval(loss, {"zerojax": zerojax, "jnp": jnp}))


def test_chunks_of_a_loss():
    hidden, head, targets = jnp.ones((2, 4)), jnp.ones((8, 4)), jnp.zeros(2, int)
    loss = lambda **options: jax.eval_shape(  # noqa: E731
        functools.partial(head_next_token, **{"vocab_dim": 0, "chunk": 2, **options}),
        *(hidden, head, targets),
    )
    least, usual = told(lambda: loss(chunk=0), r"at least (1) token; (\d+) is usual$")
    for chunk in (least, usual):
        loss(chunk=int(chunk))
    (dim,) = told(lambda: loss(vocab_dim=2), r"must be (0) \(\[vocab, width\]\)")
    loss(vocab_dim=int(dim))


def test_models_of_other_kinds():
    names, _ = told(
        lambda: architecture_of({"model_type": "mamba"}),
        r"has a model for: (.*); train the model as your (own flax module) instead$",
    )
    assert [architecture_of({"model_type": name}).model_type for name in names.split(", ")]
    line()  # a module of one's own
    (known,) = told(lambda: models.tensor_parallel_rules("gpt3"), r"; known: (.*)$")
    for name in known.split(", "):
        assert models.tensor_parallel_rules(name)


def adapters(model: Any) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in state}


@pytest.mark.thorough
def test_adapters_of_two_kinds(tmp_path):
    lora = zerojax.LoraConfig(rank=2, targets=("attention/(query|value)",))
    arrays = adapters(zerojax.add_lora(gpt2(), lora))
    one = dict.fromkeys(adapted_kernels(arrays), lora.scale)
    assert len(one) == 2
    write = lambda scales: write_adapter(  # noqa: E731
        tmp_path / "adapters", gpt2().config, arrays, scales=scales
    )
    mixed = {name: lora.scale + index for index, name in enumerate(one)}
    told(lambda: write(mixed), r"; PEFT's files have one of each: add all adapters with one z")
    assert (write(one) / ADAPTER_FILE).is_file()


def test_files_of_safetensors(tmp_path):
    whole, file = np.ones(4, np.float32), tmp_path / "x.safetensors"
    write = lambda array: write_file(  # noqa: E731
        file, [Tensor(name="x", shape=array.shape, dtype=array.dtype)], lambda _: array, metadata={}
    )
    told(lambda: write(whole.astype(np.complex64)), r"does not have; give another dtype$")
    write(whole)
    theirs = file.read_bytes()
    with file.open("wb") as hollow:  # no block of it is on the disk
        hollow.write(struct.pack("<Q", MAX_TABLE_BYTES + 1))
        hollow.truncate(MAX_TABLE_BYTES + 64)
    told(lambda: read_table(file), r"the format allows \d+; fetch it again$")
    file.write_bytes(theirs)
    assert read_table(file)["x"].shape == (4,)


BERT = {"vocab_size": 20, "max_seq_len": 8, "num_layers": 1, "num_heads": 2, "embed_dim": 8}


@functools.cache
def bert(**changes: Any) -> Any:
    return abstract("Bert", **{**BERT, **changes})


def abstract(name: str, **sizes: Any) -> Any:
    """A model of shapes."""
    config = getattr(models, f"{name}Config")(**sizes)
    return nnx.eval_shape(lambda: getattr(models, name)(config, rngs=nnx.Rngs(0)))


def run(model: Any, method: str, *given: Any) -> Any:
    """What a method gives, in shapes."""
    graphdef, state = nnx.split(model)
    return nnx.eval_shape(
        lambda state, given: getattr(nnx.merge(graphdef, state), method)(*given), state, given
    )


def test_a_bert():
    least, usual = told(lambda: bert(num_types=0), r"at least (\d); BERT has (\d)$")
    for number in (least, usual):
        models.BertConfig(num_types=int(number))
    pool = lambda **changes: run(bert(**changes), "pool", np.ones((1, 2, 8)))  # noqa: E731
    (part,) = told(pool, r"; build it with (has_pooler=True)$")
    assert pool(**eval(f"dict({part})")).shape == (1, 8)
    tokens = jnp.zeros((2, 4), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    loss = lambda batch: run(bert(), "loss", batch)  # noqa: E731
    (weight,) = told(lambda: loss(batch), r"or give weights of (1) where every token counts$")
    loss({**batch, "weights": jnp.full((2, 4), float(weight))})


def test_tokens_of_a_decoder():
    tokens, gpt2 = np.zeros((1, 4), np.float32), abstract("GPT2", **SIZES)
    look = lambda tokens: run(gpt2, "__call__", tokens)  # noqa: E731
    (cast,) = told(lambda: look(tokens), r"with a tokenizer, or cast ids with (tokens\..*)$")
    whole = eval(cast, {"tokens": tokens})
    (one,) = told(lambda: look(whole[0]), r"; write (tokens\[None\]) for a single text$")
    look(eval(one, {"tokens": whole[0]}))
    (limit,) = told(
        lambda: look(np.zeros((1, 99), int)),
        r"max_seq_len=(\d+); cut them or build the model with a larger max_seq_len$",
    )
    look(np.zeros((1, 99), int)[:, : int(limit)])
    config = lambda **changes: dataclasses.replace(gpt2.config, **changes)  # noqa: E731
    (none,) = told(lambda: config(dropout=1.0), r"; use (\S+) for none$")
    config(dropout=float(none))


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "remedies"),
    [
        (10, 9, [(10, 6), (7, 9)]),
        (16, 4, [(12, 4)]),
        (4, 30, [(4, 12)]),
        (16, 16, [(15, 1)]),
    ],
)
def test_a_text_that_is_too_long_to_go_on(prompt, num_tokens, remedies, monkeypatch):
    drawn = lambda *given, num_tokens, **_: jnp.zeros((1, num_tokens), jnp.int32)  # noqa: E731
    monkeypatch.setattr("zerojax.models.zoo.generation._continue", drawn)
    model = abstract("GPT2", **SIZES)
    draw = lambda prompt, more: generate(model, np.zeros((1, prompt), int), more)  # noqa: E731
    (sentence,) = told(lambda: draw(prompt, num_tokens), r"max_seq_len=16; (.*)$")
    found = []
    for remedy in sentence.split(", or "):
        cut, more = re.search(r"cut the prompt to (\d+)", remedy), re.search(r"=(\d+)", remedy)
        found.append((int(cut[1]) if cut else prompt, int(more[1]) if more else num_tokens))
        assert draw(*found[-1]).shape == (1, sum(found[-1]))
    assert found == remedies


@pytest.mark.thorough
def test_how_tokens_are_drawn(monkeypatch):
    drawn = lambda *given, num_tokens, **_: jnp.zeros((1, num_tokens), jnp.int32)  # noqa: E731
    monkeypatch.setattr("zerojax.models.zoo.generation._continue", drawn)
    draw = lambda model=None, **options: generate(  # noqa: E731
        model or abstract("GPT2", **SIZES), np.zeros((1, 4), int), 2, **options
    )
    for bad in (-1.0, math.inf, math.nan):
        usual, greedy = told(
            lambda bad=bad: draw(temperature=bad),
            r"; use ([\d.]+) for the model's own probabilities, (0) for the likeliest token$",
        )
        for value in (usual, greedy):
            draw(temperature=float(value))
    least, most, none = told(
        lambda: draw(top_k=99), r"between (\d) and the vocabulary's (\d+); use (None) for no limit$"
    )
    for value in (least, most, none):
        draw(top_k=eval(value))
    names = told(lambda: draw(bert()), r"are drawn from a (\w+), a (\w+) or a (\w+)$")
    for name in names:
        draw(abstract(name, **SIZES))
    (name,) = told(lambda: draw(abstract("T5")), r"; for the targets of a T5 use (\w+)$")
    assert getattr(models, name) is generate_from_source


@pytest.mark.thorough
def test_merging_what_was_not_added():
    lora = zerojax.LoraConfig(rank=2)
    (function,) = told(lambda: zerojax.merge_lora(gpt2()), r"; zerojax\.(\w+) adds them$")
    zerojax.merge_lora(getattr(zerojax, function)(gpt2(), lora))


def test_kinds_of_models():
    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(4)(x)

    (call,) = told(lambda: as_model(Dense), r"; give an instance: (Dense\()\.\.\.\)$")
    as_model(eval(f"{call})", {"Dense": Dense}))
    module, factory, other, pair = told(
        lambda: as_model({}),
        r": give a (flax nnx\.Module), a callable (.*), a (flax linen\.Module), or a pair of "
        r"functions (\(init, apply\))$",
    )
    kinds = {
        module: nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        factory: lambda rngs: nnx.Linear(2, 2, rngs=rngs),
        other: Dense(),
        pair: (lambda key, batch: {}, lambda params, x: x),
    }
    assert len({as_model(kinds[kind]).kind for kind in kinds}) == 4
    made = functools.partial(zerojax.add_lora, config=zerojax.LoraConfig(rank=2))
    for given in ({}, lambda rngs: {}):

        def add(given: Any = given) -> Any:
            added = made(given)
            return added(nnx.Rngs(0)) if callable(given) else added

        told(add, r": give an nnx\.Module, or a factory rngs -> nnx\.Module$")
    config = models.GPT2Config(**SIZES)
    nnx.eval_shape(lambda: made(lambda rngs: models.GPT2(config, rngs=rngs))(nnx.Rngs(0)))


def test_a_name_twice():
    told(
        lambda: trees.flatten_names({"a": {"b": 1}, "a/b": 2}),
        r"named 'a/b': a key of the tree contains '/'; rename it$",
    )
    assert set(trees.flatten_names({"a": {"b": 1}, "a_b": 2})) == {"a/b", "a_b"}


@pytest.mark.thorough
def test_second_derivatives_of_a_chunked_loss():
    def second(**changes: Any) -> Any:
        graphdef, state = nnx.split(abstract("GPT2", **SIZES, tie_embeddings=False, **changes))
        tokens = jnp.zeros((1, 4), jnp.int32)

        def loss(state):
            total, _ = nnx.merge(graphdef, state).loss({"tokens": tokens, "targets": tokens})
            return total

        return jax.eval_shape(lambda s: jax.jvp(jax.grad(loss), (s,), (s,)), state)

    (part,) = told(lambda: second(loss_chunk=2), r"; use the plain loss \((loss_chunk=None)\)$")
    second(**eval(f"dict({part})"))


def test_prompts(monkeypatch):
    drawn = lambda *given, num_tokens, **_: jnp.zeros((1, num_tokens), jnp.int32)  # noqa: E731
    monkeypatch.setattr("zerojax.models.zoo.generation._continue", drawn)
    gpt2, letters = abstract("GPT2", **{**SIZES, "vocab_size": 256}), zerojax.data.ByteTokenizer()

    def write(prompt: str, tokenizer: Any = letters) -> str:
        sampling = {"temperature": 1.0, "top_k": None, "seed": 0}
        return continue_text(gpt2, tokenizer, prompt, num_tokens=None, **sampling)

    (most,) = told(lambda: write("x" * 16), r"; shorten it to at most (\d+) tokens$")
    write("x" * int(most))
    (letter,) = told(lambda: write(""), r'at least one letter, such as "(\w)"$')
    write(letter)
    told(lambda: write("a", None), r"; train on text, or on token files of `zerojax data prepare`$")
    write("a", letters)
    small = abstract("GPT2", **SIZES)
    told(
        lambda: generate(small, np.full((1, 2), 99), 2),
        r"; encode the text with the tokenizer that the model was trained with$",
    )
    generate(small, np.full((1, 2), 63), 2)


def test_rotary_positions():
    made = lambda kind, **more: RopeScaling(kind=kind, factor=2.0, **more)  # noqa: E731
    factors = {"short_factor": (1.0,), "long_factor": (2.0,)}
    for kind in told(lambda: made("bent"), r": use (\w+), (\w+), (\w+), (\w+) or (\w+)$"):
        made(kind, original_max_seq_len=32, **factors)
    (name,) = told(lambda: made("dynamic"), r" needs (\w+), the number of tokens of the texts")
    made("dynamic", **{name: 32})


def test_layers_that_differ():
    linear = lambda width, rngs: nnx.Linear(8, width, rngs=rngs)  # noqa: E731
    stages = lambda *layers, head=None: zerojax.Stages(  # noqa: E731
        linear(8, nnx.Rngs(0)), list(layers), head or linear(4, nnx.Rngs(0))
    )
    told(
        lambda: stages(linear(8, nnx.Rngs(0)), nnx.LayerNorm(8, rngs=nnx.Rngs(0))),
        r"; make a block that holds several kinds of layers, and stack that$",
    )
    blocks = [
        nnx.Sequential(linear(8, nnx.Rngs(i)), nnx.LayerNorm(8, rngs=nnx.Rngs(i))) for i in (0, 1)
    ]
    stages(*blocks)
    told(lambda: stages(*blocks, head=3), r"; give an nnx\.Module or a function$")
    stages(*blocks, head=jnp.tanh)


def test_an_adapter_beside_the_head():
    config = models.GPT2Config(**SIZES, tie_embeddings=False)
    add = lambda *targets: nnx.eval_shape(  # noqa: E731
        lambda: zerojax.add_lora(
            lambda rngs: models.GPT2(config, rngs=rngs), zerojax.LoraConfig(rank=2, targets=targets)
        )(nnx.Rngs(0))
    )
    (targets,) = told(
        lambda: add("lm_head"), r"; name targets inside of the layers, such as '(.*)'$"
    )
    add(targets)


def test_an_index_of_other_files(tmp_path):
    theirs = write_folder(tmp_path / "theirs", "llama_tied", shards=2)
    ours = Path(shutil.copytree(theirs, tmp_path / "ours"))
    index = json.loads((ours / INDEX).read_text())
    name, other = sorted(set(index["weight_map"].values()))
    swapped = {key: other if file == name else file for key, file in index["weight_map"].items()}
    swapped[max(swapped)] = name
    (ours / INDEX).write_text(json.dumps({**index, "weight_map": swapped}))
    told(lambda: zerojax.from_hugging_face(ours), r"; it is not: fetch both again$")
    shutil.copytree(theirs, ours, dirs_exist_ok=True)
    zerojax.from_hugging_face(ours)


def test_tensors_of_another_class(tmp_path):
    known = tensors_of("llama_tied")
    more = {**known, "score.weight": np.ones((2, 8), np.float32)}
    folder = write_folder(tmp_path / "classes", "llama_tied", tensors=more)
    (name,) = told(
        lambda: zerojax.from_hugging_face(folder).initial_arrays(),
        r"; save it as (\w+) with transformers$",
    )
    assert CASES["llama_tied"]["config"]["architectures"] == [name]
    zerojax.from_hugging_face(write_folder(folder, "llama_tied")).initial_arrays()


@pytest.mark.thorough
def test_no_adapters_for_peft(tmp_path):
    write = lambda model: write_adapter(  # noqa: E731
        tmp_path / "adapters",
        gpt2().config,
        adapters(model),
        scales=dict.fromkeys(adapted_kernels(adapters(model)), 1.0),
    )
    (function,) = told(lambda: write(gpt2()), r"; zerojax\.(\w+) adds them$")
    lora = zerojax.LoraConfig(rank=2, targets=("attention/query",))
    write(getattr(zerojax, function)(gpt2(), lora))
