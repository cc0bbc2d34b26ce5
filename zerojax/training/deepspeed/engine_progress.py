"""Progress queries of DeepSpeed's engine: steps, rates and norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import jax
from jax.sharding import Mesh

from zerojax.config import OptimizerConfig
from zerojax.plan.plan import Plan
from zerojax.plan.state import TrainState
from zerojax.training import deepspeed
from zerojax.training.deepspeed.engine_answers import Answers


class Progress(Answers):
    """The part of an engine that is known once there are steps.

    Attributes:
      plan: of the run; None before the first batch.
      state: the current state; None before the first batch.
      global_steps: batches consumed, those before a resume included.
      metrics: of the last step, still on the devices; {} before the first.
    """

    def __init__(self, translation: deepspeed.Translation, mesh: Mesh) -> None:
        super().__init__(translation, mesh)
        self.plan: Plan | None = None
        self.state: TrainState | None = None
        self.global_steps = 0
        self.metrics: Mapping[str, jax.Array] = {}

    def get_lr(self) -> list[float]:
        """The learning rate of the next update, in a list as DeepSpeed has it.

        Raises:
          ValueError: it is inside the user's own optax transformation.
        """
        schedule = self.translation.learning_rate if self.plan is None else self.plan.learning_rate
        if schedule is None and isinstance(self.translation.optimizer, OptimizerConfig):
            raise ValueError(
                "the learning rate is known from the first batch on; call "
                "engine.prepare(example_batch) to ask for it before"
            )
        if schedule is None:
            raise ValueError(
                "the learning rate is inside the optax transformation that initialize got; ask "
                "the schedule that it was made of"
            )
        return [float(schedule(self.global_steps - self.skipped_steps))]

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradients before clipping; None: there was no step."""
        return float(self.metrics["grad_norm"]) if self.metrics else None

    def was_step_applied(self) -> bool:
        """Whether the last step changed parameters: not when something was not finite. Waits."""
        return bool(self.metrics) and not int(self.metrics["skipped"])

    @property
    def skipped_steps(self) -> int:
        """Steps of the run that changed nothing, since something was not finite. Waits."""
        return 0 if self.state is None else int(self.state["skipped"])

    @property
    def num_steps(self) -> int:
        """`global_steps` under `Trainer`'s name, for what takes either."""
        return self.global_steps

    @property
    def global_samples(self) -> int:
        """Rows consumed."""
        return self.global_steps * self.train_batch_size()

    @property
    def micro_steps(self) -> int:
        """Micro-batches consumed."""
        return self.global_steps * self.gradient_accumulation_steps()

    def train(self, mode: bool = True) -> Self:
        """Changes nothing: `train_batch` trains and `eval_batch` evaluates."""
        return self

    def eval(self) -> Self:
        """Changes nothing, see `train`."""
        return self
