"""Planning of a Python list of layers, per layer, and of a model of many arrays: CPU seconds.

Every sample is a separate process; results are medians. Plans are for ZeRO 3 on 8 absent devices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import zerojax
from benchmarks import first_step
from benchmarks.machine import load_average
from benchmarks.measuring import in_a_process
from benchmarks.recipe import CLIPPED
from benchmarks.recording import Goal, Record, add_arguments, save_so_far, write_record

REPEATS = 3
DEVICES = 8
DEPTHS = (12, 48, 96)
ARRAYS = 2000
LAYER_LIMIT, ARRAYS_LIMIT = 0.03, 3.0
NNX, NNX_OPTAX, LINEN, DENSE = "nnx, own", "nnx, optax", "linen, own", "arrays, own"


class LinenBlock(nn.Module):
    """A layer of attention and MLP; maps [rows, tokens, width] to the same shape."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        seen = nn.MultiHeadDotProductAttention(num_heads=first_step.HEADS)(nn.LayerNorm()(x))
        x = x + seen
        up = nn.Dense(4 * first_step.WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(first_step.WIDTH)(nn.gelu(up))


class LinenList(nn.Module):
    """A decoder that calls a list of layers."""

    layers: int

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        x = nn.Embed(first_step.VOCAB, first_step.WIDTH)(batch["tokens"])
        for _ in range(self.layers):
            x = LinenBlock()(x)
        return nn.Dense(first_step.VOCAB, use_bias=False)(x)


def _linen_loss(model: Any, batch: Any) -> jax.Array:
    logits = model(batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def main(argv: list[str] | None = None) -> None:
    """Writes the record; with `--one`, plans one model in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="processes of each model")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "LAYERS"))
    arguments = parser.parse_args(argv)
    if arguments.one:
        kind, layers = arguments.one
        print(json.dumps(planning_seconds(kind, int(layers))))
        return
    load_before = load_average()
    depths = (2, 4) if arguments.smoke else DEPTHS
    dense = 4 if arguments.smoke else ARRAYS // 2
    cases = [(kind, depth) for kind in (NNX, NNX_OPTAX, LINEN) for depth in depths]
    record = Record(name="planning_time", rows=[])
    for kind, layers in [*cases, (DENSE, dense)]:
        repeats = 1 if arguments.smoke else arguments.repeats
        seconds = statistics.median(
            in_a_process("benchmarks.planning_time", "--one", kind, str(layers))
            for _ in range(repeats)
        )
        row = {"model": kind, "layers": layers, "plan_cpu_s": seconds}
        record = Record(name=record.name, rows=[*record.rows, row])
        save_so_far(record, arguments, load_before)
    write_record(
        Record(name=record.name, rows=record.rows, goals=_goals(record.rows)),
        arguments,
        load_before,
    )


def _goals(rows: Any) -> list[Goal]:
    goals = []
    for kind in (NNX, NNX_OPTAX, LINEN):
        first, *_, last = [row for row in rows if row["model"] == kind]
        more = last["plan_cpu_s"] - first["plan_cpu_s"]
        goals.append(
            Goal(
                name=f"{kind}: CPU s per layer, {first['layers']} to {last['layers']} layers",
                value=more / (last["layers"] - first["layers"]),
                limit=LAYER_LIMIT,
            )
        )
    name = f"{2 * rows[-1]['layers']} arrays: CPU s"
    return [*goals, Goal(name=name, value=rows[-1]["plan_cpu_s"], limit=ARRAYS_LIMIT)]


def planning_seconds(kind: str, layers: int) -> float:
    """Returns the CPU seconds of one call of `zerojax.make_plan`."""
    jax.block_until_ready(jnp.zeros(()) + 1)  # starts the devices
    tokens = np.zeros((DEVICES, first_step.TOKENS), np.int32)
    batch: dict[str, Any] = {"tokens": tokens, "targets": tokens}
    model: Callable[..., Any] | nn.Module
    if kind == DENSE:
        rows = np.zeros((64, first_step.WIDTH), np.float32)
        model, batch = lambda rngs: first_step.Dense(layers, rngs), {"x": rows, "y": rows}
    elif kind == LINEN:
        model = LinenList(layers)
    else:
        model = lambda rngs: first_step.Listed(layers, rngs)  # noqa: E731
    tx: Any = zerojax.adamw(3e-4, b2=0.95, weight_decay=0.01, **CLIPPED)
    if kind == NNX_OPTAX:
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.01))
    mesh = zerojax.make_abstract_mesh({"data": DEVICES}, DEVICES)
    began = time.process_time()
    zerojax.make_plan(
        model, mesh, example_batch=batch, optimizer=tx, zero=3, precision="fp32",
        loss=_linen_loss if kind == LINEN else None,
    )  # fmt: skip
    return time.process_time() - began


if __name__ == "__main__":
    main()
