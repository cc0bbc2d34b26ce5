r"""`zerojax train` with a fault at a place that the variable FAULT names.

FAULT='{"process": 1, "at": "step", "count": 5, "what": "kill"}' \
    python -m tests.support.fault_process train tiny.yaml run_dir=run

`at`: "start" (before the first step is asked for), "step", "data", "evaluate", "save" (as it
begins), "space" (the disk has just been found to have some), "saved" (as it has returned). `count`
is the number of the step for steps and data, else of the call. PACE=0.1 makes a step take so many
seconds at least, so that a signal can arrive.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zerojax.training.trainer
from zerojax.checkpoint import folders
from zerojax.data.source import TokenSource
from zerojax.runtime.process_group import PROCESS_ID

FOR_EVER = 10**6


def _hang_with_the_interpreter() -> None:
    """No other Python thread gets a turn: a C function that does not release the lock."""
    ctypes.PyDLL(None).sleep(FOR_EVER)


FAULTS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "int": lambda: os.kill(os.getpid(), signal.SIGINT),
    "hang": lambda: time.sleep(FOR_EVER),
    "hang_with_the_interpreter": _hang_with_the_interpreter,
}


def _raise() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "/data/tokens.bin")


def _fill_the_disk() -> None:
    """Another program takes what was free, but for a little."""
    path = Path(os.environ["DISK"]) / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\1" * 4096):
            pass
    os.truncate(path, path.stat().st_size - 16 * 4096)


def _refuse_large_files() -> None:
    """The system lets this process write no file of more than 16 KiB: as a quota, for it alone."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, hard))


FAULTS |= {"raise": _raise, "fill": _fill_the_disk, "limit": _refuse_large_files}


def install(at: str, count: int, what: str) -> None:
    """Puts the fault in its place."""
    trainer = zerojax.training.trainer.Trainer
    calls = iter(range(1, FOR_EVER))

    def around(owner: Any, name: str, number: Callable[..., int], *, after: bool = False) -> None:
        plain = getattr(owner, name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            due = number(*args, **kwargs) == count
            if due and not after:
                FAULTS[what]()
            result = plain(*args, **kwargs)
            if due and after:
                FAULTS[what]()
            return result

        setattr(owner, name, faulty)

    def call(*args: Any, **kwargs: Any) -> int:
        return next(calls)

    if at == "start":
        around(trainer, "fit", lambda *_: count)
    elif at == "step":
        around(trainer, "_step_on_devices", lambda self, *_: self.num_steps + 1)
    elif at == "data":
        around(TokenSource, "rows", lambda self, first, _: first // self.global_batch_size + 1)
    elif at == "evaluate":
        around(trainer, "_measure", call)
    elif at == "space":
        around(folders, "check_free", call, after=True)
    elif at in ("save", "saved"):
        around(zerojax.training.trainer, "save_state", call, after=at == "saved")
    else:
        raise ValueError(at)


def slow_down(seconds: float) -> None:
    """Makes every step take longer."""
    plain = zerojax.training.trainer.Trainer._step_on_devices

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return plain(*args, **kwargs)

    zerojax.training.trainer.Trainer._step_on_devices = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down(float(os.environ.get("PACE", "0")))
    fault = json.loads(os.environ.get("FAULT", "{}"))
    if fault and fault["process"] == int(os.environ.get(PROCESS_ID, "0")):
        install(fault["at"], fault.get("count", 0), fault["what"])
    sys.argv[0] = "zerojax"
    runpy.run_module("zerojax", run_name="__main__", alter_sys=False)
