"""Table of supported Hugging Face architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerojax.models.hugging_face.bert_weights import BERT_ROW
from zerojax.models.hugging_face.gpt2_weights import GPT2_ROW
from zerojax.models.hugging_face.layouts import Architecture, UnsupportedError
from zerojax.models.hugging_face.llama_weights import LLAMA_ROW

ARCHITECTURES: Mapping[str, Architecture] = {
    row.model_type: row for row in (GPT2_ROW, LLAMA_ROW, BERT_ROW)
}
"""model_type -> row."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The row that config.json asks for.

    Raises:
      UnsupportedError: there is none.
    """
    name = config.get("model_type")
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"config.json: model_type={name!r} is none of those that zerojax has a model for: "
            f"{', '.join(ARCHITECTURES)}; train the model as your own flax module instead"
        )
    return ARCHITECTURES[name]


def architecture_of_config(config: Any) -> Architecture:
    """The row of a model of ours, by the class of its sizes.

    Raises:
      UnsupportedError: a model of the user's own.
    """
    for row in ARCHITECTURES.values():
        if isinstance(config, row.config_class):
            return row
    raise UnsupportedError(
        f"a model whose config is a {type(config).__name__} has no form in Hugging Face's files; "
        f"those of {', '.join(ARCHITECTURES)} have one. `zerojax checkpoint export` without "
        "--format writes any model's parameters under their own names"
    )
