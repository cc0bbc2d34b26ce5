"""Compares DeepSpeed with zerojax: same weights, batches and ds_config, on CPUs of this machine.

DeepSpeed runs in processes of its own (`deepspeed_reference`). zerojax's tensors are read from
exports in Hugging Face's format, so that both sides have the same names and shapes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zerojax.config import ConfigError
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.regular_files import decode_text
from zerojax.deepspeed_config import CallerValues, DsConfig
from zerojax.deepspeed_engine import initialize
from zerojax.equality import deepspeed_reference
from zerojax.training.hugging_face_export import Trained, to_hugging_face
from zerojax.zoo.hugging_face import from_hugging_face
from zerojax.zoo.hugging_face.safetensors import read_block, read_table

LIMITS = {"float32": (2e-4, 1e-4, 2e-2), "bfloat16": (2e-2, 5e-2, 3e-1)}
"""Largest differences that count as rounding, by dtype of computation: of a loss (relative); of a
gradient, relative to the tensor's largest entry; of an update, norm of the difference relative to
the norm."""
_NOISE = 1e-4
"""Entries whose first gradient is below this part of the tensor's largest entry are left out of the
comparison of updates. Adam divides each entry by its own size, so that rounding decides about the
update of an entry whose gradient is 0 in exact arithmetic, as for the bias of attention's keys."""
_RATE = 2.0**20
"""Learning rate of the step of SGD from which a gradient is read: the update then is so much larger
than the parameter that no digit of the gradient is lost."""
_SECONDS = 1800.0

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """Differences of one tensor.

    Attributes:
      name: name in Hugging Face's format.
      gradient: largest difference of the gradients of the first step, relative to the largest entry
        of DeepSpeed's.
      update: norm of the difference of the sums of all updates, relative to the norm of
        DeepSpeed's. Entries with almost no gradient are left out.
    """

    name: str
    gradient: float
    update: float


@dataclass(frozen=True, kw_only=True)
class DeepSpeedComparison:
    """Result of `compare_with_deepspeed`; `print(result.page())` shows it.

    Attributes:
      config, model: names of the files that were compared.
      versions: {package: version}.
      dtype: dtype of computation.
      processes: number of processes of DeepSpeed, and of devices of zerojax.
      losses: (DeepSpeed's, zerojax's) loss of each step.
      tensors: differences of each tensor, in the order of the model.
    """

    config: str
    model: str
    versions: Mapping[str, str]
    dtype: str
    processes: int
    losses: tuple[tuple[float, float], ...]
    tensors: tuple[TensorDifference, ...]

    @property
    def first(self) -> str | None:
        """What differs first: a loss, a gradient or an update, by more than rounding; or None."""
        loss, gradient, update = LIMITS[self.dtype]
        a, b = self.losses[0]
        if not abs(a - b) <= loss * abs(a):
            return f"the loss of step 1: {a:.7g} and {b:.7g}"
        for one in self.tensors:
            if not one.gradient <= gradient:
                return f"the gradient of {one.name}, by {one.gradient:.2g} of its largest entry"
        for one in self.tensors:
            if not one.update <= update:
                return f"the update of {one.name}, by {one.update:.2g} of its norm"
        for step, (a, b) in enumerate(self.losses, start=1):
            if not abs(a - b) <= loss * abs(a):
                return f"the loss of step {step}: {a:.7g} and {b:.7g}"
        return None

    def page(self) -> str:
        """Formats the comparison as text."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        width = max(len(one.name) for one in self.tensors)
        lines = [
            f"{self.config} with {self.model}, {self.dtype}, {self.processes} processes",
            versions,
            "",
            "step   DeepSpeed    zerojax      difference",
            *(
                f"{step:>4}   {a:<11.7f}  {b:<11.7f}  {abs(a - b):.1e}"
                for step, (a, b) in enumerate(self.losses, start=1)
            ),
            "",
            f"{'tensor':<{width}}  gradient  update",
            *(f"{x.name:<{width}}  {x.gradient:<8.1e}  {x.update:.1e}" for x in self.tensors),
            "",
            "gradient: largest difference in step 1, relative to the tensor's largest entry",
            f"update: after {len(self.losses)} steps, norm of the difference relative to the norm, "
            "without",
            f"entries whose gradient is below {_NOISE:g} of the largest one",
        ]
        result = "equal up to rounding" if self.first is None else f"first difference: {self.first}"
        return "\n".join([*lines, f"result: {result}"])

    def as_dict(self) -> dict[str, Any]:
        """Returns all values for JSON."""
        return {**dataclasses.asdict(self), "first": self.first}


def compare_with_deepspeed(
    config: str | Path,
    model: str | Path,
    *,
    processes: int = 2,
    steps: int = 3,
    length: int = 32,
    seed: int = 0,
    python: str = sys.executable,
    progress: Callable[[str], None] = lambda text: None,
) -> DeepSpeedComparison:
    """Trains some steps with DeepSpeed and with zerojax, and compares them. Dropout is off.

    Args:
      config: path of the ds_config.json.
      model: Hugging Face folder of a decoder.
      processes: processes of DeepSpeed on this machine; zerojax uses as many devices.
      steps: number of steps.
      length: tokens per row; tokens are random.
      seed: seed of the tokens.
      python: Python that has torch, deepspeed and transformers.
      progress: function called with a few words at each stage.

    Raises:
      ConfigError: the configuration is refused, or cannot run here.
      ValueError: JAX has another number of devices than `processes`.
      RuntimeError: DeepSpeed failed; the message has its last lines.
    """
    if jax.device_count() != processes:
        raise ValueError(
            f"JAX has {jax.device_count()} devices, and DeepSpeed would have {processes} processes;"
            f" pass processes={jax.device_count()}, or start JAX with {processes} CPU devices"
        )
    content = json.loads(decode_text(Path(config).read_bytes(), config))
    pretrained = from_hugging_face(str(model))
    width = getattr(pretrained.config, "embed_dim", None)
    given = CallerValues(steps=steps, hidden_size=width)
    translation = DsConfig(content, processes, given).translate()
    rng = np.random.default_rng(seed)
    if translation.train_batch_size is None:
        raise ConfigError(
            "the batch size is not known; set train_batch_size", ("train_batch_size",)
        )
    shape = (steps, translation.train_batch_size, length + 1)
    rows = rng.integers(0, pretrained.config.vocab_size, shape, np.int32)
    batches = {"tokens": rows[..., :-1], "targets": rows[..., 1:]}
    with tempfile.TemporaryDirectory(prefix="zerojax-compare-") as space:
        progress(f"DeepSpeed: {steps} steps in {processes} processes")
        losses, gradients, theirs = _run_deepspeed(
            content, str(model), batches, processes, Path(space), python
        )
        progress(f"zerojax: {steps} steps on {processes} devices")
        own_losses, before, ours = _run_zerojax(content, str(model), batches, steps, Path(space))
        progress("zerojax: the gradient of the first step")
        descent = _for_gradient(content)
        _, _, moved = _run_zerojax(descent, str(model), batches, 1, Path(space, "gradient"))
    unknown = [name for name in gradients if name not in ours]
    if unknown:
        raise RuntimeError(
            f"zerojax's export of {model} has no tensor {unknown[0]!r}, which the model of "
            "transformers trains; pass a folder whose config.json names another architecture"
        )
    return DeepSpeedComparison(
        config=Path(config).name,
        model=Path(model).name,
        versions=_versions(python),
        dtype=np.dtype(translation.precision.compute_dtype or np.float32).name,
        processes=processes,
        losses=tuple(zip(losses, own_losses, strict=True)),
        tensors=tuple(
            TensorDifference(
                name=name,
                gradient=_peak(gradients[name], (before[name] - moved[name]) / _RATE),
                update=_norm(
                    *(_clear(x[name] - before[name], gradients[name]) for x in (theirs, ours))
                ),
            )
            for name in gradients
        ),
    )


def _peak(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.max(np.abs(a - b)) / max(np.max(np.abs(a)), np.finfo(np.float32).tiny))


def _norm(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(a), np.finfo(np.float32).tiny))


def _clear(update: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Returns the entries of `update` where |gradient| exceeds `_NOISE` times its maximum."""
    size = np.abs(gradient)
    return update[size > _NOISE * size.max()]


def _for_gradient(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with plain SGD, without schedule and clipping."""
    changed = copy.deepcopy(dict(config))
    changed.pop("scheduler", None)
    changed["gradient_clipping"] = 0.0
    changed["optimizer"] = {"type": "SGD", "params": {"lr": _RATE}}
    return changed


# --- zerojax --------------------------------------------------------------------------------------


def _run_zerojax(
    config: Mapping[str, Any], model: str, batches: Tensors, steps: int, space: Path
) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns (loss of each step, tensors before the first step, tensors after the last one)."""
    losses = []
    taken = [{name: rows[step] for name, rows in batches.items()} for step in range(steps)]
    with initialize(model=from_hugging_face(model), config=dict(config), steps=steps) as engine:
        engine.prepare(taken[0])
        before = _export(engine, space / "before")
        for batch in taken:
            losses.append(float(engine.train_batch(batch)))
        return losses, before, _export(engine, space / "after")


def _export(engine: Trained, folder: Path) -> dict[str, np.ndarray]:
    """Returns all tensors under Hugging Face's names, float32."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    to_hugging_face(engine, folder, dtype="float32")
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in read_table(path).items():
            whole = [[(0, size)] for size in tensor.shape]
            found[name] = read_block(path, tensor, whole)[0]
    return found


# --- DeepSpeed ------------------------------------------------------------------------------------


def _run_deepspeed(
    config: Mapping[str, Any],
    model: str,
    batches: Tensors,
    processes: int,
    space: Path,
    python: str,
) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns (loss of each step, first gradients, tensors after the last step)."""
    np.savez(space / "batches.npz", tokens=batches["tokens"], targets=batches["targets"])
    request = {"model": str(Path(model).absolute()), "config": dict(config)}
    request |= {"batches": str(space / "batches.npz"), "out": str(space)}
    (space / "request.json").write_text(json.dumps(request), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [python, "-P", deepspeed_reference.__file__, str(space / "request.json")]
    common = {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    outputs = [space / f"output-{rank}.txt" for rank in range(processes)]
    try:
        for rank, path in enumerate(outputs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with path.open("wb") as output:
                started.append(
                    subprocess.Popen(
                        command, env={**os.environ, **common, **own}, stdout=output, stderr=output
                    )
                )
        end = time.monotonic() + _SECONDS
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in started:
                process.wait(max(0.0, end - time.monotonic()))
        codes = [process.poll() for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
    _check_codes(codes, outputs, python)
    losses = json.loads((space / "losses.json").read_text(encoding="utf-8"))
    last = dict(np.load(space / f"parameters-{len(losses)}.npz"))
    return losses, dict(np.load(space / "gradients.npz")), last


def _check_codes(codes: Sequence[int | None], outputs: Sequence[Path], python: str) -> None:
    """Raises RuntimeError with the last lines of a process that failed (its code is not 0), or else
    of a process that did not end (None)."""
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is None and None in codes:
        failed = codes.index(None)
    if failed is None:
        return
    text = outputs[failed].read_text(encoding="utf-8", errors="replace")
    if codes[failed] == deepspeed_reference.MISSING:
        raise RuntimeError(
            f"{text.strip().splitlines()[-1]} in {python}; install it: pip install torch deepspeed "
            "transformers"
        )
    last = "\n".join(text.strip().splitlines()[-15:])
    if codes[failed] is None:
        raise RuntimeError(
            f"DeepSpeed did not end within {_SECONDS:g} seconds in process {failed}; compare fewer "
            f"steps or a smaller model; its last lines:\n{last}"
        )
    raise RuntimeError(f"DeepSpeed ended with code {codes[failed]} in process {failed}:\n{last}")


def _versions(python: str) -> dict[str, str]:
    """Returns versions of both sides' packages."""
    code = (
        "import importlib.metadata as m, json; print(json.dumps("
        "{n: m.version(n) for n in ('deepspeed', 'torch', 'transformers')}))"
    )
    theirs = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return {**json.loads(theirs.stdout), "jax": importlib.metadata.version("jax")}
