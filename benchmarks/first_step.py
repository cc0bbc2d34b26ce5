"""Planning, tracing and compiling a step, compared with a step that a JAX expert writes by hand.

Measures six models on one CPU device, and at every ZeRO stage on eight, each side in a fresh
process, alternating: processor time of planning and of compiling, and peak memory of the process.
The expert's step is `plain_gspmd` at the same stage, with optax; zerojax takes the same optax chain
or its own AdamW. The last rows are a GPT of 7 billion parameters with a Python list of 32 layers,
compiled for 8 H100 without a GPU, if the extra `plan` is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.zoo import GPT2, GPT2Config

CASES = ((1, 1), (8, 0), (8, 1), (8, 2), (8, 3))
"""(number of devices, ZeRO stage) of each row."""
EXPERT, WITH_OPTAX, OWN = "expert", "zerojax, optax", "zerojax, own"
SIDES = (EXPERT, WITH_OPTAX, OWN)
REPEATS = 1
COMPILE_LIMIT = 1.15
LAYERS, TOKENS, WIDTH, HEADS, VOCAB = 12, 64, 64, 4, 512
EXPERTS, EXPERT_LAYERS = 8, 4
ON_GPUS = ("GPT 7B, list of 32", "h100", 8)
"""(model, card, number of cards) of the rows that are compiled without a GPU."""
GPU_STAGES = (1, 3)
DENSE = 100
"""Number of layers of the model with 200 arrays."""


@dataclasses.dataclass(frozen=True)
class ListSizes:
    """Sizes of a decoder that is a list of layers, and of its batch of `rows` sequences."""

    width: int = WIDTH
    heads: int = HEADS
    vocab: int = VOCAB
    tokens: int = TOKENS
    rows: int = 8


SMALL = ListSizes()
GPT_7B = ListSizes(width=4096, heads=32, vocab=50304, tokens=2048)
LAYERS_OF_7B = 32


class Block(nnx.Module):
    """One layer of a decoder; maps [rows, tokens, width] to the same shape."""

    def __init__(self, rngs: nnx.Rngs, sizes: ListSizes = SMALL) -> None:
        width, self.heads = sizes.width, sizes.heads
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        parts = jnp.split(self.qkv(self.norms[0](x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], self.heads, -1) for part in parts)
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Listed(nnx.Module):
    """A decoder that calls a list of layers."""

    def __init__(self, layers: int, rngs: nnx.Rngs, sizes: ListSizes = SMALL) -> None:
        self.embed = nnx.Embed(sizes.vocab, sizes.width, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, sizes) for _ in range(layers)])
        self.head = nnx.Linear(sizes.width, sizes.vocab, use_bias=False, rngs=rngs)

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


class Cells(nnx.Module):
    """A layer of LSTM cells; maps [rows, tokens, width] to the same shape."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gates = nnx.Linear(2 * WIDTH, 4 * WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(carry: Any, x: jax.Array) -> Any:
            hidden, memory = carry
            taken, forgotten, shown, new = jnp.split(
                self.gates(jnp.concatenate([x, hidden], axis=-1)), 4, axis=-1
            )
            memory = nnx.sigmoid(forgotten) * memory + nnx.sigmoid(taken) * jnp.tanh(new)
            hidden = nnx.sigmoid(shown) * jnp.tanh(memory)
            return (hidden, memory), hidden

        zeros = jnp.zeros_like(x[:, 0])
        return jax.lax.scan(step, (zeros, zeros), x.swapaxes(0, 1))[1].swapaxes(0, 1)


class Recurrent(nnx.Module):
    """Two layers of LSTM cells over tokens."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([Cells(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def loss(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = self.embed(batch["tokens"])
        for layer in self.layers:
            x = layer(x)
        return _of_classes(self.head(x), batch["targets"])


class Mixture(nnx.Module):
    """Two of `EXPERTS` MLPs for each token; every device has all of them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        draw = nnx.initializers.lecun_normal(batch_axis=0)
        self.up = nnx.Param(draw(rngs.params(), (EXPERTS, WIDTH, 2 * WIDTH)))
        self.down = nnx.Param(draw(rngs.params(), (EXPERTS, 2 * WIDTH, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        weights, chosen = jax.lax.top_k(nnx.softmax(self.gate(x)), 2)
        shares = jnp.einsum("btk,btke->bte", weights, jax.nn.one_hot(chosen, EXPERTS))
        hidden = nnx.silu(jnp.einsum("btd,edf->btef", x, self.up[...]))
        return jnp.einsum("btef,efd,bte->btd", hidden, self.down[...], shares)


class WithExperts(nnx.Module):
    """A decoder with experts after each layer."""

    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.mixtures = nnx.List([Mixture(rngs) for _ in range(layers)])
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def loss(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = self.embed(batch["tokens"])
        for block, mixture in zip(self.blocks, self.mixtures, strict=True):
            x = block(x)
            x = x + mixture(x)
        return _of_classes(self.head(x), batch["targets"])


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
        "LSTM": (Recurrent, texts),
        "experts": (lambda rngs: WithExperts(1 if smoke else EXPERT_LAYERS, rngs), texts),
    }


def large_list(smoke: bool) -> tuple[Callable[[nnx.Rngs], Any], dict[str, Any]]:
    """Returns the factory of GPT 7B with a list of layers, and an example of its global batch."""
    sizes, layers = (SMALL, 2) if smoke else (GPT_7B, LAYERS_OF_7B)
    tokens = np.zeros((sizes.rows, sizes.tokens), np.int32)
    return lambda rngs: Listed(layers, rngs, sizes), {"tokens": tokens, "targets": tokens}


def main(argv: list[str] | None = None) -> None:
    """Writes the record; with `--one`, measures one side of one model in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="processes of each side")
    parser.add_argument("--gpus", action="store_true", help="only GPT 7B for 8 H100, own record")
    parser.add_argument("--one", nargs=4, metavar=("MODEL", "DEVICES", "ZERO", "SIDE"))
    arguments = parser.parse_args(argv)
    if arguments.one:
        model, devices, zero, side = arguments.one
        found = measure_one(model, int(devices), int(zero), side, smoke=arguments.smoke)
        print(json.dumps(found))
        return
    load_before = load_average()
    why = compile_client.missing() if arguments.gpus else None
    if why is not None:
        raise SystemExit(why)
    record = Record(name="first_step_gpus" if arguments.gpus else "first_step", rows=[])
    names = [ON_GPUS[0]] if arguments.gpus else [*models(arguments.smoke)]
    cases = [(ON_GPUS[2], zero) for zero in GPU_STAGES] if arguments.gpus else [*CASES]
    for name in names:
        for case in cases[:3] if arguments.smoke else cases:
            repeats = 1 if arguments.smoke else arguments.repeats
            record = _with_rows(record, name, case, repeats=repeats, smoke=arguments.smoke)
            save_so_far(record, arguments, load_before)
    write_record(record, arguments, load_before)


def _with_rows(
    record: Record, name: str, case: tuple[int, int], *, repeats: int, smoke: bool
) -> Record:
    """Returns the record with three more rows and two more goals."""
    devices, zero = case
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for repeat in range(repeats):
        for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
            words = ("--one", name, str(devices), str(zero), side, *["--smoke"] * smoke)
            taken[side].append(in_a_process("benchmarks.first_step", *words))
    medians = {
        side: {key: statistics.median(one[key] for one in found) for key in found[0]}
        for side, found in taken.items()
    }
    above = medians[EXPERT]["compile_cpu_s"]
    ratios = {side: values["compile_cpu_s"] / above for side, values in medians.items()}
    rows = [
        {"model": name, "devices": devices, "zero": zero, "side": side}
        | values
        | {"compile": ratios[side]}
        for side, values in medians.items()
    ]
    where = title(name, devices, zero)
    goals = [
        Goal(name=f"compiling, {where}: {side} / expert", value=ratios[side], limit=COMPILE_LIMIT)
        for side in (WITH_OPTAX, OWN)
    ]
    return Record(name=record.name, rows=[*record.rows, *rows], goals=[*record.goals, *goals])


def title(name: str, devices: int, zero: int) -> str:
    """Returns the words for a case in the name of a goal."""
    return f"{name}, {f'{devices} devices, stage {zero}' if devices > 1 else '1 device'}"


def measure_one(name: str, devices: int, zero: int, side: str, *, smoke: bool) -> dict[str, float]:
    """Returns the cost of one side in this process.

    Returns:
      CPU seconds; MB of this process at its peak; MB of each device, for temporaries and at the
      peak of a step, state included (zerojax keeps weights sharded and gathers them in each step).
    """
    jax.config.update("jax_num_cpu_devices", devices)
    on_gpus = name == ON_GPUS[0]
    factory, batch = large_list(smoke) if on_gpus else models(smoke)[name]
    jax.block_until_ready(jnp.zeros(()) + 1)  # starts the devices
    used = compile_client.gpu_devices(find_gpu(ON_GPUS[1]), devices) if on_gpus else jax.devices()
    tx: Any = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.01))
    if side == OWN:
        tx = zerojax.adamw(3e-4, b2=0.95, weight_decay=0.01, **CLIPPED)
    began = time.process_time()
    if side == EXPERT:
        planned = began
        lowered = plain_gspmd.lower_step(factory, tx, batch, zero=zero, devices=used)
    else:
        mesh = zerojax.make_mesh({"data": devices}, devices=used)
        plan = zerojax.make_plan(
            factory, mesh, example_batch=batch, optimizer=tx, zero=zero, precision="fp32"
        )
        planned = time.process_time()
        lowered = zerojax.build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    traced = time.process_time()
    if on_gpus:
        memory = compile_client.compile_for_gpus(lowered).memory
    else:
        memory = compile_client.memory_of(lowered.compile())
    return {
        "plan_cpu_s": planned - began,
        "trace_cpu_s": traced - planned,
        "compile_cpu_s": time.process_time() - traced,
        "peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "temporaries_MB": memory.temporary / 1e6,
        "device_peak_MB": memory.peak / 1e6,
    }


if __name__ == "__main__":
    main()
