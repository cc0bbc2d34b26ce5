"""Bytes that attention over 8 H100 sends, read from the programs they would run.

Needs the compile-only client (extra `plan`) and no GPU: pytest -m gpu_programs. About two minutes
of processor time.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from tests.test_context import largest_array, lowered
from zerojax.forecasting import hlo
from zerojax.hardware import compile_client, gpus
from zerojax.models.context import WAYS, Sizes, wire_bytes
from zerojax.plan.device_mesh import make_mesh

MISSING = compile_client.missing()
pytestmark = [
    pytest.mark.gpu_programs,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
DEVICES, TOKENS = 8, 32768


def compiled(way, kv_heads, *, backward):
    devices = compile_client.gpu_devices(gpus.find_gpu("h100"), DEVICES)
    mesh = make_mesh({"model": DEVICES}, devices)
    sizes = Sizes(
        rows=1,
        tokens=TOKENS,
        heads=32,
        kv_heads=kv_heads,
        head_dim=128,
        itemsize=2,
        devices=DEVICES,
    )
    program = lowered(mesh, way, sizes, jnp.bfloat16, backward=backward)
    return compile_client.compile_for_gpus(program, sketch=True), wire_bytes(way, sizes)


@pytest.mark.parametrize("kv_heads", [32, 8, 2])
@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_those_of_the_formulas_and_no_device_decides_whether_others_wait(way, kv_heads):
    for backward in (False, True):
        built, expected = compiled(way, kv_heads, backward=backward)
        program = hlo.read_program(built.text)
        found = hlo.find_collectives(program, DEVICES)
        wanted = sum(expected) if backward else expected.forward
        assert sum(x.times * x.wire_bytes for x in found) == pytest.approx(wanted, rel=0.04)
        assert hlo.find_in_branches(program, DEVICES) == []
        assert program.unknown_loops == ()
        assert largest_array(built.text) <= TOKENS * 32 * 128  # keys of all heads and tokens
