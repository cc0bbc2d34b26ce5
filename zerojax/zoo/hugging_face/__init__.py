"""Hugging Face checkpoints: reads and writes weights and settings."""

from zerojax.zoo.hugging_face.architectures import (
    ARCHITECTURES,
    architecture_of,
    architecture_of_config,
)
from zerojax.zoo.hugging_face.config_reading import UnsupportedError
from zerojax.zoo.hugging_face.folder import end_tokens_in
from zerojax.zoo.hugging_face.layouts import Architecture, Leaf
from zerojax.zoo.hugging_face.pretrained import (
    Pretrained,
    StoredArray,
    arrays_in,
    config_from_hugging_face,
    factory_of,
    from_hugging_face,
)
from zerojax.zoo.hugging_face.writing import Description, describe_model

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Description",
    "Leaf",
    "Pretrained",
    "StoredArray",
    "UnsupportedError",
    "architecture_of",
    "architecture_of_config",
    "arrays_in",
    "config_from_hugging_face",
    "describe_model",
    "end_tokens_in",
    "factory_of",
    "from_hugging_face",
]
