"""What a plan decides about a pipeline: microbatches, division of layers, what is passed over."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from zerojax import make_abstract_mesh, make_plan
from zerojax.pipeline.pipeline_costs import executed_flops
from zerojax.zoo.gpt2 import GPT2, GPT2Config

SMALL = GPT2Config(
    vocab_size=512, max_seq_len=16, num_layers=8, num_heads=2, embed_dim=32, remat="full"
)


def plan(*, config=SMALL, rows=32, num_microbatches=8, stage=2, model=1, **options):
    tokens = jax.ShapeDtypeStruct((rows, config.max_seq_len), jnp.int32)
    return make_plan(
        lambda rngs: GPT2(config, rngs=rngs),
        make_abstract_mesh({"data": 2, "stage": stage, "model": model}, 2 * stage * model),
        example_batch={"tokens": tokens, "targets": tokens},
        num_microbatches=num_microbatches,
        **options,
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rows", "stage", "number"),
    [(32, 2, 8), (64, 4, 16), (24, 4, 12), (4, 4, 2), (2, 2, 1), (32, 1, 1)],
)
def test_microbatches_have_a_default(rows, stage, number):
    """Up to four for each stage, as many as the rows of a data shard allow, whole groups first."""
    made = plan(rows=rows, stage=stage, num_microbatches=None)
    assert made.num_microbatches == number
    told = [line for line in made.reasons if line.startswith("num_microbatches=")]
    assert len(told) == (stage > 1)
    assert all(f"={number}: " in line and f" {rows // 2} rows" in line for line in told)


def test_flops_is_the_division_with_the_shortest_step():
    """Compared with every division of 16 layers. What the last stage gives up, three others share:
    the forward slot is three layers shorter, the backward slot of twice the time one longer."""
    config = dataclasses.replace(SMALL, num_layers=16, vocab_size=1024)
    chosen = plan(config=config, rows=64, num_microbatches=32, stage=4, partition="flops").pipeline
    assert chosen.skips_padding
    every = [
        (*parts, 16 - sum(parts))
        for parts in itertools.product(range(1, 14), repeat=3)
        if sum(parts) < 16
    ]
    time = {
        layers: executed_flops(
            dataclasses.replace(chosen, layers=layers, skips_padding=len(set(layers)) > 1)
        )
        for layers in every
    }
    assert time[chosen.layers] == min(time.values())
    assert time[chosen.layers] < time[4, 4, 4, 4]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"zero": 2},
        {"zero": 3},
        {"model": 2},
        {"config": dataclasses.replace(SMALL, remat="none")},
        {"config": dataclasses.replace(SMALL, remat="dots")},
    ],
    ids=str,
)
def test_where_padding_is_computed_an_even_division_is_the_fastest(options):
    chosen = plan(stage=4, partition="flops", **options).pipeline
    assert chosen.layers == (2, 2, 2, 2)
    given = plan(stage=4, partition=(3, 2, 2, 1), **options).pipeline
    assert not given.skips_padding


def test_an_input_stash_passes_over_padding_without_checkpoints():
    config = dataclasses.replace(SMALL, remat="none")
    assert plan(config=config, partition=(5, 3), stash="input").pipeline.skips_padding


def test_parameters_count_the_embedding_where_it_is_read_first():
    made = plan(partition="parameters").pipeline
    assert made.layers[0] < made.layers[1]
