"""A run that tries a kernel before its state exists, and what this kernel does.

Words: what the kernel does where it is tried (MODES), the folder of the cache, and after how many
seconds a process that tries something is taken to hang. Prints what was chosen and that it trained.
Devices of the CPU stand for GPUs; the kernel runs inside of a jitted program, as kernels do.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zerojax
from tests.support.small_models import apply_functions, init_functions, regression_loss
from tests.support.trajectories import regression_batch
from zerojax.training.tuning import Question, Way, tuned_plan


def hang() -> None:
    """For good, and not in Python's main thread, which waits for the device."""
    while True:
        time.sleep(3600)


MODES: dict[str, Callable[[], Any]] = {
    "works": lambda: None,
    "hangs": hang,
    "exits": lambda: os._exit(3),
    "faults": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}


def question(mode: str, *_: Any) -> Question:
    """A sum by XLA, or by a kernel that does as `mode` says."""
    x = jnp.arange(8.0)

    def kernel(x: Any) -> np.ndarray:
        MODES[mode]()
        return np.asarray(x).sum()

    result = jax.ShapeDtypeStruct((), jnp.float32)
    other = jax.jit(lambda x: jax.pure_callback(kernel, result, x))
    reference = jax.jit(jnp.sum)
    return Question(
        title="gradient statistics",
        key={"what": "sum"},
        reference=Way(name="xla", run=lambda: reference(x)),
        other=Way(name="mosaic_gpu", run=lambda: other(x)),
        difference=tuned_plan.difference,
    )


def main(mode: str, folder: str, seconds: str) -> None:
    os.environ["ZEROJAX_CACHE"] = folder
    tuned_plan.is_on_gpus = lambda plan: True
    tuned_plan.open_kernels = lambda plan: {"statistics": "stats"}
    tuned_plan.open_calls = lambda plan: {}
    tuned_plan.statistics_question = lambda *_: question(mode)
    tuned_plan.TRIAL_SECONDS = float(seconds)
    trainer = zerojax.train(
        (init_functions, apply_functions), {}, regression_batch, loss=regression_loss, steps=2
    )
    (said,) = [reason for reason in trainer.plan.reasons if reason.startswith("gradient stat")]
    print(said, flush=True)
    print(f"trained {trainer.num_steps} steps", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
