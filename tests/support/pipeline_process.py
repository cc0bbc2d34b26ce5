"""One of several processes that train over pipeline stages: what `test_pipeline_processes` starts.

    python -m tests.support.pipeline_process OUT.json ORDER ZERO THETA

ORDER is a permutation of all devices, such as 0,2,1,3: neighbours in it are on neighbouring stages.
THETA is that of layer drop; 1 keeps all layers.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax

from tests.support.process_groups import join

STEPS = 8


def inputs_of(theta: float) -> Any:
    """The inputs of planning, the same with and without stages."""
    from tests.support.inputs_with_features import plan_inputs
    from tests.support.pipeline_runs import small
    from tests.support.trajectories import optimizer, text_batch
    from zerojax import LayerDropConfig

    return plan_inputs(
        model=small(layers=4, rate=0.1),
        example_batch=text_batch(0),
        optimizer=optimizer(),
        precision="fp32",
        num_microbatches=4,
        layer_drop=LayerDropConfig() if theta == 1 else LayerDropConfig(theta=theta, gamma=50.0),
    )


def main(out: str, order: str, zero: str, theta: str) -> None:
    join(2)
    from tests.support.pipeline_runs import THRESHOLD
    from tests.support.trajectories import text_batch
    from zerojax import build_step, init_state, make_mesh, shard_batch
    from zerojax.data import local_rows
    from zerojax.plan.make import plan_of

    devices = [jax.devices()[int(place)] for place in order.split(",")]
    plan = plan_of(
        inputs_of(float(theta)),
        make_mesh({"data": 2, "stage": 2}, devices),
        zero=int(zero),
        partition=(3, 1),
        persistence_threshold=THRESHOLD,
    )
    sizes = plan.mesh.shape["data"], plan.mesh.shape["stage"]  # the other axes have one device
    owners = [[device.process_index for device in row] for row in plan.mesh.devices.reshape(sizes)]
    step, state, losses = build_step(plan), init_state(plan, 0), []
    low, high = local_rows(plan)
    for index in range(STEPS):
        batch = {name: x[low:high] for name, x in text_batch(index).items()}
        state, metrics = step(state, shard_batch(plan, batch))
        losses.append(float(metrics["loss"]))
    if jax.process_index() == 0:
        Path(out).write_text(json.dumps({"owners": owners, "losses": losses}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
