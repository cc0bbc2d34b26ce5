"""Codes of frozen weights, as a GPU's compiler makes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.forecasting import hlo
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.optim.weight_codes import KINDS, WeightCodes

pytestmark = pytest.mark.gpu_programs


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_chosen_by_the_scale_that_is_stored(kind: str) -> None:
    """The compiler may remove a cast to bfloat16 and back, but no `reduce-precision`."""
    mesh = Mesh(np.array(compile_client.gpu_devices(find_gpu("h200"), 1)), ("data",))
    values = jax.ShapeDtypeStruct((128, 256), jnp.float32, sharding=NamedSharding(mesh, P()))
    program = jax.jit(WeightCodes(kind, -1).encode)
    text = compile_client.compile_for_gpus(program, values).text
    rounded = {
        instruction.name
        for computation in hlo.read_program(text).computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "reduce-precision"
    }
    assert len(rounded) == 1
