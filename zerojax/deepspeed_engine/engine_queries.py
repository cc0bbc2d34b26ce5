"""Methods of DeepSpeed's engine that return settings and counters: batch sizes, stage, steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from zerojax import deepspeed_config
from zerojax.config import OptimizerConfig
from zerojax.data import local_rows_of_mesh
from zerojax.placement import device_mesh as meshes
from zerojax.placement.state import TrainState
from zerojax.plan.make import Plan
from zerojax.training.step_runner import StepRunner


class EngineQueries:
    """Methods of DeepSpeed's engine that read the configuration, the plan or the state.

    Attributes:
      translation: zerojax settings of the configuration, with a line per key.
      mesh: mesh of the devices.
      metrics: metrics of the last step, still on the devices; {} before the first step.
    """

    def __init__(
        self, translation: deepspeed_config.Translation, mesh: Mesh | AbstractMesh
    ) -> None:
        self.translation = translation
        self.mesh: Any = mesh
        self._num_rows = translation.train_batch_size
        self._runner: StepRunner | None = None
        self._loaded_step = 0
        self.metrics: Mapping[str, jax.Array] = {}

    def train_batch_size(self) -> int:
        """Returns the number of rows of a step's batch, over all processes.

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
        """Returns the number of rows of a micro-batch on one data shard."""
        shards = meshes.num_data_shards(self.mesh)
        return self.train_batch_size() // (shards * self.gradient_accumulation_steps())

    def gradient_accumulation_steps(self) -> int:
        """Returns the number of micro-batches per step."""
        return self.translation.num_microbatches

    def get_batch_info(self) -> tuple[int, int, int]:
        """Returns (rows of a step, rows of a micro-batch on one data shard, micro-batches)."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def local_rows(self) -> tuple[int, int]:
        """Returns (low, high): this process passes rows low to high - 1 of every global batch."""
        size = self.train_batch_size()
        if isinstance(self.mesh, AbstractMesh):  # of a plan, which has one process
            return 0, size
        return local_rows_of_mesh(self.mesh, size)

    def gradient_clipping(self) -> float:
        """Returns the maximum global gradient norm; 0: no clipping."""
        return self.translation.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """Returns the ZeRO stage, 0 to 3."""
        return self.translation.zero_stage

    def zero_optimization(self) -> bool:
        """Returns True if any part of the state is sharded (ZeRO stage 1, 2 or 3)."""
        return self.zero_optimization_stage() > 0

    @property
    def config(self) -> dict[str, Any]:
        """Content of the ds_config under DeepSpeed's names, with "auto" replaced where Hugging
        Face's rules give a value; batch sizes keep "auto"."""
        return copy.deepcopy(dict(self.translation.resolved))

    def optimizer_name(self) -> str | None:
        """Returns the optimizer's name in lower case, as DeepSpeed does; None if the ds_config has
        no optimizer."""
        name = self._in_section("optimizer", "type")
        return None if name is None else name.lower()

    def optimizer_params(self) -> dict[str, Any] | None:
        """Returns the parameters of the ds_config's optimizer; None if it has no optimizer."""
        return self._in_section("optimizer", "params")

    def scheduler_name(self) -> str | None:
        """Returns the name of the ds_config's schedule; None if it has no schedule."""
        return self._in_section("scheduler", "type")

    def scheduler_params(self) -> dict[str, Any] | None:
        """Returns the parameters of the ds_config's schedule; None if it has no schedule."""
        return self._in_section("scheduler", "params")

    def _in_section(self, section: str, key: str) -> Any:
        return (self.config.get(section) or {}).get(key)

    def elasticity_enabled(self) -> bool:
        """Returns True if the section `elasticity` determines the batch size."""
        return self.translation.elasticity.enabled

    @property
    def dp_world_size(self) -> int:
        """Number of data shards into which a batch is divided, over all devices."""
        return meshes.num_data_shards(self.mesh)

    @property
    def mp_world_size(self) -> int:
        """Number of devices over which each matrix is split (tensor parallelism)."""
        return self.mesh.shape[meshes.MODEL]

    def steps_per_print(self) -> int | None:
        """Returns the number of steps between printed lines; None if the ds_config does not set it:
        then only skipped steps and the log of a run folder are printed."""
        return self.translation.steps_per_print

    def fp16_enabled(self) -> bool:
        """Returns True if forward and backward pass compute in float16."""
        return self.translation.precision.compute_dtype == jnp.float16

    def bfloat16_enabled(self) -> bool:
        """Returns True if forward and backward pass compute in bfloat16."""
        return self.translation.precision.compute_dtype == jnp.bfloat16

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns True, because every `train_batch` is a complete step."""
        return True

    @property
    def global_rank(self) -> int:
        """Index of this process over all hosts; process 0 prints."""
        return jax.process_index()

    @property
    def plan(self) -> Plan | None:
        """Plan of the run; None before the first batch."""
        return None if self._runner is None else self._runner.plan

    @property
    def state(self) -> TrainState | None:
        """Current train state, in which no update waits; None before the first batch."""
        return None if self._runner is None else self._runner.state

    @property
    def _held_state(self) -> TrainState | None:
        """The state as it is; an update may wait in it (`offload.update_in_forward`)."""
        return None if self._runner is None else self._runner.held_state

    @property
    def global_steps(self) -> int:
        """Number of batches consumed, including those before a resume."""
        return self._loaded_step if self._runner is None else self._runner.num_steps

    def get_lr(self) -> list[float]:
        """Returns the learning rate of the next update, in a list as DeepSpeed does.

        Raises:
          ValueError: the learning rate is not known, because it is inside the user's own optax
            transformation or there was no batch yet.
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
        """Returns the last step's gradient norm before clipping; None before the first step."""
        return float(self.metrics["grad_norm"]) if self.metrics else None

    def was_step_applied(self) -> bool:
        """Returns True if the last step changed the parameters, False if its numbers were not
        finite or there was no step. Blocks until the step is done."""
        return bool(self.metrics) and not int(self.metrics["skipped"])

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because their loss or gradients were not finite. Blocks until the
        last step is done."""
        return 0 if self._held_state is None else int(self._held_state["skipped"])

    @property
    def num_steps(self) -> int:
        """Number of batches consumed, as `global_steps`; the name that `Trainer` uses."""
        return self.global_steps

    @property
    def global_samples(self) -> int:
        """Number of rows consumed over all processes."""
        return self.global_steps * self.train_batch_size()

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches consumed, over all steps."""
        return self.global_steps * self.gradient_accumulation_steps()

    def train(self, mode: bool = True) -> Self:
        """Does nothing: `train_batch` trains and `eval_batch` evaluates."""
        return self

    def eval(self) -> Self:
        """Does nothing: `train_batch` trains and `eval_batch` evaluates."""
        return self
