"""Lists decoders' arrays and their tensor names in transformers, derived from a configuration.

Kernels in the files are [out, in], with heads and their features in one dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zerojax.zoo.decoder_config import DecoderConfig
from zerojax.zoo.hugging_face.layouts import Leaf, RowsOfTensor

_BLOCK, _LAYER = "blocks/", "model.layers.{layer}."
# {norm_places: ((zerojax name, transformers name), ...)}.
_NORMS = {
    "pre": (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")),
    "post": (
        ("attention_post_norm", "post_attention_layernorm"),
        ("mlp_post_norm", "post_feedforward_layernorm"),
    ),
    "pre_post": (
        ("attention_norm", "input_layernorm"),
        ("attention_post_norm", "post_attention_layernorm"),
        ("mlp_norm", "pre_feedforward_layernorm"),
        ("mlp_post_norm", "post_feedforward_layernorm"),
    ),
    "parallel": (("attention_norm", "input_layernorm"),),
}
_QKV = (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
_KERNEL_OF_HEADS = "(heads head_dim) embed -> embed heads head_dim"


_EXPERTS = ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})
_EXPERTS_OF_MIXTRAL = ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"})


TASK_LEAF = Leaf("task_head/kernel", "score.weight", "labels embed -> embed labels")
"""Head for classes of texts, which has no bias in decoders."""


def leaves(config: DecoderConfig) -> list[Leaf]:
    """Lists a model's parameters and their tensors; no two parameters share a tensor.

    Each expert of a layer has its own tensors.
    """
    return _leaves(config, joined=False)


def mixtral_leaves(config: DecoderConfig) -> list[Leaf]:
    """Lists a model's parameters as `leaves` does, with Mixtral's names of experts."""
    return _leaves(config, joined=False, experts=_EXPERTS_OF_MIXTRAL)


def joined_leaves(config: DecoderConfig) -> list[Leaf]:
    """Lists parameters of models (Phi-3) with one tensor for query, key, value and one for gate,
    up."""
    return _leaves(config, joined=True)


def gpt_oss_leaves(config: DecoderConfig) -> list[Leaf]:
    """Lists parameters of gpt-oss: one tensor for all experts of a layer, in which columns of gate
    and up alternate."""
    return _leaves(config, joined=False, experts=None)


def _leaves(
    config: DecoderConfig,
    *,
    joined: bool,
    experts: tuple[str, Mapping[str, str]] | None = _EXPERTS,
) -> list[Leaf]:
    entries = [Leaf("token_embedding/embedding", "model.embed_tokens.weight", "vocab embed")]
    for ours, theirs in _NORMS[config.norm_places]:
        entries += _norm(config, f"{_BLOCK}{ours}", f"{_LAYER}{theirs}", "embed")
    entries += _joined_heads(config) if joined else _heads(config)
    entries += _query_key_norms(config)
    ours, theirs = f"{_BLOCK}attention/output", f"{_LAYER}self_attn.o_proj"
    dims = "embed (heads head_dim) -> heads head_dim embed"
    entries.append(Leaf(f"{ours}/kernel", f"{theirs}.weight", dims))
    if config.output_bias:
        entries.append(Leaf(f"{ours}/bias", f"{theirs}.bias", "embed"))
    if config.attention_sinks:
        entries.append(Leaf(f"{_BLOCK}attention/sinks", f"{_LAYER}self_attn.sinks", "heads"))
    if config.moe.num_experts:
        entries += _experts_together() if experts is None else _experts(*experts)
    else:
        entries += _joined_mlp() if joined else _mlp(config)
    entries += _norm(config, "final_norm", "model.norm", "embed")
    if config.task is not None:
        entries.append(TASK_LEAF)
    elif not config.tie_embeddings:
        entries.append(Leaf("lm_head/kernel", "lm_head.weight", "vocab embed -> embed vocab"))
    return entries


def _norm(config: DecoderConfig, ours: str, theirs: str, dims: str) -> Iterator[Leaf]:
    if config.norm.has_scale:
        yield Leaf(f"{ours}/scale", f"{theirs}.weight", dims)
    if config.norm.has_bias:
        yield Leaf(f"{ours}/bias", f"{theirs}.bias", dims)


def _heads(config: DecoderConfig) -> Iterator[Leaf]:
    for ours, theirs in _QKV:
        name, tensor = f"{_BLOCK}attention/{ours}", f"{_LAYER}self_attn.{theirs}"
        yield Leaf(f"{name}/kernel", f"{tensor}.weight", _KERNEL_OF_HEADS)
        if config.qkv_bias:
            dims = "(heads head_dim) -> heads head_dim"
            yield Leaf(f"{name}/bias", f"{tensor}.bias", dims)


def _joined_heads(config: DecoderConfig) -> Iterator[Leaf]:
    assert not config.qkv_bias, "no family has biases in a joined tensor"
    heads, kv_heads = config.num_heads, config.num_kv_heads or config.num_heads
    total, first = heads + 2 * kv_heads, 0
    for (ours, _), count in zip(_QKV, (heads, kv_heads, kv_heads), strict=True):
        features = config.features_per_head
        yield Leaf(
            f"{_BLOCK}attention/{ours}/kernel",
            f"{_LAYER}self_attn.qkv_proj.weight",
            _KERNEL_OF_HEADS,
            rows=RowsOfTensor(first * features, total * features),
        )
        first += count


def _query_key_norms(config: DecoderConfig) -> Iterator[Leaf]:
    names = {"head": "{}_norm", "all": "{}_heads_norm"}
    if config.query_key_norm == "none":
        return
    of_all = "(heads head_dim) -> heads head_dim"
    dims = {"head": "head_dim", "all": of_all}[config.query_key_norm]
    for part, theirs in (("query", "q_norm"), ("key", "k_norm")):
        ours = names[config.query_key_norm].format(part)
        yield from _norm(config, f"{_BLOCK}attention/{ours}", f"{_LAYER}self_attn.{theirs}", dims)


def _mlp(config: DecoderConfig) -> Iterator[Leaf]:
    for ours in ("gate", "up"):
        name, tensor = f"{_BLOCK}mlp/{ours}", f"{_LAYER}mlp.{ours}_proj"
        yield Leaf(f"{name}/kernel", f"{tensor}.weight", "mlp embed -> embed mlp")
        if config.mlp_bias:
            yield Leaf(f"{name}/bias", f"{tensor}.bias", "mlp")
    name, tensor = f"{_BLOCK}mlp/down", f"{_LAYER}mlp.down_proj"
    yield Leaf(f"{name}/kernel", f"{tensor}.weight", "embed mlp -> mlp embed")
    if config.mlp_bias:
        yield Leaf(f"{name}/bias", f"{tensor}.bias", "embed")


def _experts(block: str, names: Mapping[str, str]) -> Iterator[Leaf]:
    """Yields the router and the experts' kernels; shared experts are not supported in files."""
    dims = "experts embed -> embed experts"
    yield Leaf(f"{_BLOCK}mlp/router/kernel", f"{_LAYER}{block}.gate.weight", dims)
    for ours, theirs in names.items():
        tensor = f"{_LAYER}{block}.experts.{{expert}}.{theirs}.weight"
        dims = "embed mlp -> mlp embed" if ours == "down" else "mlp embed -> embed mlp"
        yield Leaf(f"{_BLOCK}mlp/experts/{ours}", tensor, dims)


def _experts_together() -> Iterator[Leaf]:
    ours, theirs = f"{_BLOCK}mlp", f"{_LAYER}mlp"
    dims = "experts embed -> embed experts"
    yield Leaf(f"{ours}/router/kernel", f"{theirs}.router.weight", dims)
    yield Leaf(f"{ours}/router/logit_bias", f"{theirs}.router.bias", "experts")
    tensor = f"{theirs}.experts.gate_up_proj"
    for part, name in enumerate(("gate", "up")):
        dims = "experts embed (mlp 2) -> experts embed mlp"
        yield Leaf(f"{ours}/experts/{name}", tensor, dims, part)
    for part, name in enumerate(("gate", "up")):
        dims = "experts (mlp 2) -> experts mlp"
        yield Leaf(f"{ours}/experts/{name}_bias", f"{tensor}_bias", dims, part)
    yield Leaf(f"{ours}/experts/down", f"{theirs}.experts.down_proj", "experts mlp embed")
    yield Leaf(f"{ours}/experts/down_bias", f"{theirs}.experts.down_proj_bias", "experts embed")


def _joined_mlp() -> Iterator[Leaf]:
    for part, ours in enumerate(("gate", "up")):
        tensor = f"{_LAYER}mlp.gate_up_proj.weight"
        yield Leaf(f"{_BLOCK}mlp/{ours}/kernel", tensor, "(2 mlp) embed -> embed mlp", part)
    tensor = f"{_LAYER}mlp.down_proj.weight"
    yield Leaf(f"{_BLOCK}mlp/down/kernel", tensor, "embed mlp -> mlp embed")
