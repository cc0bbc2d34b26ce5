"""The compile-only client: what it compiles, and what is said when it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.marks import needs_compiler
from zerojax import make_mesh
from zerojax.config import MeshConfig
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.compiler_options import (
    NO_KERNELS_OPTIONS,
    PREFETCH_OPTIONS,
    TWO_AT_ONCE_OPTIONS,
    UNFILLED_OPTIONS,
    choose_options,
)

H100 = find_gpu("h100")


def test_a_client_of_another_version_is_not_used(monkeypatch):
    versions = {"jaxlib": "0.11.2", "jax-cuda13-pjrt": "0.12.0.1"}
    monkeypatch.setattr(compile_client, "_plugin", lambda: "xla_cuda13")
    monkeypatch.setattr(compile_client, "_version", versions.get)
    why = compile_client.missing()
    assert why is not None
    assert why.endswith("pip install jax-cuda13-pjrt==0.11.2 jax-cuda13-plugin==0.11.2")
    versions["jax-cuda13-pjrt"] = "0.11.2"
    assert compile_client.missing() is None


def test_what_decides_a_program_is_named(monkeypatch):
    versions = {"jaxlib": "0.12.0", "jax-cuda13-pjrt": "0.12.0", "nvidia-cuda-nvcc": "13.4.92"}
    versions["nvidia-nvvm"] = "13.5.37"
    monkeypatch.setattr(compile_client, "_version", versions.get)
    nothing = "--xla_cpu_max_isa=AVX --xla_dump_to=/somewhere --xla_gpu_kernel_cache_file=/kernels"
    monkeypatch.setenv("XLA_FLAGS", nothing)
    named = "jaxlib 0.12.0, jax-cuda13-pjrt 0.12.0, nvidia-cuda-nvcc 13.4.92, nvidia-nvvm 13.5.37"
    assert compile_client.compiler_version() == named
    assert compile_client.compiler_version(fast=True) == f"{named}, fast options"
    flag = "--xla_gpu_enable_triton_gemm=false"
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/somewhere {flag}")
    assert compile_client.compiler_version() == f"{named}, XLA_FLAGS={flag}"
    fast = f"{named}, XLA_FLAGS={flag}, fast options"
    assert compile_client.compiler_version(fast=True) == fast


def test_the_first_cause_of_a_chain_is_told_with_its_remedy():
    try:
        try:
            raise ValueError("\n  No PTX compilation provider is available.\nlong tail\n")
        except ValueError as inner:
            raise RuntimeError("compilation failed") from inner
    except RuntimeError as error:
        told = compile_client.first_cause(error)
    assert told.startswith("No PTX compilation provider is available. (the assembler is missing")
    assert "long tail" not in told
    assert compile_client.first_cause(KeyError()) == "KeyError"
    assert len(compile_client.first_cause(ValueError("x" * 2000))) == 500


class Program:
    """Of a product for which Triton has no kernel; or, `always`, of one that nothing computes."""

    def __init__(self, always: bool = False):
        self.always = always

    def compile(self, compiler_options):
        folder = Path(compiler_options["xla_dump_to"])
        with_triton = compiler_options.get("xla_gpu_enable_triton_gemm", True)
        (folder / f"module.triton_{with_triton}.txt").touch()
        if with_triton or self.always:
            raise RuntimeError("INTERNAL: No supported config found for HLO: %gemm_fusion_dot.1")
        return self

    def as_text(self):
        return "by cuBLAS"

    def memory_analysis(self):
        names = ("argument", "output", "alias", "temp")
        sizes = {f"{host}{name}_size_in_bytes": 1 for host in ("", "host_") for name in names}
        return SimpleNamespace(**sizes)


def test_a_product_that_triton_cannot_compute_is_compiled_for_cublas(tmp_path):
    compiled = compile_client.compile_for_gpus(Program(), dump=tmp_path)
    assert compiled.by_cublas
    assert compiled.text == "by cuBLAS"
    left = [path.name for path in tmp_path.iterdir()]
    assert left == ["module.triton_False.txt"], "accounts of the first try would be read too"
    with pytest.raises(compile_client.CompileError, match="No supported config found"):
        compile_client.compile_for_gpus(Program(always=True), dump=tmp_path)


def test_host_memory_is_not_counted_as_the_devices():
    use = compile_client.MemoryUse(
        arguments=10,
        outputs=9,
        aliased=8,
        temporary=7,
        host_arguments=100,
        host_outputs=100,
        host_aliased=100,
        host_temporary=5,
    )
    assert use.peak == 10 + 9 - 8 + 7
    assert use.host_peak == 105


def test_virtual_devices_are_no_gpus():
    assert not compile_client.is_cuda(make_mesh({"data": 8}))
    assert not compile_client.is_cuda(jax.sharding.AbstractMesh((8,), ("data",)))


@needs_compiler
@pytest.mark.gpu_programs
def test_where_jax_looked_for_a_gpu_in_vain_the_remedy_is_named():
    program = (
        "import jax; jax.devices(); from zerojax.hardware import compile_client as compiler, gpus\n"
        "try: compiler.gpu_devices(gpus.find_gpu('h100'), 8)\n"
        "except compiler.CompilerMissing as error: print(error)"
    )
    variables = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    if not done.stdout:
        pytest.skip("the plugin loads: there is a GPU, or its libraries are installed")
    assert done.stdout.rstrip().endswith("start Python with JAX_PLATFORMS=cpu")


@needs_compiler
@pytest.mark.gpu_programs
def test_an_option_is_used_where_the_compiler_knows_it_and_listed_where_not():
    mesh = make_mesh({"data": 8}, devices=compile_client.gpu_devices(H100, 8))
    assert compile_client.is_cuda(mesh)
    options = {"xla_gpu_autotune_level": 0, "xla_no_such_option": True}
    known, dropped = compile_client.keep_known_options(mesh, options)
    assert known == {"xla_gpu_autotune_level": 0}
    assert list(dropped) == ["xla_no_such_option"]
    assert "xla_no_such_option" in dropped["xla_no_such_option"]


@needs_compiler
@pytest.mark.gpu_programs
def test_a_program_is_compiled_for_gpus_that_are_not_here():
    mesh = make_mesh({"data": 8}, devices=compile_client.gpu_devices(H100, 8))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((1024, 256), jnp.float32, sharding=split)
    w = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=whole)
    jitted = jax.jit(lambda x, w: (x @ w).sum(0), out_shardings=whole)
    program = compile_client.compile_for_gpus(jitted.lower(x, w), sketch=True)
    assert program.memory.arguments == (1024 // 8 + 256) * 256 * 4
    assert program.memory.outputs == 256 * 4
    assert "all-reduce" in program.text
    assert program.memory.host_peak == 0


LAYERS, ROWS, COLUMNS = 6, 256, 512


def lower_with_host_memory(num_devices, body):
    """The lowering for CUDA of a loop that does `body` to every slice of an array on the host."""
    mesh = make_abstract_mesh(MeshConfig(), num_devices)
    host = NamedSharding(mesh, P(None, None, "data"), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((LAYERS, ROWS, COLUMNS), jnp.float32, sharding=host)

    def local(x):
        def one(i, x):
            piece = lax.dynamic_index_in_dim(x, i, 0, allow_negative_indices=False)
            return lax.dynamic_update_index_in_dim(x, body(piece), i, 0)

        return lax.fori_loop(0, LAYERS, one, x)

    specs = {"mesh": mesh, "in_specs": P(None, None, "data"), "out_specs": P(None, None, "data")}
    step = jax.jit(
        jax.shard_map(local, check_vma=False, **specs), donate_argnums=0, out_shardings=host
    )
    return compile_client.lower_for_gpus(step.trace(x))


def on_the_device(piece):
    piece = jax.device_put(piece, jax.memory.Space.Device)
    return jax.device_put(piece * 2, jax.memory.Space.Host)


def test_a_program_with_host_memory_is_lowered_for_gpus_without_any():
    text = lower_with_host_memory(8, on_the_device).as_text()
    assert text.count("annotate_device_placement") >= 2
    assert 'memory_kind = "pinned_host"' in text


@needs_compiler
@pytest.mark.gpu_programs
@pytest.mark.parametrize("num_devices", [1, 8])
def test_host_memory_is_counted_apart_and_donated_in_place(num_devices):
    devices = compile_client.gpu_devices(H100, num_devices)
    lowered = lower_with_host_memory(num_devices, on_the_device)
    program = compile_client.compile_for_gpus(
        lowered, devices=devices, options=compile_client.HOST_OPTIONS, sketch=True
    )
    whole = LAYERS * ROWS * COLUMNS * 4 // num_devices
    memory = program.memory
    assert (memory.host_arguments, memory.host_outputs, memory.host_aliased) == (whole,) * 3
    assert memory.host_temporary == 0
    assert memory.arguments == 0
    assert 0 < memory.temporary <= 2 * whole // LAYERS + 4096  # a slice, its double, counters


@needs_compiler
@pytest.mark.gpu_programs
def test_arithmetic_on_the_host_is_refused_with_a_remedy():
    devices = compile_client.gpu_devices(H100, 1)
    lowered = lower_with_host_memory(1, lambda piece: piece * 2)
    with pytest.raises(compile_client.CompileError, match=r"move it to the device first"):
        compile_client.compile_for_gpus(
            lowered, devices=devices, options=compile_client.HOST_OPTIONS
        )
    # Without the options it becomes a program for the host's processor, and nobody is told.
    compile_client.compile_for_gpus(lowered, devices=devices, sketch=True)


@needs_compiler
@pytest.mark.gpu_programs
def test_steps_with_host_memory_are_compiled_with_the_guard():
    mesh = make_mesh({"data": 8}, devices=compile_client.gpu_devices(H100, 8))
    assert choose_options(mesh, regather=False) == (UNFILLED_OPTIONS, {})
    with_host = UNFILLED_OPTIONS | compile_client.HOST_OPTIONS
    assert choose_options(mesh, regather=False, on_host=True) == (with_host, {})
    chosen, dropped = choose_options(mesh, regather=True, unrolled=True)
    assert chosen == UNFILLED_OPTIONS
    (why,) = (dropped[name] for name in PREFETCH_OPTIONS)
    assert why == "layers outside of loops would all be gathered for the next microbatch, too"
    chosen, dropped = choose_options(mesh, regather=True, on_host=True)
    assert chosen.keys() | dropped.keys() == {*with_host, *PREFETCH_OPTIONS, *TWO_AT_ONCE_OPTIONS}


@needs_compiler
@pytest.mark.gpu_programs
def test_small_all_reduces_over_many_devices_do_not_end_the_process():
    """Without the option XLA aborts, and this process with it."""
    few = make_mesh({"data": 32}, devices=compile_client.gpu_devices(H100, 32))
    assert choose_options(few, regather=False) == (UNFILLED_OPTIONS, {})
    mesh = make_mesh({"data": 64}, devices=compile_client.gpu_devices(H100, 64))
    chosen, dropped = choose_options(mesh, regather=False)
    assert (chosen, dropped) == (UNFILLED_OPTIONS | NO_KERNELS_OPTIONS, {})
    numbers = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=NamedSharding(mesh, P()))
    summed = jax.shard_map(
        lambda x: lax.psum(2 * x, "data"), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    compiled = compile_client.compile_for_gpus(jax.jit(summed), numbers, options=chosen)
    assert "all-reduce" in compiled.text


def test_a_refused_program_is_one_sentence():
    """The CPU's compiler refuses in the same way."""

    class Lowered:
        def compile(self, compiler_options):
            lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(8))
            return lowered.compile(compiler_options={**compiler_options, "xla_no_such": True})

    with pytest.raises(compile_client.CompileError) as caught:
        compile_client.compile_for_gpus(Lowered())
    assert "\n" not in str(caught.value)
    assert "No such compile option: 'xla_no_such'" in str(caught.value)
