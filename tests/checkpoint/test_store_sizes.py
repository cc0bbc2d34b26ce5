"""Buckets of one store may differ in size: what is read and written is what each one has."""

import numpy as np
import pytest

from zerojax.checkpoint.store import BucketStore
from zerojax.checkpoint.store.direct_io import BLOCK, pad_to_block

SIZES = [5000, 1, BLOCK, (4 << 20) + 8]


@pytest.mark.parametrize("durable", [False, True], ids=["scratch", "durable"])
def test_buckets_of_different_sizes(tmp_path, durable):
    content = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in SIZES]
    with BucketStore.create(tmp_path, num_buckets=4, bucket_bytes=SIZES, durable=durable) as store:
        assert (store.bucket_bytes, store.bucket_sizes) == (SIZES[-1], tuple(SIZES))
        assert store.buffer_bytes == 3 * pad_to_block(SIZES[-1])
        assert store.disk_bytes == sum(map(pad_to_block, SIZES)) * (1 + durable)
        for _ in range(2):
            for bucket in store.sweep(read=False, order=[3, 0, 2, 1]):
                bucket.array[:] = content[bucket.index]
                bucket.write()
    with BucketStore.open(tmp_path) as store:
        for bucket in store.sweep():
            assert np.array_equal(bucket.array, content[bucket.index])
