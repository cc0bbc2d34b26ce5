"""Bytes that one decoded position reads, from the programs of generation compiled for an H200."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.forecasting import hlo
from zerojax.forecasting.hlo.costs import HbmTraffic
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.zoo import Llama, LlamaConfig, generation
from zerojax.zoo.sampling import Sampling
from zerojax.zoo.weight_only import with_codes

pytestmark = pytest.mark.gpu_programs

SIZES = LlamaConfig(
    vocab_size=1024,
    num_layers=3,
    num_heads=16,
    num_kv_heads=4,
    embed_dim=2048,
    mlp_dim=8192,
    max_seq_len=4096,
)
SHORT, LONG = 1024, 2048
"""Numbers of positions in the cache."""
FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")


class Decoding(NamedTuple):
    """One decoded position of a compiled program, in bytes of device memory."""

    total: int
    """Read and written by all kernels."""
    codes: int
    """Read from arrays of int8 codes of weights."""
    largest_result: int
    """Largest number of elements of an array that a kernel writes."""
    weights: int
    """Size of the weights that each position reads: all but the table of tokens."""
    cache: int
    """Size of the cache."""


def bytes_of(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def bf16_llama() -> Llama:
    graphdef, state = nnx.split(Llama(SIZES, rngs=nnx.Rngs(0)))
    return nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))


@functools.cache
def decoding(batch: int, quantize: str | None, cache: str | None, length: int = SHORT) -> Decoding:
    mesh = Mesh(np.array(compile_client.gpu_devices(find_gpu("h200"), 1)), ("data",))
    rows = NamedSharding(mesh, P("data"))

    def placed(tree: Any) -> Any:
        everywhere = NamedSharding(mesh, P())
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree
        )

    graphdef, state = nnx.split(nnx.eval_shape(lambda: with_codes(bf16_llama(), quantize)))
    controls = jax.tree.map(jnp.asarray, Sampling(temperature=0.0).controls(SIZES.vocab_size))
    progress, kept = jax.eval_shape(
        lambda state: generation._start(
            state,
            jnp.int32(0),
            size=batch,
            cache_length=length,
            has_codes=cache is not None,
            graphdef=graphdef,
            row_sharding=None,
        ),
        state,
    )
    numbers = jax.ShapeDtypeStruct((batch,), jnp.int32)
    prompts = generation._Batch(jax.ShapeDtypeStruct((batch, 32), jnp.int32), *[numbers] * 3)
    args = (state, progress, kept, prompts, controls, jnp.int32(0))
    lowered = generation._decode.lower(*placed(args), graphdef=graphdef, row_sharding=rows)
    program = hlo.read_program(compile_client.compile_for_gpus(lowered).text)
    traffic = HbmTraffic(program)
    [loop] = [x for x in program.entry.instructions if x.opcode == "while"]
    body = program.computations[loop.callees["body"][0]]
    kernels = [x for x in body.instructions if x.opcode not in (*FREE, "while")]
    arrays = [array for x in kernels for array in body.operand_arrays(x)]
    weights = bytes_of(state) - bytes_of(state["token_embedding"])
    return Decoding(
        total=traffic.total.of_computation(body.name),
        codes=sum(x.bytes for x in arrays if x.dtype == "s8") if cache is None else 0,
        largest_result=max(int(np.prod(x.shape)) for i in kernels for x in i.arrays),
        weights=weights,
        cache=bytes_of(kept),
    )


@pytest.mark.parametrize("batch", [1, 32])
def test_int8_weights_are_read_once_and_no_copy_is_written(batch):
    eight, sixteen = decoding(batch, "int8", None), decoding(batch, None, None)
    print(eight, sixteen, decoding(batch, "int8", "int8"), decoding(batch, "int8", "int8", LONG), decoding(batch, "int8", None, LONG))
