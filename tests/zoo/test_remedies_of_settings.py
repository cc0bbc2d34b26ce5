"""Refusals of settings of models, of what is generated with them, and of what is written."""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import zerojax
from tests.support.hugging_face_folders import case_of, tensors_of, write_folder
from tests.support.refusals import Refusal, refused, table
from tests.zoo.test_remedies_of_models import SIZES, abstract, bert, run
from zerojax import zoo
from zerojax.config import BitScheduleConfig, FixedLayout, ModelConfig, MoEConfig
from zerojax.models.adapt import as_model
from zerojax.zoo.decoder_config import DecoderConfig, LayerKind
from zerojax.zoo.generation import MAX_SIZE, continue_rows, generate_from_source
from zerojax.zoo.hugging_face import from_hugging_face
from zerojax.zoo.hugging_face.architectures import ARCHITECTURES
from zerojax.zoo.hugging_face.quantized_writing import with_codes
from zerojax.zoo.hugging_face.safetensors import read_table
from zerojax.zoo.hugging_face.writing import describe_model
from zerojax.zoo.layers import NormConfig
from zerojax.zoo.rope import Rope, RopeScaling
from zerojax.zoo.sampling import Sampling
from zerojax.zoo.text_generation import continue_texts
from zerojax.zoo.weight_only import check_weight_kind

TOKENS = np.zeros((2, 4), np.int32)
EXPERTS = MoEConfig(num_experts=4, experts_per_token=2, expert_dim=8)


# --- sizes and switches ---------------------------------------------------------------------------


def model(**options: Any) -> Any:
    return zoo.build_model(ModelConfig(**{**MODEL, **options}), 64)


MODEL = {"num_layers": 1, "num_heads": 2, "embed_dim": 16, "max_seq_len": 16}


def gpt2(**options: Any) -> Any:
    return zoo.GPT2Config(**SIZES | options)


def llama(**options: Any) -> Any:
    return zoo.LlamaConfig(**SIZES | options)


def decoder(*kinds: LayerKind, layers: int = 2, **options: Any) -> Any:
    if kinds:
        options["kinds"] = kinds
    return DecoderConfig(**{**SIZES, "num_layers": layers, **options})


def rotary(**options: Any) -> Any:
    kinds = [LayerKind(rope=Rope(**options)), LayerKind(rope=Rope(), window=4)]
    return decoder(*kinds, pattern=(0, 1))


def longrope(number: int) -> Any:
    factors = {"short_factor": (1.0,) * number, "long_factor": (2.0,) * number}
    scaling = RopeScaling(kind="longrope", factor=2.0, original_max_seq_len=8, **factors)
    return Rope(scaling=scaling).check(8)


def adapted(target: str, **options: Any) -> Any:
    config = llama(**options)
    lora = zerojax.LoraConfig(rank=2, targets=(target,))
    return nnx.eval_shape(lambda: zerojax.add_lora(zoo.Llama(config, rngs=nnx.Rngs(0)), lora))


def mixture(use_bias: bool = False, **options: Any) -> Any:
    config = MoEConfig(**{"num_experts": 4, "expert_dim": 8, **options})
    return nnx.eval_shape(lambda: zoo.MoE(8, config, rngs=nnx.Rngs(0), use_bias=use_bias))


def staged(held: bool) -> Any:
    rngs = nnx.Rngs(0)
    layer = nnx.Linear(8, 8, rngs=rngs)
    head = (lambda x: layer(x)) if held else layer
    return zerojax.Stages(layer, [layer], head)


FULL, WINDOW = LayerKind(), LayerKind(window=4)
SETTINGS = table(
    """
model(vocab_size=8) | model.vocab_size=8 64 | 64 leave | model(vocab_size=64) ; model()
model(name="gpt2", num_kv_heads=1) | model.num_kv_heads=1 2 | remove model.name=llama
  | model(name="gpt2") ; model(name="llama", num_kv_heads=1)
model(name="gpt2", moe=EXPERTS) | model.moe.num_experts=4 | model.name=llama
  | model(name="llama", moe=EXPERTS)
gpt2(bit_schedule=BitScheduleConfig(start_bits=10, period=2)) | matmul_dtype=None
  | 'fake_int8' 'fake_int4' remove
  | gpt2(bit_schedule=BitScheduleConfig(start_bits=10, period=2), matmul_dtype='fake_int8') ;
    gpt2(bit_schedule=BitScheduleConfig(start_bits=10, period=2), matmul_dtype='fake_int4') ; gpt2()
gpt2(mlp_chunk=4, matmul_dtype="fp8") | mlp_chunk=4 'fp8' | mlp_chunk=None matmul_dtype=None
  | gpt2(mlp_chunk=None, matmul_dtype="fp8") ; gpt2(mlp_chunk=4, matmul_dtype=None)
decoder(activation="rleu") | activation='rleu' | relu silu | decoder(activation="$")
decoder(clip_qkv=0) | clip_qkv=0 | None | decoder(clip_qkv=$)
decoder(attention_softcap=-1) | attention_softcap=-1 | None | decoder(attention_softcap=$)
decoder(FULL, WINDOW) | 2 pattern=None | index | decoder(FULL, WINDOW, pattern=(0, 1))
decoder(FULL, WINDOW, pattern=(0, 1, 0)) | 3 num_layers=2 | one
  | decoder(FULL, WINDOW, pattern=(0, 1))
decoder(FULL, WINDOW, pattern=(0, 0)) | "[0]" 2 | 0 1 | decoder(FULL, WINDOW, pattern=(0, 1))
rotary(fraction=0.5) | fraction interleaved | same | rotary()
decoder(expert_limit=7.0) | expert_limit=7.0 | None | decoder(expert_limit=$)
decoder(moe=EXPERTS, gated=False) | gated=False 4 | gated=True without
  | decoder(moe=EXPERTS, gated=True) ; decoder(gated=False)
decoder(moe=dataclasses.replace(EXPERTS, products="loop"), mlp_bias=True) | 'loop' mlp_bias=True
  | products='batched' mlp_bias=False
  | decoder(moe=EXPERTS, mlp_bias=True) ;
    decoder(moe=dataclasses.replace(EXPERTS, products="loop"), mlp_bias=False)
decoder(vocab_size=2**40) | vocab_size=1099511627776 | smaller | decoder(vocab_size=64)
zoo.T5Config(**T5, dropout=1.0) | dropout=1.0 | 0.0 | zoo.T5Config(**T5, dropout=$)
NormConfig(kind="rsm") | 'rsm' | rms layer | NormConfig(kind="$")
Rope(fraction=0.4).check(8) | head_dim=8 fraction=0.4 3 | even 2
  | Rope(fraction=0.5).check(8) ; Rope(fraction=0.25).check(8)
longrope(3) | 3 4 | pair | longrope(4)
adapted("experts", moe=EXPERTS) | 'experts' | targets=('attention/',)
  | adapted("attention/", moe=EXPERTS)
adapted("attention/", matmul_dtype="fake_int8") | 'fake_int8' | matmul_dtype=None no
  | adapted("attention/", matmul_dtype=None) ; llama(matmul_dtype="fake_int8")
run(adapted("mlp", mlp_chunk=1), "__call__", TOKENS) | mlp_chunk=1
  | mlp_chunk=None targets=('attention/',)
  | run(adapted("mlp", mlp_chunk=None), "__call__", TOKENS) ;
    run(adapted("attention/", mlp_chunk=1), "__call__", TOKENS)
mixture(expert_dim=None) | expert_dim=None | both | mixture(expert_dim=8)
mixture(True, products="loop") | 'loop' | products='batched' | mixture(True, products='batched')
staged(True) | Linear | attribute | staged(False)
""",
    (ValueError, TypeError),
)
T5 = {"vocab_size": 64, "num_layers": 1, "num_heads": 2, "embed_dim": 16, "mlp_dim": 8}
T5 |= {"max_seq_len": 16, "head_dim": 8}
IMPORTED = (BitScheduleConfig, NormConfig)
NAMES = {one.__name__: one for one in IMPORTED} | {"dataclasses": dataclasses}


def take(call: str) -> None:
    eval(call, globals() | NAMES)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("row", SETTINGS)
def test_settings(row):
    SETTINGS[row].check(take)


# --- generation -----------------------------------------------------------------------------------

SMALL = abstract("GPT2", **SIZES)
LETTERS = {**SIZES, "vocab_size": 256}


def continued(*prompts: Any, numbers: Any = None) -> Any:
    rows = [np.asarray(row) for row in prompts]
    return continue_rows(SMALL, rows, 2, Sampling(), row_numbers=numbers)


def written_on(prompt: str) -> str:
    model = abstract("GPT2", **LETTERS)
    letters = zerojax.data.ByteTokenizer()
    return continue_texts(model, letters, [prompt], None, Sampling())[0].text


def coded(kind: Any, **options: Any) -> None:
    model = abstract("Llama", **SIZES, **options)
    check_weight_kind(model, kind)


def of_bert(head: bool, batch: Any = None) -> Any:
    model = bert() if head else bert(has_mlm_head=False)
    return run(model, "hidden" if batch is None else "loss", batch or TOKENS)


PACKED = dict.fromkeys(("tokens", "targets", "segments"), TOKENS)
MASKED = {**dict.fromkeys(("tokens", "targets"), TOKENS), "weights": np.ones((2, 4), np.float32)}


def without_drawing(model: Any, slots: Any, controls: Any, **_: Any) -> Any:
    zeros, ended = np.zeros((slots.size, 64), np.int32), np.ones(slots.size, bool)
    batch, _ = slots.fill()
    while not slots.collect(zeros, batch.limits, ended):
        batch, _ = slots.fill()
    return slots.continued(0)


GENERATED = table(
    """
continued() | 0 | one | continued([1])
continued([1], []) | 2 | one | continued([1], [1])
continued([1], numbers=[0, 1]) | 1 2 | 1 integers | continued([1], numbers=[0])
continued([1], numbers=[MAX_SIZE + 1]) | 2147483648 | 2147483647
  | continued([1], numbers=[MAX_SIZE])
generate_from_source(SMALL, TOKENS, 2) | GPT2 | "generate(model, prompts, ...)"
  | zoo.generate(SMALL, TOKENS, 2)
written_on("a\\ud800") | surrogate 1 | remove | written_on("a")
coded("int4") | 'int4' | 'int8' 'fp8' None | coded($)
coded("int8", moe=EXPERTS) | 'int8' 4 | leave | coded(None, moe=EXPERTS)
coded("int8", matmul_dtype="fp8") | 'int8' 'fp8' | leave | coded(None, matmul_dtype="fp8")
of_bert(False, MASKED) | has_mlm_head=False | model.hidden loss= | of_bert(False)
of_bert(True, PACKED) | batch['segments'] | zerojax.data.as_masked_source | of_bert(True, MASKED)
""",
    (ValueError, TypeError),
)
NAMES |= {"MAX_SIZE": MAX_SIZE, "generate_from_source": generate_from_source}


@pytest.mark.parametrize("row", GENERATED)
def test_generation(row, monkeypatch):
    """Nothing is drawn: programs are not run."""
    monkeypatch.setattr("zerojax.zoo.generation._continue", without_drawing)
    GENERATED[row].check(take)


@pytest.mark.thorough
def test_an_end_of_targets():
    model = zoo.T5(zoo.T5Config(**T5), rngs=nnx.Rngs(0))
    end = lambda token: generate_from_source(model, TOKENS, 1, end_token=token)  # noqa: E731
    Refusal(64, "end_token=64 64", "1", [1]).check(end)


# --- what is written ------------------------------------------------------------------------------


def described(config: Any) -> Any:
    kind = zoo.Llama if isinstance(config, zoo.LlamaConfig) else zoo.Decoder
    kind = zoo.GPT2 if isinstance(config, zoo.GPT2Config) else kind
    return describe_model(as_model(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))))


def of_family(family: str, **options: Any) -> Any:
    """The switches of a published family, with others."""
    case = {"qwen3": "qwen3", "": "qwen3"}[family]
    config = case_of(case)["config"]
    row = ARCHITECTURES["qwen3"]
    sizes = row.config_class(**row.read_config(config))
    return dataclasses.replace(sizes, family=family, **options)


def codes(kind: str, name: str = "LlamaForCausalLM") -> Any:
    return with_codes(name, [], kind)


LAYOUT = FixedLayout(block=4, num_local_blocks=2)
SCHEDULE = {"matmul_dtype": "fake_int8", "bit_schedule": BitScheduleConfig(start_step=9)}
WRITTEN = table(
    """
described(llama(attention_layout=LAYOUT)) | fixed LlamaForCausalLM | attention_layout=None
  | described(llama(attention_layout=None))
described(gpt2(attention_window=4)) | attention_window=4 GPT2LMHeadModel | attention_window=None
  | described(gpt2(attention_window=None))
described(of_family("")) | family='' | qwen3 | described(of_family("qwen3"))
described(of_family("qwen3", clip_qkv=8.0)) | clip_qkv=8.0 None | DecoderConfig.family
  | described(of_family("qwen3"))
described(gpt2(**SCHEDULE)).check_width("int8", 3) | int8 3 9 | 9 without
  | described(gpt2(**SCHEDULE)).check_width("int8", 9) ;
    described(gpt2(**SCHEDULE)).check_width(None, 3)
described(llama(moe=dataclasses.replace(EXPERTS, bias_rate=0.01))) | moe.bias_rate=0.01
  | zerojax.load_run names | described(llama(moe=EXPERTS))
codes("int3") | 'int3' | int8 int4 | codes("$")
codes("int8", "BertModel") | BertModel | without | describe_model(as_model(bert()))
"""
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", WRITTEN)
def test_what_is_written(row):
    WRITTEN[row].check(take)


# --- what is read ---------------------------------------------------------------------------------


def test_folders_of_other_kinds(tmp_path):
    good = write_folder(tmp_path / "good", "llama_tied")
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text("{}")
    Refusal(adapters, [adapters, "peft_type"], "merge_and_unload", [good]).check(from_hugging_face)
    both = write_folder(tmp_path / "both", "llama_tied")
    (both / "adapter_config.json").write_text("{}")
    refused(lambda: from_hugging_face(both), [both, "PEFT"], "move")
    (both / "adapter_config.json").rename(adapters / "moved.json")
    from_hugging_face(both)
    absent = functools.partial(refused, error=FileNotFoundError)
    for name, remedy in (
        ("run.json", "zerojax.load_run"),
        ("writer.lock", "--format hugging_face"),
        ("manifest.ocdbt", "safetensors config.json"),
        ("x.gguf", "examples/conversion/gguf_to_hugging_face.py"),
    ):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("{}")
        absent(lambda folder=folder: from_hugging_face(folder), [folder], remedy)
    assert (Path(__file__).parents[2] / "examples/conversion/gguf_to_hugging_face.py").is_file()
    absent(lambda: from_hugging_face(tmp_path), [tmp_path], [good.name])


def test_an_index_that_leaves_its_folder(tmp_path):
    folder = write_folder(tmp_path / "model", "llama_tied", shards=2)
    path = folder / "model.safetensors.index.json"
    whole = path.read_text()
    path.write_text(whole.replace("model-00001", "../model-00001"))
    refused(lambda: from_hugging_face(folder), [path, "../model-00001-of-00002"], "fetch")
    path.write_text(whole)
    from_hugging_face(folder)


def test_configs_of_other_models(tmp_path):
    folder = write_folder(tmp_path / "model", "llama_tied")
    whole = (folder / "config.json").read_text()
    read = functools.partial(from_hugging_face, folder)
    for content, value, remedy in (
        ("[]", "list", "fetch"),
        (json.dumps({"model_type": "x", "text_config": json.loads(whole)}), "'x' llama", "Llama"),
        (json.dumps({**json.loads(whole), "architectures": ["LlamaX"], "hidden_size": 8}), "", ""),
    ):
        (folder / "config.json").write_text(content)
        refused(read, value, [*remedy.split()] if remedy != "Llama" else ["LlamaForCausalLM"])
    (folder / "config.json").write_text(whole)
    read()


def test_tensors_that_do_not_fit(tmp_path):
    tensors = tensors_of("llama_tied")
    first, head = min(tensors), "lm_head.weight"
    tied = {**tensors, head: np.zeros_like(tensors["model.embed_tokens.weight"])}
    own = write_folder(tmp_path / "own", "llama_tied", tensors=tied)
    value = [head, "model.embed_tokens.weight"]
    refused(lambda: from_hugging_face(own), value, ['"tie_word_embeddings": false', "remove"])
    write_folder(tmp_path / "own", "llama_tied", tensors=tied, tie_word_embeddings=False)
    from_hugging_face(own)
    table = "model.embed_tokens.weight"
    zeros = np.zeros_like(tied.pop(table))  # without the table, the head is of no parameter
    own = write_folder(tmp_path / "headed", "llama_tied", tensors=tied)
    read = functools.partial(from_hugging_face, new=("token_embedding",))
    refused(lambda: read(own), [head], "save")
    write_folder(own, "llama_tied", tensors={**tied, table: zeros})
    read(own)
    from_hugging_face(write_folder(own, "llama_tied", tensors=tensors))
    whole = {**tensors, first: tensors[first].astype(np.int8)}
    folder = write_folder(tmp_path / "integers", "llama_tied", tensors=whole)
    refused(lambda: from_hugging_face(folder), [first, "int8"], "bfloat16 unquantized")
    whole[first] = tensors[first].astype("bfloat16")
    from_hugging_face(write_folder(folder, "llama_tied", tensors=whole))


def test_tables_of_safetensors(tmp_path):
    file, good = tmp_path / "x.safetensors", {"x": np.ones(4, np.float32)}
    save_file(good, file)
    row = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    for content, value in (
        ([], "object"),
        ({"__metadata__": {"a": 1}, "x": row}, "__metadata__"),
        ({"x": {**row, "data_offsets": [4, 20]}}, "4"),
        ({"x": row, "y": row}, "16"),
        ({"x": {**row, "data_offsets": [0, 32], "shape": [8]}}, "truncated"),
        ({"x": {**row, "dtype": "F4"}}, "F4"),
    ):
        text = json.dumps(content).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
        remedy = "BF16 unquantized" if value == "F4" else "fetch"
        refused(lambda: read_table(file), [file, *value.split()], remedy)
    save_file(good, file)
    assert read_table(file)["x"].shape == (4,)
