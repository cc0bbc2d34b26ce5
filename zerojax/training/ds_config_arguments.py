"""Fills arguments of `zerojax.train` from a DeepSpeed configuration passed instead of a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerojax import deepspeed_config, models, optim, tracing
from zerojax.config import ConfigError
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.recognition import is_deepspeed
from zerojax.deepspeed_config.attention_keys import with_layout
from zerojax.deepspeed_config.compression_keys import check_rounding
from zerojax.deepspeed_config.expert_keys import check_router
from zerojax.training.train_arguments import Arguments


@dataclass(frozen=True)
class DsConfigArguments:
    """A ds_config that was passed to `train`, together with the other arguments of the call.

    Attributes:
      config: the ds_config and the values of the call.
      translation: the resulting settings, before the rows of a batch are known.
    """

    config: deepspeed_config.DsConfig
    translation: deepspeed_config.Translation

    @classmethod
    def of(
        cls, arguments: Arguments, *, default_steps: int | None, num_devices: int
    ) -> DsConfigArguments | None:
        """Translates the ds_config of a call of `train`; returns None if no ds_config was passed.

        Args:
          arguments: checked arguments, with the model as a `tracing.Model`.
          default_steps: number of steps if neither the call nor the file sets one.
          num_devices: number of devices of the run.

        Raises:
          ConfigError: the ds_config has a setting that is not supported.
          TypeError: `optimizer` is not an optimizer.
        """
        source = _source_of(arguments.mesh_config)
        if source is None:
            return None
        optim.check_optimizer(arguments.optimizer)
        given = deepspeed_config.CallerValues(
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
        config = deepspeed_config.DsConfig(source, num_devices, given)
        return cls(config, config.translate())

    def fill(self, arguments: Arguments) -> Arguments:
        """Returns the arguments with the settings of the ds_config, before batches are known.

        Raises:
          ConfigError: the call has other settings of a feature than the file.
        """
        translation = self.translation
        changes = _settings_of(translation)
        in_file = [settings for settings in translation.features.given if not settings.is_off]
        for settings in in_file:
            if (passed := arguments.features.find(type(settings))) not in (None, settings):
                assert settings.ds_section is not None
                raise ConfigError(
                    f"differs from {settings.keyword}={passed}; pass only one of them",
                    (settings.ds_section,),
                    translation.source,
                )
        changes["features"] = arguments.features.replaced(*in_file)
        changes |= {
            "mesh_config": translation.mesh,
            "global_batch_size": translation.train_batch_size,
        }
        steps = translation.total_steps
        if arguments.steps is None and steps is not None:
            reason = f"steps={steps}, the length of the schedule in {translation.source}"
            changes |= {"steps": steps, "reasons": (*arguments.reasons, reason)}
        if arguments.run_dir == "auto" and arguments.checkpoint is None:
            changes["run_dir"] = translation.run_dir or arguments.run_dir
        return dataclasses.replace(arguments, **changes)

    def with_layout(self, model: tracing.Model, loss: tracing.Loss | None) -> tracing.Loss | None:
        """Returns the loss with the attention layout of the ds_config; None: the model's own loss.

        Raises:
          ConfigError: the model's layout or router differs from the file's.
        """
        check_router(model, self.translation.router)
        check_rounding(model, self.translation.rounding)
        return with_layout(model, loss, self.translation.attention_layout)

    def with_rows(self, arguments: Arguments, rows: int | None) -> Arguments:
        """Returns the arguments for batches with `rows` rows; issues the ds_config's warnings.

        Args:
          arguments: result of `fill`.
          rows: number of rows of the global batch; None if the batches have no rows.

        Raises:
          ConfigError: a setting is not supported, or `rows` does not fit the batch sizes.
        """
        translation = self.config.with_rows(rows)
        deepspeed_config.warn_of(translation)
        reasons = (*arguments.reasons, *translation.warnings, *translation.reasons)
        return dataclasses.replace(arguments, **_settings_of(translation), reasons=reasons)


def batch_size_of(mesh_config: object, *, num_devices: int) -> int | None:
    """Returns train_batch_size of a ds_config; None if it is not set or no ds_config was passed."""
    source = _source_of(mesh_config)
    if source is None:
        return None
    return deepspeed_config.explain(source, num_devices=num_devices).train_batch_size


def _source_of(mesh_config: object) -> deepspeed_config.Source | None:
    """Returns the second argument of `train` if it is a ds_config, else None."""
    if isinstance(mesh_config, Mapping):
        return mesh_config if is_deepspeed(mesh_config) else None
    return mesh_config if isinstance(mesh_config, (str, Path)) else None


def _settings_of(translation: deepspeed_config.Translation) -> dict[str, Any]:
    """Returns {argument of `train`: value} for the settings of a ds_config.

    reduce_dtype and accumulate_dtype are None, because the returned `precision` contains them.
    """
    return {
        "optimizer": translation.optimizer,
        "precision": translation.precision,
        "reduce_dtype": None,
        "accumulate_dtype": None,
        "num_microbatches": translation.num_microbatches,
        "log": translation.log,
    }
