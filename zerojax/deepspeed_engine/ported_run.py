"""Describes the run of a call of `initialize`, for an engine and for the plan of a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from zerojax import deepspeed_config, models, optim, tracing
from zerojax.config.checks import as_patterns
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.config.tree_types import Batch
from zerojax.deepspeed_config.attention_keys import with_layout
from zerojax.deepspeed_config.compression_keys import check_rounding
from zerojax.deepspeed_config.expert_keys import check_router
from zerojax.plan.inputs import PlanInputs
from zerojax.runtime.distributed import join_processes


@dataclass(frozen=True, kw_only=True)
class PortedRun:
    """Run that a call of `initialize` describes.

    Attributes:
      model: its model.
      config: the ds_config and the values of the call.
      translation: settings of the ds_config; before `with_rows` those that depend on the rows of a
        batch may be open.
      loss: loss of the call, with the attention layout of the ds_config; None: the model's own.
      freeze: regular expressions of parameters that are not trained.
      steps: number of steps of the run, if the call or the ds_config has one.
      folder: folder for metrics and the plan; None: nothing is written.
    """

    model: tracing.Model
    config: deepspeed_config.DsConfig
    translation: deepspeed_config.Translation
    loss: tracing.Loss | None
    freeze: tuple[str, ...]
    steps: int | None
    folder: Path | None

    @classmethod
    def of_call(cls, given: Mapping[str, Any], num_devices: int | None = None) -> PortedRun:
        """Returns the run of a call of `initialize`.

        Args:
          given: arguments of the call by name.
          num_devices: number of devices that may be absent; None: the processes that the
            environment describes are joined, and the run has all their devices.

        Raises:
          ConfigError: the ds_config is invalid, or does not fit the model.
          TypeError: an argument is invalid.
        """
        if hasattr(given["model"], "deepspeed_config"):
            raise TypeError(
                "the first argument of initialize is the model, but it is the result of argparse; "
                "pass that as args=args"
            )
        source = _configuration(given["config"], given["args"], given["config_params"])
        if num_devices is None:
            join_processes()
            num_devices = jax.device_count()
        model = models.as_model(given["model"])
        optim.check_optimizer(given["optimizer"])
        values = deepspeed_config.CallerValues(
            optimizer=given["optimizer"],
            steps=given["steps"],
            hidden_size=models.width_of(model),
        )
        config = deepspeed_config.DsConfig(source, num_devices, values)
        translation = config.translate()
        check_router(model, translation.router)
        check_rounding(model, translation.rounding)
        run_dir = given["run_dir"]
        return cls(
            model=model,
            config=config,
            translation=translation,
            loss=with_layout(model, given["loss"], translation.attention_layout),
            freeze=as_patterns("freeze", given["freeze"]),
            steps=translation.total_steps if given["steps"] is None else given["steps"],
            folder=translation.run_dir if run_dir is None else user_path(run_dir),
        )

    def with_rows(self, rows: int | None) -> PortedRun:
        """Returns the run for batches of `rows` rows; None: batches have no rows."""
        return dataclasses.replace(self, translation=self.config.with_rows(rows))

    def inputs(self, batch: Batch) -> PlanInputs:
        """Returns the inputs of planning.

        Args:
          batch: a global batch, as `ShapeDtypeStruct`s.
        """
        translation = self.translation
        return PlanInputs(
            model=self.model,
            example_batch=batch,
            loss=self.loss,
            optimizer=translation.optimizer,
            precision=translation.precision,
            num_microbatches=translation.num_microbatches,
            freeze=self.freeze,
            steps=self.steps,
            features=translation.features,
        )


def _configuration(config: object, args: object, config_params: object) -> Any:
    """Returns the ds_config that the caller passed as `config`, `args` or `config_params`."""
    ways = {
        "config": config,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "config_params": config_params,
    }
    given = {name: value for name, value in ways.items() if value is not None}
    if len(given) != 1:
        found = (
            f"both {' and '.join(given)} were passed" if given else "no configuration was passed"
        )
        raise TypeError(f"{found}; pass one: zerojax.initialize(model, config='ds_config.json')")
    return next(iter(given.values()))
