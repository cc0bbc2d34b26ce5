"""Answers queries of DeepSpeed's engine: batch sizes, stage, precision, steps, rates, norms."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax import deepspeed_config
from zerojax.config import OptimizerConfig
from zerojax.data import local_rows_of_mesh
from zerojax.plan import device_mesh as meshes
from zerojax.plan.make import Plan
from zerojax.plan.state import TrainState
from zerojax.training.step_runner import StepRunner


class ConfigQueries:
    """Methods of DeepSpeed's engine that need only the configuration.

    Attributes:
      translation: the zerojax settings of the configuration, key by key.
      mesh: the devices of the run.
    """

    def __init__(self, translation: deepspeed_config.Translation, mesh: Mesh) -> None:
        self.translation, self.mesh = translation, mesh
        self._num_rows = translation.train_batch_size

    def train_batch_size(self) -> int:
        """Returns the rows of a step's batch, over all processes.

        Raises:
          ValueError: the configuration does not set it, and there was no batch yet.
        """
        if self._num_rows is None:
            raise ValueError(
                "the configuration has no batch size, so the first batch determines it, but there "
                "has been no batch yet; set train_batch_size in the configuration, or call this "
                "method after the first batch"
            )
        return self._num_rows

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the rows of a micro-batch on one copy of the model."""
        shards = meshes.num_data_shards(self.mesh)
        return self.train_batch_size() // (shards * self.gradient_accumulation_steps())

    def gradient_accumulation_steps(self) -> int:
        """Returns the number of micro-batches of a step."""
        return self.translation.num_microbatches

    def get_batch_info(self) -> tuple[int, int, int]:
        """Returns (rows of a step, rows of a micro-batch on one model copy, micro-batches)."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def local_rows(self) -> tuple[int, int]:
        """Returns (low, high): the rows of every global batch that this process passes."""
        return local_rows_of_mesh(self.mesh, self.train_batch_size())

    def gradient_clipping(self) -> float:
        """Returns the limit of the global gradient norm; 0: none."""
        return self.translation.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """Returns the ZeRO stage, 0 to 3."""
        return self.translation.zero_stage

    def zero_optimization(self) -> bool:
        """Returns whether any of the state is sharded: stage 1, 2 or 3."""
        return self.zero_optimization_stage() > 0

    @property
    def config(self) -> dict[str, Any]:
        """The configuration with every "auto" filled, under DeepSpeed's names."""
        return copy.deepcopy(dict(self.translation.resolved))

    def optimizer_name(self) -> str | None:
        """Returns the optimizer's name in lower case, as DeepSpeed does; None if the ds_config sets
        none."""
        name = self._in_section("optimizer", "type")
        return None if name is None else name.lower()

    def optimizer_params(self) -> dict[str, Any] | None:
        """Returns the parameters of the ds_config's optimizer; None if it sets none."""
        return self._in_section("optimizer", "params")

    def scheduler_name(self) -> str | None:
        """Returns the name of the ds_config's schedule; None if it sets none."""
        return self._in_section("scheduler", "type")

    def scheduler_params(self) -> dict[str, Any] | None:
        """Returns the parameters of the ds_config's schedule; None if it sets none."""
        return self._in_section("scheduler", "params")

    def _in_section(self, section: str, key: str) -> Any:
        return (self.config.get(section) or {}).get(key)

    def elasticity_enabled(self) -> bool:
        """Returns whether elasticity determines the batch."""
        return self.translation.elasticity.enabled

    @property
    def dp_world_size(self) -> int:
        """Number of data shards over all devices, which a batch is divided into."""
        return meshes.num_data_shards(self.mesh)

    @property
    def mp_world_size(self) -> int:
        """Number of devices that each matrix is split over (tensor parallelism)."""
        return self.mesh.shape[meshes.MODEL]

    def steps_per_print(self) -> int | None:
        """Returns the steps between printed lines; None: nothing is printed."""
        return self.translation.steps_per_print

    def fp16_enabled(self) -> bool:
        """Returns whether forward and backward pass compute in float16."""
        return self.translation.precision.compute_dtype == jnp.float16

    def bfloat16_enabled(self) -> bool:
        """Returns whether forward and backward pass compute in bfloat16."""
        return self.translation.precision.compute_dtype == jnp.bfloat16

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns True: every `train_batch` is a complete step."""
        return True

    @property
    def global_rank(self) -> int:
        """Index of this process; process 0 prints."""
        return jax.process_index()


class EngineQueries(ConfigQueries):
    """Methods of DeepSpeed's engine that need the plan or the state.

    Attributes:
      metrics: of the last step, still on the devices; {} before the first.
    """

    def __init__(self, translation: deepspeed_config.Translation, mesh: Mesh) -> None:
        super().__init__(translation, mesh)
        self._runner: StepRunner | None = None
        self._loaded_step = 0
        self.metrics: Mapping[str, jax.Array] = {}

    @property
    def plan(self) -> Plan | None:
        """The plan of the run; None before the first batch."""
        return None if self._runner is None else self._runner.plan

    @property
    def state(self) -> TrainState | None:
        """The current train state; None before the first batch."""
        return None if self._runner is None else self._runner.state

    @property
    def global_steps(self) -> int:
        """Number of batches consumed, including those before a resume."""
        return self._loaded_step if self._runner is None else self._runner.num_steps

    def get_lr(self) -> list[float]:
        """Returns the learning rate of the next update, in a list as DeepSpeed does.

        Raises:
          ValueError: it is not known, since it is inside the user's own optax transformation.
        """
        schedule = self.translation.learning_rate if self.plan is None else self.plan.learning_rate
        if schedule is None and isinstance(self.translation.optimizer, OptimizerConfig):
            raise ValueError(
                "the learning rate is unknown before the first batch; call "
                "engine.prepare(example_batch) to read it earlier"
            )
        if schedule is None:
            raise ValueError(
                "the learning rate is inside the optax transformation that was passed to "
                "initialize; call your own schedule function"
            )
        return [float(schedule(self.global_steps - self.skipped_steps))]

    def get_global_grad_norm(self) -> float | None:
        """Returns the gradient norm of the last step before clipping; None: there was no step."""
        return float(self.metrics["grad_norm"]) if self.metrics else None

    def was_step_applied(self) -> bool:
        """Returns whether the last step changed the parameters; False if its numbers were not
        finite. Blocks."""
        return bool(self.metrics) and not int(self.metrics["skipped"])

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because their gradients were not finite. Blocks until the last
        step is done."""
        return 0 if self.state is None else int(self.state["skipped"])

    @property
    def num_steps(self) -> int:
        """`global_steps`, under the name that `Trainer` uses."""
        return self.global_steps

    @property
    def global_samples(self) -> int:
        """Number of rows consumed."""
        return self.global_steps * self.train_batch_size()

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches consumed."""
        return self.global_steps * self.gradient_accumulation_steps()

    def train(self, mode: bool = True) -> Self:
        """Has no effect: `train_batch` trains and `eval_batch` evaluates."""
        return self

    def eval(self) -> Self:
        """Has no effect: `train_batch` trains and `eval_batch` evaluates."""
        return self
