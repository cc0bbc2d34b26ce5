"""Hugging Face checkpoints: weights and settings in both directions."""

from zerojax.models.hugging_face.architectures import (
    ARCHITECTURES,
    architecture_of,
    architecture_of_config,
)
from zerojax.models.hugging_face.layouts import Architecture, Leaf, UnsupportedError
from zerojax.models.hugging_face.pretrained import Pretrained, from_hugging_face
from zerojax.models.hugging_face.writing import Description, describe_model

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Description",
    "Leaf",
    "Pretrained",
    "UnsupportedError",
    "architecture_of",
    "architecture_of_config",
    "describe_model",
    "from_hugging_face",
]
