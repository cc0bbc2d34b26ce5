"""A ds_config with the arguments of the call beside it, read again once batches are known."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from zerojax import models, optim
from zerojax.config.recognition import is_deepspeed
from zerojax.plan.plan import Plan
from zerojax.training.arguments import Arguments
from zerojax.training.deepspeed.placing import check_rules
from zerojax.training.deepspeed.result import Given, Translation
from zerojax.training.deepspeed.translating import Source, translate


@dataclasses.dataclass(frozen=True)
class Ported:
    """What `zerojax.train` and `zerojax.initialize` are given, and take in the same way.

    Attributes:
      source: the file, its text, or its content.
      num_devices: of the run.
      given: what the call says beside it.
    """

    source: Source
    num_devices: int
    given: Given

    def translate(self) -> Translation:
        """What the file says before anything is known of the batches.

        Raises:
          ConfigError: see `translate`.
        """
        return translate(self.source, num_devices=self.num_devices, given=self.given)

    def with_rows(self, rows: int | None) -> Translation:
        """What it says of batches with so many rows, over all devices.

        Args:
          rows: None: the batches have none.

        Raises:
          ConfigError: these are not train_batch_size.
        """
        given = dataclasses.replace(self.given, global_batch_size=rows)
        return dataclasses.replace(self, given=given).translate()


def warn_of(translation: Translation, *, stacklevel: int) -> None:
    """Gives the warnings of a configuration, in the one form that a user meets.

    Args:
      stacklevel: frames from the caller of this to the user's line; 1 is the caller itself. A
        decorator of a function in between is one frame.
    """
    for text in translation.warnings:
        warnings.warn(f"{translation.source}: {text}", UserWarning, stacklevel=stacklevel + 1)


def as_arguments(arguments: Arguments, *, default_steps: int | None) -> Arguments:
    """The same arguments, with a ds_config in the place of the mesh translated into them.

    Args:
      arguments: checked, the model as a `models.Model`; without a ds_config they are returned.
      default_steps: of the run where neither the call nor the file says a number.

    Raises:
      ConfigError: see `translate`. TypeError: the optimizer is none.
    """
    source = _source_of(arguments.mesh_config)
    if source is None:
        return arguments
    optim.check_optimizer(arguments.optimizer)
    given = Given(
        optimizer=arguments.optimizer,
        precision=arguments.precision,
        reduce_dtype=arguments.reduce_dtype,
        accumulate_dtype=arguments.accumulate_dtype,
        num_microbatches=arguments.num_microbatches,
        global_batch_size=arguments.global_batch_size,
        steps=arguments.steps,
        default_steps=default_steps,
        log=arguments.log,
        hidden_size=models.width_of(arguments.model),
    )
    ported = Ported(source, jax.device_count(), given)
    says = ported.translate()
    changes = _said(says) | {"mesh_config": says.mesh, "global_batch_size": says.train_batch_size}
    if arguments.steps is None and says.total_steps is not None:
        reason = f"steps={says.total_steps}: the schedule of {says.source} is made for so many"
        changes |= {"steps": says.total_steps, "reasons": (*arguments.reasons, reason)}
    if arguments.run_dir == "auto" and arguments.checkpoint is None:
        changes["run_dir"] = says.run_dir or arguments.run_dir
    return PortedArguments(**(vars(arguments) | changes), ported=ported)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PortedArguments(Arguments):
    """Arguments of `train` of which a ds_config says a part.

    Attributes:
      ported: the file, which decides about the batch once its rows are known.
    """

    ported: Ported

    def with_rows(self, rows: int | None, *, stacklevel: int) -> Arguments:
        """What the file says of such batches; it gives the file's warnings.

        Raises:
          ConfigError: these rows are not train_batch_size.
        """
        says = self.ported.with_rows(rows)
        warn_of(says, stacklevel=stacklevel + 1)
        reasons = (*self.reasons, *says.warnings, *says.reasons)
        return dataclasses.replace(self, **_said(says), reasons=reasons)

    def check_plan(self, plan: Plan) -> None:
        """Refuses rules of the file that split nothing. Raises: ConfigError."""
        check_rules(plan.settings, plan.placement.leaves)


def _source_of(mesh_config: Any) -> Source | None:
    """The second argument of `train` where it is a DeepSpeed configuration: a path, or a dict."""
    if isinstance(mesh_config, Mapping):
        return mesh_config if is_deepspeed(mesh_config) else None
    return mesh_config if isinstance(mesh_config, (str, Path)) else None


def _said(says: Translation) -> dict[str, Any]:
    """The arguments that a file says; its precision holds the dtypes of sums as well."""
    return {
        "optimizer": says.optimizer,
        "precision": says.precision,
        "reduce_dtype": None,
        "accumulate_dtype": None,
        "num_microbatches": says.num_microbatches,
        "log": says.log,
    }
