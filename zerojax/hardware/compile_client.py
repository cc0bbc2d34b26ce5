"""Compiles programs for GPUs that this machine does not have, with XLA's compile-only client.

The client needs neither a GPU nor a driver, cuDNN, NCCL or cuBLAS (measured on jaxlib 0.10.2 to
0.12.0). Its devices have no host memory, and a sharding on a mesh of them silently loses its memory
kind. So a program that keeps arrays in host memory is traced over an `AbstractMesh`, lowered for
CUDA by name, and passed to the client directly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import xla_client

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.hardware import gpus

INSTALL = "pip install 'zerojax[plan]'"
_PLUGINS = ("xla_cuda13", "xla_cuda12")
_PACKAGES = (
    "jaxlib",
    "jax-cuda13-pjrt",
    "jax-cuda12-pjrt",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-nvvm",
)
_DECIDES_NOTHING = re.compile(  # flags without effect on GPU programs
    r"--xla_(dump_|cpu_|force_host_platform_device_count|gpu_kernel_cache_file)"
)

FAST_OPTIONS: Mapping[str, Any] = {"xla_gpu_autotune_level": 0}
"""Compiler options that compile one kernel for each product instead of searching for the fastest.
The compiled program is otherwise the same, so memory and collectives are exact to the byte."""

CUBLAS_OPTIONS: Mapping[str, Any] = {"xla_gpu_enable_triton_gemm": False}
"""Compiler options that compute every product by cuBLAS. On a GPU the compiler tries cuBLAS and
Triton for each product and takes the faster; the compile-only client cannot, and uses Triton where
it can. The peak of memory differs: 43.07 instead of 47.21 GiB for a Llama of 7 billion parameters
on 8 H100."""


SKETCH_OPTIONS: Mapping[str, Any] = {
    **FAST_OPTIONS,
    **CUBLAS_OPTIONS,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Compiler options with the least work, for reading collectives only: the bytes of collectives are
exact, the bytes of memory are not."""


_NO_KERNEL = "No supported config found for HLO"

HOST_OPTIONS: Mapping[str, Any] = {
    "xla_disable_automatic_host_compute_offload": True,
    "xla_disable_hlo_passes": "rematerialization",
    "xla_gpu_enable_command_buffer": "",
}
"""Compiler options for programs with arrays in host memory.

1. Arithmetic on an array in host memory is an error. By default it would become a program for the
  host's processor.
2. XLA's own rematerialization is off. Where memory is tight, it confuses host memory with device
  memory and recomputes in vain, or, with `xla_gpu_enable_host_memory_offloading`, moves activations
  to the host in every loop: for 13 billion parameters on one H200 6.5 TiB per step instead of 87
  GiB.
3. CUDA graphs are off: on an H100 (JAX 0.11.2) they ran all copies and kernels one after the other
  in spite of the schedule, also with `xla_gpu_command_buffer_scheduling_mode` LHS.
"""


class CompilerMissing(RuntimeError):
    """No compile-only client is available. The message says how to install one."""


class CompileError(RuntimeError):
    """The compiler rejected the program. The message begins with the first cause."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Memory of a compiled program in bytes per device, as reported by the compiler.

    Attributes:
      arguments, outputs, temporary: number of bytes in device memory for arguments, outputs and
        temporary values.
      aliased: number of bytes of outputs that reuse the memory of donated arguments.
      host_arguments, host_outputs, host_aliased, host_temporary: the same numbers for host memory.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    host_arguments: int
    host_outputs: int
    host_aliased: int
    host_temporary: int

    @property
    def peak(self) -> int:
        """Largest number of bytes in use on the device at once. XLA's own number adds host memory
        to it."""
        return self.arguments + self.outputs - self.aliased + self.temporary

    @property
    def host_peak(self) -> int:
        return self.host_arguments + self.host_outputs - self.host_aliased + self.host_temporary


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A program compiled for devices that this machine does not have; it can be read but not run.

    Attributes:
      text: optimized and scheduled HLO.
      memory: memory of the program in bytes per device.
      by_cublas: whether all products use cuBLAS, because Triton had no kernel for one product.
    """

    text: str
    memory: MemoryUse
    by_cublas: bool = False


def missing() -> str | None:
    """Checks whether this machine can compile for GPUs that it does not have.

    Returns:
      None if it can; otherwise the reason and the remedy.
    """
    plugin = _plugin()
    if plugin is None:
        return (
            "the compile-only CUDA client is not installed, so nothing was compiled: "
            f"{INSTALL} (about 700 MB, no GPU needed)"
        )
    package = f"jax-{plugin.removeprefix('xla_')}-pjrt"
    jaxlib, client = _version("jaxlib"), _version(package)
    if client is not None and client.split(".")[:3] != (jaxlib or "").split(".")[:3]:
        names = " ".join(
            f"{name}=={jaxlib}" for name in (package, package.replace("pjrt", "plugin"))
        )
        return (
            f"{package} {client} does not belong to jaxlib {jaxlib}, so nothing was compiled: "
            f"pip install {names}"
        )
    return None


def compiler_version(*, fast: bool = False) -> str:
    """Lists everything that determines a compiled program, as text: versions, XLA flags and
    options.

    Args:
      fast: whether the program is compiled with `FAST_OPTIONS`.
    """
    found = {name: _version(name) for name in _PACKAGES}
    parts = [f"{name} {version}" for name, version in found.items() if version]
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if not _DECIDES_NOTHING.match(flag)]
    parts += [f"XLA_FLAGS={' '.join(flags)}"] * bool(flags)
    parts += ["fast options"] * fast
    return ", ".join(parts)


def gpu_devices(gpu: gpus.Gpu, count: int) -> Sequence[Any]:
    """Returns device objects for GPUs that this machine does not have, to make meshes and to
    compile for; they hold no arrays.

    Args:
      gpu: the kind of GPU.
      count: number of devices; above `gpu.node_devices` it must be a multiple of
        `gpu.node_devices`.

    Raises:
      CompilerMissing: there is no compile-only client.
      ValueError: the count is below 1 or does not fill whole nodes, or the card has no description
        for the compiler.
      CompileError: the client rejects the card's description.
    """
    why = missing()
    if why is not None:
        raise CompilerMissing(why)
    if count < 1:
        raise ValueError(f"devices={count} is below 1; give at least 1 GPU")
    in_node = min(count, max(gpu.node_devices, 1))
    if count % in_node:
        below, above = count - count % in_node, count + in_node - count % in_node
        raise ValueError(
            f"devices={count} is not a multiple of the node size {in_node} {gpu.title}; use "
            f"{below} or {above}, or state how many GPUs a machine has: node_devices in a card's "
            "file, --card node_devices=N of zerojax plan"
        )
    try:
        description = topologies.get_topology_desc(
            platform="cuda",
            target_config=gpus.target_text(gpu),
            topology=f"1x{count // in_node}x{in_node}",
        )
    except NotImplementedError as error:
        # Without a GPU the plugin registers itself only if JAX was told to use no GPU.
        raise CompilerMissing(
            "JAX found no GPU and unloaded its CUDA plugin, so nothing can be "
            "compiled; start Python with JAX_PLATFORMS=cpu"
        ) from error
    except Exception as error:  # whatever the plugin raises
        raise CompileError(f"{gpu.name}: {first_cause(error)}") from error
    return description.devices


def is_cuda(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether a mesh consists of NVIDIA GPUs, attached to this machine or not; False for an
    `AbstractMesh`."""
    if not isinstance(mesh, Mesh):
        return False
    return mesh.devices.flat[0].platform in ("cuda", "gpu")


def keep_known_options(mesh: Mesh, options: Mapping[str, Any]) -> tuple[dict, dict[str, str]]:
    """Drops the compiler options that the installed compiler does not know, by compiling a tiny
    program with each.

    Args:
      mesh: mesh of the devices to compile for.
      options: {name of the option: value}.

    Returns:
      ({name: value} of the known options, {name: reason why the option was dropped}).
    """
    known, dropped = {}, {}
    for name, value in options.items():
        why = _why_unknown(mesh.devices.flat[0], name, value)
        if why is None:
            known[name] = value
        else:
            dropped[name] = why
    return known, dropped


def lower_for_gpus(traced: jax.stages.Traced) -> Any:
    """Lowers a program that was traced over an `AbstractMesh` to StableHLO for CUDA.

    Args:
      traced: result of `jax.jit(function).trace(...)`.
    """
    return traced.lower(lowering_platforms=("cuda",))


def compile_for_gpus(
    program: Any,
    *abstract_args: Tree,
    devices: Sequence[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    dump: Path | None = None,
    sketch: bool = False,
) -> CompiledProgram:
    """Compiles a program for GPUs that this machine does not have.

    If Triton has no kernel for a product, for which a GPU would use cuBLAS, the program is compiled
    again with `CUBLAS_OPTIONS`.

    Args:
      program: result of `jax.jit`; or, without `abstract_args`, a result of its method `lower` or
        of `lower_for_gpus`.
      *abstract_args: `ShapeDtypeStruct`s with shardings on a mesh of `gpu_devices`.
      devices: devices from `gpu_devices` in the order of the mesh; needed for a result of
        `lower_for_gpus`, which may hold arrays in host memory. None: the devices of the arguments'
        shardings.
      options: compiler options. With `devices` they must be complete, because the options of
        `jax.jit` are then not used.
      dump: folder to which the compiler writes its memory reports, which
        `forecasting.hlo.live_buffers` reads; its files are deleted before a second compilation.
      sketch: whether to compile with `SKETCH_OPTIONS`.

    Raises:
      CompileError: the compiler rejects the program; the message states the first cause.
    """
    lowered = program.lower(*abstract_args) if abstract_args else program
    all_options = {**(options or {}), **(SKETCH_OPTIONS if sketch else {})}
    if dump is not None:
        all_options |= {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    try:
        return _compile(lowered, devices, all_options)
    except Exception as error:  # XLA's own exception type, which is not public
        if _NO_KERNEL not in str(error) or all_options.keys() & CUBLAS_OPTIONS.keys():
            raise CompileError(first_cause(error)) from error
    # Otherwise the dump would also have the files of the failed compilation.
    for path in [] if dump is None else dump.iterdir():
        path.unlink()
    again = {**(options or {}), **CUBLAS_OPTIONS}
    compiled = compile_for_gpus(lowered, devices=devices, options=again, dump=dump)
    return dataclasses.replace(compiled, by_cublas=True)


def _compile(
    lowered: jax.stages.Lowered, devices: Sequence[Any] | None, options: Mapping[str, Any]
) -> CompiledProgram:
    if devices is not None:
        return _compile_directly(lowered, list(devices), options)
    with without_cache():
        compiled = lowered.compile(compiler_options=dict(options))
    text = compiled.as_text()
    assert text is not None, "XLA's compilers have a text of each program"
    return CompiledProgram(text=text, memory=memory_of(compiled))


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Disables JAX's compilation cache inside a `with` block, because the compile-only client
    cannot read its entries."""
    before = jax.config.jax_enable_compilation_cache
    if not (before and jax.config.jax_compilation_cache_dir):
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it stores whether it is used
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _compile_directly(
    lowered: jax.stages.Lowered, devices: list[Any], options: Mapping[str, Any]
) -> CompiledProgram:
    """Compiles StableHLO for `devices` as one replica with one partition per device."""
    settings = xla_client.CompileOptions()
    build = settings.executable_build_options
    ids = np.array([[device.id for device in devices]])
    settings.device_assignment = xla_client.DeviceAssignment.create(ids)
    settings.num_replicas, settings.num_partitions = ids.shape
    build.num_replicas, build.num_partitions = ids.shape
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = bool(getattr(jax.config, "jax_use_shardy_partitioner", True))
    folder = _cuda_folder()
    if folder is not None:
        # The caller's options have priority.
        options = {"xla_gpu_cuda_data_dir": folder, **options}
    settings.env_option_overrides = list(options.items())
    executable = devices[0].client.compile(
        lowered.compiler_ir("stablehlo"), xla_client.DeviceList(tuple(devices)), settings
    )
    return CompiledProgram(
        text="\n\n".join(module.to_string() for module in executable.hlo_modules()),
        memory=_memory_use(executable.get_compiled_memory_stats()),
    )


def memory_of(compiled: jax.stages.Compiled) -> MemoryUse:
    """Reads the compiler's memory report of a compiled program (result of `lowered.compile()`)."""
    return _memory_use(compiled.memory_analysis())


def _memory_use(stats: object) -> MemoryUse:
    names = {"arguments": "argument", "outputs": "output", "aliased": "alias", "temporary": "temp"}
    sizes = {}
    for prefix in ("", "host_"):
        for name, theirs in names.items():
            sizes[prefix + name] = int(getattr(stats, f"{prefix}{theirs}_size_in_bytes"))
    return MemoryUse(**sizes)


_REMEDIES = (
    (
        r"PTX compilation provider|ptxas|nvlink|libnvvm|libdevice",
        f"the assembler is missing: {INSTALL}",
    ),
    (
        r"No such compile option|no field named|Error parsing text-format",
        "this jaxlib does not know the option",
    ),
    (r"RESOURCE_EXHAUSTED|Out of memory", "the program does not fit on this card"),
    (
        r"Automatic host compute offload",
        "the step computes with an array in host memory: move it to the device first, "
        "with jax.device_put(x, jax.memory.Space.Device)",
    ),
)


def first_cause(error: BaseException) -> str:
    """Finds the first informative line of the root cause in a chain of errors; appends the remedy
    if it is known."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = re.sub(r"\s+", " ", lines[0]) if lines else type(error).__name__
    line = line if len(line) <= 500 else line[:497] + "..."
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, text):
            return f"{line} ({remedy})"
    return line


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_folder() -> str | None:
    """Finds the folder of NVIDIA's Python packages that contains the assembler; returns None to let
    the compiler search."""
    for package in ("nvidia.cu13", "nvidia.cuda_nvcc"):
        try:
            # It imports the parent package, and raises if there is none.
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        folders = None if found is None else found.submodule_search_locations
        for folder in folders or ():
            if (Path(folder) / "bin" / "ptxas").exists():
                return str(folder)
    return None


def _plugin() -> str | None:
    for name in _PLUGINS:
        try:
            if importlib.util.find_spec(f"jax_plugins.{name}") is not None:
                return name
        except ModuleNotFoundError:
            continue
    return None


@functools.lru_cache(maxsize=256)
def _why_unknown(device: object, name: str, value: object) -> str | None:
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), P())
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)
    lowered = jax.jit(lambda x: x + 1, out_shardings=sharding).lower(number)
    try:
        lowered.compile(compiler_options={name: value})
    except Exception as error:  # XLA's own exception type, which is not public
        return first_cause(error)
    return None
