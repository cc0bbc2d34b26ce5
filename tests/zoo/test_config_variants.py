"""Every key of config.json means what it means to transformers, or is refused by its name.

The logits are of tests/oracles/config_variants.py: the same weights with keys removed, null, of
other values, under older spellings, at other levels, or twice.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.config_variants import (
    BASES,
    DATA,
    alike,
    base_of,
    digest,
    tensors_of,
    tokens_of,
    varied,
)
from zerojax.zoo import T5
from zerojax.zoo.hugging_face import UnsupportedError, architecture_of, from_hugging_face


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


def sizes_of(name: str, patch: dict[str, Any]) -> Any:
    """The configuration that zerojax reads, or the message of the refusal."""
    values = varied(base_of(name)[0], patch)
    try:
        row = architecture_of(values)
        return row.config_class(**row.read_config(values))
    except (TypeError, ValueError) as error:
        return str(error)


REASONS = {
    "is not supported for this model and may change": "no row reads it; transformers stores it",
    "which the model requires": "transformers takes sizes of another model, or other names",
    "; only .* supported": "another value is another model, or one that transformers ignores",
    "supports? only|is not a supported activation": "an activation or head that zerojax lacks",
    "has an entry|needs entries|one entry per type": "transformers ignores entries there",
    "which transformers ignores for this model": "the file asks for a scaling",
    "must be (a whole number of )?at least|must be >= 1": "no layers, heads or experts",
    "two names of the same number": "transformers takes one of two values",
    "has a head that is not supported": "transformers takes the class that calls it",
    "layer_types has .*but there is no window": "transformers takes all layers as full",
    "must be above 0": "all scores are 0",
    "is null, which": "null has no meaning for this number",
    "model_type=None": "transformers takes the class that calls it",
    "is not (true or false|a )": "another type of value",
    "rotates 1 features": "half a pair of features",
}
"""{a refusal of what transformers reads: the reason}."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BASES)
def test_a_key_means_what_it_means_to_transformers(name):
    """Equal settings of ours have equal logits of theirs; what we refuse is refused by its key.

    That unequal settings have the right logits is seen by the next test.
    """
    seen: dict[str, list[float]] = {}
    for theirs, patches in recorded()[name]:
        for patch in patches:
            ours = sizes_of(name, patch)
            if theirs is None:
                continue
            if isinstance(ours, str):
                assert any(re.search(reason, ours) for reason in REASONS), (patch, ours)
                keys = re.findall(r"\w+", json.dumps(patch))
                assert any(key in ours for key in [*keys, "fraction"]), (patch, ours)
            else:
                assert alike(seen.setdefault(repr(ours), theirs), theirs), patch
    assert len(seen) >= 3


@pytest.mark.thorough
@pytest.mark.parametrize("name", BASES)
def test_logits_of_all_variants_are_those_of_transformers(name, tmp_path):
    """One variant for each of our settings; float32 on both sides, sums in other orders."""
    save_file(tensors_of(name), tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens, seen = jnp.asarray(tokens_of(name)), set()
    for theirs, patches in recorded()[name]:
        for patch in patches:
            sizes = sizes_of(name, patch)
            if theirs is None or isinstance(sizes, str) or repr(sizes) in seen:
                continue
            seen.add(repr(sizes))
            (tmp_path / "config.json").write_text(json.dumps(varied(base_of(name)[0], patch)))
            try:
                model = from_hugging_face(tmp_path).to_model()
            except UnsupportedError as error:
                # transformers ignores such tensors, does not tie what differs, and always ties T5.
                allowed = "belong to no parameter|config.json ties them|lm_head.weight' is missing"
                if re.search(allowed, str(error)):
                    continue
                raise
            if name != "bert" or sizes.has_mlm_head:
                logits = np.asarray(logits_of(model, tokens))
                assert alike(digest(logits), theirs), (patch, digest(logits), theirs)
