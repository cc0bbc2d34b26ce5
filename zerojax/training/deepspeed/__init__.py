"""Translates DeepSpeed's ds_config.json into zerojax settings, with a reason for each."""

from zerojax.training.deepspeed.keys_page import keys_markdown, keys_page
from zerojax.training.deepspeed.mesh_keys import check_rules
from zerojax.training.deepspeed.translating import (
    Ported,
    Source,
    explain,
    translate,
    warn_of,
)
from zerojax.training.deepspeed.translation import Given, Line, Translation, explanation

__all__ = [
    "Given",
    "Line",
    "Ported",
    "Source",
    "Translation",
    "check_rules",
    "explain",
    "explanation",
    "keys_markdown",
    "keys_page",
    "translate",
    "warn_of",
]
