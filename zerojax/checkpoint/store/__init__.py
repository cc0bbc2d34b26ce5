"""Bucket store: numbered buckets of bytes in files, read and written in order in constant memory.

with BucketStore.create("runs/mine/offload", num_buckets=24, bucket_bytes=48 << 20) as store:
    for bucket in store.sweep(dtype=np.float32):
        update(bucket.array)
        bucket.write()
"""

from zerojax.checkpoint.store.direct_io import StoreError, StoreFailedError
from zerojax.checkpoint.store.store import BucketStore
from zerojax.checkpoint.store.sweep import Bucket

__all__ = ["Bucket", "BucketStore", "StoreError", "StoreFailedError"]
