"""One process of one program: `python -m benchmarks.compare.worker JSON`.

Passes weights and batches to a model of either framework; files in `ways` are like user programs.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.compare import subject
from benchmarks.compare.sockets import bytes_sent
from benchmarks.machine import pin_to_core
from benchmarks.workers import serve
from zerojax.runtime.memory import keep_freed_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Task of one worker.

    Attributes:
      way: name of a file in `ways`, whose keyword arguments are `options`.
      framework: "jax" or "torch".
      index, count: number of this process, and number of processes of the group.
      core: core to which the process is pinned.
      folder: folder of the exported files.
    """

    way: str
    options: dict[str, Any]
    framework: str
    index: int
    count: int
    core: int
    folder: str
    smoke: bool


def main() -> None:
    """Prepares the program and answers requests for steps until standard input ends."""
    task = Task(**json.loads(sys.argv[1]))
    pin_to_core(task.core)
    keep_freed_memory()  # the same for all programs: it helps XLA most, but also torch
    make_model, read = _subject_of(task)
    batches = subject.read_batches(Path(task.folder))
    own = [read(subject.rows_of(batch, task.index, task.count)) for batch in batches]
    if task.way.startswith("deepspeed"):
        _leave_out_the_shared_memory_operator()
    way = importlib.import_module(f"benchmarks.compare.ways.{task.way}")
    step = way.prepare(make_model, read(batches[0]), **task.options)
    done = 0

    def take_step() -> dict[str, Any]:
        nonlocal done
        sent = bytes_sent()
        loss = step(own[done % len(own)])
        done += 1
        after = bytes_sent()
        return {"loss": loss, "sent": None if None in (sent, after) else after - sent}

    serve(take_step, lambda: {"peak_mb": peak_mb()})
    # Skips the exit of backends, which would wait for each other.
    sys.stdout.flush()
    os._exit(0)


def _leave_out_the_shared_memory_operator() -> None:
    """Prevents DeepSpeed from compiling its shared-memory operator, which only its inference uses.

    DeepSpeed compiles it on CPUs when processes join. This takes a compiler, ninja and 80 s of
    processor time. A process that is ended meanwhile leaves a lock for which later processes wait
    without end.
    """
    import deepspeed  # only where it is installed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _subject_of(task: Task) -> tuple[Callable[[], Any], Callable[[subject.Batch], Any]]:
    """Returns two functions: one makes the model with the exported weights, one makes a batch."""
    weights = subject.read_weights(Path(task.folder))
    if task.framework == "jax":
        from benchmarks import plain_jax, small_gpt  # only where JAX is installed

        factory = small_gpt.make_factory(small_gpt.choose_config(task.smoke))

        def make_jax_model() -> Any:
            import jax.numpy as jnp

            arrays = {name: jnp.asarray(value) for name, value in weights.items()}
            return plain_jax.build_model(factory, arrays)

        return make_jax_model, lambda batch: batch
    import torch  # only where it is installed

    from benchmarks.gpu.torch_model import Decoder, load_jax_parameters

    def make_torch_model() -> Any:
        model = Decoder(subject.choose_workload(task.smoke))
        load_jax_parameters(model, weights)
        return model

    def read_torch(batch: subject.Batch) -> Any:
        return {name: torch.from_numpy(array).long() for name, array in batch.items()}

    return make_torch_model, read_torch


def peak_mb() -> int | None:
    """Returns the peak resident memory of this process in MB; None if unknown to the system.

    `ru_maxrss` is not used, since it starts with the memory of the parent process.
    """
    path = Path("/proc/self/status")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) * 1024 / 1e6)
    return None


if __name__ == "__main__":
    main()
