"""One layer of experts as it compiles for an H100: its products, its buffers, and no float scatter.

Needs the compile-only client (extra `plan`) and no GPU: pytest -m gpu_programs.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from tests.operators.test_experts import swiglu
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client, gpus
from zerojax.operators.marks import FURTHER_ROUNDS
from zerojax.operators.routed_experts import experts_split_over, slots_per_expert

pytestmark = pytest.mark.gpu_programs
TOKENS, WIDTH, HIDDEN, EXPERTS, K = 4096, 2048, 1024, 8, 8
"""As many rows and weights as a device of OLMoE has of one layer with its experts over 8."""
SLOTS = EXPERTS * slots_per_expert(TOKENS, K, EXPERTS, 1.25)
assert 8 * EXPERTS * slots_per_expert(TOKENS, K, 8 * EXPERTS, 1.25) == SLOTS
ROWS = SLOTS * (WIDTH + 2 * HIDDEN) * 2
"""Bytes of a row's own numbers and of its hidden units, in all slots."""


@functools.cache
def compiled(is_split: bool) -> compile_client.CompiledProgram:
    """Result and derivatives of one layer in bfloat16, on each of 8 devices by itself, or of 64
    experts split over them."""
    mesh = Mesh(np.array(compile_client.gpu_devices(gpus.find_gpu("h100"), 8)), ("data",))

    def local(x, gates, ids, weights, slope):
        def result(x, gates, weights):
            with experts_split_over("data" if is_split else None):
                return zerojax.experts(x, gates, ids, weights, swiglu)

        out, pull = jax.vjp(result, x, gates, weights)
        # As in a model, in which the result is there before its gradient.
        out, slope = jax.lax.optimization_barrier((out, slope))
        return out, pull(slope)

    rows = P("data")
    run = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)

    def shape(dtype, *sizes):
        sharding = NamedSharding(mesh, rows)
        return jax.ShapeDtypeStruct((8 * sizes[0], *sizes[1:]), dtype, sharding=sharding)

    wide = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return compile_client.compile_for_gpus(
        jax.jit(run),
        shape(jnp.bfloat16, TOKENS, WIDTH),
        shape(jnp.float32, TOKENS, K),
        shape(jnp.int32, TOKENS, K),
        {name: shape(jnp.bfloat16, EXPERTS, *sizes) for name, sizes in wide.items()},
        shape(jnp.bfloat16, TOKENS, WIDTH),
    )


def products(is_split: bool) -> list[tuple[int, bool]]:
    """(FLOPs, whether it is in the loop of further rounds) of every product."""
    text, found = compiled(is_split).text, []
    made = re.findall(r"(%[\w.-]+) = \w+\[([\d,]+)\]", text)
    shapes = {name: [int(size) for size in sizes.split(",")] for name, sizes in made}
    for line in text.splitlines():
        product = re.search(r"(%[\w.-]+) = .* dot\((%[\w.-]+), .*lhs_contracting_dims={(\d)}", line)
        assert product or 'custom_call_target="__cublas' not in line, line
        if product:
            name, left, dim = product.groups()
            flops = 2 * math.prod(shapes[name]) * shapes[left][int(dim)]
            found.append((flops, FURTHER_ROUNDS in line))
    return found


@pytest.mark.parametrize("is_split", [False, True])
def test_the_first_round_is_the_ideal_arithmetic_times_slack(is_split):
    """Three products forward, two for each backward, on 1.25 times the rows."""
    found = products(is_split)
    in_line = sum(flops for flops, is_further in found if not is_further)
    ideal = 9 * 2 * TOKENS * K * WIDTH * HIDDEN
    assert in_line <= 1.3 * ideal
    assert in_line == 9 * 2 * SLOTS * WIDTH * HIDDEN
    # A quarter of it in the loops: three products forward; backward these again, and six.
    further = sum(flops for flops, is_further in found if is_further)
    assert further == 12 * 2 * SLOTS * WIDTH * HIDDEN / 4


def test_loops_of_further_rounds_count_as_not_run():
    program = hlo.read_program(compiled(False).text)
    assert program.unknown_loops == ()
    text = compiled(False).text
    assert len(re.findall(rf" while\(.*{FURTHER_ROUNDS}", text)) == 2  # forward and backward
    assert len(re.findall(r" while\(", text)) == 2


def test_rows_move_without_scatters():
    """One of integers, each to a place of its own: no sum depends on which thread comes first."""
    scatters = re.findall(r"= (\w+)\[.* scatter\(.*", compiled(False).text)
    assert scatters == ["s32"]
    assert "unique_indices=true" in compiled(False).text


def test_temporaries_are_at_most_one_and_a_half_times_the_rows():
    """545 MiB were measured, 721 without `_is_kept`: a product of each expert, gate, up and what
    it gives, and the gradient of that; 1.5 times the rows of 2 WIDTH and 2 HIDDEN numbers.

    Beside them lies the gradient of one array of weights in float32, in which rounds are summed.
    """
    in_float32 = EXPERTS * WIDTH * HIDDEN * 4
    assert compiled(False).memory.temporary <= 1.5 * ROWS + in_float32 + 2**20


def test_temporaries_of_split_experts_are_three_times_the_rows():
    """961 MiB: rows, hidden units and results (1.5 times), rows as they arrived, and the gradient
    of results, which is there twice while it is sent. No array is of as many times the rows as
    there are devices."""
    found = compiled(True)
    assert found.memory.temporary <= 3.05 * ROWS
    sizes = re.findall(r"bf16\[([\d,]+)\]", found.text)
    assert max(math.prod(map(int, dims.split(","))) for dims in sizes) == SLOTS * WIDTH
