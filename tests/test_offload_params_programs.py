"""What programs with layers in host memory move, and that their device memory is flat in depth.

The first tests read what is handed to a compiler for CUDA, on any machine. The others (marker
`gpu_programs`) read programs compiled for H200s that are not here.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from zerojax import compiler
from zerojax.config import OffloadConfig
from zerojax.mesh import make_abstract_mesh
from zerojax.models import GPT2, GPT2Config
from zerojax.offload import streaming
from zerojax.plan import Plan, make_plan
from zerojax.step import pass_config

WIDTH, SEQ, ROWS = 256, 128, 2
MIB = 2**20
MATRICES = 6
"""Stacked matrices of a GPT-2; its biases and norms are small and stay on the device."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of a GPT-2 whose weights, masters, moments and layers' inputs are on the host."""

    devices: int
    zero: int
    microbatches: int = 1
    in_backward: bool = False

    @property
    def name(self) -> str:
        parts = [f"zero{self.zero}", f"{self.devices}gpus", f"m{self.microbatches}"]
        return "-".join(parts + ["in_backward"] * self.in_backward)


def plan_of(case: Case, layers: int) -> Plan:
    """Slices are small, so that every matrix has several."""
    config = GPT2Config(
        vocab_size=512, max_seq_len=SEQ, num_layers=layers, num_heads=4, embed_dim=WIDTH
    )
    tokens = jax.ShapeDtypeStruct((case.devices * case.microbatches * ROWS, SEQ), np.int32)
    return make_plan(
        lambda rngs: GPT2(config, rngs=rngs),
        make_abstract_mesh({}, case.devices),
        example_batch={"tokens": tokens, "targets": tokens},
        zero=case.zero,
        num_microbatches=case.microbatches,
        optimizer=zerojax.adamw(1e-3, clip_norm=None),
        persistence_threshold=1000,
        offload=OffloadConfig(
            opt_state="host",
            params="host",
            activations="host",
            update_in_backward=case.in_backward,
            min_elements=layers * WIDTH * WIDTH // case.devices,
            slice_elements=WIDTH * WIDTH // case.devices,
        ),
    )


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_is_placed_where_is_in_the_program_for_cuda(microbatches):
    """Each matrix: twice a first row and one in the loop forward, one in the loop backward.

    The backward pass begins with the row that the forward pass ended with. Each gradient: where it
    is made, one in the loop and the last one behind it; with several microbatches each is read
    before it is written. The layers' inputs: made, written in a loop, and read in a loop.
    """
    plan = plan_of(Case(2, 3, microbatches), 4)
    assert plan.offload is not None
    assert len(plan.offload.streamed) == MATRICES
    gradients = jax.jit(streaming.build_gradients(pass_config(plan)))
    state = plan.abstract_state
    key_data = jax.ShapeDtypeStruct((2,), jnp.uint32)
    traced = gradients.trace(
        state["params"], state["frozen"], state["extras"], key_data, plan.abstract_batch
    )
    text = compiler.lower_for_gpus(traced).as_text()
    placed = re.findall(r'_xla_buffer_placement = "(\w+)"', text)
    weights, read = 3 * MATRICES, 2 * MATRICES * (microbatches > 1)
    assert placed.count("device") == weights + read + 1
    assert placed.count("pinned_host") == 3 * MATRICES + 2
    assert len(placed) == placed.count("device") + placed.count("pinned_host")
