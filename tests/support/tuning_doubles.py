"""Stand-ins for kernels, clocks and processes that choose an implementation, and a small plan."""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zerojax
from tests.support.small_models import reference_model
from zerojax.training.tuning import Answer, KeptChoices, Question, Way, decide, tuned_plan

RIGHT = np.arange(4.0, dtype=np.float32)


class Clock:
    """Time that passes where a way runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Runs:
    """A way that takes given seconds in turn, and counts how often it ran.

    Args:
      seconds: of each call; the last one goes on.
      result: what it computes; an exception is raised.
    """

    def __init__(self, clock: Clock, *seconds: float, result: Any = RIGHT) -> None:
        self.clock, self.seconds, self.result, self.times = clock, seconds, result, 0

    def __call__(self) -> Any:
        self.times += 1
        self.clock.now += self.seconds[min(self.times, len(self.seconds)) - 1]
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def question(reference: Runs, other: Runs, **key: Any) -> Question:
    return Question(
        title="a sum",
        key={"what": "sum", "source": "1", **key},
        reference=Way(name="xla", run=reference),
        other=Way(name="mosaic_gpu", run=other),
        difference=tuned_plan.difference,
    )


def asked(clock: Clock, kept: KeptChoices, other: Runs, **more: Any) -> Answer:
    key = more.pop("key", {})
    reference = more.pop("reference", None) or Runs(clock, 1.0)
    return decide(lambda: question(reference, other, **key), kept, clock=clock, **more)


class Processes:
    """Threads that exchange numbers as processes do."""

    def __init__(self, number: int) -> None:
        self.rows: list[Any] = [None] * number
        self.barrier = threading.Barrier(number, timeout=120)

    def exchange(self, process: int) -> Callable[[np.ndarray], np.ndarray]:
        def call(values: np.ndarray) -> np.ndarray:
            self.rows[process] = values
            self.barrier.wait()
            found = np.stack(self.rows)
            self.barrier.wait()
            return found

        return call

    def run(self, *calls: Callable[[Any], Answer]) -> list[Answer]:
        answers: list[Any] = [None] * len(calls)

        def one(process: int) -> None:
            answers[process] = calls[process](self.exchange(process))

        threads = [threading.Thread(target=one, args=(k,)) for k in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in threads)
        return answers


def process(
    folder: Path, number: int, seconds: float, deadline: float = math.inf, **options: Any
) -> Callable[[Any], Answer]:
    def call(exchange: Any) -> Answer:
        clock = Clock()
        other, kept = Runs(clock, seconds, **options), KeptChoices(folder, number)
        return asked(clock, kept, other, exchange=exchange, deadline=deadline)

    return call


def choices(answers: list[Answer]) -> list[str]:
    return [answer.choice for answer in answers]


def plan_for(**options: Any) -> zerojax.Plan:
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    model = options.pop("model", {})
    return zerojax.make_plan(
        reference_model("gpt2", max_seq_len=16, embed_dim=32, num_layers=2, **model),
        options.pop("mesh", {"data": 8}),
        example_batch={"tokens": tokens, "targets": tokens},
        optimizer=options.pop("optimizer", zerojax.adamw(1e-3, mask=_no_biases)),
        zero=options.pop("zero", 3),
        persistence_threshold=0,
        precision="fp32",
        **options,
    )


def _no_biases(params: Any) -> Any:
    return {name: "bias" not in name for name in params}
