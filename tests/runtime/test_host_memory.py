"""Steps on CPU devices keep the memory that they free."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from flax import nnx
import zerojax

rows = {"x": np.ones((4096, 512), np.float32)}
plan = zerojax.make_plan(
    lambda rngs: nnx.Sequential(*(nnx.Linear(512, 512, rngs=rngs) for _ in range(4))),
    {"zero": 1},
    example_batch=rows,
    loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
    precision="fp32",
)
state, step = zerojax.init_state(plan), zerojax.build_step(plan)
faults = []
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    state, metrics = step(state, zerojax.shard_batch(plan, rows))
    float(metrics["loss"])
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[4:]))  # a thread may still grow in one of these steps
"""


def faults(devices: int, **environment: str) -> int:
    """Page faults of a step of an own loop, from the fifth on."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": f"{devices}", **environment},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is what is asked")
def test_a_step_of_an_own_loop_uses_the_memory_again_that_it_freed(devices):
    """Unless the environment sets malloc; XLA's temporaries are tens of MiB, in pages of 4 KiB."""
    given_back = faults(devices, MALLOC_TRIM_THRESHOLD_="131072")
    assert given_back > 5000, "the plain allocator gives such pieces back"
    assert faults(devices) < 0.2 * given_back
