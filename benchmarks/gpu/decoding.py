"""Part "decoding": the time of a decoded position of a Llama 3 8B, compared with its lower bound.

The bound is that of `zerojax plan --generation`: bytes of weights and cache over the published
bandwidth. The time of a position is the difference between a long and a short generation by the
same programs, so the pass over the prompts and the calls are not in it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import zerojax
from benchmarks.gpu.subjects import make_factory, make_source
from benchmarks.gpu.workloads import Workload, choose_workload
from benchmarks.machine import load_average
from benchmarks.measuring import interleave, sample
from benchmarks.recording import Goal, Record, parse_arguments, save_so_far, write_record
from zerojax.forecasting.generation_bounds import BATCHES, GenerationBound, generation_bounds
from zerojax.hardware.gpus import find_gpu, gpu_of_device
from zerojax.zoo import Decoder
from zerojax.zoo.generation import CACHE_MULTIPLE, continue_rows
from zerojax.zoo.sampling import Sampling
from zerojax.zoo.weight_only import with_layers_apart

FORMATS = ((None, None), ("int8", None), ("int8", "int8"))
"""Formats of weights and cache; None is bfloat16."""
LEAST = 0.70
"""Smallest share of the bound."""
STDDEV = 0.02
GREEDY = Sampling(temperature=0.0)
SMOKE_CARD = "h200"
"""Card whose bounds a smoke run states."""


def main(argv: list[str] | None = None) -> None:
    """Measures all formats and batches, and writes the record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    for record in measure(arguments.smoke):
        save_so_far(record, arguments, load_before)
    write_record(record, arguments, load_before)


def measure(smoke: bool) -> Iterator[Record]:
    """Yields the record after each row: a format of weights and cache with a number of rows."""
    workload = choose_workload("decoding", smoke)
    kind = jax.devices()[0].device_kind
    card = find_gpu(SMOKE_CARD) if smoke else gpu_of_device(kind)
    if card is None:
        raise SystemExit(f"the bandwidth of {kind!r} is not known: see zerojax plan --gpu help")
    bounds = bounds_of(workload, card)
    stacked = random_model(workload)
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for quantize, cache in FORMATS:
        model = with_layers_apart(stacked, quantize)
        for batch in BATCHES:
            bound = bounds[quantize, cache, batch]
            seconds = seconds_per_position(model, workload, batch, cache)
            share = bound.seconds / seconds
            formats = {"weights": quantize or "bfloat16", "cache": cache or "bfloat16"}
            moved = bound.weight_bytes + bound.cache_bytes
            rows.append(
                formats
                | {"batch": batch, "GB": moved / 1e9, "ms": 1e3 * seconds}
                | {"bound_ms": 1e3 * bound.seconds, "of_bound": share}
                | {"tokens_per_s": batch / seconds, "TB/s": moved / seconds / 1e12}
            )
            title = f"{', '.join(formats.values())}, {batch} rows: share of the bound"
            goals.append(Goal(name=title, value=share, limit=LEAST, at_least=True))
            yield Record(name="decoding", rows=rows, goals=goals)


def bounds_of(workload: Workload, card: Any) -> dict[Any, GenerationBound]:
    """Returns {(weights, cache, number of rows): bound} on one device, with a full cache."""
    plan = zerojax.make_plan(
        make_factory(workload),
        zerojax.make_mesh(devices=jax.devices()[:1]),
        example_batch=make_source(workload, num_batches=1).batch(0),
        precision="bf16",
    )
    found = generation_bounds(plan, card)
    return {(x.quantize, x.cache, x.batch): x for x in found if x.way == "model 1"}


def random_model(workload: Workload) -> Decoder:
    """Returns the model with random weights in bfloat16, drawn on the device."""
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: make_factory(workload)(nnx.Rngs(0))))
    leaves, structure = jax.tree.flatten(abstract)

    @functools.partial(jax.jit, static_argnames="shape")
    def draw(number: Any, shape: tuple[int, ...]) -> jax.Array:
        return STDDEV * jax.random.normal(jax.random.key(number), shape, jnp.bfloat16)

    values = [
        draw(number, leaf.shape) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        for number, leaf in enumerate(leaves)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(structure, values))


def seconds_per_position(
    model: Decoder, workload: Workload, batch: int, cache: str | None
) -> float:
    """Returns the median seconds of a decoded position, with a cache of all positions."""
    length = workload.seq_len
    # Both fill the same cache of `length` positions, so they have the same programs.
    prompt = 3 * length // 4
    few, many = max(1, length - CACHE_MULTIPLE + 1 - prompt), length - prompt
    generator = np.random.default_rng(0)
    prompts = list(generator.integers(0, workload.vocab_size, (batch, prompt)))

    def generate(count: int) -> None:
        continue_rows(model, prompts, count, GREEDY, cache_kind=cache)

    def side(count: int) -> Any:
        return lambda steps: sample(functools.partial(generate, count), steps)

    sides = {"few": side(few), "many": side(many)}
    samples = interleave(sides, warm_up=1, steps=1, rounds=workload.rounds)
    pairs = zip(samples["many"], samples["few"], strict=True)
    differences = sorted((long.wall - short.wall) / (many - few) for long, short in pairs)
    return differences[len(differences) // 2]


if __name__ == "__main__":
    main()
