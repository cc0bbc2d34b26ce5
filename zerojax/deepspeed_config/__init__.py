"""Translates DeepSpeed's ds_config.json into zerojax settings, with a reason for each setting."""

from zerojax.deepspeed_config.keys_page import keys_markdown, keys_page
from zerojax.deepspeed_config.translating import (
    DsConfig,
    Source,
    explain,
    translate,
    warn_of,
)
from zerojax.deepspeed_config.translation import CallerValues, Line, Translation, explanation

__all__ = [
    "CallerValues",
    "DsConfig",
    "Line",
    "Source",
    "Translation",
    "explain",
    "explanation",
    "keys_markdown",
    "keys_page",
    "translate",
    "warn_of",
]
