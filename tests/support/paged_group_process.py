"""One of several processes that train layers from files, or the run of a single one.

    python -m tests.support.paged_group_process FOLDER DEVICES STEPS OPTIONS

trains on DEVICES virtual devices of each process until step STEPS. OPTIONS is JSON: "offload",
"zero", "microbatches", "layers", "clip_norm", "every" (steps between checkpoints, in
FOLDER/checkpoints), and "fault" with "process", "call" ("preadv", "pwritev" or "commit"), "folder"
(part of the path of the file), "after" (calls count when this step has been noted), "count" (the
number of the call that fails) and "kills". Each process adds step and loss to FOLDER/losses-
PROCESS, and writes the text of a StoreError to FOLDER/error-PROCESS.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax

from tests.support.process_groups import join

LAYERS = 3
noted: list[int] = []
"""Steps whose losses this process has noted."""


def install(fault: dict[str, Any]) -> None:
    """Makes a call to the files fail, or kills this process in its place."""
    from zerojax.checkpoint.store import store

    calls = 0

    def fail() -> None:
        if fault.get("kills"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(5, "Input/output error")

    def is_due(path: str) -> bool:
        nonlocal calls
        counts = fault["folder"] in path and fault["after"] in noted
        calls += counts
        return counts and calls == fault["count"]

    if fault["call"] == "commit":
        save = store.save_manifest

        def save_or_fail(folder: Path, manifest: Any) -> None:
            if folder.name == fault["folder"] and is_due(str(folder)):
                fail()
            save(folder, manifest)

        store.save_manifest = save_or_fail
        return
    real = getattr(os, fault["call"])

    def move(descriptor: int, buffers: Any, offset: int) -> int:
        if is_due(os.readlink(f"/proc/self/fd/{descriptor}")):
            fail()
        return real(descriptor, buffers, offset)

    setattr(os, fault["call"], move)


def main(folder: Path, devices: int, steps: int, options: dict[str, Any]) -> None:
    join(devices)
    import zerojax
    from tests.support.pipeline_runs import small
    from tests.support.trajectories import text_batch
    from zerojax.checkpoint.store import StoreError
    from zerojax.config import CheckpointConfig, LogConfig

    process = jax.process_index()
    fault = options.get("fault")
    if fault and fault["process"] == process:
        install(fault)
    settings = {"zero": options.get("zero", 3), "persistence_threshold": 50}
    if "offload" in options:
        settings["offload"] = {"folder": str(folder / "store"), **options["offload"]}
    every = options.get("every")
    checkpoint = CheckpointConfig(
        path=str(folder / "checkpoints"), every=every or 1, save_on_exit=False
    )
    try:
        with (folder / f"losses-{process}").open("a", buffering=1, encoding="utf-8") as losses:

            def note(trainer: Any, metrics: Any) -> None:
                losses.write(f"{metrics['step']} {metrics['loss'].hex()}\n")
                noted.append(int(metrics["step"]))

            trainer = zerojax.train(
                small(layers=options.get("layers", LAYERS), width=16, rate=0.2),
                settings,
                [text_batch(index) for index in range(4)],
                optimizer=zerojax.adamw(0.05, eps=1e-5, clip_norm=options.get("clip_norm", 0.1)),
                precision="fp32",
                num_microbatches=options.get("microbatches", 1),
                steps=steps,
                checkpoint=checkpoint if every else None,
                run_dir=None,
                log=LogConfig(every=1),
                callbacks=[note],
            )
            rows = 32 // jax.process_count()
            own = slice(rows * process, rows * (process + 1))
            value = trainer.evaluate([{n: x[own] for n, x in text_batch(5).items()}])
            losses.write(f"{steps} {value['loss'].hex()} evaluation\n")
            trainer.close()
    except StoreError as error:
        (folder / f"error-{process}").write_text(str(error), encoding="utf-8")
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
