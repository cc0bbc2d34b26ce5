"""Forward and backward pass of a step at each ZeRO stage, and the update of the optimizer.

The pass is one `shard_map`, manual over the data axes; the compiler partitions tensor-parallel
axes. The package knows parameters only by their placement, and never sees the optimizer, which runs
outside of the `shard_map` on global arrays.
"""

from zerojax.passes.gradients import build_forward, build_gradients, for_evaluation
from zerojax.passes.microbatch import (
    PassConfig,
    map_forward,
    map_gradients,
    over_batch,
    run_microbatch,
    shard_key,
    specs_of,
    split_batch,
)
from zerojax.passes.parameters import (
    build_reads,
    build_rewriting,
    prepare_parameters,
    reduce_gradients,
    tile_collectives,
    values_to_read,
)

__all__ = [
    "PassConfig",
    "build_forward",
    "build_gradients",
    "build_reads",
    "build_rewriting",
    "for_evaluation",
    "map_forward",
    "map_gradients",
    "over_batch",
    "prepare_parameters",
    "reduce_gradients",
    "run_microbatch",
    "shard_key",
    "specs_of",
    "split_batch",
    "tile_collectives",
    "values_to_read",
]
