"""Finds which frameworks a Python interpreter has, with their versions.

Runs the given interpreter; imports none of the frameworks itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess

FRAMEWORKS = ("torch", "deepspeed")
_PACKAGES = {
    "jax": ("jax", "jaxlib", "flax", "optax"),
    "torch": ("torch", "numpy"),
    "deepspeed": ("deepspeed", "torch", "numpy"),
}
_SECONDS = 200


@dataclasses.dataclass(frozen=True)
class Found:
    """Versions by package or, if the framework is missing, the reason."""

    versions: dict[str, str]
    reason: str | None = None


def probe(framework: str, python: str) -> Found:
    """Imports a framework in a Python interpreter; returns its versions, or why that failed.

    Args:
      framework: "jax", "torch" or "deepspeed".
      python: path of a Python interpreter.
    """
    code = (
        f"import json, platform; from importlib import metadata\n"
        f"import {framework}\n"
        f"found = {{name: metadata.version(name) for name in {_PACKAGES[framework]!r}}}\n"
        "print('found ' + json.dumps({'python': platform.python_version()} | found))"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "JAX_PLATFORMS": "cpu"}
    try:
        result = subprocess.run(
            [python, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except OSError as error:
        return Found({}, f"no such Python: {error.strerror}")
    except subprocess.TimeoutExpired:
        return Found({}, f"{framework} was not ready within {_SECONDS} s")
    for line in result.stdout.splitlines():
        if line.startswith("found "):
            return Found(json.loads(line.removeprefix("found ")))
    last = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
    if "ModuleNotFoundError" in last and framework in last:
        return Found({}, f"{framework} is not installed in the Python of --{framework}")
    return Found({}, f"{framework} does not start: {last[:200]}")
