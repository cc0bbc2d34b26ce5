"""Launches and bytes of the whole update phase, compiled for an H200: XLA's fusions and kernels.

The update phase follows the backward pass: unscale, finite check, norm, clip, update and skip. The
cast of weights to the compute dtype belongs to the next step and has separate rows: as it is now,
and by an update that also writes a copy of the weights. Needs the extra `plan`; nothing here is a
measurement of a GPU (`benchmarks/gpu/optimizer.py` measures).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import zerojax
from benchmarks.machine import load_average
from benchmarks.recipe import DECAYED
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from pallas_kernels import choice, optimizers
from pallas_kernels.update import update as update_leaf
from pallas_kernels.update import update_trees
from zerojax import passes
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.optim.precision import as_precision
from zerojax.passes.update import ThisStep, build_norm, build_update
from zerojax.placement.device_mesh import make_mesh
from zerojax.step.build import pass_config

CARD = "h200"
WIDTH, LAYERS, VOCAB, LENGTH = 768, 12, 50257, 1024
MOST_BYTES = 1.02
"""Limit of the bytes that the kernels move, relative to XLA's fusions. Muon's kernels write a
direction that XLA fuses with its norm."""
LAUNCHES = ("fusion", "custom-call", "copy", "fusion-start", "sort", "reduce")
WITHOUT_MASTERS = "bf16 without masters"
CASES = (
    ("adamw", "fp16"),
    ("adamw", "bf16"),
    ("adamw", WITHOUT_MASTERS),
    ("lion", "bf16"),
    ("sgd", "bf16"),
    ("lamb", "bf16"),
    ("adam8bit", "bf16"),
    ("muon", "bf16"),
)
PRODUCTS = "newton_schulz"
"""Named scope of Muon's matrix products, which XLA computes in both ways."""
CASTS = (
    "each weight, by the next step (one device, stage 3)",
    "into the buckets of the next step's gathers (stages 1, 2)",
    "kept copies into these buckets",
)
UPDATES = ("AdamW", "AdamW that leaves a copy")


def main(argv: list[str] | None = None) -> None:
    """Compiles the cases and writes the record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Returns a row per optimizer, precision, form of the model and implementation."""
    why = choice.missing() or compile_client.missing()
    if why is not None:
        return Record(name="update_phase", rows=[], notes=[why])
    forms = {"a list": _shapes(2 if smoke else LAYERS, stacked=False)}
    if not smoke:
        forms["stacked"] = _shapes(LAYERS, stacked=True)
    rows = [
        {"optimizer": name, "precision": precision, "model": form, **_read(shapes, *case, way)}
        for form, shapes in forms.items()
        for case in (CASES[:1] if smoke else CASES)
        for name, precision in (case,)
        for way in ("xla", "mosaic_gpu")
    ]
    goals = [
        Goal(
            name=f"{ours['optimizer']}, {ours['precision']}, {ours['arrays']} arrays: bytes of the "
            "kernels / of XLA's fusions",
            value=ours["bytes_per_parameter"] / xla["bytes_per_parameter"],
            limit=MOST_BYTES,
        )
        for xla, ours in zip(rows[::2], rows[1::2], strict=True)
    ]
    sizes = sum(math.prod(shape) for shape in forms["a list"].values())
    notes = [
        f"compiled for one {CARD}; GPT-2, {sizes / 1e6:.1f} million parameters; statistics, "
        "clipping and skipping included; gradients as the backward pass leaves them (float32); "
        "launches of Muon's products of matrices are counted apart, their bytes are among all"
    ]
    rows += cast_rows(forms["a list"])
    return Record(name="update_phase", rows=rows, goals=goals, notes=notes)


def cast_rows(shapes: dict[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    """Returns the cost of bfloat16 weights, cast by the next step or written by the update."""
    (device,) = compile_client.gpu_devices(find_gpu(CARD), 1)
    place = NamedSharding(make_mesh({}, [device]), P())
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=place)

    def tree(dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        return {n: jax.ShapeDtypeStruct(x, dtype, sharding=place) for n, x in shapes.items()}

    def cast(params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def bucket(params: Any) -> jax.Array:
        return jnp.concatenate([x.astype(jnp.bfloat16).reshape(-1) for x in params.values()])

    def update(way: str, outputs: tuple[Any, ...]) -> Callable[..., Any]:
        def run(state: Any, grads: Any, rate: jax.Array, count: jax.Array) -> Any:
            scalars = optimizers.adam_scalars(rate, count=count, weight_decay=0.1)
            more = {"scalars": scalars, "out_dtypes": outputs}
            chosen = choice.Choice(way, "compiled")  # type: ignore[arg-type]
            leaf = functools.partial(update_leaf, optimizers.ADAMW, impl=chosen, **more)
            found = update_trees(leaf, state, (grads,))
            return found.updated, found.outputs

        return run

    def count(what: str, way: str, program: Any, *given: Any, donated: Any = ()) -> dict[str, Any]:
        found = compile_client.compile_for_gpus(jax.jit(program, donate_argnums=donated), *given)
        return {"cast": what, "way": way, **_counted(found.text, shapes)}

    whole, half = tree(jnp.float32), tree(jnp.bfloat16)
    programs = zip(CASTS, ((cast, whole), (bucket, whole), (bucket, half)), strict=True)
    rows = [count(what, "xla", *program) for what, program in programs]
    given = ((whole, whole, whole), whole, number, number)
    for way in ("xla", "mosaic_gpu"):
        for what, outputs in zip(UPDATES, ((), (jnp.bfloat16,)), strict=True):
            rows.append(count(what, way, update(way, outputs), *given, donated=0))
    return rows


class Arrays(nnx.Module):
    """A model of arrays with given shapes; its loss reads each array."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape)))

    def loss(self, batch: dict) -> jax.Array:
        leaves = jax.tree.leaves(nnx.state(self, nnx.Param))
        return sum(jnp.sum(jnp.sin(x)) for x in leaves) * jnp.mean(batch["x"])


def _shapes(layers: int, *, stacked: bool) -> dict[str, tuple[int, ...]]:
    """Returns GPT-2's shapes: 12 arrays per layer, or 12 stacks, and 4 others."""
    layer = {
        **{f"norm{k}_{name}": (WIDTH,) for k in (1, 2) for name in ("scale", "bias")},
        "qkv_kernel": (WIDTH, 3 * WIDTH),
        "qkv_bias": (3 * WIDTH,),
        "out_kernel": (WIDTH, WIDTH),
        "out_bias": (WIDTH,),
        "up_kernel": (WIDTH, 4 * WIDTH),
        "up_bias": (4 * WIDTH,),
        "down_kernel": (4 * WIDTH, WIDTH),
        "down_bias": (WIDTH,),
    }
    others = {
        "tokens": (VOCAB, WIDTH),
        "positions": (LENGTH, WIDTH),
        "norm_scale": (WIDTH,),
        "norm_bias": (WIDTH,),
    }
    if stacked:
        return {**{name: (layers, *shape) for name, shape in layer.items()}, **others}
    letters = "abcdefghijkl"[:layers]  # names with numbers would be recognized as a list of layers
    return {**{f"{k}_{n}": shape for k in letters for n, shape in layer.items()}, **others}


def _read(shapes: dict, optimizer: str, precision: str, way: str) -> dict[str, Any]:
    found = compile_phase(_plan(shapes, optimizer, precision, way))
    return {
        "arrays": len(shapes),
        "way": way,
        "kernels": found.text.count('custom_call_target="mosaic_gpu_v2"'),
        **_counted(found.text, shapes),
        "temporary_MB": found.memory.temporary / 1e6,
    }


def _counted(text: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Counts launches and bytes per parameter of a compiled program."""
    parameters = sum(math.prod(shape) for shape in shapes.values())
    program = hlo.read_program(text)
    launched = [one for one in program.entry.instructions if one.opcode in LAUNCHES]
    products = [one for one in launched if PRODUCTS in one.attribute_text]
    found = {
        "launches": len(launched) - len(products),
        "bytes_per_parameter": hlo.hbm_bytes(program) / parameters,
    }
    return found | ({"products": len(products)} if products else {})


def _plan(shapes: dict, optimizer: str, precision: str, way: str) -> zerojax.Plan:
    masters = precision != WITHOUT_MASTERS
    more = {} if masters else {"param_dtype": "bf16", "moments_dtype": "bf16"}
    return zerojax.make_plan(
        lambda rngs: Arrays(shapes),
        make_mesh({}, compile_client.gpu_devices(find_gpu(CARD), 1)),
        example_batch={"x": jax.ShapeDtypeStruct((1, 8), jnp.float32)},
        optimizer=_optimizer(optimizer),
        precision=as_precision("bf16", **more) if precision != "fp16" else "fp16",
        kernels=way,
        zero=1,
        roll="off",
    )


def _optimizer(name: str) -> Any:
    if name == "muon":
        return zerojax.optim.muon(1e-3, weight_decay=0.1, dimensions=_matrices, clip_norm=1.0)
    return getattr(zerojax.optim, name)(1e-3, **DECAYED)


def _matrices(params: dict[str, Any]) -> dict[str, Any]:
    matrix = MuonDimensionNumbers(-2, -1)
    return {name: matrix if name.endswith("kernel") else None for name in params}


def compile_phase(plan: zerojax.Plan) -> compile_client.CompiledProgram:
    """Compiles the update phase of a plan's step alone."""
    norm, update = build_norm(plan), build_update(plan)

    def phase(grads: Any, state: Any, loss: jax.Array, weight: jax.Array) -> Any:
        scale = 1 / weight
        read = norm(grads, scale)
        finite = jnp.isfinite(loss) & jnp.isfinite(read.norm)
        now = ThisStep(scale, read.norm, ~finite, jax.random.key(0), loss)
        params, opt_state = update(grads, state, now)
        # In the order of the donated arrays, so that each array is updated in place.
        return {"params": params, "opt_state": opt_state}, read.norm

    state = plan.abstract_state
    grads = _abstract_gradients(plan)
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(plan.mesh, P()))
    trained = {name: state[name] for name in ("params", "opt_state")}
    program = jax.jit(phase, donate_argnums=1)
    return compile_client.compile_for_gpus(program, grads, trained, number, number)


def _abstract_gradients(plan: zerojax.Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of the gradients that the plan's backward pass returns."""
    state, key = plan.abstract_state, jax.random.key_data(jax.random.key(0))
    given = (state["params"], state["frozen"], state["extras"], key, plan.abstract_batch, None)
    grads = jax.eval_shape(passes.build_gradients(pass_config(plan)), *given)[1]
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=state["params"][name].sharding)
        for name, x in grads.items()
    }


if __name__ == "__main__":
    main()
