"""Tokenizer of a GGUF file as `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerojax.config.display import quoted

_TOKENS = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens that are found in a text before it is cut."""

_BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT2 = {**_BYTES, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_CUTS: Mapping[str, Any] = {
    "gpt-2": _GPT2,
    # Each digit alone, then as GPT-2 (llama.cpp, src/llama-vocab.cpp: LLAMA_VOCAB_PRE_TYPE_SMOLLM).
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _GPT2]},
}
"""How a text is cut before pairs are merged, by the name in `tokenizer.ggml.pre`."""


def tokenizer_json(fields: Mapping[str, Any]) -> dict[str, Any] | str:
    """What becomes tokenizer.json; or, in words, why there can be none.

    Args:
      fields: the GGUF file's table.
    """
    model, cut = fields.get(f"{_TOKENS}model"), fields.get(f"{_TOKENS}pre", "gpt-2")
    if model != "gpt2":
        kind = quoted(model)
        return f"its tokenizer is of the kind {kind}; only byte-level pairs (gpt2) are converted"
    if not isinstance(cut, str) or cut not in _CUTS:
        known = ", ".join(_CUTS)
        return f"it cuts text as {quoted(cut)}, which is not among those that are known: {known}"
    tokens, kinds = _list(fields, "tokens", str), _list(fields, "token_type", int)
    pairs = [tuple(pair.split(" ", 1)) for pair in _list(fields, "merges", str)]
    if len(tokens) != len(kinds) or any(len(pair) != 2 for pair in pairs):
        return f"its {len(tokens)} tokens, {len(kinds)} kinds and the merges do not fit together"
    if len(set(tokens)) != len(tokens):
        return "it has a token twice"
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _CUTS[cut],
        "post_processor": None,
        "decoder": {**_BYTES, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [list(pair) for pair in pairs],
        },
    }


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What becomes tokenizer_config.json: special tokens by their use, and the chat template."""
    tokens = _list(fields, "tokens", str)
    written: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = fields.get(f"{_TOKENS}{theirs}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            written[f"{ours}_token"] = tokens[index]
    if isinstance(template := fields.get("tokenizer.chat_template"), str) and template:
        written["chat_template"] = template
    return written


def _list(fields: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """A list of the table; empty where there is none, or one of something else."""
    found = fields.get(f"{_TOKENS}{name}")
    is_one = isinstance(found, list) and all(isinstance(item, kind) for item in found)
    return found if is_one else []
