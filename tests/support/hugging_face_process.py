"""One of several processes with weights of Hugging Face, which tells what it has read and held.

    python -m tests.support.hugging_face_process FOLDER OUT ZERO MODEL_AXIS

writes OUT/process_0.json ..., and the model, out again, into OUT/exported.
"""

import ctypes
import json
import re
import resource
import sys
from pathlib import Path

import jax

from tests.support.process_groups import join


def peak_rss() -> int:
    """Bytes, the most since `forget_peak`."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def rss() -> int:
    """Bytes now."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def forget_peak() -> None:
    """From here on `peak_rss` counts anew (man 5 proc, clear_refs), without what is kept unused."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def bytes_read() -> int:
    """By system calls of this process, page cache or not."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def failures(trainer, out: Path) -> dict[str, str]:
    """What each process is told where the first one fails, which goes on afterwards."""
    import zerojax

    def told(write) -> str:
        try:
            write()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    export = zerojax.to_hugging_face
    result = {"there": told(lambda: export(trainer, out / "exported"))}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if jax.process_index() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, limits[1]))
    result["full"] = told(lambda: export(trainer, out / "full"))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    result["adapters"] = told(lambda: zerojax.to_peft(trainer, out / "adapters"))
    result["again"] = told(lambda: export(trainer, out / "again", dtype="bfloat16"))
    return result


def main(folder: str, out: str, zero: str, model_axis: str) -> None:
    join(1, optimised=True)
    import jax.numpy as jnp
    import optax

    import zerojax
    from zerojax.training.trainer import Trainer

    pretrained = zerojax.from_hugging_face(folder)
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    plan = zerojax.make_plan(
        pretrained,
        {"zero": int(zero), "model": int(model_axis), "persistence_threshold": 0},
        example_batch={"tokens": tokens, "targets": tokens},
        optimizer=optax.sgd(0.1),  # no state of its own
        precision="fp32",
    )
    forget_peak()
    before, read_before = rss(), bytes_read()
    trainer = Trainer(plan)
    jax.block_until_ready(trainer.state)
    found = {
        "counted": pretrained.folder.bytes_read,
        "by_system_calls": bytes_read() - read_before,
        "grown": peak_rss() - before,
        "own": sum(
            shard.data.nbytes
            for leaf in trainer.state["params"].values()
            for shard in leaf.addressable_shards
        ),
    }
    zerojax.to_hugging_face(trainer, Path(out) / "compiled")  # compiles
    forget_peak()
    before = rss()
    zerojax.to_hugging_face(trainer, Path(out) / "exported")
    found["grown_in_export"] = peak_rss() - before
    found["failures"] = failures(trainer, Path(out))
    path = Path(out) / f"process_{jax.process_index()}.json"
    path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
