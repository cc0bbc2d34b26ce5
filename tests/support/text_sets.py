"""Text sets for tests: few texts whose tokens say where they are from."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.data.text_set import TextSetWriter, open_text_set


def some_texts(count: int, *, vocab_size: int = 64, longest: int = 14, seed: int = 0) -> list:
    """[(ids, asked)]: random texts of 2 to `longest` tokens, the last third of each asked for."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        ids = random.integers(1, vocab_size, random.integers(2, longest + 1))
        made.append((ids, np.arange(len(ids)) >= len(ids) - max(1, len(ids) // 3)))
    return made


def write_texts(folder: Path, texts: list, *, vocab_size: int = 64, **about: Any) -> Path:
    """The folder, with these texts in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with TextSetWriter(folder, vocab_size) as writer:
        for ids, asked in texts:
            writer.add(np.asarray(ids), np.asarray(asked))
        writer.finish({"vocab_size": vocab_size, **about})
    return folder


def text_set(folder: Path, texts: list, **about: Any):
    """What training reads of such a folder."""
    return open_text_set(write_texts(folder, texts, **about))[0]


def change_sidecar(folder: Path, **changes: Any) -> None:
    """Other values in texts.json; None takes one away."""
    file = folder / "texts.json"
    about = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: x for key, x in about.items() if x is not None}))
