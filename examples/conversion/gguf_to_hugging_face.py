"""Conversion of a Llama model in llama.cpp's format (GGUF) to a folder of Hugging Face.

    pip install 'zerojax[examples]'
    python examples/conversion/gguf_to_hugging_face.py model.gguf weights/model --dtype bf16

`zerojax.from_hugging_face("weights/model")` loads the folder. The package `gguf` dequantises one
tensor at a time to float32; what quantisation has rounded away does not come back. The package
believes the lengths that a file claims, so convert only files that you trust.
"""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np

from zerojax.models.hugging_face.safetensors import Tensor, write_files

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
"""Kinds of tokens that are found in a text before it is split."""


def convert(path: Path, out: Path, dtype: str = "float32") -> str:
    """Writes config.json, safetensors and, where its kind is known, the tokenizer.

    Args:
      path: a GGUF file of a Llama model.
      out: a folder that is new or empty.
      dtype: of the weights, "float32" or "bfloat16".

    Returns:
      A sentence about what was written.

    Raises:
      FileExistsError: something is in `out`.
      ValueError: no whole GGUF file, or a model that zerojax's Llama does not compute.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; name a new folder")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is no GGUF file, or is cut short ({error})") from None
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = model_config(fields, stored)
    names = tensor_names(config)
    check_tensors(set(names.values()), set(stored))
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
    tokenizer = tokenizer_json(fields)
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


def model_config(fields: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """config.json of the model; refuses what zerojax's Llama does not compute."""
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise ValueError(f"general.architecture={kind!r}; only 'llama' is converted")
    if "token_embd.weight" not in stored:
        raise ValueError("no token_embd.weight: this is one part of several")

    def number(key: str, default: float | None = None) -> Any:
        value = fields.get(f"llama.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"llama.{key}={value!r}; one number for all layers is needed")
        return value

    vocab_size, width = shape_of(stored["token_embd.weight"])
    heads = number("attention.head_count")
    head_dim = number("attention.key_length", width // heads)
    if (turned := number("rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(f"llama.rope.dimension_count={turned}; all {head_dim} features must turn")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ValueError(f"llama.rope.scaling.type={scaling!r}; only none and linear are converted")
    linear = {"rope_type": "linear", "factor": number("rope.scaling.factor", 1.0)}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": number("feed_forward_length"),
        "max_position_embeddings": number("context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": number("block_count"),
        "num_key_value_heads": number("attention.head_count_kv", heads),
        # A float32 of the file as people write it: 1e-5, not 9.999999747378752e-06.
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
    """{name of Hugging Face: name of llama.cpp} of every tensor of a model."""
    names = {"model.embed_tokens.weight": "token_embd.weight"}
    for layer in range(config["num_hidden_layers"]):
        for name, theirs in LAYER_TENSORS.items():
            names[f"model.layers.{layer}.{name}.weight"] = f"blk.{layer}.{theirs}.weight"
    names["model.norm.weight"] = "output_norm.weight"
    if not config["tie_word_embeddings"]:
        names["lm_head.weight"] = "output.weight"
    return names


def check_tensors(needed: set[str], stored: set[str]) -> None:
    """Refuses tensors that are missing, and others, such as biases or a table of frequencies."""
    if missing := sorted(needed - stored):
        raise ValueError(f"{len(missing)} tensors are missing, such as {missing[0]}")
    if others := sorted(stored - needed):
        raise ValueError(f"{len(others)} tensors have no place in a Llama, such as {others[0]}")


def shape_of(stored: Any) -> tuple[int, ...]:
    """GGUF stores the fastest dimension first."""
    return tuple(int(size) for size in reversed(stored.shape))


def in_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head as Hugging Face has them.

    Rotary positions turn pairs of features: llama.cpp stores the two of a pair side by side,
    Hugging Face stores all first ones, then all second ones.

    Args:
      values: [heads * head_dim, embed].
    """
    pairs = values.reshape(num_heads, -1, 2, values.shape[-1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def tokenizer_json(fields: dict[str, Any]) -> dict[str, Any] | str:
    """tokenizer.json of a byte-level vocabulary; of another one the reason why there is none."""
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or split not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        return f"kind {kind!r} that splits text as {split!r}; known are gpt2 with one of {known}"
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
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
            "merges": [pair.split(" ", 1) for pair in fields["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by their use, and the chat template."""
    tokens = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        if (index := fields.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            config[f"{ours}_token"] = tokens[index]
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


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
