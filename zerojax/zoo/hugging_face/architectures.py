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
from zerojax.zoo.hugging_face.t5_weights import T5_ROW

ARCHITECTURES: Mapping[str, Architecture] = {
    **{row.model_type: row for row in (GPT2_ROW, families.LLAMA_ROW, BERT_ROW, T5_ROW)},
    **families.ROWS,
    **gemma_rows.ROWS,
    **olmo_rows.ROWS,
    **moe_rows.ROWS,
}
"""{model_type: description of the architecture}."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Returns the architecture that a config.json describes.

    Raises:
      UnsupportedError: the model_type is not supported.
    """
    name = ConfigReading(config).get("model_type")
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    inner = config.get("text_config")
    inner_name = ConfigReading(inner).get("model_type") if isinstance(inner, Mapping) else None
    if inner_name in ARCHITECTURES:
        raise UnsupportedError(
            f"config.json: model_type={quoted(name)} combines a {inner_name} with other models; "
            f"save only its language model, as {ARCHITECTURES[inner_name].class_name} with "
            "transformers"
        )
    raise UnsupportedError(
        f"config.json: model_type={quoted(name)} is not supported; use one of "
        f"{', '.join(ARCHITECTURES)}, or train the model as your own flax module"
    )


def architecture_of_config(config: object) -> Architecture:
    """Returns the architecture of a zerojax model from its configuration.

    Raises:
      UnsupportedError: the configuration is not of zerojax, or is a decoder's without a family.
    """
    if isinstance(config, DecoderConfig):
        if config.family in ARCHITECTURES:
            return ARCHITECTURES[config.family]
        known = (name for name, row in ARCHITECTURES.items() if row.config_class is DecoderConfig)
        raise UnsupportedError(
            f"DecoderConfig.family={config.family!r} has no Hugging Face format; set the family "
            f"with the same switches, one of {', '.join(known)}. `zerojax checkpoint export` "
            "without --format writes any model's parameters under zerojax's names"
        )
    for row in ARCHITECTURES.values():
        if isinstance(config, row.config_class):
            return row
    raise UnsupportedError(
        f"a model whose config is a {type(config).__name__} has no Hugging Face format; "
        f"{', '.join(ARCHITECTURES)} have one. `zerojax checkpoint export` without "
        "--format writes any model's parameters under zerojax's names"
    )
