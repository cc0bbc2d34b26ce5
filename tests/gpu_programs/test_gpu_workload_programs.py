"""What `benchmarks/gpu` will run at its full sizes, compiled for an H100.

Needs the compile-only client (extra `plan`), no GPU: pytest -m gpu_programs
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import optimizer, plain_jax
from benchmarks.gpu import optimizer as gpu_optimizer
from benchmarks.gpu.subjects import make_factory, make_optimizer, make_source
from benchmarks.gpu.workloads import choose_workload
from pallas_kernels import choice
from tests.support.marks import needs_kernels
from zerojax.forecasting import forecast, hlo
from zerojax.forecasting.compiled_step import forecast_attached
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import make_plan
from zerojax.step.build import build_step

pytestmark = [pytest.mark.gpu_programs, pytest.mark.slow]
ROOM = 0.9 * 78 * 2**30
"""What JAX is given of the memory that an H100 has free (`benchmarks/gpu/run.sh`)."""


@pytest.fixture(scope="module")
def devices():
    return compile_client.gpu_devices(find_gpu("h100"), 1)


@pytest.fixture(scope="module")
def on_device(devices):
    return NamedSharding(Mesh(np.array(devices), ("x",)), P())


def abstract(tree, sharding):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_both_sides_fit_even_where_neither_gets_the_others_place(name, devices, on_device):
    workload = choose_workload(name, smoke=False)
    factory, batch = make_factory(workload), make_source(workload, 1).batch(0)
    plan = make_plan(
        factory,
        make_mesh({"data": 1}, devices),
        example_batch=abstract(batch, None),
        optimizer=make_optimizer(),
        precision="bf16",
    )
    lowered = build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
    ours = compile_client.compile_for_gpus(lowered, options=compile_client.FAST_OPTIONS).memory
    params = jax.eval_shape(lambda: plain_jax.init_params(factory))
    opt_state = jax.eval_shape(make_optimizer().init, params)
    step = plain_jax.build_step(factory, make_optimizer(), compute_dtype=jnp.bfloat16)
    arguments = abstract((params, opt_state, batch), on_device)
    bare = compile_client.compile_for_gpus(
        step, *arguments, options=compile_client.FAST_OPTIONS
    ).memory
    assert ours.arguments == pytest.approx(bare.arguments, rel=0.01)
    assert ours.peak + bare.peak < ROOM


def test_a_run_predicts_from_its_own_program_what_a_plan_predicts(devices):
    workload = choose_workload("gpt2", smoke=True)
    plan = make_plan(
        make_factory(workload),
        make_mesh({"data": 1}, devices),
        example_batch=make_source(workload, 1).batch(0),
        optimizer=make_optimizer(),
        precision="bf16",
    )
    with compile_client.without_cache():
        mine = forecast_attached(plan, build_step(plan), find_gpu("h100"))
    assert mine.estimate == forecast(plan, gpu="h100").estimate


MANY = [("adamw", "XLA"), ("adamw", "kernel"), ("stats", "kernel")]
CASES = [("1 leaf", kind, way) for kind in optimizer.BYTES for way in ("XLA", "kernel", "optax")]
CASES += [("148 leaves", *one) for one in MANY]
CASES.remove(("1 leaf", "adam8bit", "optax"))


@needs_kernels
@pytest.mark.parametrize(("layout", "kind", "name"), CASES, ids=lambda x: str(x).replace(" ", "_"))
def test_ten_updates_in_one_program_each_read_and_write_all_in_place(
    layout, kind, name, on_device, monkeypatch
):
    """Nothing is computed once for all rounds, nothing is copied between them."""
    monkeypatch.setattr(
        gpu_optimizer, "choose", lambda *_, **__: choice.Choice("mosaic_gpu", "compiled only")
    )
    shapes = gpu_optimizer.LAYOUTS[layout]
    ours, _ = gpu_optimizer.implementations(kind, smoke=False, many_leaves=len(shapes) > 1)
    way = optimizer.ways_of(kind, shapes, ours)[name]
    rounds = gpu_optimizer.UPDATES
    compiled = optimizer.compile_way(way, shapes, rounds, on_device)
    memory, program = compile_client.memory_of(compiled), hlo.read_program(compiled.as_text())
    assert memory.temporary < 0.01 * memory.arguments
    outside = [c for c in program.computations.values() if not c.name.startswith("fused")]
    found = [(program.times_run(c.name), i) for c in outside for i in c.instructions]
    copied = sum(i.bytes for _, i in found if i.opcode in ("copy", "copy-start"))
    assert copied < 0.01 * memory.arguments
    launched = [(times, i) for times, i in found if i.opcode in gpu_optimizer.LAUNCHES]
    large = [(times, i.bytes) for times, i in launched if i.bytes > 1000]
    assert large
    assert {times for times, _ in large} == {rounds}
    if kind != "stats":  # which writes sums alone
        assert sum(size for _, size in large) > 0.99 * memory.outputs
