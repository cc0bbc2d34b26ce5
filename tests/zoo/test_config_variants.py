"""Every key of config.json means what it means to transformers, or is refused by its name.

The logits are of tests/oracles/config_variants.py: the same weights with keys removed, null, of
other values, under older spellings, at other levels, or twice.
"""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from tests.support.config_variants import (
    DATA,
    base_of,
    digest,
    tensors_of,
    tokens_of,
    varied,
)
from zerojax.zoo import T5
from zerojax.zoo.hugging_face import config_from_hugging_face, from_hugging_face


@functools.cache
def recorded() -> dict[str, Any]:
    """{case: [(digest, or None if transformers refuses; the variants that have it)]}."""
    return json.loads(gzip.decompress((DATA / "config_variants.json.gz").read_bytes()))["cases"]


def logits_of(model, tokens):
    """Logits, one operation after the other: each is compiled once for all variants."""
    with jax.disable_jit():
        if isinstance(model, T5):
            return model(tokens, tokens, jnp.ones_like(tokens))
        return model(tokens)


class Ours:
    """The model that zerojax makes of a folder whose config.json changes."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.seen = folder, name, {}
        save_file(tensors_of(name), folder / "model.safetensors", metadata={"format": "pt"})

    def __call__(self, patch: dict[str, Any]) -> list[float] | str:
        """A digest of the logits, or the message of the refusal."""
        config = varied(base_of(self.name)[0], patch)
        (self.folder / "config.json").write_text(json.dumps(config))
        try:
            sizes = repr(config_from_hugging_face(self.folder))
            if sizes not in self.seen:
                self.seen[sizes] = self._computed()
        except ValueError as error:
            return str(error)
        return self.seen[sizes]

    def _computed(self) -> list[float] | str:
        try:
            pretrained = from_hugging_face(self.folder)
        except ValueError as error:
            return str(error)
        if self.name == "bert" and not pretrained.config.has_mlm_head:
            return "architectures: only the encoder, which has no logits"
        tokens = jnp.asarray(tokens_of(self.name))
        return digest(np.asarray(logits_of(pretrained.to_model(), tokens)))
