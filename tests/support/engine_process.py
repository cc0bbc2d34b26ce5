"""One of two processes of a loop that was written for DeepSpeed; prints what it saw as JSON.

python tests/support/engine_process.py FOLDER
"""

import itertools
import json
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
}


class Regression(nnx.Module):
    """One layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.Linear(12, 5, rngs=rngs)

    def loss(self, batch):
        return jnp.mean((self.layer(batch["x"]) - batch["y"]) ** 2)


def batch(step, low, high):
    """This process's rows of a global batch."""
    x = np.random.default_rng(step).normal(size=(16, 12)).astype(np.float32)[low:high]
    return {"x": x, "y": x[:, :5] - x[:, 5:10]}


def main(folder: Path) -> dict:
    import zerojax

    def start(stage):
        config = CONFIG | {"zero_optimization": {"stage": stage}}
        return zerojax.initialize(model=Regression, config=config)

    engine = start(2)
    rows = engine.local_rows()
    losses = [float(engine.train_batch(batch(step, *rows))) for step in range(2)]
    engine.save_checkpoint(folder, client_state={"epoch": 1})
    try:
        engine.save_checkpoint(folder, f"tag{engine.global_rank}")
        refused = ""
    except zerojax.errors.CheckpointError as error:
        refused = str(error)
    try:
        engine.eval_batch(batch(2, 0, 16))  # of one process these are its rows
        whole = ""
    except ValueError as error:
        whole = str(error)
    losses.append(float(engine.train_batch(batch(2, *rows))))

    again = start(3)
    loaded = again.load_checkpoint(folder)
    same = float(again.train_batch(batch(2, *rows)))
    return {
        "rank": engine.global_rank,
        "rows": rows,
        "losses": losses,
        "again": same,
        "client_state": loaded[1],
        "refused": refused,
        "whole": whole,
    }


def save_forever(folder: Path) -> None:
    import zerojax

    engine = zerojax.initialize(model=Regression, config=CONFIG)
    engine.train_batch(batch(0, *engine.local_rows()))
    for number in itertools.count():
        engine.save_checkpoint(folder, "best", client_state={"number": number})
        if number == 0:
            print("saved", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    warnings.simplefilter("ignore")
    if sys.argv[2:] == ["forever"]:
        save_forever(Path(sys.argv[1]))
    print(json.dumps(main(Path(sys.argv[1]))))
