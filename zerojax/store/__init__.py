"""Numbered buckets of bytes on a disk, swept in constant memory: read i+1 | compute i | write i-1.

Knows files, threads and checksums; never knows what is in a bucket, models, plans or devices.

    with BucketStore.create("runs/mine/offload", num_buckets=24, bucket_bytes=48 << 20) as store:
        for bucket in store.sweep(dtype=np.float32):
            update(bucket.array)
            bucket.write()
"""

from zerojax.store.errors import StoreError
from zerojax.store.store import BucketStore
from zerojax.store.sweep import Bucket

__all__ = ["Bucket", "BucketStore", "StoreError"]
