"""One of several processes with a mixture's weights of Hugging Face, over the axis `expert`.

    python -m tests.support.expert_folder_process FOLDER OUT ZERO

writes OUT/process_0.json ..., with the tensors that it read and its losses, and the model, out
again before the first step, into OUT/exported.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from tests.support.process_groups import join

STEPS = 3


def batch(index: int) -> dict[str, np.ndarray]:
    """Tokens and targets, [8, 16], of the cases' vocabulary of 22."""
    tokens = np.random.default_rng(index).integers(0, 20, (8, 17), np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def main(folder: str, out: str, zero: str) -> None:
    join(1, optimised=True)
    import optax

    import zerojax
    from zerojax.training.trainer import Trainer

    pretrained = zerojax.from_hugging_face(folder)
    plan = zerojax.make_plan(
        pretrained,
        {"zero": int(zero), "expert": jax.process_count(), "persistence_threshold": 0},
        example_batch=batch(0),
        optimizer=optax.sgd(0.1),
        precision="fp32",
    )
    read, names = pretrained.folder.read, set()

    def noted(name, runs):
        names.add(name)
        return read(name, runs)

    pretrained.folder.read = noted
    trainer = Trainer(plan)
    jax.block_until_ready(trainer.state)
    found = {
        "names": sorted(names),
        "counted": pretrained.folder.bytes_read,
        "own": sum(
            shard.data.nbytes
            for leaf in trainer.state["params"].values()
            for shard in leaf.addressable_shards
        ),
    }
    zerojax.to_hugging_face(trainer, Path(out) / "exported")
    losses = [
        trainer.step(zerojax.shard_batch(plan, _own_rows(batch(i))))["loss"] for i in range(STEPS)
    ]
    found["losses"] = [float(loss) for loss in losses]
    path = Path(out) / f"process_{jax.process_index()}.json"
    path.write_text(json.dumps(found), encoding="utf-8")


def _own_rows(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    own = 8 // jax.process_count()
    first = own * jax.process_index()
    return {name: x[first : first + own] for name, x in rows.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
