"""examples/conversion: files of llama.cpp become folders of Hugging Face, tokenizer included."""

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

import zerojax
from examples.conversion.gguf_to_hugging_face import convert

ROOT = Path(__file__).resolve().parents[2]
LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, MLP, VOCAB = 2, 4, 2, 8, 32, 64, 300
RANDOM = np.random.default_rng(0)


def their_tensors():
    """A Llama's tensors, as Hugging Face has them."""
    shapes = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (WIDTH,),
            f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, WIDTH),
            f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            f"{prefix}self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
            f"{prefix}post_attention_layernorm.weight": (WIDTH,),
            f"{prefix}mlp.gate_proj.weight": (MLP, WIDTH),
            f"{prefix}mlp.up_proj.weight": (MLP, WIDTH),
            f"{prefix}mlp.down_proj.weight": (WIDTH, MLP),
        }
    return {name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "lm_head": "output",
}


def gguf_name(name):
    for theirs, short in NAMES.items():
        name = name.replace(theirs, short)
    return name


def side_by_side(values, heads):
    """llama.cpp's order of a head's rows: feature i beside feature i + head_dim / 2."""
    rows = [
        head * HEAD_DIM + half * HEAD_DIM // 2 + i
        for head in range(heads)
        for i in range(HEAD_DIM // 2)
        for half in (0, 1)
    ]
    return values[rows]


def bytes_as_text():
    """The characters by which a byte-level vocabulary writes the 256 bytes."""
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def write_gguf(path, tensors, *, kinds=None, fields=None, **tokenizer):
    """A file as llama.cpp's converter leaves one."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in (fields or {}).items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    letters = bytes_as_text()
    tokens = ["<|end|>", *letters, "he", "ll", "hell"]
    tokens += [f"<|{i}|>" for i in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model(tokenizer.get("model", "gpt2"))
    writer.add_tokenizer_pre(tokenizer.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(letters) + 3), *[3] * (VOCAB - len(letters) - 4)])
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_eos_token_id(0)
    for name, values in tensors.items():
        if name.endswith("q_proj.weight"):
            values = side_by_side(values, HEADS)
        if name.endswith("k_proj.weight"):
            values = side_by_side(values, KV_HEADS)
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.thorough
def test_a_file_becomes_the_folder_that_it_was_made_of(tmp_path):
    tensors = their_tensors()
    path = write_gguf(tmp_path / "a.gguf", tensors)
    script = ROOT / "examples" / "conversion" / "gguf_to_hugging_face.py"
    result = subprocess.run(
        [sys.executable, str(script), str(path), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert f"20 tensors (20 F32) are float32 in {tmp_path / 'out'}" in result.stdout
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLM"],
        "eos_token_id": 0,
        "head_dim": HEAD_DIM,
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "max_position_embeddings": 128,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 5000.0,
        "tie_word_embeddings": True,
        "vocab_size": VOCAB,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert zerojax.from_hugging_face(tmp_path / "out") is not None


def test_blocks_of_few_bits_become_the_numbers_they_stand_for(tmp_path):
    tensors = their_tensors()
    tensors["lm_head.weight"] = RANDOM.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    some = {
        "model.embed_tokens.weight": gguf.GGMLQuantizationType.Q8_0,
        "model.layers.1.mlp.down_proj.weight": gguf.GGMLQuantizationType.Q4_1,
        "model.layers.0.self_attn.k_proj.weight": gguf.GGMLQuantizationType.Q4_1,
        "lm_head.weight": gguf.GGMLQuantizationType.BF16,
    }
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = write_gguf(tmp_path / "a.gguf", tensors, kinds=some, fields=scaling)
    said = convert(path, tmp_path / "out", "bfloat16")
    assert "21 tensors (1 Q8_0, 17 F32, 2 Q4_1, 1 BF16) are bfloat16" in said
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {values.dtype.name for values in found.values()} == {"bfloat16"}
    for name, values in tensors.items():
        # Half a step of 4 bits over the range of 32 normal numbers, or of bfloat16.
        limit = 0.25 if some.get(name) == gguf.GGMLQuantizationType.Q4_1 else 0.03
        difference = np.abs(found[name].astype(np.float32) - values).max()
        assert difference < limit, name
        assert difference > 0, name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert not config["tie_word_embeddings"]


def test_the_tokenizer_cuts_as_llama_cpp_does(tmp_path):
    convert(write_gguf(tmp_path / "a.gguf", their_tensors()), tmp_path / "out")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    text = "hello 42<|end|> ümläut\n\thell"
    encoded = tokenizer.encode(text)
    assert encoded.tokens[:5] == ["hell", "o", "Ġ", "4", "2"]
    assert encoded.tokens[5] == "<|end|>"
    assert encoded.tokens[-1] == "hell"
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|end|>"


def test_a_tokenizer_that_is_not_known_is_said(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", their_tensors(), pre="tekken")
    said = convert(path, tmp_path / "out")
    assert "no tokenizer.json: kind 'gpt2' that splits text as 'tekken'; known are gpt2" in said
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_what_cannot_be_computed_is_refused(tmp_path):
    tensors, out = their_tensors(), tmp_path / "out"
    refused = {
        "rope.scaling.type='yarn'; only none and linear": {"llama.rope.scaling.type": "yarn"},
        "rope.dimension_count=8; all 16 features": {"llama.attention.key_length": 16},
    }
    for number, (sentence, fields) in enumerate(refused.items()):
        path = write_gguf(tmp_path / f"{number}.gguf", tensors, fields=fields)
        with pytest.raises(ValueError, match=sentence):
            convert(path, out)
    more = {**tensors, "model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    with pytest.raises(ValueError, match=r"1 tensors .*blk.0.attn_q.bias"):
        convert(write_gguf(tmp_path / "more.gguf", more), out)
    del tensors["model.norm.weight"]
    with pytest.raises(ValueError, match=r"1 tensors are missing, such as output_norm.weight"):
        convert(write_gguf(tmp_path / "less.gguf", tensors), out)
    with pytest.raises(FileNotFoundError, match=r"none.gguf"):
        convert(tmp_path / "none.gguf", out)
    (tmp_path / "text.gguf").write_text("GGUF, but not really: this is text")
    with pytest.raises(ValueError, match=r"text.gguf is no GGUF file, or is damaged"):
        convert(tmp_path / "text.gguf", out)
    whole = (tmp_path / "more.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut.gguf is no GGUF file, or is damaged"):
        convert(tmp_path / "cut.gguf", out)
    assert not out.exists()
    with pytest.raises(FileExistsError, match="is not empty; name a new folder"):
        convert(tmp_path / "more.gguf", tmp_path)


def field(key, kind, *values):
    """A field's bytes; each value is (format, number)."""
    head = struct.pack("<Q", len(key)) + key + struct.pack("<I", kind)
    return head + b"".join(struct.pack("<" + kind, value) for kind, value in values)


TABLES = {
    "a list of 2^40 numbers": (1, field(b"a", 9, ("I", 0), ("Q", 2**40)), "items of 'a' are cl"),
    "a list of 2^40 texts": (1, field(b"a", 9, ("I", 8), ("Q", 2**40)), "items of 'a' are cl"),
    "a list of 5 million": (1, field(b"a", 9, ("I", 0), ("Q", 5 * 10**6)), "has 5000000 items"),
    "2^63 fields": (2**63, b"", "9223372036854775808 fields are claimed"),
    "a text of 2^62 bytes": (1, field(b"a", 8, ("Q", 2**62)), "are claimed for the text of 'a'"),
    "an unknown kind": (1, field(b"a", 77), "'a' has the unknown kind 77"),
    "a field twice": (2, field(b"a", 0, ("B", 1)) * 2, "the field 'a' is there twice"),
    "lists in lists": (1, field(b"a", 9, *[("I", 9), ("Q", 1)] * 9), "nested more than 4 levels"),
    "a name that is not text": (1, field(b"\xff\x1b", 0, ("B", 1)), r"is not text: b'.xff.x1b'"),
}


@pytest.mark.parametrize("case", TABLES)
def test_a_table_that_cannot_be_is_refused_before_it_is_walked(case, tmp_path):
    count, content, words = TABLES[case]
    path = tmp_path / "x.gguf"
    size = 6 * 10**6 if "million" in case else 64  # sparse: the items could be there
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, count) + content)
        file.truncate(file.tell() + size)
    with pytest.raises(ValueError, match=words) as caught:
        convert(path, tmp_path / "out")
    assert str(path) in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.thorough
def test_changed_bytes_are_refused_in_a_sentence_or_converted(tmp_path):
    """Of the table, which is nine tenths vocabulary here: so also of its fields by name."""
    good = write_gguf(tmp_path / "good.gguf", their_tensors()).read_bytes()
    end = good.index(b"token_embd.weight") + 900
    names = [good.index(name) for name in (b"llama.", b"tokenizer.ggml.merges", b"token_embd")]
    draw, outcomes = random.Random(11), []
    for number in range(150):
        changed = bytearray(good)
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            near = draw.choice([4, *names])
            at = draw.randrange(4, end) if draw.random() < 0.3 else near + draw.randrange(300)
            at, way = min(at, len(changed) - 1), draw.random()
            if way < 0.5:
                changed[at] = draw.choice([0, 1, 8, 9, 127, 128, 255, draw.randrange(256)])
            elif way < 0.65:
                value = draw.choice([2**64 - 1, 0, 2**62, 2**40, 2**31, 10**6])
                changed[at : at + 8] = value.to_bytes(8, "little")
            elif way < 0.8:
                del changed[at : at + draw.randrange(1, 9)]
            elif way < 0.9:
                changed = changed[: max(5, at)]
            else:
                changed[at:at] = draw.randbytes(draw.randrange(1, 9))
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(changed)
        try:
            convert(path, tmp_path / f"{number}")
            outcomes.append("converted")
        except ValueError as error:
            assert is_ours(error), error  # noqa: PT017  (any of them will do)
            outcomes.append("refused")
        path.unlink()
    assert outcomes.count("refused") > 50
    assert outcomes.count("converted") > 5


def is_ours(error):
    """Whether the sentence was written here: not one of NumPy's, nor of the package's."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    name = trace.tb_frame.f_globals["__name__"]
    return name.startswith(("zerojax.", "examples."))
