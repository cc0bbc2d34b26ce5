"""The kernels lower for CUDA on a JAX that has only a CPU: which kernels, and what they write into.

Runs Pallas' tracing and Mosaic's layout inference; machine code is the business of
test_kernels_gpu_programs.py.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import choice, optimizers
from pallas_kernels.choice import Choice
from pallas_kernels.update import update, update_trees
from tests.support.kernel_rules import RULES

pytestmark = pytest.mark.skipif(choice.missing() is not None, reason=str(choice.missing()))
KERNEL, XLA = Choice("mosaic_gpu", "lowered only"), Choice("xla", "lowered only")
F32, BF16 = jnp.float32, jnp.bfloat16
CALL = "mosaic_gpu_v2"


def abstract(shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def lowered_for_cuda(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def aliases_of(text):
    """How many operands each kernel writes into, in the order of the program."""
    calls = [line for line in text.splitlines() if f"@{CALL}" in line]
    return [line.count("output_operand_alias<") for line in calls]


def arrays(rule, shape):
    updated = tuple(abstract(shape) for _ in range(rule.num_updated))
    read = tuple(abstract(shape, BF16) for _ in range(rule.num_read))
    return updated, read, tuple(abstract(()) for _ in rule.scalars._fields)


def program_of(rule, impl=KERNEL):
    def program(updated, read, scalars):
        more = {"scalars": rule.scalars(*scalars), "out_dtypes": (BF16,) * rule.num_outputs}
        return update(rule, updated, read, impl=impl, **more)

    return program


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", [(1024, 512), (1003, 7)], ids=["whole tiles", "a tail"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_one_kernel_that_writes_into_every_updated_array(rule, shape):
    text = lowered_for_cuda(program_of(rule), *arrays(rule, shape))
    # An output of a leaf with a tail is written into an array that ends with it.
    outputs = rule.num_outputs if shape[1] == 7 else 0
    assert aliases_of(text) == [rule.num_updated + outputs]
    reference = lowered_for_cuda(program_of(rule, XLA), *arrays(rule, shape))
    assert aliases_of(reference) == []


def test_equal_leaves_are_lowered_once():
    rule, leaves = optimizers.LION, 12

    def program(params, mus, grads, scalars):
        leaf = lambda updated, read: update(  # noqa: E731
            rule, updated, read, scalars=rule.scalars(*scalars), impl=KERNEL
        )
        return update_trees(leaf, (params, mus), (grads,))

    trees = [[abstract((64, 128), dtype)] * leaves for dtype in (F32, F32, BF16)]
    text = lowered_for_cuda(program, *trees, tuple(abstract(()) for _ in rule.scalars._fields))
    assert aliases_of(text) == [rule.num_updated]
    assert len(re.findall(r"call @_update\(", text)) == leaves
