"""Converts a Llama model in llama.cpp's format (GGUF) to a Hugging Face folder.

    pip install 'zerojax[examples]'
    python examples/conversion/gguf_to_hugging_face.py model.gguf weights/model --dtype bf16

`zerojax.from_hugging_face("weights/model")` loads the folder. The package `gguf` dequantises one
tensor at a time to float32; the rounding of the quantisation remains.

The package reads as many items as a file claims to have, one by one, and treats data after the end
of the file as empty: a length of 2^40 would take weeks. So the table of a file is checked first.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np

from zerojax.config.display import quoted
from zerojax.runtime.bounded_json import open_regular
from zerojax.zoo.hugging_face.safetensors import Tensor, write_files

LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE_TOKENIZERS = {
    "gpt-2": BYTES,
    # Each digit alone, then as GPT-2 (llama.cpp, src/llama-vocab.cpp: LLAMA_VOCAB_PRE_TYPE_SMOLLM).
    "smollm": {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]},
}
CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens that are searched for in a text before it is split into pieces."""

MAX_TABLE = 2**28
"""Maximum number of bytes of the table at the start of a file; the arrays follow it."""
MAX_ITEMS = 2**22
"""Maximum number of items of all lists together. The longest lists of real files are vocabularies:
some hundred thousand tokens, and as many merges."""
MAX_DEPTH = 4
MAX_DIMENSIONS = 4
"""Maximum number of dimensions of a tensor (GGML_MAX_DIMS of llama.cpp)."""
MAX_NAME = 2**16 - 1
STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Number of bytes of a value of each kind."""


def convert(path: Path, out: Path, dtype: str = "float32") -> str:
    """Writes config.json, safetensors and, if its kind is supported, the tokenizer.

    Args:
      path: path of a GGUF file of a Llama model.
      out: folder to write, which must be new or empty.
      dtype: dtype of the written weights, "float32" or "bfloat16".

    Returns:
      A sentence that describes the written files.

    Raises:
      FileExistsError: `out` is not empty.
      ValueError: the file is no complete GGUF file, or zerojax's Llama does not support the model.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; name a new folder")
    try:
        with open(open_regular(path), "rb") as file:
            Table(file.read(MAX_TABLE)).check()
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is no GGUF file, or is damaged: {error}") from None
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = model_config(fields, stored)
    names = tensor_names(config)
    check_tensors(names, stored, config)
    tokenizer = tokenizer_json(fields)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def values(tensor: Tensor) -> np.ndarray:
        found = stored[names[tensor.name]]
        array = gguf.dequantize(found.data, found.tensor_type).reshape(tensor.shape)
        projection = tensor.name.split(".")[-2]
        if projection in heads:
            array = in_halves(array, heads[projection])
        return array.astype(tensor.dtype, copy=False)

    tensors = [
        Tensor(name=name, shape=shape_of(stored[theirs]), dtype=jnp.dtype(dtype))
        for name, theirs in names.items()
    ]
    out.mkdir(parents=True, exist_ok=True)
    write_files(out, tensors, values, metadata={"format": "pt"})
    if isinstance(tokenizer, dict):
        write_json(out / "tokenizer.json", tokenizer)
        write_json(out / "tokenizer_config.json", tokenizer_config(fields))
    write_json(out / "config.json", {**config, "torch_dtype": dtype})
    kinds = collections.Counter(tensor.tensor_type.name for tensor in reader.tensors)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    sentence = f"{len(tensors)} tensors ({counts}) are {dtype} in {out}"
    return (
        sentence if isinstance(tokenizer, dict) else f"{sentence}; no tokenizer.json: {tokenizer}"
    )


def number_of(fields: dict[str, Any], key: str, default: float | None = None) -> Any:
    """Reads a setting of a Llama that must be one number for all layers."""
    value = fields.get(f"llama.{key}", default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"llama.{key}={quoted(value)}; it must be one number for all layers")
    return value


def count_of(fields: dict[str, Any], key: str, default: int | None = None) -> int:
    """Reads a setting that must be a positive integer."""
    value = number_of(fields, key, default)
    if not isinstance(value, int) or not 1 <= value < 2**31:
        raise ValueError(f"llama.{key}={quoted(value)}; an integer of at least 1 is needed")
    return value


def model_config(fields: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """Returns the model's config.json; refuses models that zerojax's Llama does not support."""
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise ValueError(f"general.architecture={kind!r}; only 'llama' can be converted")
    if "token_embd.weight" not in stored:
        raise ValueError("token_embd.weight is missing: merge the parts of a split model first")

    number, count = (functools.partial(one, fields) for one in (number_of, count_of))
    shape = shape_of(stored["token_embd.weight"])
    if len(shape) != 2:
        raise ValueError(f"token_embd.weight has the shape {shape}; two dimensions are needed")
    vocab_size, width = shape
    heads, layers = count("attention.head_count"), count("block_count")
    if layers * len(LAYER_TENSORS) > len(stored):
        raise ValueError(f"llama.block_count={layers}; {len(stored)} tensors do not fit it")
    head_dim = count("attention.key_length", width // heads)
    if (turned := count("rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(f"llama.rope.dimension_count={turned}; all {head_dim} features must turn")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ValueError(f"llama.rope.scaling.type={scaling!r}; only none and linear are supported")
    linear = {"rope_type": "linear", "factor": number("rope.scaling.factor", 1.0)}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": count("feed_forward_length"),
        "max_position_embeddings": count("context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        # A float32 of the file in short form: 1e-5, not 9.999999747378752e-06.
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_scaling": linear if scaling == "linear" else None,
        "rope_theta": number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in stored,
        "vocab_size": vocab_size,
    }
    for name in ("bos", "eos"):
        if (index := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name}_token_id"] = index
    return config


def tensor_names(config: dict[str, Any]) -> dict[str, str]:
    """Returns {name of Hugging Face: name of llama.cpp} of every tensor of a model."""
    names = {"model.embed_tokens.weight": "token_embd.weight"}
    for layer in range(config["num_hidden_layers"]):
        for name, theirs in LAYER_TENSORS.items():
            names[f"model.layers.{layer}.{name}.weight"] = f"blk.{layer}.{theirs}.weight"
    names["model.norm.weight"] = "output_norm.weight"
    if not config["tie_word_embeddings"]:
        names["lm_head.weight"] = "output.weight"
    return names


def check_tensors(names: dict[str, str], stored: dict[str, Any], config: dict[str, Any]) -> None:
    """Refuses missing tensors, additional ones such as biases, and tensors of other shapes.

    Args:
      names: {name of Hugging Face: name of llama.cpp} of the expected tensors.
    """
    if missing := sorted(set(names.values()) - set(stored)):
        raise ValueError(f"{len(missing)} tensors are missing, such as {missing[0]}")
    if others := sorted(set(stored) - set(names.values())):
        raise ValueError(
            f"{len(others)} tensors do not belong to a Llama, such as {quoted(others[0])}"
        )
    width, hidden = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "q_proj": (queries, width),
        "k_proj": (keys, width),
        "v_proj": (keys, width),
        "o_proj": (width, queries),
        "gate_proj": (hidden, width),
        "up_proj": (hidden, width),
        "down_proj": (width, hidden),
        "embed_tokens": (config["vocab_size"], width),
        "lm_head": (config["vocab_size"], width),
    }
    for name, theirs in names.items():
        wanted = shapes.get(name.split(".")[-2], (width,))
        if (found := shape_of(stored[theirs])) != wanted:
            raise ValueError(f"{theirs} has the shape {found}; this model needs {wanted}")


def shape_of(stored: Any) -> tuple[int, ...]:
    """Returns the shape of a tensor; GGUF stores the fastest dimension first."""
    return tuple(int(size) for size in reversed(stored.shape))


def in_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the rows of each head to Hugging Face's order.

    Rotary positions rotate pairs of features. llama.cpp stores the two features of a pair next to
    each other; Hugging Face stores all first features, then all second features.

    Args:
      values: array [heads * head_dim, embed].
    """
    pairs = values.reshape(num_heads, -1, 2, values.shape[-1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def tokenizer_json(fields: dict[str, Any]) -> dict[str, Any] | str:
    """Returns tokenizer.json of a byte-level vocabulary, or the reason why it cannot be written."""
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or split not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        return f"kind {kind!r} that splits text as {split!r}; known are gpt2 with one of {known}"
    tokens, kinds, merges = (
        fields.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type", "merges")
    )
    are_texts = all(isinstance(text, str) for text in [*tokens, *merges])
    if not are_texts or len(tokens) != len(kinds) or not all(" " in pair for pair in merges):
        raise ValueError("the vocabulary is damaged: tokens, token_type and merges do not fit")
    added = [
        {"id": index, "content": token, "special": kind == CONTROL}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": PRE_TOKENIZERS[split],
        "decoder": BYTES,
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [pair.split(" ", 1) for pair in merges],
        },
    }


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns tokenizer_config.json: special tokens by their use, and the chat template."""
    tokens = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            config[f"{ours}_token"] = tokens[index]
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


class Table:
    """One pass over the bytes of a file's table, which is checked but not stored.

    Args:
      content: first bytes of a file.
    """

    def __init__(self, content: bytes) -> None:
        self._content, self._at, self._items = content, 0, 0
        self._order = "<"

    def check(self) -> None:
        """Reads all fields and all tensors.

        Raises:
          ValueError: the bytes are not a valid table.
        """
        if self._take(4, "the first bytes") != b"GGUF":
            raise ValueError("the first bytes are not GGUF")
        (version,) = struct.unpack("<I", self._take(4, "the version"))
        if version & 0xFFFF == 0:  # written on a machine with the other byte order
            self._order = ">"
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            raise ValueError(f"version {version} of the format is not supported; only 2 and 3 are")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        self._check_count(num_fields, 8 + 4 + 1, "fields")
        self._check_count(num_tensors, 8 + 4 + 4 + 8, "tensors")
        self._named(num_fields, "field", lambda name: self._value(name, self._number("I"), 0))
        self._named(num_tensors, "tensor", self._tensor)

    def _named(self, count: int, what: str, read: Callable[[str], None]) -> None:
        seen: set[str] = set()
        for _ in range(count):
            raw = self._string(f"the name of a {what}", MAX_NAME)
            try:
                name = raw.decode("utf-8")
            except UnicodeDecodeError:
                raise ValueError(f"the name of a {what} is not text: {quoted(raw)}") from None
            if name in seen:
                raise ValueError(f"the {what} {quoted(name)} is there twice")
            seen.add(name)
            read(name)

    def _value(self, name: str, kind: int, depth: int) -> None:
        if kind == STRING:
            self._string(f"the text of {quoted(name)}")
        elif kind in SIZES:
            self._take(SIZES[kind], f"the value of {quoted(name)}")
        elif kind != ARRAY:
            raise ValueError(f"{quoted(name)} has the unknown kind {kind}")
        elif depth == MAX_DEPTH:
            raise ValueError(f"{quoted(name)} has lists nested more than {MAX_DEPTH} levels deep")
        else:
            self._list(name, depth)

    def _list(self, name: str, depth: int) -> None:
        kind, length = self._number("I"), self._number("Q")
        least = SIZES.get(kind, 8 if kind == STRING else 12)
        self._check_count(length, least, f"items of {quoted(name)}")
        self._items += length
        if self._items > MAX_ITEMS:
            raise ValueError(f"{quoted(name)} has {length} items; {MAX_ITEMS} are allowed in all")
        if kind in SIZES:
            self._take(length * least, f"the items of {quoted(name)}")
        else:
            for _ in range(length):
                self._value(name, kind, depth + 1)

    def _tensor(self, name: str) -> None:
        count = self._number("I")
        if not 1 <= count <= MAX_DIMENSIONS:
            raise ValueError(f"the tensor {quoted(name)} has {count} dimensions, not 1 to 4")
        shape = [self._number("Q") for _ in range(count)]
        if not all(1 <= size < 2**31 for size in shape):
            raise ValueError(f"the tensor {quoted(name)} has the shape {quoted(shape)}")
        self._number("I")  # the package knows kinds, and where the arrays begin
        self._number("Q")

    def _check_count(self, count: int, least: int, what: str) -> None:
        left = len(self._content) - self._at
        if count * least > left:
            raise ValueError(f"{count} {what} are claimed, but only {left} bytes are left")

    def _string(self, what: str, most: int = MAX_TABLE) -> bytes:
        length = self._number("Q")
        if length > most:
            raise ValueError(f"{length} bytes are claimed for {what}")
        return self._take(length, what)

    def _number(self, kind: str) -> int:
        return struct.unpack(self._order + kind, self._take(struct.calcsize(kind), "a number"))[0]

    def _take(self, count: int, what: str) -> bytes:
        found = self._content[self._at : self._at + count]
        if len(found) < count:
            raise ValueError(f"it ends within {what}")
        self._at += count
        return found


def write_json(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Convert a Llama of llama.cpp to Hugging Face.")
    parser.add_argument("source", metavar="FILE.gguf", type=Path)
    parser.add_argument("target", metavar="OUT", type=Path, help="a new folder")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    dtypes = {"fp32": "float32", "bf16": "bfloat16"}
    print(convert(args.source, args.target, dtypes[args.dtype]))
