"""Stand-in for an engine in a script that is planned or checked, up to its first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self

from jax.sharding import AbstractMesh, Mesh

from zerojax.config.tree_types import Batch
from zerojax.deepspeed_engine.engine_absent import AbsentMethods
from zerojax.deepspeed_engine.engine_batches import as_arrays_of_batch, as_batch
from zerojax.deepspeed_engine.engine_queries import EngineQueries
from zerojax.deepspeed_engine.ported_run import PortedRun


class EngineUntilBatch(EngineQueries, AbsentMethods):
    """Engine without a plan and state, whose first batch ends the script.

    Until then it answers as an engine that runs, before its first batch.

    Args:
      run: run of the call of `initialize`.
      mesh: mesh of devices that may be absent.
      end: receives the first batch.
    """

    is_open = True

    def __init__(
        self, run: PortedRun, mesh: Mesh | AbstractMesh, end: Callable[[Any], NoReturn]
    ) -> None:
        super().__init__(run.translation, mesh)
        self._end = end

    def train_batch(
        self, batch: Batch = None, *, data_iter: Iterator[Any] | None = None
    ) -> NoReturn:
        self._end(as_batch(batch, data_iter, self.gradient_accumulation_steps()))

    eval_batch = train_batch

    def prepare(self, example_batch: Batch) -> NoReturn:
        self._end(as_arrays_of_batch(example_batch))

    def load_checkpoint(self, *_: Any, **__: Any) -> tuple[None, dict[str, Any]]:
        """Loads nothing, as if nothing had been saved: the plan does not depend on it."""
        return None, {}

    def save_checkpoint(self, *_: Any, **__: Any) -> NoReturn:
        """Raises, as there is no state before the first batch."""
        raise ValueError("there is no state before the first batch; call this after train_batch")

    to_model = reshard = save_checkpoint

    def close(self) -> None:
        """Does nothing: no file is open."""

    destroy = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
