"""Translation of DeepSpeed's ds_config.json into zerojax settings, with the reason of each."""

from zerojax.training.deepspeed.keys_page import keys_markdown, keys_page
from zerojax.training.deepspeed.page import explanation
from zerojax.training.deepspeed.placing import check_rules
from zerojax.training.deepspeed.ported import Ported, as_arguments, warn_of
from zerojax.training.deepspeed.result import Given, Line, Translation
from zerojax.training.deepspeed.translating import Source, explain, translate

__all__ = [
    "Given",
    "Line",
    "Ported",
    "Source",
    "Translation",
    "as_arguments",
    "check_rules",
    "explain",
    "explanation",
    "keys_markdown",
    "keys_page",
    "translate",
    "warn_of",
]
