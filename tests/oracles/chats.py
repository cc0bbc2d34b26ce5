"""Chats rendered, tokenised and masked by transformers, for tests/batches/test_chat_templates.py.

Needs transformers, which no test imports; run with transformers 5.23.0, jinja2 3.1.6, tokenizers
0.23.3:

    PYTHONPATH=. python tests/oracles/chats.py tests/data/chats.json

Every template is rendered with its generation marks, which give transformers the tokens of the
assistant, and without them, as most are published.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import tokenizers
import transformers

from tests.support.chat_samples import BOS, CHATS, EOS, SPECIAL, TEMPLATES, unmarked

TEXT = [
    "The sky is blue, of course. Are you there? Good day, and hello to all of you.",
    "It is fine weather. What is the weather of Köln? Who asks why, and what is a prime?",
    "system user assistant model tool function name description parameters type object string",
] * 4


def byte_level() -> tokenizers.Tokenizer:
    """As of Llama 3 and Qwen: bytes, split before words."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=[*SPECIAL],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(TEXT, trainer=trainer)
    return made


def pieces() -> tokenizers.Tokenizer:
    """As of Llama 2 and Gemma: spaces are a letter, unknown characters are bytes."""
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    made.train_from_iterator(TEXT, trainer=trainer)
    return made


def rendered(tokenizer: Any, template: str, chat: dict) -> Any:
    """{"text", "ids", "mask"}, or {"error"}."""
    try:
        options = {"tools": chat.get("tools"), "chat_template": template}
        text = tokenizer.apply_chat_template(chat["messages"], tokenize=False, **options)
        found = tokenizer.apply_chat_template(
            chat["messages"],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **options,
        )
    except Exception as error:
        return {"error": str(error)}
    return {"text": text, "ids": found["input_ids"], "mask": found["assistant_masks"]}


def main(path: str) -> None:
    today = datetime.datetime.now()
    made: dict[str, Any] = {"date": today.isoformat(timespec="seconds"), "tokenizers": {}}
    cases = []
    for kind in (byte_level, pieces):
        backend = kind()
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token=BOS, eos_token=EOS
        )
        made["tokenizers"][kind.__name__] = json.loads(backend.to_str())
        for name, template in TEMPLATES.items():
            for chat_name, chat in CHATS.items():
                case = {"tokenizer": kind.__name__, "template": name, "chat": chat_name}
                marked = rendered(tokenizer, template, chat)
                plain = rendered(tokenizer, unmarked(template), chat)
                assert marked.get("ids") == plain.get("ids"), case
                cases.append(case | marked)
    assert datetime.datetime.now().date() == today.date(), "midnight has passed; run it again"
    made["cases"] = cases
    Path(path).write_text(json.dumps(made, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
