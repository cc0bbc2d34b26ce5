"""A run in too little address space; started by test_monitor_memory.

Usage: out_of_memory_process.py FOLDER
Prints the type of the error, then its notes.
"""

import re
import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax

ROWS, HIDDEN = 16_384, 4096
ROOM = 700 * 2**20
"""Bytes that the process may still take: one activation has 256 MiB, and the step needs some."""


def loss(params, batch):
    hidden = batch["x"] @ params["into"]
    for _ in range(4):
        hidden = jnp.sort(hidden, axis=-1) * 1.5
    return jnp.mean(jnp.square(hidden @ params["out"]))


def main(folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jnp.ones(8).sum().block_until_ready()  # its threads take address space, too
    used = re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())
    assert used is not None
    limit = int(used[1]) * 1024 + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    params = {"into": jnp.ones((16, HIDDEN)), "out": jnp.ones((HIDDEN, 8))}
    model = (lambda key, batch: params, loss)
    try:
        zerojax.train(
            model,
            {"zero": 1},
            [{"x": np.ones((ROWS, 16), np.float32)}],
            loss=lambda apply, batch: apply(batch),
            optimizer=optax.sgd(0.1),
            precision="fp32",
            checkpoint=f"{folder}/checkpoints",
            run_dir=folder,
        )
    except Exception as error:
        print(type(error).__name__)
        print("\n".join(error.__notes__))


if __name__ == "__main__":
    main(sys.argv[1])
