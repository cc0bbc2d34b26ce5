"""Compares a run that resumes on its own mesh with the same run on another mesh.

Both begin at the newest checkpoint, in child processes that write nothing to the run's folder.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from zerojax.checkpoint.inspection import find_step
from zerojax.config import RunConfig, load
from zerojax.config.checks import MAX_CPU_DEVICES, check_whole_number
from zerojax.config.display import printable
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.runtime import bounded_json
from zerojax.training.resumed_steps import AFTER, BEFORE, RECORD, StepsRecord, StepsRequest
from zerojax.training.run_folder import CONFIG_FILE
from zerojax.training.run_record import RECORD_FILE

STEPS = 4
"""Number of steps that are compared by default."""
MOST_STEPS = 1000
IDENTICAL, CLOSE, REDRAWN, DIFFERS = "identical", "close", "redrawn", "differs"
LIMITS = {
    "float64": {"loss": 1e-12, "grad_norm": 1e-10, "parameters": 1e-6},
    "float32": {"loss": 1e-5, "grad_norm": 1e-4, "parameters": 5e-2},
    "bfloat16": {"loss": 8e-3, "grad_norm": 5e-2, "parameters": 0.5},
    "float16": {"loss": 1e-3, "grad_norm": 1e-2, "parameters": 0.5},
}
"""Largest relative differences that count as rounding, by compute dtype.

loss: sums of a batch in another order differ by up to 4e-6 in float32 over 20 steps
(`zerojax.equality.short_runs`); bfloat16: the spacing of its numbers. parameters: L2 norm of the
difference of all parameters relative to their change over all steps. Adam's first updates of
parameters whose gradient is rounding noise, such as biases of attention keys, have random signs.
"""
CLEAR = 100.0
"""Random numbers count as equal if another key changes the loss by this factor more."""

Verdict = Literal["identical", "close", "redrawn", "differs"]


@dataclass(frozen=True)
class ResumeFinding:
    """Comparison of one aspect of a resumed run.

    Attributes:
      aspect: name of the aspect, such as "data".
      verdict: "identical" (bit for bit), "close" (equal up to rounding), "redrawn" (random numbers
        that depend on the mesh by design) or "differs".
      text: what was compared, with numbers.
    """

    aspect: str
    verdict: Verdict
    text: str


@dataclass(frozen=True, kw_only=True)
class ResumeCheck:
    """Result of a check.

    Attributes:
      run: folder of the run.
      first_step: number of batches that the run had consumed when it was saved.
      steps: number of steps that were compared.
      before: plan on the saved run's mesh, in one line.
      after: plan on the new mesh, in one line.
      findings: one per aspect.
      notes: lines that the run on the new mesh logs about settings that differ.
    """

    run: str
    first_step: int
    steps: int
    before: str
    after: str
    findings: tuple[ResumeFinding, ...]
    notes: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the resume on the new mesh equals that on the saved run's mesh bit for bit."""
        return all(one.verdict == IDENTICAL for one in self.findings)

    @property
    def agrees(self) -> bool:
        """Whether no aspect differs, except random numbers that depend on the mesh by design."""
        return all(one.verdict != DIFFERS for one in self.findings)

    def page(self) -> str:
        """Returns the result as text."""
        width = max(len(one.aspect) for one in self.findings)
        bad = ", ".join(one.aspect for one in self.findings if one.verdict == DIFFERS)
        if self.is_exact:
            result = "the run continues on the new mesh bit for bit"
        elif self.agrees:
            redrawn = any(one.verdict == REDRAWN for one in self.findings)
            result = "the run continues on the new mesh, equal up to rounding"
            result += ", with other random numbers" * redrawn
        else:
            result = f"the run does NOT continue on the new mesh as it was: {bad}"
        lines = [
            f"{self.run}, {_count(self.steps)} after step {self.first_step}",
            f"  saved on  {self.before}",
            f"  new mesh  {self.after}",
            "",
            *(f"{x.aspect:<{width}}  {x.verdict:<9}  {printable(x.text)}" for x in self.findings),
            "",
            *(f"note: {printable(text)}" for text in self.notes),
            f"result: {result}",
        ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Returns every number and text as a JSON-compatible dictionary."""
        found = dataclasses.asdict(self)
        return {**found, "is_exact": self.is_exact, "agrees": self.agrees}


def check_resume(
    run: str | os.PathLike[str],
    *,
    devices: int,
    words: Sequence[str] = (),
    steps: int = STEPS,
    on_cpu: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> ResumeCheck:
    """Tries a resume of a run on another mesh, and compares it with a resume on its own mesh.

    Three child processes train from the newest checkpoint: on the saved run's mesh, on the new
    mesh, and one step on the saved run's mesh with another random key, which shows how much random
    numbers matter. If the meshes draw different random numbers, two more processes train without
    dropout, so that everything else can be compared. The run's folder is only read.

    Args:
      run: folder of a run that `zerojax train` started.
      devices: number of devices of the new mesh.
      words: settings of the resumed run that differ, as `KEY=VALUE`; without `mesh.data`, the axis
        `data` takes the devices that other axes leave.
      steps: number of steps to compare.
      on_cpu: whether the steps run on virtual CPU devices; False uses JAX's default devices, of
        which there must be as many as either mesh has.
      progress: function called with a few words about each stage of the work.

    Raises:
      ValueError: the run or a setting cannot be used.
      CheckpointError: the run has no checkpoint.
      RuntimeError: a child process ended without a result.
    """
    check_whole_number("steps", steps, 1, MOST_STEPS)
    check_whole_number("devices", devices, 1, MAX_CPU_DEVICES)
    folder = user_path(run).absolute()
    file = folder / CONFIG_FILE
    _check_run(folder, file)
    saved = find_step(folder)
    about = saved.whole_metadata()
    common = (f"run_dir={folder}", *_precision_of(folder, file))
    own = about.num_devices, common
    other = devices, (*common, *_default_data(words), *words)
    children, numbers = _Children(on_cpu, progress), itertools.count()
    with tempfile.TemporaryDirectory(prefix="zerojax-resume-") as space:

        def train(
            mesh: tuple[int, tuple[str, ...]], title: str, count: int = steps, **how: bool
        ) -> _Steps:
            request = StepsRequest(config=str(file), words=mesh[1], steps=count, **how)
            return children.run(request, mesh[0], Path(space, str(next(numbers))), title)

        def both(aside: str = "", **how: bool) -> tuple[_Steps, _Steps]:
            # The new mesh is first, because its settings may be invalid.
            new = train(other, f"{_count(steps)} on the new mesh{aside}", **how)
            return train(own, f"{_count(steps)} on the saved run's mesh{aside}", **how), new

        old, found = both()
        changed = train(own, "1 step with another random key", 1, other_key=True)
        random = _random_numbers(old.record, found.record, changed.record)
        aside, compared = "", (old, found)
        if random.verdict == REDRAWN:
            aside = ", without dropout"
            compared = both(aside, without_dropout=True)
        findings = [
            _state(old.record, found.record),
            _data(old.record, found.record),
            random,
            *_learning_rate(old.record, found.record),
            _metric("loss", "loss", *compared, aside),
            _metric("gradient norm", "grad_norm", *compared, aside),
            _parameters(*compared, aside),
        ]
    return ResumeCheck(
        run=str(run),
        first_step=old.record.first_step,
        steps=len(old.record.steps),
        before=old.record.plan,
        after=found.record.plan,
        findings=tuple(findings),
        notes=tuple(found.record.notes),
    )


def _check_run(folder: Path, file: Path) -> None:
    """Raises ValueError if a folder is not that of a run of `zerojax train`."""
    values = bounded_json.load(file) if file.is_file() else None
    if not isinstance(values, dict) or "run_dir" not in values:
        raise ValueError(
            f"{folder} is not the folder of a run that `zerojax train` started: it has no "
            f"{CONFIG_FILE} with the settings of a run file; use such a folder. A script can "
            "resume itself on another mesh and compare trainer.history"
        )


def _precision_of(folder: Path, file: Path) -> tuple[str, ...]:
    """Returns overrides that give the precision of the saved run to a run on other devices.

    A run file without `precision` uses bfloat16 on GPUs and float32 on CPUs.
    """
    record = folder / RECORD_FILE
    if load(RunConfig, file).precision is not None or not record.is_file():
        return ()
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    dtype = bounded_json.load(record).get("precision", {}).get("compute_dtype")
    return (f"precision={names[dtype]}",) if dtype in names else ()


def _default_data(words: Sequence[str]) -> tuple[str, ...]:
    given = {word.partition("=")[0] for word in words}
    # The run's number of data shards may not fit the new devices, so they decide it.
    return () if given & {"data", "mesh.data", "mesh"} else ("mesh.data=-1",)


Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class _Steps:
    """What one child process left: its record, and the parameters before and after its steps."""

    record: StepsRecord
    before: Arrays
    after: Arrays


@dataclass(frozen=True)
class _Children:
    """Starts child processes.

    Attributes:
      on_cpu: whether they use virtual CPU devices.
      progress: called with a few words before each of them.
    """

    on_cpu: bool
    progress: Callable[[str], None]

    def run(self, request: StepsRequest, devices: int, folder: Path, title: str) -> _Steps:
        """Returns what one child process recorded in a new folder."""
        self.progress(title)
        folder.mkdir()
        file = folder / "request.json"
        file.write_text(json.dumps(dataclasses.asdict(request)))
        environment = dict(os.environ)
        if self.on_cpu:
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        command = [sys.executable, "-m", "zerojax.training.resumed_steps", str(file), str(folder)]
        child = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if child.returncode or not (folder / RECORD).is_file():
            last = (child.stderr.strip().splitlines() or ["no output"])[-1]
            raise RuntimeError(f"{title}: the process ended with code {child.returncode}: {last}")
        found = json.loads((folder / RECORD).read_text())
        if "error" in found:
            raise ValueError(f"{title}: {found['error']}")
        return _Steps(StepsRecord(**found), _arrays(folder / BEFORE), _arrays(folder / AFTER))


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


# --- aspects ------------------------------------------------------------------------------------


def _state(old: StepsRecord, new: StepsRecord) -> ResumeFinding:
    common = old.state.keys() & new.state.keys()
    changed = sorted(name for name in common if old.state[name] != new.state[name])
    alone = sorted(old.state.keys() ^ new.state.keys())
    if changed:
        text = f"{len(changed)} of {len(common)} arrays differ, such as {changed[0]!r}"
        return ResumeFinding("state", DIFFERS, text)
    if alone:
        text = f"{len(alone)} arrays are kept on one mesh only, such as {alone[0]!r}"
        return ResumeFinding("state", DIFFERS, f"{len(common)} arrays are equal; {text}")
    return ResumeFinding("state", IDENTICAL, f"{len(common)} arrays, before the first step")


def _data(old: StepsRecord, new: StepsRecord) -> ResumeFinding:
    pairs = list(zip(old.batches, new.batches, strict=False))
    wrong = [number for number, (a, b) in enumerate(pairs, start=1) if a != b]
    if len(old.batches) != len(new.batches):
        counts = f"{len(old.batches)} and {len(new.batches)} batches are left"
        return ResumeFinding("data", DIFFERS, counts)
    if wrong:
        first = old.first_step + wrong[0]
        return ResumeFinding("data", DIFFERS, f"the batch of step {first} has other rows")
    return ResumeFinding("data", IDENTICAL, f"{len(pairs)} batches, row by row in the same order")


def _random_numbers(old: StepsRecord, new: StepsRecord, other: StepsRecord) -> ResumeFinding:
    aspect = "random numbers"
    own, found, changed = (record.steps[0]["loss"] for record in (old, new, other))
    if changed == own:
        return ResumeFinding(
            aspect, IDENTICAL, "the step uses none: another key gives the same loss"
        )
    by_key, by_mesh = _relative(changed, own), _relative(found, own)
    text = f"another key changes the first loss by {by_key:.1e}, the new mesh by {by_mesh:.1e}"
    if by_mesh == 0:
        return ResumeFinding(aspect, IDENTICAL, text)
    if by_mesh * CLEAR <= by_key:
        return ResumeFinding(aspect, CLOSE, text)
    same_pieces = old.axes == new.axes and old.num_microbatches == new.num_microbatches
    if same_pieces or (old.is_deterministic and new.is_deterministic):
        return ResumeFinding(aspect, DIFFERS, text)
    return ResumeFinding(
        aspect,
        REDRAWN,
        f"{text}: each device draws its own dropout masks; with mesh.deterministic=mesh they are "
        "the same on every mesh",
    )


def _count(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"


def _learning_rate(old: StepsRecord, new: StepsRecord) -> list[ResumeFinding]:
    """Compares learning rates; returns nothing if the optimizer does not report them."""
    rates = [[step.get("learning_rate") for step in one.steps] for one in (old, new)]
    if None in (*rates[0], *rates[1]):
        return []
    for number, (a, b) in enumerate(zip(*rates, strict=False), start=old.first_step + 1):
        if a != b:
            return [ResumeFinding("learning rate", DIFFERS, f"step {number}: {a:.6g} and {b:.6g}")]
    text = f"{rates[0][0]:.4g} to {rates[0][-1]:.4g}"
    return [ResumeFinding("learning rate", IDENTICAL, text)]


def _metric(aspect: str, name: str, old: _Steps, new: _Steps, aside: str) -> ResumeFinding:
    """Compares a metric of each step."""
    values = [[step[name] for step in one.record.steps] for one in (old, new)]
    if len(values[0]) != len(values[1]):
        counts = f"{len(values[0])} and {len(values[1])} steps were taken"
        return ResumeFinding(aspect, DIFFERS, counts)
    if values[0] == values[1]:
        return ResumeFinding(aspect, IDENTICAL, f"{len(values[0])} steps{aside}")
    limit = LIMITS[old.record.compute_dtype][name]
    worst = max(_relative(b, a) for a, b in zip(*values, strict=True))
    text = f"largest relative difference {worst:.1e} (limit {limit:g}){aside}"
    return ResumeFinding(aspect, CLOSE if worst <= limit else DIFFERS, text)


def _parameters(old: _Steps, new: _Steps, aside: str) -> ResumeFinding:
    """Compares the parameters after the last step, relative to their change over all steps."""
    change, apart, worst, where = 0.0, 0.0, 0.0, ""
    for name, end in old.after.items():
        changed = np.square(end - old.before[name], dtype=np.float64).sum()
        differs = np.square(new.after[name] - end, dtype=np.float64).sum()
        change, apart = change + changed, apart + differs
        if differs > worst:
            worst, where = differs, name
    if not where:
        text = f"{len(list(old.after))} arrays, after the last step{aside}"
        return ResumeFinding("parameters", IDENTICAL, text)
    ratio = math.sqrt(apart / change) if change else math.inf
    limit = LIMITS[old.record.compute_dtype]["parameters"]
    text = (
        f"difference / change over all steps {ratio:.1e} (limit {limit:g}), most of it in "
        f"{where!r}{aside}"
    )
    return ResumeFinding("parameters", CLOSE if ratio <= limit else DIFFERS, text)


def _relative(found: float, expected: float) -> float:
    """Returns the relative difference; 0 for two values that are both not finite."""
    if not (math.isfinite(found) and math.isfinite(expected)):
        return 0.0 if str(found) == str(expected) else math.inf
    return abs(found - expected) / max(abs(expected), 1e-30)
