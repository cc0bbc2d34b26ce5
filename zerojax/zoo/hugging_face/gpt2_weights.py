"""GPT-2 in transformers' format: one projection for query, key and value, kernels [in, out]."""

from __future__ import annotations

from typing import Any

from zerojax.zoo.gpt2 import GPT2, GPT2Config
from zerojax.zoo.hugging_face.config_reading import ConfigReading
from zerojax.zoo.hugging_face.decoder_leaves import TASK_LEAF
from zerojax.zoo.hugging_face.layouts import Architecture, Leaf


def leaves(config: GPT2Config) -> list[Leaf]:
    """Lists a model's parameters and the tensors that contain them."""
    layer, block = "transformer.h.{layer}.", "blocks/"
    qkv = ("query", "key", "value")
    entries = [
        Leaf("token_embedding/embedding", "transformer.wte.weight", "vocab embed"),
        Leaf("position_embedding/embedding", "transformer.wpe.weight", "position embed"),
    ]
    for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
        entries.append(Leaf(f"{block}{ours}/scale", f"{layer}{theirs}.weight", "embed"))
        entries.append(Leaf(f"{block}{ours}/bias", f"{layer}{theirs}.bias", "embed"))
    for part, ours in enumerate(qkv):
        kernel, bias = (f"{block}attention/{ours}/{x}" for x in ("kernel", "bias"))
        dims = "embed (3 heads head_dim) -> embed heads head_dim"
        entries.append(Leaf(kernel, f"{layer}attn.c_attn.weight", dims, part))
        dims = "(3 heads head_dim) -> heads head_dim"
        entries.append(Leaf(bias, f"{layer}attn.c_attn.bias", dims, part))
    dims = "(heads head_dim) embed -> heads head_dim embed"
    entries += [
        Leaf(f"{block}attention/output/kernel", f"{layer}attn.c_proj.weight", dims),
        Leaf(f"{block}attention/output/bias", f"{layer}attn.c_proj.bias", "embed"),
        Leaf(f"{block}mlp/up/kernel", f"{layer}mlp.c_fc.weight", "embed mlp"),
        Leaf(f"{block}mlp/up/bias", f"{layer}mlp.c_fc.bias", "mlp"),
        Leaf(f"{block}mlp/down/kernel", f"{layer}mlp.c_proj.weight", "mlp embed"),
        Leaf(f"{block}mlp/down/bias", f"{layer}mlp.c_proj.bias", "embed"),
        Leaf("final_norm/scale", "transformer.ln_f.weight", "embed"),
        Leaf("final_norm/bias", "transformer.ln_f.bias", "embed"),
    ]
    if config.task is not None:
        entries.append(TASK_LEAF)
    elif not config.tie_embeddings:
        entries.append(Leaf("lm_head/kernel", "lm_head.weight", "vocab embed -> embed vocab"))
    return entries


def read_config(config: ConfigReading) -> dict[str, Any]:
    """Reads config.json, whose keys have the names of the original GPT-2."""
    config.require(
        "this model uses the tanh form of GELU",
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
    )
    config.require("scores are scaled by head_dim^-0.5", scale_attn_weights=(True,))
    config.require("all layers have one scale", scale_attn_by_inverse_layer_idx=(False, None))
    # Two keys for one size; transformers reads the first.
    positions, older = config.get("n_positions"), config.get("n_ctx")
    return {
        "vocab_size": config.needed("vocab_size"),
        "max_seq_len": positions or older or config.needed("n_positions"),
        "num_layers": config.needed("n_layer"),
        "num_heads": config.needed("n_head"),
        "embed_dim": config.needed("n_embd"),
        "mlp_dim": config.get("n_inner"),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def write_config(config: GPT2Config) -> dict[str, Any]:
    """Builds the keys of config.json, including dropout; attention dropout is 0."""
    return {
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": config.dropout,
        "layer_norm_epsilon": config.norm_eps,
        "n_ctx": config.max_seq_len,
        "n_embd": config.embed_dim,
        "n_head": config.num_heads,
        "n_inner": config.mlp_dim,
        "n_layer": config.num_layers,
        "n_positions": config.max_seq_len,
        "resid_pdrop": config.dropout,
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
    }


GPT2_ROW = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    config_class=GPT2Config,
    build=lambda config, rngs: GPT2(config, rngs=rngs),
    leaves=leaves,
    read=read_config,
    write_config=write_config,
    dropout=("embd_pdrop", "resid_pdrop"),
    attention_dropout=("attn_pdrop",),
    # Scores are always computed in float32.
    no_effect=(
        "reorder_and_upcast_attn",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ),
    prefix="transformer.",
    tasks={"GPT2ForSequenceClassification": "sequence_classification"},
    # Causal masks, which early versions saved with the weights.
    ignored=(r"\.attn\.(masked_)?bias$",),
)
