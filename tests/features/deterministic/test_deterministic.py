"""`deterministic="mesh"`: the same bits on 8, 4, 2 and 1 devices.

Every metric of every step and every array of the last state is compared byte by byte. The quick
tests take one way through; the whole matrix is slow.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.mesh_free_runs import Layers, differences, plan_on, run
from tests.support.recipe import RECIPE
from tests.support.small_models import reference_model
from tests.support.trajectories import regression_batch, text_batch
from zerojax.config import LossScale, MeshConfig
from zerojax.optim import adamw, lamb
from zerojax.optim.precision import as_precision
from zerojax.placement.device_mesh import make_mesh
from zerojax.placement.leaf_placement import Access
from zerojax.plan.make import make_plan
from zerojax.step.build import build_step
from zerojax.transport.sums import TreeOrder, run_in_barriers, tree_sum, tree_total

slow = pytest.mark.slow


# Each is run once on 8 devices.
@functools.cache
def on_eight(case: str, zero: int) -> dict[str, np.ndarray]:
    return run_case(case, zero, 8)


def run_case(case: str, zero: int, devices: int) -> dict[str, np.ndarray]:
    options: dict[str, Any] = {"zero": zero}
    batch = {}
    if case == "bf16":
        options["precision"] = "bf16"
    elif case == "fp16":
        scale = LossScale(initial=2.0**13, window=4, hysteresis=1)
        options["precision"] = as_precision("fp16", loss_scale=scale)
    elif case == "bf16 moments":
        options["precision"] = as_precision("bf16", param_dtype="bf16", moments_dtype="bf16")
    elif case == "16 shards":
        options["virtual_shards"] = 16
    elif case == "gpt":
        options["model"] = reference_model("gpt2", dropout=0.1)
        batch = {"batch": text_batch}
    return run(plan_on(devices, **options, **batch), **batch)


def assert_same_bits(case: str, zero: int, devices: int) -> dict[str, np.ndarray]:
    found, expected = run_case(case, zero, devices), on_eight(case, zero)
    assert differences(found, expected) == []
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("zero", "devices"), [(1, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_same_bits(zero, devices):
    found = assert_same_bits("fp32", zero, devices)
    losses = found["metrics/loss"]
    assert losses[-1] < losses[0]
    assert np.ptp(found["metrics/grad_norm"]) > 0
    assert (found["metrics/grad_norm"] > 0.5).any(), "nothing was clipped"


@slow
@pytest.mark.parametrize("devices", [4, 2, 1])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("case", ["fp32", "bf16", "fp16", "bf16 moments", "16 shards", "gpt"])
def test_same_bits_everywhere(case, zero, devices):
    found = assert_same_bits(case, zero, devices)
    if case == "fp16":
        skipped = found["metrics/skipped"].sum()
        assert 0 < skipped < len(found["metrics/skipped"]), f"{skipped} steps overflowed"


@pytest.mark.parametrize(
    ("model", "zero", "devices"),
    [
        pytest.param("transformer", 1, 1, marks=pytest.mark.thorough),
        pytest.param("transformer", 3, 2, marks=slow),
        pytest.param("layers", 1, 2, marks=slow),
        pytest.param("layers", 3, 2, marks=slow),
    ],
)
def test_same_bits_of_programs_as_users_compile_them(model, zero, devices):
    """With all optimisations, and with instructions that multiply and add at once: which products
    they take depends on what is fused, which `tests/conftest.py` spares the other tests."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
        environment.pop(name, None)
    finished = subprocess.run(
        [sys.executable, "-m", "tests.support.mesh_free_runs", model, str(zero), "8", str(devices)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "differences: []"


def test_a_loop_over_pieces_stays_a_loop():
    """XLA's CPU compiler turns a small loop into one function, with other bits of sums than those
    of a piece alone. It must not do so with what runs in barriers, also when a result is unused."""

    def sums(x: jax.Array, *, barriers: bool) -> jax.Array:
        of_piece = lambda y: (jnp.sum(y * y), y + 1)  # noqa: E731

        def one(number: jax.Array, found: jax.Array) -> jax.Array:
            piece = x[number]
            result = run_in_barriers("branch", x, of_piece, piece) if barriers else of_piece(piece)
            return found.at[number].set(result[0])

        return jax.lax.fori_loop(0, len(x), one, jnp.zeros(len(x)))

    def is_function(*, barriers: bool) -> bool:
        x = jax.ShapeDtypeStruct((8, 4, 4), jnp.float32)
        lowered = jax.jit(functools.partial(sums, barriers=barriers)).lower(x)
        return "xla_cpu_small_call" in lowered.compile().as_text()

    if not is_function(barriers=False):
        pytest.skip("this XLA keeps small loops")
    assert not is_function(barriers=True)


def test_a_division_is_a_division():
    """As a product with a reciprocal, 49 / 49 is below 1 in float32."""
    rows = np.arange(1, 129, dtype=np.float32).reshape(16, 8)

    def loss(model, batch):
        whole = jnp.floor(batch["x"] / batch["y"]) + jnp.floor(batch["x"] / batch["x"])
        return jnp.mean(jnp.square(model(whole)))

    def losses(**options):
        plan = make_plan(
            lambda rngs: nnx.Linear(8, 3, rngs=rngs),
            make_mesh({"data": 8}),
            example_batch={"x": rows, "y": rows},
            loss=loss,
            precision="fp32",
            **options,
        )
        batch = zerojax.shard_batch(plan, {"x": rows, "y": rows})
        return float(build_step(plan)(zerojax.init_state(plan, 0), batch)[1]["loss"])

    assert losses(deterministic="mesh") == pytest.approx(losses(), rel=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("order", TreeOrder)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_one_tree_whatever_is_local(order, devices):
    """What devices have is combined before or after what lies on one device, in one tree."""
    values = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32) * 1e3
    local = 8 // devices
    rows = jnp.asarray(values).reshape(devices, local, 5)

    def total(row_of: Any) -> jax.Array:
        like = jax.ShapeDtypeStruct((row_of(0).shape), jnp.float32)
        value_of = lambda number, carried: (row_of(number), carried)  # noqa: E731
        return tree_total(value_of, local, order, like=like, carried=None)[0]

    if order is TreeOrder.LOWEST_FIRST:
        partial = [total(lambda number, d=d: rows[d][number]) for d in range(devices)]
        found = tree_sum(jnp.stack(partial), order)
    else:
        found = total(lambda number: tree_sum(rows[:, number], order))
    pairs = values
    while len(pairs) > 1:
        half = len(pairs) // 2
        if order is TreeOrder.LOWEST_FIRST:
            pairs = pairs[0::2] + pairs[1::2]
        else:
            pairs = pairs[:half] + pairs[half:]
    assert np.asarray(found).tobytes() == pairs[0].tobytes()


def test_a_sum_of_negative_zeros_stays_one():
    rows = jnp.full((4, 1), -0.0)
    like = jax.ShapeDtypeStruct((1,), jnp.float32)
    total, _ = tree_total(
        lambda i, c: (rows[i], c), 4, TreeOrder.LOWEST_FIRST, like=like, carried=None
    )
    assert np.signbit(np.asarray(total)).all()


def test_the_plan_says_it():
    plan = plan_on(4, zero=3)
    assert plan.num_microbatches == 2
    assert "deterministic over meshes: 8 virtual shards" in plan.describe()
    assert "computes 2 of 8 virtual shards" in plan.table()
    assert plan.as_dict()["virtual_shards"] == 8
    assert plan_on(4, deterministic=None).as_dict()["deterministic"] is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", range(4))
def test_no_collective_adds_up(zero):
    """The order in which a collective adds is the backend's, and another on another mesh."""
    plan = plan_on(8, zero=zero)
    program = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).as_text()
    assert "all_to_all" in program
    assert "all_reduce" not in program
    assert "reduce_scatter" not in program


@pytest.mark.thorough
def test_train_takes_the_keyword():
    """Also where the mesh is made by the user; a plan for another mesh keeps it."""
    trainer = zerojax.train(
        Layers,
        make_mesh({"data": 2, "stage": 1}, jax.devices()[:2]),
        [regression_batch(0)],
        deterministic="mesh",
        optimizer=adamw(1e-3, **RECIPE),
        steps=1,
        run_dir=None,
    )
    assert trainer.plan.settings.deterministic == "mesh"
    assert trainer.plan.num_microbatches == 4
    moved = trainer.plan.remake(make_mesh({"data": 4}, jax.devices()[:4]))
    assert moved.num_microbatches == 2


def test_places_do_not_depend_on_the_mesh():
    tables = [plan_on(devices, zero=3).placement.leaves for devices in (8, 4, 2, 1)]
    assert all(table == tables[0] for table in tables)
    assert {leaf.access for leaf in tables[0].values()} >= {Access.GATHER_ON_USE}


def test_what_is_read_twice_is_gathered_once():
    """Scattered read by read, its sums would be combined after devices, not before."""
    leaves = plan_on(8, zero=3, persistence_threshold=0).placement.leaves
    assert leaves["scale"].access is Access.GATHER_ONCE
    assert "read more than once" in leaves["scale"].reasons[-1]
    assert leaves["blocks/linear/kernel"].access is Access.GATHER_ON_USE
    tied = plan_on(8, reference_model("gpt2"), batch=text_batch, zero=2).placement.leaves
    accesses = {name: leaf.access for name, leaf in tied.items()}
    assert accesses["token_embedding/embedding"] is Access.GATHER_ONCE
    plain = plan_on(8, zero=3, persistence_threshold=0, deterministic=None).placement.leaves
    assert plain["scale"].access is Access.GATHER_ON_USE


REFUSED = {
    "3 devices": (
        {"devices": 3},
        "data=3: virtual_shards=8 is not divisible by 3 devices; use 2 devices",
    ),
    "8 devices, 4 pieces": (
        {"devices": 8, "virtual_shards": 4},
        "not divisible by 8 devices; use virtual_shards=8, or 4 devices",
    ),
    "16 pieces of 24": ({"devices": 4, "batch": 24, "virtual_shards": 16}, "use 16 or 32"),
    "other microbatches": ({"devices": 4, "num_microbatches": 4}, "use virtual_shards=16"),
    "lamb": ({"devices": 4, "optimizer": lamb(1e-3)}, "use zerojax.adamw, lion or sgd"),
    "bf16 sums": (
        {"devices": 4, "precision": "bf16", "accumulate_dtype": "bf16"},
        "use accumulate_dtype='fp32'",
    ),
    "offload": ({"devices": 4, "offload": {"opt_state": "host"}}, "leave offload or deterministic"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exact_is_refused(case):
    options, remedy = REFUSED[case]
    options = dict(options)
    rows = options.pop("batch", None)
    if rows:
        batch = {"x": np.zeros((rows, 12), np.float32), "y": np.zeros((rows, 5), np.float32)}
        options["batch"] = lambda _: batch
    with pytest.raises(ValueError, match=remedy):
        plan_on(**options)


@pytest.mark.parametrize("count", [0, 6, 12])
def test_virtual_shards_are_a_power_of_two(count):
    with pytest.raises(ValueError, match=f"virtual_shards.*{count}"):
        MeshConfig(deterministic="mesh", virtual_shards=count)
