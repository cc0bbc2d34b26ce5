"""Marks of single cases, and what tests need that is not installed everywhere."""

import functools

import jax
import pytest

from pallas_kernels import choice
from zerojax.hardware import compile_client

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
"""A case that takes more than about ten seconds."""
thorough = functools.partial(pytest.param, marks=pytest.mark.thorough)
"""A further case."""
needs_kernels = pytest.mark.skipif(choice.missing() is not None, reason=str(choice.missing()))
"""For tests that build kernels; in tests of programs for GPUs as well."""
needs_compiler = pytest.mark.skipif(
    compile_client.missing() is not None, reason=str(compile_client.missing())
)
"""For tests outside of the tier `gpu_programs` that compile for GPUs."""
gathers_twice = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="the CPU compiler of JAX 0.10 merges the two all-gathers of a weight",
)
"""For tests that read the all-gather of the backward pass in a compiled CPU program."""
