"""One of two processes of an engine; the second is killed or stopped between two steps.

python tests/support/engine_fault_process.py FOLDER kill|stop|none READ [SECONDS]

READ: "each" reads every loss, as most loops do, "none" leaves them on the devices. SECONDS is the
watchdog's limit for a step.
"""

import os
import signal
import sys
import warnings

import jax

import zerojax
from tests.support.engine_process import CONFIG, Regression, batch
from zerojax.config import WatchConfig

NUM_STEPS, FAULT_AFTER = 60, 3


def main(folder: str, what: str, read: str, seconds: str = "0") -> None:
    watch = {"watch": WatchConfig(step_timeout=float(seconds))} if float(seconds) else {}
    with zerojax.initialize(Regression, CONFIG, **watch) as engine:
        for step in range(NUM_STEPS):
            if step == FAULT_AFTER:
                engine.save_checkpoint(folder)
                print("ready", flush=True)
                if engine.global_rank == 1 and what != "none":
                    os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            loss = engine.train_batch(batch(step, *engine.local_rows()))
            if read == "each":
                float(loss)
    print("done", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
