"""`zerojax tune RUN --search`: times the best plans of a search on this machine's devices.

The search (`zerojax plan --search`) ranks plans by the roofline of their compiled programs. This
module runs the first few plans for some steps each, and writes the fastest one as a run file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerojax.config import RunConfig, load, run_file_lines
from zerojax.config.display import show
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.hardware.gpus import find_gpu, gpu_of_device
from zerojax.runtime.redaction import redact
from zerojax.runtime.user_files import replace_text

if TYPE_CHECKING:
    import jax

    from zerojax.training.tuning import TimedStep

BEST = 4
"""Default number of plans from the search that are timed."""
OWN = "the run's own settings"


@dataclass(frozen=True)
class RunWords:
    """Settings of a run as typed: its run file, if any, and KEY=VALUE words."""

    path: str | None
    words: Sequence[str]

    def config(self, more: Sequence[str] = ()) -> RunConfig:
        """Returns the parsed settings, with `more` words after the typed ones."""
        return load(RunConfig, self.path, [*self.words, *more])


def check_options(args: argparse.Namespace) -> None:
    """Checks the options of --search.

    Raises:
      ValueError: an option is invalid, or is given without --search.
    """
    if not args.search:
        for option, value in (("--gpu", args.gpu), ("--best", args.best), ("--out", args.out)):
            if value is not None:
                raise ValueError(f"{option} {value} needs --search; leave it out, or add --search")
        return
    if args.no_steps:
        raise ValueError("--search times whole steps, and --no-steps skips them; leave one out")
    if args.best is not None and args.best < 1:
        raise ValueError(f"--best {args.best} is below 1; use 1 plan or more")
    if args.budget <= 0:
        raise ValueError(f"--budget {args.budget:g}: give seconds above 0, such as 300")
    if args.out is not None and user_path(args.out).exists():
        raise ValueError(f"--out {args.out} exists already; name a new file")


def tune_by_search(args: argparse.Namespace, run: RunWords) -> int:
    """Times the best plans of a search and the run's own plan; `--out` gets the fastest one.

    Returns:
      Exit code: 0 if a plan was timed, 1 if no plan of the search fits the GPU.

    Raises:
      ValueError: the GPU is unknown, there are several processes, or no plan could be timed.
      RuntimeError: the search failed.
    """
    import jax

    from zerojax.training.run_file import plan_from_config
    from zerojax.training.tuning import time_steps

    if jax.process_count() > 1:
        raise ValueError(
            f"--search runs in one process, and this job has {jax.process_count()}; search with "
            "`zerojax plan --search`, and time the words it prints with `zerojax tune`"
        )
    devices = jax.devices()
    found = _search(run, _card(args.gpu, devices[0]), len(devices), args.budget)
    if found["chosen"] is None:
        show(found["sentence"])
        return 1
    listed = {OWN: [], **{" ".join(words): words for words in _best(found, args.best or BEST)}}
    plans = {}
    for name, words in listed.items():
        try:
            plans[name] = plan_from_config(run.config(words), len(devices), is_here=True)
        except ValueError as error:
            show(redact(f"  {name}: not timed ({error})"))
    if not plans:
        raise ValueError("no plan of the search can run here; the lines above give the reasons")
    show(f"{len(plans)} plans on {len(devices)} x {devices[0].device_kind}, a batch of zeros:")
    timed: list[TimedStep] = []
    for step in time_steps(plans):
        timed.append(step)
        show(redact(_row(step)))
    fastest = min(timed, key=lambda step: step.seconds)
    if not math.isfinite(fastest.seconds):
        raise ValueError("no plan could be timed: each one failed, as the lines above say")
    show(f"fastest: {fastest.name}")
    if args.out is not None:
        _write(
            args.out, run, listed[fastest.name], timed, f"{len(devices)} x {devices[0].device_kind}"
        )
        show(f"written to {args.out}")
    return 0


def _card(name: str | None, device: jax.Device) -> str:
    """Returns the name, or the file of a description, of the GPU to search plans for.

    Raises:
      ValueError: no name is given, and zerojax has no description of the device.
    """
    if name is not None:
        find_gpu(name)
        return name
    card = gpu_of_device(device.device_kind)
    if card is None:
        raise ValueError(
            f"no description of {device.device_kind!r} is known, which the search needs; name a "
            "GPU or a YAML file that describes it: --gpu h100"
        )
    return card.name


def _search(run: RunWords, card: str, devices: int, budget: float) -> Mapping[str, Any]:
    """Runs the search in a child process, to keep its compiler for absent GPUs out of this process.

    Raises:
      RuntimeError: the search failed; contains the child's message.
    """
    show(f"searching plans for {devices} x {card}, for {budget:g} s at most ...")
    words = [*([run.path] if run.path else []), *run.words]
    options = ["--gpu", card, "--devices", str(devices), "--budget", f"{budget:g}"]
    # -P: the child searches the folders of this process, and not also its working folder.
    command = [sys.executable, "-P", "-m", "zerojax", "plan", *words, *options]
    here = os.pathsep.join(each or os.getcwd() for each in sys.path)
    child = subprocess.run(
        [*command, "--search", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": here},
    )
    if child.returncode not in (0, 1) or not child.stdout.strip():
        told = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        raise RuntimeError(f"the search failed: {told[-1].removeprefix('zerojax: error: ')}")
    return json.loads(child.stdout)


def _best(found: Mapping[str, Any], number: int) -> list[list[str]]:
    """Returns the KEY=VALUE words of the fastest fitting plans, the search's choice first."""
    fitting = [trial for trial in found["trials"] if trial["status"] == "fits"]
    fitting.sort(key=lambda trial: trial["seconds"])
    listed = [found["words"], *(trial["words"] for trial in fitting)]
    return listed[:number]


def _row(step: TimedStep) -> str:
    if not math.isfinite(step.seconds):
        return f"  {step.name}: no time ({step.failure or 'it failed'})"
    return f"  {step.name}: {1e3 * step.seconds:.4g} ms a step"


def _write(
    out: str, run: RunWords, words: Sequence[str], timed: Sequence[TimedStep], where: str
) -> None:
    """Writes a run file with the fastest settings; its comments say what was measured.

    The folder of the run stays only if the user has set it: by default it is named after the file.
    """
    config = run.config(words)
    if run.path is not None and config.run_dir == f"runs/{Path(run.path).stem}":
        config = dataclasses.replace(config, run_dir=RunConfig.run_dir)
    said = " ".join([run.path or "", *run.words]).strip() or "the default run"
    lines = [
        f"# The fastest of {len(timed)} plans of {said} on {where},",
        "# written by `zerojax tune --search`. Median of a step on a batch of zeros:",
        *(f"#{_row(step)}" for step in timed),
        *run_file_lines(config),
    ]
    replace_text(user_path(out), "\n".join(redact(line) for line in lines) + "\n")
