"""Supervised fine-tuning by formula: chats, models and settings of runs that TRL has made as well.

Knows chats as rows of a file, no library; imports what `tests/oracles/sft.py` can import elsewhere.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.support.chat_samples import BOS, EOS, TEMPLATES

STEPS = 20
EPS = 1e-6
"""Of AdamW. With 1e-8 a weight whose gradient is rounding noise moves as far as any other."""
TEXT = (
    "The sky is blue of course are you there good day and hello to all it is fine weather what why "
    "who asks for a prime number seven nine two divides it never mind the colour of water"
)
WORDS = TEXT.split()
TOKENIZER = "byte_level"
"""Of tests/data/chats.json."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A run of both libraries.

    Attributes:
      model_type: of transformers' configuration.
      sizes: what it differs in from its class's defaults.
      rows: texts that go through the model at a time.
      accumulation: how many times as many make a step.
      schedule: "cosine" or "linear" to 0.
      warmup: steps.
      rank: of adapters; 0: all parameters are trained.
      seq_len: of our rows.
      first: number of the first chat.
    """

    model_type: str
    sizes: dict[str, Any]
    rows: int
    accumulation: int = 1
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    schedule: str = "cosine"
    warmup: int = 0
    rank: int = 0
    alpha: float = 8.0
    seq_len: int = 112
    first: int = 0

    @property
    def batch(self) -> int:
        """Texts of a step."""
        return self.rows * self.accumulation

    def chats(self) -> list[dict[str, Any]]:
        """Those of all steps, in their order."""
        return [chat(self.first + number) for number in range(STEPS * self.batch)]


_SIZES = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_QWEN3 = {"model_type": "qwen3", "sizes": {**_SIZES, "head_dim": 12, "tie_word_embeddings": True}}
_LLAMA = {"model_type": "llama", "sizes": {**_SIZES, "tie_word_embeddings": False}}
CASES = {
    "whole": Case(**_QWEN3, rows=4),
    "accumulated": Case(**_LLAMA, rows=2, accumulation=2, schedule="linear", warmup=5, first=500),
    "lora": Case(**_QWEN3, rows=4, rank=4, learning_rate=5e-3, weight_decay=0.0, first=900),
}


def chat(number: int) -> dict[str, Any]:
    """A row of a file of chats; every fourth has two answers, and lengths differ by a factor 2."""

    def words(count: int, salt: int) -> str:
        return " ".join(WORDS[(number * salt + 7 * i * i + i) % len(WORDS)] for i in range(count))

    turns = [words(5 + number * 5 % 8, 3), words(4 + number * 7 % 9, 5)]
    if number % 4 == 0:
        turns += [words(2, 11), words(3 + number % 3, 13)]
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": x} for i, x in enumerate(turns)]}


def write_tokenizer(folder: Path) -> None:
    """What a folder of weights has beside them."""
    file = Path(__file__).parents[1] / "data" / "chats.json"
    content = json.loads(file.read_text())["tokenizers"][TOKENIZER]
    settings = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATES["chatml"])


def adapter_name(name: str) -> str:
    """A parameter's name by PEFT, as it stands in its files."""
    return name.replace(".default", "")
