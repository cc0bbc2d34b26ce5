"""Llama in transformers' format: kernels [out, in], heads joined with their features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerojax.models.hugging_face.layouts import (
    Architecture,
    Leaf,
    UnsupportedError,
    needed,
    require,
)
from zerojax.models.zoo.llama import Llama, LlamaConfig
from zerojax.models.zoo.rope import RopeScaling


def leaves(config: LlamaConfig) -> list[Leaf]:
    """Every array of a model of these sizes."""
    layer, block = "model.layers.{layer}.", "blocks/"
    found = [Leaf("token_embedding/embedding", "model.embed_tokens.weight", "vocab embed")]
    for ours, theirs in (
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
    ):
        found.append(Leaf(f"{block}{ours}/scale", f"{layer}{theirs}.weight", "embed"))
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        name, tensor = f"{block}attention/{ours}/kernel", f"{layer}self_attn.{theirs}.weight"
        found.append(Leaf(name, tensor, "(heads head_dim) embed -> embed heads head_dim"))
    output = f"{layer}self_attn.o_proj.weight"
    dims = "embed (heads head_dim) -> heads head_dim embed"
    found.append(Leaf(f"{block}attention/output/kernel", output, dims))
    for ours in ("gate", "up"):
        tensor = f"{layer}mlp.{ours}_proj.weight"
        found.append(Leaf(f"{block}mlp/{ours}/kernel", tensor, "mlp embed -> embed mlp"))
    tensor = f"{layer}mlp.down_proj.weight"
    found.append(Leaf(f"{block}mlp/down/kernel", tensor, "embed mlp -> mlp embed"))
    found.append(Leaf("final_norm/scale", "model.norm.weight", "embed"))
    if not config.tie_embeddings:
        found.append(Leaf("lm_head/kernel", "lm_head.weight", "vocab embed -> embed vocab"))
    return found


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes from config.json, whether transformers 4 or 5 wrote it."""
    require(config, "this model's MLP is gated by SiLU", hidden_act=("silu", "swish"))
    require(config, "the projections of this model have no biases", attention_bias=(False, None))
    require(config, "the MLP of this model has no biases", mlp_bias=(False, None))
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    longest = needed(config, "max_position_embeddings")
    return {
        "vocab_size": needed(config, "vocab_size"),
        "max_seq_len": longest,
        "num_layers": needed(config, "num_hidden_layers"),
        "num_heads": needed(config, "num_attention_heads"),
        "num_kv_heads": config.get("num_key_value_heads"),
        "embed_dim": needed(config, "hidden_size"),
        "mlp_dim": needed(config, "intermediate_size"),
        "head_dim": config.get("head_dim"),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "rope_scaling": _rope_scaling(rope, longest),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
    }


def _rope_scaling(rope: Mapping[str, Any], longest: int) -> RopeScaling | None:
    """What `rope_scaling` or `rope_parameters` says; "type" was the key before "rope_type"."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    require(rope, "here all features of a head turn", partial_rotary_factor=(1.0, None))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(needed(rope, "factor")))
    if kind == "dynamic":
        factor = float(needed(rope, "factor"))
        return RopeScaling(kind="dynamic", factor=factor, original_max_seq_len=longest)
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=float(needed(rope, "factor")),
            original_max_seq_len=int(needed(rope, "original_max_position_embeddings")),
            low_freq_factor=float(needed(rope, "low_freq_factor")),
            high_freq_factor=float(needed(rope, "high_freq_factor")),
        )
    raise UnsupportedError(
        f"config.json: rotary positions of type {kind!r} are not built; default, linear, dynamic "
        "and llama3 are"
    )


def write_config(config: LlamaConfig) -> dict[str, Any]:
    """config.json from sizes, in the keys that transformers 4 and 5 both read."""
    rope, longest = config.rope_scaling, config.max_seq_len
    written: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": config.features_per_head,
        "hidden_act": "silu",
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": longest,
        "mlp_bias": False,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
    }
    if rope is not None:
        written["rope_scaling"] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope is not None and rope.kind == "dynamic":
        # Theirs takes the original length from here.
        written["max_position_embeddings"] = rope.original_max_seq_len
    if rope is not None and rope.kind == "llama3":
        written["rope_scaling"] |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_seq_len,
        }
    return written


LLAMA_ROW = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    config_class=LlamaConfig,
    build=lambda config, rngs: Llama(config, rngs=rngs),
    leaves=leaves,
    read_config=read_config,
    write_config=write_config,
    prefix="model.",
    ignored=(r"\.rotary_emb\.inv_freq$",),
)
