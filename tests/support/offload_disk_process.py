"""A training process for tests that kill it: a tiny run with slices in files.

python -m tests.support.offload_disk_process FOLDER STEPS durable|scratch CHECKPOINT_EVERY
"""

import os
import sys
from pathlib import Path

import jax

from tests.support.offload_disk_runs import Regression, offload
from tests.support.trajectories import regression_batch
from zerojax.config import CheckpointConfig, LogConfig, MeshConfig
from zerojax.optim import adamw
from zerojax.training.entry import train


def main(folder: Path, steps: int, durable: bool, every: int) -> None:
    """Trains until `steps`; adds number and loss of each step to FOLDER/losses, as they come.

    Args:
      folder: of everything.
      steps: of the whole run.
      durable: whether two generations are kept.
      every: steps between checkpoints; 0: none are saved.
    """
    settings = MeshConfig(data=2, offload=offload(folder / "store", durable=durable))
    checkpoint = CheckpointConfig(
        path=str(folder / "checkpoints"), every=every or 1, save_on_exit=False
    )
    with (folder / "losses").open("a", buffering=1, encoding="utf-8") as losses:

        def note(trainer, metrics):
            losses.write(f"{metrics['step']} {metrics['loss'].hex()}\n")

        trainer = train(
            Regression,
            settings,
            [regression_batch(index) for index in range(4)],
            optimizer=adamw(1e-2, clip_norm=1.0),
            steps=steps,
            checkpoint=checkpoint if every else None,
            run_dir=None,
            log=LogConfig(every=1),
            callbacks=[note],
        )
        trainer.close()


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "durable", int(sys.argv[4]))
