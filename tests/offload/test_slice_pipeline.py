"""A loop over slices on the host computes what a plain loop computes, for every form of a stack."""

import jax
import numpy as np
import pytest

from zerojax.offload.slice_pipeline import SliceStack, update_slices


@pytest.mark.parametrize("host", [(True, True, True), (True, False, True), (False, False, False)])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_slices_are_those_of_a_plain_loop(count: int, host: tuple[bool, bool, bool]) -> None:
    """Two stacks read and written, one only read, one only written from its second slice on."""
    rng = np.random.default_rng(count)
    first, second, read = (rng.normal(size=(count, 8)).astype(np.float32) for _ in range(3))
    written = rng.normal(size=(count + 1, 8)).astype(np.float32)

    def update(number, slices):
        a, b, c = slices
        return a + 2 * b * c, b - number, a + c

    kinds = ["pinned_host" if on_host else "device" for on_host in (*host, host[0])]
    shardings = [
        jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind) for kind in kinds
    ]

    def run(*arrays):
        a, b, c, d = arrays
        stacks = (
            SliceStack(array=a, on_host=host[0]),
            SliceStack(array=b, on_host=host[1]),
            SliceStack(array=c, on_host=host[2], is_written=False),
            SliceStack(array=d, first=1, on_host=host[0], is_read=False),
        )
        return update_slices(count, stacks, update)

    placed = [
        jax.device_put(array, sharding)
        for array, sharding in zip((first, second, read, written), shardings, strict=True)
    ]
    outputs = (shardings[0], shardings[1], shardings[3])
    results = jax.jit(run, out_shardings=outputs, donate_argnums=(0, 1, 3))(*placed)

    numbers = np.arange(count, dtype=np.float32)[:, None]
    last = np.concatenate([written[:1], first + read])
    expected = (first + 2 * second * read, second - numbers, last)
    for result, wanted, sharding in zip(results, expected, outputs, strict=True):
        assert result.sharding.memory_kind == sharding.memory_kind
        # A product and a sum may be one rounding.
        np.testing.assert_allclose(np.asarray(result), wanted, rtol=1e-6, atol=1e-6)
