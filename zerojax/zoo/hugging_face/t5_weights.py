"""T5 in transformers' format: kernels [out, in], numbered sub-layers, biases only in block 0."""

from __future__ import annotations

from typing import Any

from zerojax.zoo.hugging_face.config_reading import ConfigReading, UnsupportedError
from zerojax.zoo.hugging_face.layouts import Architecture, Leaf
from zerojax.zoo.t5 import T5, T5Config

_IS_GATED = {"relu": False, "gated-gelu": True}
_INTO_HEADS = "(heads head_dim) embed -> embed heads head_dim"
_OUT_OF_HEADS = "embed (heads head_dim) -> heads head_dim embed"


def leaves(config: T5Config) -> list[Leaf]:
    """Lists a model's parameters and the tensors that contain them."""
    entries = [
        Leaf("token_embedding/embedding", "shared.weight", "vocab embed"),
        *_stack("encoder", ["SelfAttention"], config),
        *_stack("decoder", ["SelfAttention", "EncDecAttention"], config),
    ]
    if not config.tie_embeddings:
        entries.append(Leaf("lm_head/kernel", "lm_head.weight", "vocab embed -> embed vocab"))
    return entries


_OURS = {"SelfAttention": "attention", "EncDecAttention": "cross_attention"}


def _stack(stack: str, attentions: list[str], config: T5Config) -> list[Leaf]:
    block, layers = f"{stack}/blocks", f"{stack}.block.{{layer}}.layer"
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    entries = [Leaf(f"{stack}/relative_bias/embedding", bias, "buckets heads")]
    for number, theirs in enumerate(attentions):
        ours = f"{block}/{_OURS[theirs]}"
        for name in ("query", "key", "value", "output"):
            dims = _OUT_OF_HEADS if name == "output" else _INTO_HEADS
            tensor = f"{layers}.{number}.{theirs}.{name[0]}.weight"
            entries.append(Leaf(f"{ours}/{name}/kernel", tensor, dims))
        norm = f"{layers}.{number}.layer_norm.weight"
        entries.append(Leaf(f"{ours}_norm/scale", norm, "embed"))
    last = f"{layers}.{len(attentions)}"
    names = {"up": "wi_1", "gate": "wi_0"} if config.gated_gelu else {"up": "wi"}
    for ours, theirs in sorted(names.items()):
        tensor = f"{last}.DenseReluDense.{theirs}.weight"
        entries.append(Leaf(f"{block}/mlp/{ours}/kernel", tensor, "mlp embed -> embed mlp"))
    tensor = f"{last}.DenseReluDense.wo.weight"
    entries.append(Leaf(f"{block}/mlp/down/kernel", tensor, "embed mlp -> mlp embed"))
    entries.append(Leaf(f"{block}/mlp_norm/scale", f"{last}.layer_norm.weight", "embed"))
    norm = f"{stack}.final_layer_norm.weight"
    return [*entries, Leaf(f"{stack}/final_norm/scale", norm, "embed")]


def read_config(config: ConfigReading) -> dict[str, Any]:
    """Reads config.json of transformers 4 or 5.

    In transformers 4, "tie_word_embeddings" determines whether the output weights are tied, and
    whether the decoder's result is scaled. Transformers 5 has "scale_decoder_outputs" for the
    scaling, and writes "tie_word_embeddings": true even for files with separate output weights.
    """
    config.require("this model is an encoder-decoder", is_encoder_decoder=(True, None))
    config.require("this model is an encoder-decoder", is_decoder=(False, None))
    kind = config.get("feed_forward_proj", "relu")
    if kind not in _IS_GATED:
        raise UnsupportedError(
            f"config.json: feed_forward_proj={kind!r}, but zerojax's T5 supports only "
            f"{', '.join(_IS_GATED)}"
        )
    activation = "gelu_new" if _IS_GATED[kind] else "relu"
    config.require(
        f"feed_forward_proj={kind}",
        is_gated_act=(_IS_GATED[kind], None),
        dense_act_fn=(activation, None),
    )
    is_tied = config.get("tie_word_embeddings") is not False
    return {
        "vocab_size": config.needed("vocab_size"),
        "max_seq_len": config.get("n_positions") or T5Config.max_seq_len,
        "num_layers": config.needed("num_layers"),
        "num_decoder_layers": config.get("num_decoder_layers"),
        "num_heads": config.needed("num_heads"),
        "head_dim": config.needed("d_kv"),
        "embed_dim": config.needed("d_model"),
        "mlp_dim": config.needed("d_ff"),
        "gated_gelu": _IS_GATED[kind],
        "relative_buckets": config.get("relative_attention_num_buckets", 32),
        "relative_max_distance": config.get("relative_attention_max_distance", 128),
        "norm_eps": config.get("layer_norm_epsilon", 1e-6),
        "tie_embeddings": is_tied,
        "scale_output": bool(config.get("scale_decoder_outputs", is_tied)),
        "start_token": config.get("decoder_start_token_id") or 0,
    }


def write_config(config: T5Config) -> dict[str, Any]:
    """Builds the keys of config.json, readable by transformers 4 and 5."""
    return {
        "d_ff": config.mlp_dim,
        "d_kv": config.head_dim,
        "d_model": config.embed_dim,
        "decoder_start_token_id": config.start_token,
        "dropout_rate": config.dropout,
        "feed_forward_proj": "gated-gelu" if config.gated_gelu else "relu",
        "is_encoder_decoder": True,
        "layer_norm_epsilon": config.norm_eps,
        "n_positions": config.max_seq_len,
        "num_decoder_layers": config.num_decoder_layers,
        "num_heads": config.num_heads,
        "num_layers": config.num_layers,
        "relative_attention_max_distance": config.relative_max_distance,
        "relative_attention_num_buckets": config.relative_buckets,
        "scale_decoder_outputs": config.scale_output,
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
    }


T5_ROW = Architecture(
    model_type="t5",
    class_name="T5ForConditionalGeneration",
    config_class=T5Config,
    build=lambda config, rngs: T5(config, rngs=rngs),
    leaves=leaves,
    read=read_config,
    write_config=write_config,
    dropout=("dropout_rate",),
    attention_dropout=("dropout_rate",),
    no_effect=("classifier_dropout", "initializer_factor", "output_past"),
    copies={f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")},
    # An unused bias of cross-attention in old files.
    ignored=(r"EncDecAttention\.relative_attention_bias\.weight$",),
)
