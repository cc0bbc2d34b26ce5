"""GPU cards are told to the compiler as OpenXLA's own descriptions tell it."""

from __future__ import annotations

import importlib.util
import mmap
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.gpu_cards import DATA_CENTER
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu, gpu_names, target_text
from zerojax.hardware.gpus import target as target_module

# What a driver gave, where OpenXLA has another number (benchmarks/results/gpu_h200.json, "target").
MEASURED = {("h200", "l2_cache_size"): 62914560}
FACTS = ["core_count", "device_memory_size", "memory_bandwidth", "l2_cache_size", "clock_rate_ghz"]
FACTS += ["shared_memory_per_block", "shared_memory_per_block_optin", "shared_memory_per_core"]
FACTS += ["registers_per_block_limit", "registers_per_core_limit", "threads_per_core_limit"]
FACTS += ["threads_per_block_limit", "threads_per_warp", "fpus_per_core"]
FACTS += ["block_dim_limit_x", "block_dim_limit_y", "thread_dim_limit_x", "thread_dim_limit_z"]


# The descriptions inside the installed plugin


def plugin() -> Path | None:
    for name in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        if spec and spec.origin:
            return Path(spec.origin).parent / "xla_cuda_plugin.so"
    return None


def embedded() -> dict[str, str]:
    """Name of the device -> text proto, of all that the plugin carries (none before 0.12)."""
    library, found = plugin(), {}
    if library is None:
        return {}
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(b"gpu_device_info {")
        while at >= 0:
            end = data.find(b"\0", at)
            text = data[at:end].decode("utf-8", "replace")
            if name := re.search(r'device_description_str: "([^"]*)"', text):
                found[name[1]] = text
            at = data.find(b"gpu_device_info {", end)
    return found


EMBEDDED = embedded()
HAVE_TARGET = [name for name in gpu_names() if find_gpu(name).target]
DESCRIBED = [n for n in HAVE_TARGET if find_gpu(n).target.description in EMBEDDED]
needs_plugin = pytest.mark.skipif(
    plugin() is None, reason="no jax-cuda13-pjrt here; pip install 'zerojax[plan]'"
)
needs_descriptions = pytest.mark.skipif(
    not EMBEDDED, reason="the CUDA plugin, if any, carries no GPU descriptions (0.12 and later do)"
)


def read_proto(text: str) -> dict:
    """A text proto as nested dicts; repeated fields as lists."""
    tokens = iter(re.findall(r'"[^"]*"|[{}]|[^\s:{}]+', re.sub(r"#.*", "", text)))

    def block() -> dict:
        fields: dict = {}
        for name in tokens:
            if name == "}":
                break
            value = next(tokens)
            fields.setdefault(name, []).append(block() if value == "{" else value.strip('"'))
        return {name: values[0] if len(values) == 1 else values for name, values in fields.items()}

    return block()


def rates(device: dict, unit: str) -> dict[str, tuple[float, ...]]:
    found = device.get(f"{unit}_unit_description", {"rate_infos": []})["rate_infos"]
    return {one["key"]: tuple(float(v) for v in one["value"].values()) for one in found}


@needs_descriptions
def test_every_card_that_openxla_describes_is_compared():
    assert {*DATA_CENTER, "rtx-a6000", "rtx-pro-6000"} <= set(DESCRIBED)


@pytest.mark.sampled(4)
@needs_descriptions
@pytest.mark.parametrize("name", DESCRIBED)
def test_the_target_has_the_facts_of_openxlas_description(name):
    gpu = find_gpu(name)
    ours = read_proto(target_text(gpu))
    theirs = read_proto(EMBEDDED[gpu.target.description])
    assert ours["platform_name"] == theirs["platform_name"] == "CUDA"
    ours, theirs = ours["gpu_device_info"], theirs["gpu_device_info"]
    for fact in FACTS:
        assert float(MEASURED.get((name, fact), theirs[fact])) == float(ours[fact]), fact
    capability = {"minor": "0", "feature_extension": "NONE"}
    assert capability | ours["cuda_compute_capability"] == (
        capability | theirs["cuda_compute_capability"]
    )
    for unit in ("scalar", "matrix"):
        expected = rates(theirs, unit)
        assert rates(ours, unit) == {key: pytest.approx(rate) for key, rate in expected.items()}
    for version in ("runtime_version", "dnn_version", "compile_time_toolkit_version"):
        assert ours.get(version) == theirs.get(version), version
    assert ours.get("device_interconnect_info") == theirs.get("device_interconnect_info")
    for fact in ("max_blocks_per_multiprocessor", "reserved_shared_memory_per_block"):
        assert ours[fact] == theirs.get(fact, ours[fact])


QUICK_CARDS = ("a100-40gb", "h200", "gb200", "rtx-pro-6000")  # 8.0, 9.0, 10.0 and 12.0
# Kernels are compiled without effort; which kernels there are, and their order, is decided before.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def compiled_for(target: str) -> jax.stages.Compiled:
    """A layer's matrix products, its gradients and their reduction, over 8 GPUs."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x8")
    mesh = Mesh(np.array(topology.devices), ("data",))
    split = NamedSharding(mesh, P("data"))

    def step(weights, batch):
        def loss(weights):
            hidden = jnp.tanh(batch @ weights["up"])
            return jnp.mean(jax.nn.softmax((hidden @ weights["down"]).astype(jnp.float32)) ** 2)

        updated = jax.tree.map(jnp.subtract, weights, jax.grad(loss)(weights))
        return jax.lax.with_sharding_constraint(updated, split)

    def abstract(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split)

    weights = {"up": abstract(512, 2048), "down": abstract(2048, 512)}
    with compile_client.without_cache():  # two cards may have one program
        return jax.jit(step).lower(weights, abstract(1024, 512)).compile(QUICK)


def instructions(compiled: jax.stages.Compiled) -> list[str]:
    """Of the scheduled program, without where in which file each was written."""
    lines = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text()).splitlines()
    return [line for line in lines if " = " in line]


@pytest.mark.thorough
@needs_descriptions
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK_CARDS else pytest.mark.slow) for n in DESCRIBED]
)
def test_the_target_compiles_to_the_program_of_openxlas_description(name):
    gpu = find_gpu(name)
    ours = compiled_for(target_text(gpu))
    theirs = compiled_for(EMBEDDED[gpu.target.description])
    for size in ("argument", "output", "alias", "temp"):
        field = f"{size}_size_in_bytes"
        assert getattr(ours.memory_analysis(), field) == getattr(theirs.memory_analysis(), field)
    assert re.search(r"= .* (reduce-scatter|all-reduce)(-start)?\(", ours.as_text())
    assert instructions(ours) == instructions(theirs)


@pytest.mark.sampled(4)
@needs_plugin
@pytest.mark.parametrize("name", HAVE_TARGET)
def test_the_compiler_accepts_the_target(name):
    gpu = find_gpu(name)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_text(gpu), topology="1x2x4"
    )
    assert len(topology.devices) == 8
    assert {device.device_kind for device in topology.devices} == {gpu.target.description}


@pytest.mark.parametrize(("version", "known"), [("0.10.2", False), ("0.11.0", True)])
def test_older_compilers_are_not_told_of_fields_they_refuse(version, known, monkeypatch):
    monkeypatch.setattr(target_module.importlib.metadata, "version", lambda package: version)
    text = target_text(find_gpu("h200"))
    for field in ("max_blocks_per", "reserved_shared_memory_per", "collective_memory_granularity"):
        assert (field in text) == known
    assert "mem_clock_ghz" not in text  # no version needs it


def test_accelerated_features_belong_to_hopper_and_blackwell_servers():
    for name in HAVE_TARGET:
        gpu = find_gpu(name)
        accelerated = gpu.target.capability in ("9.0a", "10.0a")
        assert ("feature_extension: ACCELERATED_FEATURES" in target_text(gpu)) == accelerated


@pytest.mark.parametrize("name", ["h100", "h200", "b200", "gb200", "a100-80gb", "a100-40gb"])
def test_dense_peaks_follow_from_the_units(name):
    """cores x units x multiply-adds x clock is what the datasheet halves from its sparse rate."""
    gpu = find_gpu(name)
    device = read_proto(target_text(gpu))["gpu_device_info"]
    clock, units, ops = rates(device, "matrix")["16"]
    flops = gpu.target.cores * units * ops * 2 * clock * 1e9
    assert gpu.bf16_flops == pytest.approx(flops, rel=0.06)
