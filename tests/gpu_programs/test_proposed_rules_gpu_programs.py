"""All-reduces of proposed rules on 8 H100, read from the programs they would run.

Needs the compile-only client (extra `plan`) and no GPU: pytest -m gpu_programs.
"""

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.support.gpu_plans import gpu_mesh
from tests.support.own_transformers import OwnDecoder
from zerojax.forecasting.hlo import find_collectives, read_program
from zerojax.hardware import compile_client
from zerojax.zoo import Decoder, DecoderConfig

pytestmark = pytest.mark.gpu_programs
TOKENS = {name: jax.ShapeDtypeStruct((32, 16), jnp.int32) for name in ("tokens", "targets")}
SCALARS = 400
"""Bytes: parts of the norm of all gradients, see tests/parallel/test_proposed_rules.py."""


def decoder(rngs):
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32}
    return Decoder(DecoderConfig(**sizes, max_seq_len=16, vocab_size=64), rngs=rngs)


@pytest.mark.parametrize(
    ("model", "sums"),
    [
        # For each layer two sums of results, and one of gradients by each of the two inputs, to
        # which queries, keys and values, or gate and up, are added first. Then the embedding and
        # the head: a lookup, a gradient, and maximum, sum and target of the softmax.
        (decoder, 2 * 4 + 5),
        (lambda rngs: OwnDecoder(rngs), 3 * 4 + 5),
    ],
    ids=["reference", "own list"],
)
def test_all_reduces_are_those_of_the_proposal(model, sums):
    mesh = gpu_mesh({"data": 4, "model": 2})
    proposal = zerojax.propose_rules(model, mesh, example_batch=TOKENS, precision="bf16")
    counted = sum(part.forward_sums + part.backward_sums for part in proposal.parts)
    assert counted == sums
    options = {"precision": "bf16", "zero": 0, "roll": "off", "rules": proposal.rules}
    plan = zerojax.make_plan(model, mesh, example_batch=TOKENS, **options)
    lowered = zerojax.build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    text = lowered.compile(compiler_options=compile_client.SKETCH_OPTIONS).as_text()
    found = [one for one in find_collectives(read_program(text), 8) if one.group == (0, 1)]
    assert {one.kind for one in found} == {"all-reduce"}
    sent = sum(one.payload_bytes * one.times for one in found)
    assert 0 <= sent - (proposal.forward_bytes + proposal.backward_bytes) < SCALARS
