"""Plans and trains a user's script: the targets of `zerojax plan SCRIPT` and `train SCRIPT`.

To plan a script, it runs up to its first call of zerojax, and the arguments of this call are
planned. Imports JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import jax
from jax.sharding import AbstractMesh, Mesh

import zerojax
from zerojax.cli.script_calls import End, as_script, first_call
from zerojax.config import MeshConfig, as_mesh_config
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import coerce_fields, load_dataclass
from zerojax.config.recognition import is_deepspeed
from zerojax.config.tree_types import Batch
from zerojax.data import abstract_global
from zerojax.deepspeed_config import explain
from zerojax.deepspeed_engine.engine_batches import rows_of
from zerojax.deepspeed_engine.first_batch import EngineUntilBatch
from zerojax.deepspeed_engine.ported_run import PortedRun
from zerojax.hardware.gpus import Gpu
from zerojax.placement import device_mesh as meshes
from zerojax.plan.inputs import PlanInputs
from zerojax.plan.make import Plan
from zerojax.training import entry
from zerojax.training.auto_settings import AUTO
from zerojax.training.run_spec import RunSpec
from zerojax.training.search_runs import PlannedCall
from zerojax.training.train_arguments import Arguments

_CALL_ONE = "call one of them in the script, or plan a run file (CONFIG.yaml)"
_CALL_TRAIN = "call it in the script, or pass a run file (CONFIG.yaml)"
_IN_THE_FILE = (
    "the script passes a DeepSpeed configuration, which sets the mesh; change {} there instead of "
    "on the command line"
)


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """Settings of a script that KEY=VALUE words on the command line may change."""

    mesh: MeshConfig
    num_microbatches: int | None = None

    def __post_init__(self) -> None:
        coerce_fields(self)


@dataclass(frozen=True)
class _Target:
    """Devices to plan a script for, and the mesh settings from the command line."""

    num_devices: int
    gpu: Gpu | None
    overrides: Sequence[str]

    def mesh_of(self, settings: MeshConfig) -> AbstractMesh:
        return meshes.make_abstract_mesh(settings, self.num_devices, gpu=self.gpu)


def plan_of_script(
    path: str, overrides: Sequence[str], num_devices: int, gpu: Gpu | None = None
) -> Plan:
    """Returns the plan of a script's first `train`, `make_plan` or engine step, for absent devices.

    The script runs up to that call, with its output on standard error.

    Args:
      path: path of the script, which runs as with `python SCRIPT`.
      overrides: KEY=VALUE words, such as "zero=3", that change the mesh options of the call or its
        num_microbatches.
      num_devices: number of devices to plan for.
      gpu: kind of the devices.

    Raises:
      ValueError: the script makes no such call or fails before it; or an error of `make_plan`.
    """
    call, mesh = _call_and_mesh(path, overrides, num_devices, gpu)()
    return call.plan_on(mesh, gpu)


def spec_of_script(path: str, overrides: Sequence[str], *, command: str) -> RunSpec:
    """Returns the run of a script's first `train`, on the devices of this machine.

    The script runs up to that call, with its output on standard error; nothing is trained.

    Args:
      path: path of the script, which runs as with `python SCRIPT`.
      overrides: KEY=VALUE words, such as "zero=3", that change the mesh options of the call or its
        num_microbatches.
      command: sub-command of zerojax that runs the script, for messages.

    Raises:
      ValueError: the script makes no such call or fails before it; or an error of `train`.
    """

    def read(given: Mapping[str, Any], end: End) -> Any:
        arguments = Arguments.of_call(given)
        is_mesh = isinstance(arguments.mesh_config, Mesh) and not overrides
        settings = None if is_mesh else _settings(arguments.mesh_config, overrides)
        if settings is not None:
            arguments = dataclasses.replace(arguments, mesh_config=settings.mesh)
            if settings.num_microbatches is not None:
                number = settings.num_microbatches
                arguments = dataclasses.replace(arguments, num_microbatches=number)
        end(entry.spec_of(arguments))

    with contextlib.redirect_stdout(sys.stderr):
        return first_call(path, {"train": read}, _CALL_TRAIN, command=command)


def call_of_script(
    path: str, overrides: Sequence[str], num_devices: int, gpu: Gpu | None = None
) -> PlannedCall:
    """Returns the arguments of a script's first `train` or `make_plan`, as a search needs them.

    Args:
      path: path of the script, which runs as with `python SCRIPT`.
      overrides: KEY=VALUE words, such as "zero=3", that change the mesh options of the call or its
        num_microbatches.
      num_devices: number of devices to plan for.
      gpu: kind of the devices.

    Raises:
      ValueError: the script makes no such call or fails before it; or a DeepSpeed configuration
        sets the mesh.
    """
    call, _ = _call_and_mesh(path, overrides, num_devices, gpu)()
    if call.is_deepspeed:
        raise ValueError(
            f"{path} passes a DeepSpeed configuration, which sets the mesh, and --search changes "
            "it; pass a zerojax.MeshConfig to train, or compare configurations without --search"
        )
    return call


def _call_and_mesh(
    path: str, overrides: Sequence[str], num_devices: int, gpu: Gpu | None
) -> Callable[[], tuple[PlannedCall, AbstractMesh]]:
    target = _Target(num_devices, gpu, overrides)
    readers = {
        name: functools.partial(read, target=target)
        for name, read in (("train", _train), ("make_plan", _make_plan), ("initialize", _engine))
    }
    with contextlib.redirect_stdout(sys.stderr):
        return first_call(path, readers, _CALL_ONE, command="plan")


def _train(given: Mapping[str, Any], end: End, *, target: _Target) -> Any:
    arguments = Arguments.of_call(given)
    settings = _settings(arguments.mesh_config, target.overrides)
    if settings is None:  # a DeepSpeed configuration, which is translated for `target`'s devices
        mesh = target.mesh_of(explain(arguments.mesh_config, num_devices=target.num_devices).mesh)
    else:
        arguments = dataclasses.replace(arguments, mesh_config=settings.mesh)
        if settings.num_microbatches is not None:
            number = settings.num_microbatches
            arguments = dataclasses.replace(arguments, num_microbatches=number)
        mesh = target.mesh_of(settings.mesh)
    spec = entry.spec_of(arguments, mesh)
    end(functools.partial(_call_of, spec, mesh, is_deepspeed=settings is None))


def _call_of(
    spec: RunSpec, mesh: AbstractMesh, *, is_deepspeed: bool
) -> tuple[PlannedCall, AbstractMesh]:
    assert isinstance(spec.mesh, MeshConfig)
    call = PlannedCall(
        inputs=spec.inputs,
        settings=spec.mesh,
        mesh_options=spec.mesh_options,
        is_deepspeed=is_deepspeed,
    )
    return call, mesh


def _make_plan(given: Mapping[str, Any], end: End, *, target: _Target) -> Any:
    values = dict(given)
    options, zero = values.pop("mesh_options"), values.pop("zero")
    found = _settings(values.pop("mesh"), ())
    assert found is not None
    own = {**options, **({} if zero is None else {"zero": zero})}
    settings = _with_words(dataclasses.replace(found.mesh, **own), target.overrides)
    if settings.num_microbatches is not None:
        values["num_microbatches"] = settings.num_microbatches
    mesh, inputs = target.mesh_of(settings.mesh), PlanInputs(**values)
    end(lambda: (PlannedCall(inputs=inputs, settings=settings.mesh), mesh))


def _engine(given: Mapping[str, Any], end: End, *, target: _Target) -> Any:
    if target.overrides:
        raise ValueError(_IN_THE_FILE.format(target.overrides[0]))
    run = PortedRun.of_call(given, target.num_devices)
    mesh = target.mesh_of(run.translation.mesh)

    def plan_for(batch: Batch) -> NoReturn:
        batch = abstract_global(batch, mesh)
        size = run.translation.train_batch_size or rows_of(batch)
        settled = run.with_rows(size)
        # A script under several processes passes the rows of one process.
        whole = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]) if x.shape else (), x.dtype), batch
        )
        settings = settled.translation.mesh
        call = PlannedCall(inputs=settled.inputs(whole), settings=settings, is_deepspeed=True)
        end(lambda: (call, mesh))

    engine = EngineUntilBatch(run, mesh, plan_for)
    if given["example_batch"] is not None:
        engine.prepare(given["example_batch"])
    return engine


def _settings(mesh: Any, overrides: Sequence[str]) -> _Settings | None:
    """Returns the mesh options of a script's call with overrides applied; None for a DeepSpeed
    configuration.

    Raises:
      ValueError: overrides are given, but a DeepSpeed configuration sets the mesh.
    """
    if mesh == AUTO:  # the mesh would be searched for the devices of a real run
        mesh = None
    if isinstance(mesh, str | Path) or (isinstance(mesh, Mapping) and is_deepspeed(mesh)):
        if overrides:
            raise ValueError(_IN_THE_FILE.format(overrides[0]))
        return None
    if isinstance(mesh, Mesh | AbstractMesh):
        sizes = {axis: mesh.shape.get(axis, 1) for axis in meshes.AXES}
        mesh = MeshConfig(**sizes)
    return _with_words(as_mesh_config(mesh), overrides)


def _with_words(settings: MeshConfig, overrides: Sequence[str]) -> _Settings:
    """Returns mesh settings with KEY=VALUE words such as "zero=3" applied.

    Raises:
      ConfigError: a key is unknown or a value is wrong.
    """
    base = _Settings(mesh=settings)
    return load_dataclass(_Settings, None, overrides, base=base) if overrides else base


def run_script(path: str, overrides: Sequence[str]) -> None:
    """Runs a script as `python SCRIPT` does, with overrides of the mesh options of its `train`
    call.

    Args:
      path: path of the script.
      overrides: KEY=VALUE words such as "zero=3".

    Raises:
      ConfigError: a key is unknown or a value is wrong.
      ValueError: the script sets its mesh by a DeepSpeed configuration or a `jax.sharding.Mesh`.
    """
    _with_words(MeshConfig(), overrides)  # raises for a wrong key before the script runs
    with as_script(path), contextlib.ExitStack() as stack:
        if overrides:
            train = _overriding(entry.train, overrides)
            stack.enter_context(mock.patch.object(zerojax, "train", train))
            stack.enter_context(mock.patch.object(entry, "train", train))
        runpy.run_path(path, run_name="__main__")


def _overriding(train: Callable[..., Any], overrides: Sequence[str]) -> Callable[..., Any]:
    signature = inspect.signature(train)

    @functools.wraps(train)
    def call(*args: object, **options: object) -> Any:
        bound = signature.bind(*args, **options)
        mesh = bound.arguments.get("mesh_config")
        if isinstance(mesh, Mesh):
            raise ValueError(
                f"the script passes a jax.sharding.Mesh, which {overrides[0]} cannot change; pass "
                "a zerojax.MeshConfig or a dict of mesh options instead"
            )
        settings = _settings(mesh, overrides)
        if settings is not None:
            bound.arguments["mesh_config"] = settings.mesh
            if settings.num_microbatches is not None:
                bound.arguments["num_microbatches"] = settings.num_microbatches
        return train(*bound.args, **bound.kwargs)

    return call
