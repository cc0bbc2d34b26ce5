"""Machine code of updates in the step, for 8 H200 and H100.

Needs the compile-only client (extra `plan`), no GPU: pytest -m gpu_programs
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from pallas_kernels.choice import Choice
from tests.support.gpu_plans import compile_step, text_plan
from tests.support.marks import needs_kernels
from tests.support.recipe import CLIPPED, RECIPE
from tests.support.small_models import reference_model
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.optim import adam8bit, coding_of
from zerojax.optim.optimizer import UpdateContext
from zerojax.tracing import trees

pytestmark = [pytest.mark.gpu_programs, needs_kernels]
SHAPES = {"stacked": (4, 512, 2048), "table": (2048, 1024), "bias": (2048,)}
DEVICES = 8
PARAMETERS = sum(math.prod(shape) for shape in SHAPES.values()) // DEVICES


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(compile_client.gpu_devices(find_gpu("h200"), DEVICES)), ("data",))


def compiled_update(mesh, chosen):
    """The update of every shard, and bytes of parameters and state on one device."""
    tx = adam8bit(1e-3, **RECIPE)

    def spec(shape):
        return P(*("data" if dim == np.argmax(shape) else None for dim in range(len(shape))))

    def place(shape, spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = {name: place(shape, spec(shape)) for name, shape in SHAPES.items()}
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    kept = (params, coding_of(tx).abstract_state(params, sizes))
    specs = jax.tree.map(lambda x: x.sharding.spec, kept)

    def local(params, state, grads, scale, skip, key_data):
        context = UpdateContext(
            gradient_scale=scale,
            skip=skip,
            key=jax.random.wrap_key_data(key_data),
            axes=dict.fromkeys(SHAPES, ("data",)),
            choice=chosen,
        )
        return tx.apply(grads, state, params, context)

    given = (*specs, specs[0], P(), P(), P())
    update = jax.shard_map(local, mesh=mesh, in_specs=given, out_specs=specs, check_vma=False)
    numbers = (place((), P()), place((), P(), jnp.bool_), place((2,), P(), jnp.uint32))
    program = jax.jit(update, donate_argnums=(0, 1))
    return compile_client.compile_for_gpus(program, *kept, params, *numbers), trees.num_bytes(kept)


def bytes_per_parameter(entry):
    """What all launches read and write; values of less than 10 kB are left out."""
    by_name = {instruction.name: instruction for instruction in entry}
    total = 0
    for instruction in entry:
        if instruction.opcode in ("fusion", "custom-call", "copy"):
            read = [by_name[name].bytes for name in instruction.operands if name in by_name]
            total += sum(size for size in (instruction.bytes, *read) if size > 10_000)
    return total / PARAMETERS


@pytest.mark.parametrize(
    ("name", "kernels", "moved", "temporary"),
    [("mosaic_gpu", 3, (16, 16.1), 10_000), ("xla", 0, (22, 39), 8.1 * PARAMETERS)],
)
def test_shards_are_updated_in_place(mesh, name, kernels, moved, temporary):
    """A kernel reads and writes once: 16 bytes, the gradient being float32. XLA needs two passes,
    one for the scales, between which it keeps none, one or two float32 arrays."""
    compiled, kept = compiled_update(mesh, Choice(name, "compiled only"))
    entry = hlo.read_program(compiled.text).entry.instructions
    assert sum("mosaic_gpu" in i.attribute_text for i in entry) == kernels
    assert not [i for i in entry if i.opcode.startswith(("all-", "reduce-scatter", "collective"))]
    assert moved[0] <= bytes_per_parameter(entry) <= moved[1]
    assert compiled.memory.temporary <= temporary
    assert compiled.memory.aliased == pytest.approx(kept / DEVICES, rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="lamb", marks=pytest.mark.slow),
        pytest.param({"matmul_dtype": "fp8"}, id="lamb and fp8"),
    ],
)
def test_the_small_sums_of_a_step_compile_for_64_gpus(options):
    """XLA 0.12 aborts at the sum of one small array over 64 GPUs; over 8 and 512 it does not."""
    model = reference_model("gpt2", max_seq_len=128, embed_dim=128, **options)
    optimizer = zerojax.lamb(1e-3, weight_decay=0.01, **CLIPPED)
    assert compile_step(text_plan(model, 64, 128, devices=64, optimizer=optimizer, zero=1))


def test_state_that_a_skipped_step_keeps_is_written_in_place_on_8_gpus():
    """Whichever values a skipped step keeps, optax's arrays are written where they are."""
    model = reference_model("gpt2", max_seq_len=128, embed_dim=256)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    plan = text_plan(model, DEVICES, 128, optimizer=optimizer, zero=3)
    step = zerojax.build_step(plan)
    compiled = compile_client.compile_for_gpus(step, plan.abstract_state, plan.abstract_batch)
    kept = plan.abstract_state["params"], plan.abstract_state["opt_state"]
    bytes_kept = trees.num_bytes(kept) / DEVICES
    assert compiled.memory.aliased >= 0.99 * bytes_kept
    entry = hlo.read_program(compiled.text).entry.instructions
    copied = sum(i.bytes for i in entry if i.opcode in ("copy", "copy-start"))
    assert copied < 0.01 * bytes_kept
