"""BERT in transformers' format: kernels [out, in], with a masked-token head, a pooler, or both, or
with a head for a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zerojax.zoo.bert import Bert, BertConfig
from zerojax.zoo.hugging_face.config_reading import ConfigReading, UnsupportedError
from zerojax.zoo.hugging_face.layouts import Architecture, Leaf
from zerojax.zoo.hugging_face.task_keys import SUFFIXES, new_head
from zerojax.zoo.task_heads import TaskKind

_PREFIX = "bert."
# {class of transformers: (has a head for masked tokens, has a pooler)}.
_HEADS: Mapping[str, tuple[bool, bool]] = {
    "BertModel": (False, True),
    "BertForMaskedLM": (True, False),
    "BertForPreTraining": (True, True),
}
_TASKS: Mapping[str, TaskKind] = {f"Bert{end}": kind for kind, end in SUFFIXES.items()}
_TASK_HEADS: Mapping[TaskKind, str] = {
    "sequence_classification": "classifier",
    "token_classification": "classifier",
    "question_answering": "qa_outputs",
}
_EXACT_GELU = {"gelu": True, "gelu_new": False, "gelu_pytorch_tanh": False}


def leaves(config: BertConfig) -> list[Leaf]:
    """Lists a model's parameters and tensors; without a head, names lack "bert."."""
    prefix = _PREFIX if config.has_mlm_head or config.task is not None else ""
    layer, block = prefix + "encoder.layer.{layer}.", "blocks/"
    embeddings = f"{prefix}embeddings."
    entries = [
        Leaf("token_embedding/embedding", f"{embeddings}word_embeddings.weight", "vocab embed"),
        Leaf(
            "position_embedding/embedding",
            f"{embeddings}position_embeddings.weight",
            "position embed",
        ),
        Leaf("type_embedding/embedding", f"{embeddings}token_type_embeddings.weight", "type embed"),
        *_norm("embed_norm", f"{embeddings}LayerNorm"),
    ]
    for name in ("query", "key", "value"):
        ours, theirs = f"{block}attention/{name}", f"{layer}attention.self.{name}"
        dims = "(heads head_dim) embed -> embed heads head_dim"
        entries.append(Leaf(f"{ours}/kernel", f"{theirs}.weight", dims))
        dims = "(heads head_dim) -> heads head_dim"
        entries.append(Leaf(f"{ours}/bias", f"{theirs}.bias", dims))
    ours, theirs = f"{block}attention/output", f"{layer}attention.output.dense"
    dims = "embed (heads head_dim) -> heads head_dim embed"
    entries += [
        Leaf(f"{ours}/kernel", f"{theirs}.weight", dims),
        Leaf(f"{ours}/bias", f"{theirs}.bias", "embed"),
        *_norm(f"{block}attention_norm", f"{layer}attention.output.LayerNorm"),
        *_dense(f"{block}mlp/up", f"{layer}intermediate.dense", "embed", "mlp"),
        *_dense(f"{block}mlp/down", f"{layer}output.dense", "mlp", "embed"),
        *_norm(f"{block}mlp_norm", f"{layer}output.LayerNorm"),
    ]
    if config.has_pooler:
        entries += _dense("pooler", f"{prefix}pooler.dense", "embed", "pooled")
    if config.task is not None:
        entries += _dense("task_head", _TASK_HEADS[config.task.kind], "embed", "labels")
    if config.has_mlm_head:
        head = "cls.predictions."
        entries += [
            Leaf("mlm_head/bias", f"{head}bias", "vocab"),
            *_dense("mlm_head/transform", f"{head}transform.dense", "embed", "turned"),
            *_norm("mlm_head/norm", f"{head}transform.LayerNorm"),
        ]
    return entries


def _dense(ours: str, theirs: str, inputs: str, outputs: str) -> list[Leaf]:
    dims = f"{outputs} {inputs} -> {inputs} {outputs}"
    return [
        Leaf(f"{ours}/kernel", f"{theirs}.weight", dims),
        Leaf(f"{ours}/bias", f"{theirs}.bias", outputs),
    ]


def _norm(ours: str, theirs: str) -> list[Leaf]:
    return [
        Leaf(f"{ours}/scale", f"{theirs}.weight", "embed"),
        Leaf(f"{ours}/bias", f"{theirs}.bias", "embed"),
    ]


def read_config(config: ConfigReading) -> dict[str, Any]:
    """Reads config.json; the class in "architectures" determines which heads the model has."""
    config.require(
        "zerojax's BERT has learned positions", position_embedding_type=("absolute", None)
    )
    config.require("zerojax's BERT is bidirectional", is_decoder=(False, None))
    config.require(
        "zerojax's BERT ties the head to the token table", tie_word_embeddings=(True, None)
    )
    activation = config.get("hidden_act", "gelu")
    if activation not in _EXACT_GELU:
        raise UnsupportedError(
            f"config.json: hidden_act={activation!r}, but zerojax's BERT supports only "
            f"{', '.join(_EXACT_GELU)}"
        )
    has_mlm_head, has_pooler = _heads(config.get("architectures") or ["BertModel"])
    return {
        "vocab_size": config.needed("vocab_size"),
        "max_seq_len": config.needed("max_position_embeddings"),
        "num_types": config.get("type_vocab_size", 2),
        "num_layers": config.needed("num_hidden_layers"),
        "num_heads": config.needed("num_attention_heads"),
        "embed_dim": config.needed("hidden_size"),
        "mlp_dim": config.needed("intermediate_size"),
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "exact_gelu": _EXACT_GELU[activation],
        "has_mlm_head": has_mlm_head,
        "has_pooler": has_pooler,
    }


def _heads(architectures: Iterable[str]) -> tuple[bool, bool]:
    for name in architectures:
        if name in _HEADS:
            return _HEADS[name]
        if name in _TASKS:
            return False, _TASKS[name] == "sequence_classification"
    raise UnsupportedError(
        f"config.json: architectures={architectures!r} has a head that is not supported; use one "
        f"of {', '.join((*_HEADS, *_TASKS))}. To read only the encoder, write "
        '"architectures": ["BertModel"] into a copy of config.json, and pass has_pooler=False to '
        f"from_hugging_face if the files have no pooler. {new_head(_TASKS)}"
    )


def write_config(config: BertConfig) -> dict[str, Any]:
    """Builds the keys of config.json, including "architectures": the class with these heads."""
    heads = (config.has_mlm_head, config.has_pooler)
    # transformers can also read a BertModel without its pooler.
    name = next((name for name, theirs in _HEADS.items() if theirs == heads), "BertModel")
    return {
        "architectures": [name],
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu" if config.exact_gelu else "gelu_new",
        "hidden_dropout_prob": config.dropout,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "layer_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_seq_len,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "type_vocab_size": config.num_types,
        "vocab_size": config.vocab_size,
    }


BERT_ROW = Architecture(
    model_type="bert",
    class_name="BertForMaskedLM",
    config_class=BertConfig,
    build=lambda config, rngs: Bert(config, rngs=rngs),
    leaves=leaves,
    read=read_config,
    write_config=write_config,
    dropout=("hidden_dropout_prob",),
    attention_dropout=("attention_probs_dropout_prob",),
    no_effect=(
        "classifier_dropout",
        "gradient_checkpointing",
        "directionality",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ),
    prefix=_PREFIX,
    tasks=_TASKS,
    # Files may contain the indices 0, 1, ..., copies of tied arrays, the pooler, and heads that the
    # class in "architectures" lacks: many files of BertForMaskedLM still have the head for sentence
    # pairs, and a "BertModel" with the files of a classifier is read without its head.
    ignored=(
        r"embeddings\.position_ids$",
        r"^(cls|classifier|qa_outputs)\.",
        r"pooler\.dense\.",
    ),
    # Names of norms in files converted from TensorFlow.
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
)
