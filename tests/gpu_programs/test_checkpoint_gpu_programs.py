"""Machine code of the fingerprints, for 8 H200: one read, nothing sent.

Needs the compile-only client (extra `plan`), no GPU: pytest -m gpu_programs
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.checkpoint.fingerprints import _program
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu

pytestmark = pytest.mark.gpu_programs
DEVICES = 8


@pytest.fixture(scope="module")
def mesh():
    devices = np.array(compile_client.gpu_devices(find_gpu("h200"), DEVICES))
    return Mesh(devices.reshape(4, 2), ("data", "model"))


@pytest.mark.parametrize(
    ("shape", "spec", "dtype"),
    [
        ((8192, 4096), P("data", "model"), jnp.float32),
        ((48, 2048, 2048), P(None, ("data", "model")), jnp.bfloat16),
        ((50304, 2048), P(), jnp.float32),
        ((2**22,), P("data"), jnp.float8_e4m3fn),
    ],
)
def test_a_fingerprint_reads_once_and_sends_nothing(mesh, shape, spec, dtype):
    sharding = NamedSharding(mesh, spec)
    abstract = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    compiled = compile_client.compile_for_gpus(_program(sharding, shape), abstract)
    shard = math.prod(sharding.shard_shape(shape)) * jnp.dtype(dtype).itemsize
    assert compiled.memory.arguments == pytest.approx(shard, abs=256)
    assert compiled.memory.temporary < shard / 8, "sums of parts, and no second copy"
    for word in ("all-reduce", "all-gather", "all-to-all", "collective-permute", " copy("):
        assert word not in compiled.text
