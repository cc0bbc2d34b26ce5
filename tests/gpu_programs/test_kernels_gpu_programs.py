"""Machine code for an H200: one kernel per leaf, in place, no copies, spills or temporaries.

Needs the compile-only client (extra `plan`), no GPU: pytest -m gpu_programs
"""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import choice, gradients, muon, optimizers
from pallas_kernels.adam8bit import init_moments
from pallas_kernels.adam8bit_kernel import update_adam8bit
from pallas_kernels.choice import Choice
from pallas_kernels.update import update, update_trees
from tests.support.marks import needs_kernels
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu

pytestmark = [pytest.mark.gpu_programs, needs_kernels]
XLA = Choice("xla", "to compare with")
F32, BF16 = jnp.float32, jnp.bfloat16
WHOLE, ODD = (4096, 256), (1_000_003,)
SMALL = 32 * 1024
"""Bytes of scalars, partial sums and tails; a leaf here has at least 2 MB."""


@pytest.fixture(scope="module")
def devices():
    return compile_client.gpu_devices(find_gpu("h200"), 1)


@pytest.fixture(scope="module")
def kernel(devices):
    """As `mosaic_gpu` is chosen for the devices that are compiled for."""
    return choice.choose("mosaic_gpu", kernel="adamw", devices=devices)


@pytest.fixture
def assembler(tmp_path, monkeypatch):
    """Folder to which Mosaic writes what the assembler says of its kernels."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    return tmp_path


def compiled_for(devices, function, *args, donated):
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), P())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    program = jax.jit(function, donate_argnums=donated)
    return compile_client.compile_for_gpus(program, *jax.tree.map(place, args))


def kernels_and_copies(compiled):
    """(kernels of Mosaic, launches of all kinds, bytes of the largest copy)."""
    entry = hlo.read_program(compiled.text).entry.instructions
    mosaic = [i for i in entry if i.opcode == "custom-call" and "mosaic_gpu" in i.attribute_text]
    launches = [i for i in entry if i.opcode in ("custom-call", "fusion", "copy", "fusion-start")]
    copies = [i.bytes for i in entry if i.opcode in ("copy", "copy-start")]
    return len(mosaic), len(launches), max(copies, default=0)


def spills_and_registers(folder):
    said = "".join(path.read_text() for path in folder.glob("*.ptxas"))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.findall(r"Used (\d+) registers", said)
    assert len(spills) == len(registers) > 0, os.listdir(folder)
    return max(int(n) for pair in spills for n in pair), max(map(int, registers))


def struct(shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def bytes_of(*trees):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


def leaf_program(rule, impl, **options):
    def program(updated, read, scalars):
        more = {"scalars": rule.scalars(*scalars), "out_dtypes": (BF16,) * rule.num_outputs}
        return update(rule, updated, read, impl=impl, **more, **options)

    return program


def leaf_arguments(rule, shape, dtype=F32):
    return (
        tuple(struct(shape, dtype) for _ in range(rule.num_updated)),
        tuple(struct(shape, BF16) for _ in range(rule.num_read)),
        tuple(struct(()) for _ in rule.scalars._fields),
    )


# Registers of 128 threads at which 8 or more programs fit on a multiprocessor: 64.
RULES = [
    (optimizers.ADAMW, 56),
    (optimizers.LION, 48),
    (optimizers.SGD, 40),
    (optimizers.SGD_NESTEROV, 40),
    (optimizers.LAMB_MOMENTS, 72),
    (optimizers.LAMB_APPLY, 40),
    (muon.MUON_MOMENTUM, 40),
    (muon.MUON_DESCENT, 40),
    (muon.NESTEROV_ADAM, 56),
    (gradients.GRADIENT_STATS, 40),
]


@pytest.mark.parametrize("shape", [WHOLE, ODD], ids=["whole tiles", "a tail"])
@pytest.mark.parametrize(("rule", "registers"), RULES, ids=lambda x: getattr(x, "name", ""))
def test_a_leaf_is_updated_in_place(devices, kernel, assembler, rule, registers, shape):
    args = leaf_arguments(rule, shape)
    compiled = compiled_for(devices, leaf_program(rule, kernel), *args, donated=0)
    mosaic, _, largest_copy = kernels_and_copies(compiled)
    assert mosaic == 1
    assert largest_copy <= SMALL
    assert compiled.memory.temporary <= (1024 if shape == WHOLE else SMALL)
    assert compiled.memory.aliased == bytes_of(args[0])
    spilled, used = spills_and_registers(assembler)
    assert spilled == 0
    assert used <= registers


@pytest.mark.parametrize(("rule", "registers"), RULES[4:6], ids=lambda x: getattr(x, "name", ""))
def test_layers_with_numbers_of_their_own_are_updated_in_place(
    devices, kernel, assembler, rule, registers
):
    updated, read, scalars = leaf_arguments(rule, (16, *WHOLE))
    scalars = (*scalars[:2], struct((16,)), *scalars[3:])
    program = leaf_program(rule, kernel, by_row=True)
    compiled = compiled_for(devices, program, updated, read, scalars, donated=0)
    mosaic, _, largest_copy = kernels_and_copies(compiled)
    assert mosaic == 1
    assert largest_copy <= SMALL
    assert compiled.memory.aliased == bytes_of(updated)
    spilled, used = spills_and_registers(assembler)
    assert spilled == 0
    assert used <= registers


def test_stochastic_rounding_moves_fourteen_bytes_in_place(devices, kernel, assembler):
    args = leaf_arguments(optimizers.ADAMW, WHOLE, BF16)

    def program(updated, read, scalars, seed):
        scalars = optimizers.AdamScalars(*scalars)
        more = {"scalars": scalars, "seed": seed, "impl": kernel}
        return update(optimizers.ADAMW, updated, read, **more)

    seed = struct((2,), jnp.uint32)
    compiled = compiled_for(devices, program, *args, seed, donated=0)
    assert kernels_and_copies(compiled)[0] == 1
    assert kernels_and_copies(compiled)[2] == 0
    assert compiled.memory.temporary <= 1024
    assert compiled.memory.aliased == bytes_of(args[0])
    traffic = compiled.memory.arguments + compiled.memory.outputs
    assert traffic == pytest.approx(14 * args[0][0].size, rel=1e-3)
    assert spills_and_registers(assembler)[0] == 0


def eight_bit(devices, shape, impl):
    def program(param, moments, grad, scalars, seed):
        more = {"scalars": optimizers.AdamScalars(*scalars), "seed": seed, "impl": impl}
        return update_adam8bit(param, moments, grad, compute_dtype=BF16, **more)

    moments = jax.eval_shape(lambda: init_moments(shape))
    scalars = tuple(struct(()) for _ in optimizers.AdamScalars._fields)
    args = (struct(shape), moments, struct(shape, BF16), scalars, struct((2,), jnp.uint32))
    return compiled_for(devices, program, *args, donated=(0, 1)), bytes_of(args[:2])


@pytest.mark.parametrize("shape", [WHOLE, ODD], ids=["whole blocks", "a short last block"])
def test_eight_bit_adam_moves_sixteen_bytes_in_one_kernel(devices, kernel, assembler, shape):
    """And XLA needs several kernels and a temporary of a leaf's size for the same."""
    compiled, state = eight_bit(devices, shape, kernel)
    mosaic, _, largest_copy = kernels_and_copies(compiled)
    size = np.prod(shape)
    assert mosaic == 1
    assert largest_copy <= SMALL  # the scales, where the last block is short
    assert compiled.memory.temporary <= (1024 if shape == WHOLE else SMALL)
    assert compiled.memory.aliased == state
    traffic = compiled.memory.arguments + compiled.memory.outputs
    assert traffic == pytest.approx((16 + 16 / 512) * size, rel=1e-3)
    spilled, used = spills_and_registers(assembler)
    assert spilled == 0
    assert used <= 80
    (ptx,) = (path.read_text() for path in assembler.glob("*.ptx"))
    if shape == WHOLE:  # four elements for each thread; the kernel is bound by its instructions
        assert len(re.findall(r"^\t(?:@\S+ )?[a-z]+[.\w]*\s.*;$", ptx, re.MULTILINE)) < 550
    reference, _ = eight_bit(devices, shape, XLA)
    assert reference.memory.temporary >= 4 * size
    assert kernels_and_copies(reference)[1] >= 4


def adamw_on_leaves(shapes, impl):
    def step(params, mus, nus, grads, scalars):
        def leaf(updated, read):
            more = {"scalars": optimizers.AdamScalars(*scalars), "out_dtypes": (BF16,)}
            return update(optimizers.ADAMW, updated, read, impl=impl, **more)

        return update_trees(leaf, (params, mus, nus), (grads,))

    float32, bfloat16 = ([struct(shape, dtype) for shape in shapes] for dtype in (F32, BF16))
    scalars = tuple(struct(()) for _ in optimizers.AdamScalars._fields)
    return step, (float32, float32, float32, bfloat16, scalars), (0, 1, 2)


def adam8bit_on_leaves(shapes, impl):
    def step(params, moments, grads, scalars, seeds):
        more = {"scalars": optimizers.AdamScalars(*scalars), "compute_dtype": BF16, "impl": impl}
        found = [
            update_adam8bit(param, state, grad, seed=seed, **more)
            for param, state, grad, seed in zip(params, moments, grads, seeds, strict=True)
        ]
        return [tuple(part[k] for part in found) for k in range(3)]

    float32, bfloat16 = ([struct(shape, dtype) for shape in shapes] for dtype in (F32, BF16))
    moments = jax.eval_shape(lambda: [init_moments(shape) for shape in shapes])
    scalars = tuple(struct(()) for _ in optimizers.AdamScalars._fields)
    # One array each: a slice of one array of seeds would be a kernel for every leaf.
    seeds = [struct((2,), jnp.uint32) for _ in shapes]
    return step, (float32, moments, bfloat16, scalars, seeds), (0, 1)


BUILDERS = pytest.mark.parametrize("build", [adamw_on_leaves, adam8bit_on_leaves])


@BUILDERS
def test_many_leaves_are_updated_in_place_in_one_kernel_each(devices, kernel, build):
    """Scalars are packed once; equal shapes do not confuse what was donated."""
    shapes = [(768,), (2304,), (768, 768), (3072, 768), (768, 3072), (3072,)] * 4
    program, args, donated = build(shapes, kernel)
    compiled = compiled_for(devices, program, *args, donated=donated)
    mosaic, launches, largest_copy = kernels_and_copies(compiled)
    assert mosaic == len(shapes)
    assert launches <= len(shapes) + 6
    assert largest_copy == 0
    assert compiled.memory.temporary <= SMALL
    assert compiled.memory.aliased == bytes_of(*(args[number] for number in donated))


@BUILDERS
def test_many_leaves_with_tails_compile_and_are_updated_in_place(devices, kernel, build):
    """XLA (0.12) refuses to compile a tail that is written after the kernel."""
    shapes = [(1001, 777), (769,), (100_003, 5)] * 2
    program, args, donated = build(shapes, kernel)
    compiled = compiled_for(devices, program, *args, donated=donated)
    mosaic, _, largest_copy = kernels_and_copies(compiled)
    assert mosaic == len(shapes)
    assert largest_copy <= SMALL
    assert compiled.memory.temporary <= 2 * SMALL
    assert compiled.memory.aliased == bytes_of(*(args[number] for number in donated))


def test_shards_are_updated_where_they_lie():
    """Eight devices, `shard_map`: one kernel on each, nothing sent, nothing copied."""
    mesh = Mesh(np.array(compile_client.gpu_devices(find_gpu("h200"), 8)), ("data",))
    split, whole = P("data"), P()

    def local(updated, grad, scalars):
        more = {"scalars": optimizers.AdamScalars(*scalars), "out_dtypes": (BF16,)}
        kernel = Choice("mosaic_gpu", "compiled only")
        found = update(optimizers.ADAMW, updated, (grad,), impl=kernel, **more)
        return found.updated, found.outputs

    specs = {"in_specs": (split, split, whole), "out_specs": split, "check_vma": False}
    program = jax.jit(jax.shard_map(local, mesh=mesh, **specs), donate_argnums=0)

    def abstract(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    state = (abstract(WHOLE, F32, split),) * 3
    scalars = tuple(abstract((), F32, whole) for _ in optimizers.AdamScalars._fields)
    args = (state, abstract(WHOLE, BF16, split), scalars)
    compiled = compile_client.compile_for_gpus(program, *args)
    assert kernels_and_copies(compiled) == (1, 2, 0)  # the scalars are packed by the other launch
    assert compiled.memory.temporary <= 1024
    assert compiled.memory.aliased == bytes_of(state) // 8
