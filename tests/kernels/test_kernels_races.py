"""No program reads or writes another program's elements."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from jax import lax

from pallas_kernels import mosaic, optimizers, rounding
from pallas_kernels.adam8bit import init_moments
from pallas_kernels.adam8bit_kernel import update_adam8bit
from pallas_kernels.update import update
from tests.kernels.test_kernels_elementwise import BF16, F32, arrays_of, normal, scalars_of
from tests.support.kernel_rules import RULES
from tests.support.marks import needs_kernels


def run_rule(rule):
    # A rule with sums goes through up to 32 tiles in one program, but not through a prime number.
    updated, read = arrays_of(rule, (4 if rule.num_sums == 0 else 37, 512), F32, BF16)
    return update(rule, updated, read, scalars=scalars_of(rule), impl="interpret")


def run_adam8bit(shape=(5, 512)):
    param, grad = normal(0, shape), normal(1, shape, BF16)
    moments, seed = init_moments(shape), rounding.seed_of(jax.random.key(0))
    more = {"scalars": scalars_of(optimizers.ADAMW), "seed": seed, "impl": "interpret"}
    for _ in range(2):
        param, moments, *_ = update_adam8bit(param, moments, grad, **more)
    return param, moments


@pytest.mark.thorough
@needs_kernels
@pytest.mark.parametrize("rule", [*RULES, None], ids=lambda rule: rule.name if rule else "adam8bit")
def test_the_order_of_programs_does_not_matter(rule, monkeypatch):
    """Interpret mode runs program after program. Had one read what another writes, running them
    from the last to the first would change bits. That two write the same element is an error."""
    run = run_adam8bit if rule is None else lambda: run_rule(rule)
    jax.clear_caches()
    forwards = jax.tree.leaves(run())
    in_order, grids = lax.axis_index, []
    build = mosaic.mesh_of

    def mesh_of(programs):
        grids.append(programs)
        return build(programs)

    monkeypatch.setattr(mosaic, "mesh_of", mesh_of)
    monkeypatch.setattr(lax, "axis_index", lambda name: grids[-1] - 1 - in_order(name))
    jax.clear_caches()
    backwards = jax.tree.leaves(run())
    jax.clear_caches()
    assert max(grids) >= 4
    for a, b in zip(forwards, backwards, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


OVERLAPPING = """
import jax, jax.numpy as jnp
from pallas_kernels import mosaic, optimizers
from pallas_kernels.update import update
at_tile = mosaic.at_tile
mosaic.at_tile = lambda ref, row, tiles: at_tile(ref, row // 2, tiles)
x = jnp.ones((1024,))
more = {"scalars": optimizers.lion_scalars(1e-3), "impl": "interpret"}
jax.block_until_ready(update(optimizers.LION, (x, x), (x,), **more))
"""


@pytest.mark.thorough
@needs_kernels
def test_two_tiles_that_write_the_same_elements_are_found():
    """In a process of its own: JAX's interpreter is of no use after an error."""
    done = subprocess.run(
        [sys.executable, "-c", OVERLAPPING], capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "RACE DETECTED" in done.stderr
