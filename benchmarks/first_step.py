"""Planning, tracing and compiling a step, compared with a step that a JAX expert writes by hand.

Measures four models on 1 and 8 CPU devices, each side in a fresh process, alternating: processor
time of planning and of compiling, and peak memory of the process. The expert's step is
`plain_gspmd`, with optax; zerojax takes the same optax chain or its own AdamW.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax
from benchmarks import plain_gspmd
from benchmarks.machine import load_average
from benchmarks.measuring import in_a_process
from benchmarks.recipe import CLIPPED
from benchmarks.recording import Goal, Record, add_arguments, save_so_far, write_record
from zerojax.zoo import GPT2, GPT2Config

DEVICES = (1, 8)
EXPERT, WITH_OPTAX, OWN = "expert", "zerojax, optax", "zerojax, own"
SIDES = (EXPERT, WITH_OPTAX, OWN)
REPEATS = 3
COMPILE_LIMIT = 1.15
LAYERS, TOKENS, WIDTH, HEADS, VOCAB = 12, 64, 64, 4, 512
DENSE = 100
"""Number of layers of the model with 200 arrays."""


class Block(nnx.Module):
    """One layer of a decoder; maps [rows, tokens, width] to the same shape."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        parts = jnp.split(self.qkv(self.norms[0](x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], HEADS, -1) for part in parts)
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Listed(nnx.Module):
    """A decoder that calls a list of layers."""

    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def loss(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = self.embed(batch["tokens"])
        for block in self.blocks:
            x = block(x)
        return _of_classes(self.head(x), batch["targets"])


class Dense(nnx.Module):
    """A model of linear layers with two arrays each."""

    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(layers)])

    def loss(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = batch["x"]
        for layer in self.layers:
            x = x + 0.1 * jnp.tanh(layer(x))
        return jnp.sum((x - batch["y"]) ** 2) / WIDTH, jnp.float32(x.shape[0])


class Convolutions(nnx.Module):
    """A small convolutional network whose layers all differ."""

    def __init__(self, widths: tuple[int, ...], rngs: nnx.Rngs) -> None:
        pairs = list(zip((3, *widths), widths, strict=False))
        self.convs = nnx.List([nnx.Conv(a, b, (3, 3), strides=1 + (a != b), rngs=rngs)
                               for a, b in pairs])  # fmt: skip
        self.norms = nnx.List([nnx.GroupNorm(b, num_groups=8, rngs=rngs) for _, b in pairs])
        self.head = nnx.Linear(widths[-1], 10, rngs=rngs)

    def loss(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = batch["x"]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return _of_classes(self.head(x.mean((1, 2))), batch["y"])


def _of_classes(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses), jnp.float32(losses.size)


def models(smoke: bool) -> dict[str, tuple[Callable[[nnx.Rngs], Any], dict[str, Any]]]:
    """Returns {name: (factory of the model, example of a global batch)}."""
    layers, dense = (2, 3) if smoke else (LAYERS, DENSE)
    widths = (8, 16) if smoke else (32, 32, 64, 64, 128, 128)
    config = GPT2Config(
        vocab_size=VOCAB, max_seq_len=TOKENS, num_layers=layers, num_heads=HEADS,
        embed_dim=WIDTH, tie_embeddings=False,
    )  # fmt: skip
    tokens = np.zeros((8, TOKENS), np.int32)
    rows = np.zeros((64, WIDTH), np.float32)
    images = {"x": np.zeros((16, 16, 16, 3), np.float32), "y": np.zeros(16, np.int32)}
    texts = {"tokens": tokens, "targets": tokens}
    return {
        "scan": (lambda rngs: GPT2(config, rngs=rngs), texts),
        f"list of {LAYERS}": (lambda rngs: Listed(layers, rngs), texts),
        f"{2 * DENSE} arrays": (lambda rngs: Dense(dense, rngs), {"x": rows, "y": rows}),
        "convolutions": (lambda rngs: Convolutions(widths, rngs), images),
    }


def main(argv: list[str] | None = None) -> None:
    """Writes the record; with `--one`, measures one side of one model in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="processes of each side")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "DEVICES", "SIDE"))
    arguments = parser.parse_args(argv)
    if arguments.one:
        model, devices, side = arguments.one
        print(json.dumps(measure_one(model, int(devices), side, arguments.smoke)))
        return
    load_before = load_average()
    record = Record(name="first_step", rows=[])
    for name in models(arguments.smoke):
        for devices in DEVICES:
            repeats = 1 if arguments.smoke else arguments.repeats
            record = _with_rows(record, name, devices, repeats=repeats, smoke=arguments.smoke)
            save_so_far(record, arguments, load_before)
    write_record(record, arguments, load_before)


def _with_rows(record: Record, name: str, devices: int, *, repeats: int, smoke: bool) -> Record:
    """Returns the record with three more rows and two more goals."""
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for repeat in range(repeats):
        for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
            words = ("--one", name, str(devices), side, *["--smoke"] * smoke)
            taken[side].append(in_a_process("benchmarks.first_step", *words))
    medians = {
        side: {key: statistics.median(one[key] for one in found) for key in found[0]}
        for side, found in taken.items()
    }
    above = medians[EXPERT]["compile_cpu_s"]
    ratios = {side: values["compile_cpu_s"] / above for side, values in medians.items()}
    rows = [
        {"model": name, "devices": devices, "side": side} | values | {"compile": ratios[side]}
        for side, values in medians.items()
    ]
    where = f"{name}, {devices} device{'s' * (devices > 1)}"
    goals = [
        Goal(name=f"compiling, {where}: {side} / expert", value=ratios[side], limit=COMPILE_LIMIT)
        for side in (WITH_OPTAX, OWN)
    ]
    return Record(name=record.name, rows=[*record.rows, *rows], goals=[*record.goals, *goals])


def measure_one(name: str, devices: int, side: str, smoke: bool) -> dict[str, float]:
    """Returns the cost of one side in this process: CPU seconds, and peak memory in MB."""
    jax.config.update("jax_num_cpu_devices", devices)
    factory, batch = models(smoke)[name]
    jax.block_until_ready(jnp.zeros(()) + 1)  # starts the devices
    tx: Any = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.01))
    if side == OWN:
        tx = zerojax.adamw(3e-4, b2=0.95, weight_decay=0.01, **CLIPPED)
    began = time.process_time()
    if side == EXPERT:
        planned = began
        lowered = plain_gspmd.lower_step(factory, tx, batch)
    else:
        plan = zerojax.make_plan(
            factory, zerojax.make_mesh({"data": devices}), example_batch=batch, optimizer=tx,
            zero=3 if devices > 1 else 1, precision="fp32",
        )  # fmt: skip
        planned = time.process_time()
        lowered = zerojax.build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    traced = time.process_time()
    compiled = lowered.compile()
    done = time.process_time()
    memory = compiled.memory_analysis()
    return {
        "plan_cpu_s": planned - began,
        "trace_cpu_s": traced - planned,
        "compile_cpu_s": done - traced,
        "peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "temporaries_MB": memory.temp_size_in_bytes / 1e6,
    }


if __name__ == "__main__":
    main()
