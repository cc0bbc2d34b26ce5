"""Table of supported Hugging Face architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerojax.config.display import quoted
from zerojax.zoo.decoder_config import DecoderConfig
from zerojax.zoo.hugging_face import families, gemma_rows, moe_rows, olmo_rows
from zerojax.zoo.hugging_face.bert_weights import BERT_ROW
from zerojax.zoo.hugging_face.config_reading import ConfigReading, UnsupportedError
from zerojax.zoo.hugging_face.gpt2_weights import GPT2_ROW
from zerojax.zoo.hugging_face.layouts import Architecture
from zerojax.zoo.hugging_face.llama_weights import LLAMA_ROW
from zerojax.zoo.hugging_face.t5_weights import T5_ROW

ARCHITECTURES: Mapping[str, Architecture] = {
    **{row.model_type: row for row in (GPT2_ROW, LLAMA_ROW, BERT_ROW, T5_ROW)},
    **families.ROWS,
    **gemma_rows.ROWS,
    **olmo_rows.ROWS,
    **moe_rows.ROWS,
}
"""model_type -> row."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The row that config.json asks for.

    Raises:
      UnsupportedError: there is none.
    """
    name = ConfigReading(config).get("model_type")
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    inner = config.get("text_config")
    inner_name = ConfigReading(inner).get("model_type") if isinstance(inner, Mapping) else None
    if inner_name in ARCHITECTURES:
        raise UnsupportedError(
            f"config.json: model_type={quoted(name)} holds a {inner_name} beside other models; "
            f"save its language model alone, as {ARCHITECTURES[inner_name].class_name} with "
            "transformers"
        )
    raise UnsupportedError(
        f"config.json: model_type={quoted(name)} is none of those that zerojax has a model for: "
        f"{', '.join(ARCHITECTURES)}; train the model as your own flax module instead"
    )


def architecture_of_config(config: Any) -> Architecture:
    """The row of a model of ours, by its sizes.

    Raises:
      UnsupportedError: a model of the user's own, or a decoder of no family.
    """
    if isinstance(config, DecoderConfig):
        if config.family in ARCHITECTURES:
            return ARCHITECTURES[config.family]
        known = (name for name, row in ARCHITECTURES.items() if row.config_class is DecoderConfig)
        raise UnsupportedError(
            f"DecoderConfig.family={config.family!r} is none of those that Hugging Face's files "
            f"are written for: {', '.join(known)}; name one whose switches these are. `zerojax "
            "checkpoint export` without --format writes any model's parameters under their own "
            "names"
        )
    for row in ARCHITECTURES.values():
        if isinstance(config, row.config_class):
            return row
    raise UnsupportedError(
        f"a model whose config is a {type(config).__name__} has no form in Hugging Face's files; "
        f"those of {', '.join(ARCHITECTURES)} have one. `zerojax checkpoint export` without "
        "--format writes any model's parameters under their own names"
    )
