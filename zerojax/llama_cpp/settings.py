"""Sizes of a Llama from a GGUF file's table, and the names of its tensors.

Knows names and numbers (github.com/ggml-org/ggml, docs/gguf.md); never arrays or a tokenizer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from zerojax.hugging_face.table import UnsupportedError
from zerojax.models import LlamaConfig
from zerojax.models.rope import RopeScaling

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
            f"general.architecture={kind!r}: only 'llama' is converted; for another one use the "
            "original folder of Hugging Face"
        )
    table = shapes.get("token_embd.weight")
    if table is None:
        raise UnsupportedError(
            "the file has no token_embd.weight, so it is no whole model (one part of several?)"
        )
    vocab_size, width = table
    heads = int(_needed(fields, "attention.head_count"))
    head_dim = int(fields.get(f"{_PREFIX}attention.key_length", width // heads))
    _check_positions(fields, shapes, head_dim)
    return LlamaConfig(
        vocab_size=vocab_size,
        max_seq_len=int(_needed(fields, "context_length")),
        num_layers=int(_needed(fields, "block_count")),
        num_heads=heads,
        num_kv_heads=int(fields.get(f"{_PREFIX}attention.head_count_kv", heads)),
        embed_dim=width,
        mlp_dim=int(_needed(fields, "feed_forward_length")),
        head_dim=head_dim,
        tie_embeddings="output.weight" not in shapes,
        rope_theta=float(fields.get(f"{_PREFIX}rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(fields),
        norm_eps=_rounded(_needed(fields, "attention.layer_norm_rms_epsilon")),
    )


def _needed(fields: Mapping[str, Any], key: str) -> Any:
    value = fields.get(_PREFIX + key)
    if value is None:
        raise UnsupportedError(f"the file has no {_PREFIX}{key}, without which there is no model")
    if not isinstance(value, (int, float)):
        raise UnsupportedError(
            f"{_PREFIX}{key}={value!r:.60}: layers of different sizes are not built; one number "
            "for all of them is"
        )
    return value


def _rounded(value: float) -> float:
    """A float32 of the file as people write it: 1e-5, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _check_positions(fields: Mapping[str, Any], shapes: Collection[str], head_dim: int) -> None:
    turned = fields.get(f"{_PREFIX}rope.dimension_count", head_dim)
    if turned != head_dim:
        raise UnsupportedError(
            f"{_PREFIX}rope.dimension_count={turned}: here all {head_dim} features of a head turn"
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
        return RopeScaling(kind="linear", factor=float(_needed(fields, "rope.scaling.factor")))
    raise UnsupportedError(f"{_PREFIX}rope.scaling.type={kind!r} is not built; none and linear are")
