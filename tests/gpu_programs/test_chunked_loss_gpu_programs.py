"""What the loss of GPT-2's head moves in a program for an H100, and that logits are not float32.

Needs the compile-only client (extra `plan`), no GPU: pytest -m gpu_programs
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.forecasting import hlo
from zerojax.hardware import compile_client, gpus
from zerojax.operators.chunked_loss import head_next_token

pytestmark = pytest.mark.gpu_programs
TOKENS, VOCAB, WIDTH = 16_384, 50_304, 768
CHUNKS, LARGEST = 6, 2816


@pytest.mark.parametrize("vocab_dim", [0, 1])
def test_bfloat16_logits_are_moved_six_times_and_their_gradient_lies_where_they_lay(vocab_dim):
    """Written by the product, read by one reduction, replaced by their gradient (two moves), and
    read by two products."""
    (device,) = compile_client.gpu_devices(gpus.find_gpu("h100"), 1)
    whole = NamedSharding(Mesh(np.array([device]), ("data",)), P())
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=whole)  # noqa: E731

    def loss(hidden, head, targets):
        return head_next_token(hidden, head, targets, vocab_dim=vocab_dim, chunk="auto")[0]

    compiled = compile_client.compile_for_gpus(
        jax.jit(jax.value_and_grad(loss, (0, 1)), out_shardings=whole),
        of(jnp.bfloat16, TOKENS, WIDTH),
        of(jnp.bfloat16, *((VOCAB, WIDTH) if vocab_dim == 0 else (WIDTH, VOCAB))),
        of(jnp.int32, TOKENS),
        options=compile_client.FAST_OPTIONS,
    )
    head, logits, hidden = (
        2 * a * b for a, b in ((VOCAB, WIDTH), (TOKENS, VOCAB), (TOKENS, WIDTH))
    )
    # Per chunk the head is read by two products, and its float32 gradient read and written, except
    # that the first chunk only writes it. Then it is cast.
    heads = 2 * CHUNKS + 2 * (2 * CHUNKS - 1) + 3
    program = hlo.read_program(compiled.text)
    # Hidden states and their gradient are cut, read, made and joined; sums over rows are 0.5 %.
    moved = 6 * logits + heads * head + 9 * hidden
    assert hlo.hbm_bytes(program) == pytest.approx(moved, rel=0.01)
    buffers = 2 * head + 2 * LARGEST * VOCAB + hidden
    assert compiled.memory.temporary < 1.02 * buffers
