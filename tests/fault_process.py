r"""`zerojax train` with a fault at a place that the variable FAULT names.

FAULT='{"process": 1, "at": "step", "count": 5, "what": "kill"}' \
    python -m tests.fault_process train tiny.yaml run_dir=run

`at`: "join" (before the processes find each other), "start" (before the first step is asked for),
"step", "data", "evaluate", "save" (as it begins), "saved" (as it has returned); the first two have
no `count`, for steps and data it is the number of the step, else of the call.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import zerojax.trainer
from zerojax.data.source import TokenSource
from zerojax.process_group.group import PROCESS_ID

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


FAULTS["raise"] = _raise


def install(at: str, count: int, what: str) -> None:
    """Puts the fault in its place."""
    trainer = zerojax.trainer.Trainer
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

    if at == "join":
        FAULTS[what]()
    elif at == "start":
        around(trainer, "fit", lambda *_: count)
    elif at == "step":
        around(trainer, "_step_on_devices", lambda self, *_: self.num_steps + 1)
    elif at == "data":
        around(TokenSource, "batch", lambda self, index, *_: index + 1)
    elif at == "evaluate":
        around(trainer, "evaluate", call)
    elif at in ("save", "saved"):
        around(zerojax.trainer, "save_state", call, after=at == "saved")
    else:
        raise ValueError(at)


if __name__ == "__main__":
    fault = json.loads(os.environ.get("FAULT", "{}"))
    if fault and fault["process"] == int(os.environ.get(PROCESS_ID, "0")):
        install(fault["at"], fault.get("count", 0), fault["what"])
    sys.argv[0] = "zerojax"
    runpy.run_module("zerojax", run_name="__main__", alter_sys=False)
