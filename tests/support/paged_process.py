"""A process that trains layers from files, for a test of its memory.

python -m tests.support.paged_process FOLDER LAYERS make|run

"make" draws a new state, takes a step and leaves its durable files; "run" resumes from them and
takes three steps. Both print JSON: "peak_rss_bytes" of the process, "file_bytes", and "losses".
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

WIDTH = 1024
ROWS, LENGTH, STEPS = 8, 64, 3


def plan_of(folder: Path, layers: int) -> Any:
    """A plan of one device with layers of 4 MiB and inputs of 2 MiB."""
    from tests.support.pipeline_runs import small
    from zerojax.config import MeshConfig, OffloadConfig
    from zerojax.optim import adamw
    from zerojax.placement.device_mesh import make_mesh
    from zerojax.plan.make import make_plan

    return make_plan(
        small(layers=layers, width=WIDTH),
        make_mesh(MeshConfig(data=1), jax.devices()[:1]),
        example_batch=batch_of(0),
        optimizer=adamw(1e-3, clip_norm=1.0),
        precision="fp32",
        offload=OffloadConfig(params="nvme", activations="nvme", folder=str(folder), durable=True),
    )


def batch_of(index: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(index).integers(0, 32, (ROWS, LENGTH + 1), np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def run(folder: Path, layers: int, *, new: bool) -> dict[str, Any]:
    """Takes a step of a new state, or resumes and takes `STEPS` steps."""
    from zerojax.offload.disk_durable import resume
    from zerojax.step.build import build_step
    from zerojax.step.initialization import init_state

    plan = plan_of(folder, layers)
    state = init_state(plan) if new else resume(plan)[0]
    step, losses = build_step(plan), []
    for index in range(1 if new else STEPS):
        state, metrics = step(state, batch_of(index))
        losses.append(float(metrics["loss"]))
    state["disk"].close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    files = sum(path.stat().st_size for path in folder.rglob("buckets*.bin"))
    return {"peak_rss_bytes": peak, "file_bytes": files, "losses": losses}


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    place, number = Path(sys.argv[1]), int(sys.argv[2])
    print(json.dumps(run(place, number, new=sys.argv[3] == "make")))
