"""Model sizes and tensor names of a GGUF file's table.

Format: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from zerojax.config.display import quoted
from zerojax.models import LlamaConfig
from zerojax.models.hugging_face.table import UnsupportedError
from zerojax.models.zoo.rope import RopeScaling

MAX_LAYERS = 4096
_PREFIX = "llama."
_LAYER_TENSORS = {
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
_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(tensor: str) -> str:
    """The GGUF name of a tensor of Hugging Face's Llama."""
    if tensor in _TENSORS:
        return _TENSORS[tensor]
    layer, _, rest = tensor.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_TENSORS[rest.removesuffix('.weight')]}.weight"


def read_sizes(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> LlamaConfig:
    """The model's sizes.

    Args:
      fields: the file's table, texts and numbers.
      shapes: {GGUF name: shape} of its tensors, rows first.

    Raises:
      UnsupportedError: another architecture, or settings that ours does not compute.
    """
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise UnsupportedError(
            f"general.architecture={quoted(kind)}: only 'llama' is converted; for another one use "
            "the original folder of Hugging Face"
        )
    table = shapes.get("token_embd.weight")
    if table is None:
        raise UnsupportedError(
            "the file has no token_embd.weight, so it is no whole model (one part of several?)"
        )
    if len(table) != 2:
        raise UnsupportedError(f"token_embd.weight has shape {list(table)}; it should be a matrix")
    vocab_size, width = table
    heads = _size(fields, "attention.head_count")
    head_dim = _size(fields, "attention.key_length", max(1, width // heads))
    _check_positions(fields, shapes, head_dim)
    return LlamaConfig(
        vocab_size=vocab_size,
        max_seq_len=_size(fields, "context_length"),
        num_layers=_size(fields, "block_count", most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=_size(fields, "attention.head_count_kv", heads),
        embed_dim=width,
        mlp_dim=_size(fields, "feed_forward_length"),
        head_dim=head_dim,
        tie_embeddings="output.weight" not in shapes,
        rope_theta=_needed(fields, "rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(fields),
        norm_eps=_rounded(_needed(fields, "attention.layer_norm_rms_epsilon")),
    )


def _needed(fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number of the table; one without a default has to be there."""
    value = fields.get(_PREFIX + key, default)
    if value is None:
        raise UnsupportedError(f"the file has no {_PREFIX}{key}, without which there is no model")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnsupportedError(
            f"{_PREFIX}{key}={quoted(value)}: layers of different sizes are not built; one number "
            "for all of them is"
        )
    if not (math.isfinite(value) and value > 0):
        raise UnsupportedError(f"{_PREFIX}{key}={quoted(value)} is no finite number above 0")
    return value


def _size(
    fields: Mapping[str, Any], key: str, default: int | None = None, most: int = 2**31 - 1
) -> int:
    value = _needed(fields, key, default)
    if value != int(value) or value > most:
        raise UnsupportedError(f"{_PREFIX}{key}={value} is no whole number from 1 to {most}")
    return int(value)


def _rounded(value: float) -> float:
    """A float32 of the file as people write it: 1e-5, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _check_positions(fields: Mapping[str, Any], shapes: Collection[str], head_dim: int) -> None:
    turned = fields.get(f"{_PREFIX}rope.dimension_count", head_dim)
    if turned != head_dim:
        raise UnsupportedError(
            f"{_PREFIX}rope.dimension_count={quoted(turned)}: here all {head_dim} features of a "
            "head turn"
        )
    if any(name.startswith("rope_f") for name in shapes):
        raise UnsupportedError(
            "the file scales its rotary positions by a table (rope_freqs.weight, as for Llama 3.1) "
            "and does not say from which numbers; use the original folder of Hugging Face"
        )


def _rope_scaling(fields: Mapping[str, Any]) -> RopeScaling | None:
    kind = fields.get(f"{_PREFIX}rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=_needed(fields, "rope.scaling.factor"))
    raise UnsupportedError(
        f"{_PREFIX}rope.scaling.type={quoted(kind)} is not built; none and linear are"
    )
