"""Parts "gpt2" and "llama": `zerojax.train` compared with a plain JAX step of the same model.

Both alternate in one process, from the same state on the same batches; wall time per step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import zerojax
from benchmarks import plain_jax
from benchmarks.gpu.prediction import predict_step, shown
from benchmarks.gpu.subjects import make_factory, make_optimizer, make_source, peak_device_bytes
from benchmarks.gpu.traced import busy_ms, device_events, longest_kernels
from benchmarks.gpu.workloads import Workload, choose_workload, model_rates
from benchmarks.machine import load_average
from benchmarks.measuring import Sample, interleave, least_of, median_of, ratio_of, sample
from benchmarks.recording import Goal, Record, add_arguments, save_so_far, write_record
from zerojax.config import LogConfig

LIMIT = 1.01
LOSS_TOLERANCE = 0.02  # bfloat16 has 8 bits, and differences grow over a few dozen steps
WARM_UP = 3
TRAIN, UNROLLED = "zerojax.train", "zerojax.train, unroll"
TRACED_STEPS = 4


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("model", choices=("gpt2", "llama"))
    arguments = parser.parse_args(argv)
    load_before = load_average()
    workload = choose_workload(arguments.model, arguments.smoke)
    traces: dict[str, Any] = {}
    predictions: dict[str, Any] = {}
    more = {"flops_per_token": workload.flops_per_token, "traces": traces}
    more |= {"predictions": predictions}
    for record in measure(arguments.model, workload, traces, predictions):
        save_so_far(record, arguments, load_before, **more)
    write_record(record, arguments, load_before, **more)


def measure(
    name: str, workload: Workload, traces: dict[str, Any], predictions: dict[str, Any]
) -> Iterator[Record]:
    """Times both sides in alternation; then, on a GPU, the plain step with stored scores.

    Yields the record after each prediction, before the predicted step is timed, and after each
    measurement.

    Args:
      name: name of the workload.
      workload: model and batch sizes.
      traces: dict to which the kernels and copies of some steps of each way are added.
      predictions: dict to which the expected time of each way of zerojax is added.
    """
    with tempfile.TemporaryDirectory() as folder:
        train = _TrainSide(workload, folder)
        predictions[TRAIN] = train.predicted()
        yield Record(name=name, rows=[])
        bare = _BareSide(workload, train.trainer)
        sides = {"bare jit": bare.run, TRAIN: train.run}
        samples = interleave(sides, warm_up=WARM_UP, steps=workload.steps, rounds=workload.rounds)
        _check_losses(train.losses, bare.losses)
        peak = peak_device_bytes()
        memory = bare.memory()
        params, opt_state = bare.params, bare.opt_state
        traces[TRAIN] = train.traced()
        train.trainer.close()
        train.trainer.state = {}
    rows = [_row(side, samples[side], workload) for side in sides]
    rows[-1] |= shown(predictions[TRAIN])
    ratio = ratio_of(samples[TRAIN], samples["bare jit"], "wall")
    goal = Goal(name=f"{name}, step time, zerojax.train / bare jit", value=ratio, limit=LIMIT)
    notes = [
        f"{workload.batch_size} x {workload.seq_len} tokens, bf16, float32 masters, remat "
        f"{workload.remat!r}; {workload.flops_per_token / 1e9:.3f} GFLOP per token",
        "MFU against the published dense rate of this card",
        "peak of this process (both sides) "
        + ("is not counted here" if peak is None else f"{peak / 1e9:.1f} GB")
        + f"; one bare step takes {memory / 1e9:.1f} GB as compiled",
    ]
    record = Record(name=name, rows=rows, goals=[goal], notes=notes)
    yield record
    del bare, train
    if workload.remat == "none":
        with tempfile.TemporaryDirectory() as folder:
            train = _TrainSide(workload, folder, unroll=True)
            predictions[UNROLLED] = train.predicted()
            yield record
            samples = interleave(
                {UNROLLED: train.run}, warm_up=WARM_UP, steps=workload.steps, rounds=2
            )
            traces[UNROLLED] = train.traced()
            train.trainer.close()
        rows.append(_row(UNROLLED, samples[UNROLLED], workload) | shown(predictions[UNROLLED]))
        del train
        yield record
    rows.append(_stored_scores_row(workload, params, opt_state))
    yield record


def _row(side: str, samples: list[Sample], workload: Workload) -> dict[str, Any]:
    seconds = median_of(samples, "wall")
    return {
        "way": side,
        "step_ms": 1e3 * seconds,
        "least_ms": 1e3 * least_of(samples, "wall"),
        "host_cpu_ms": 1e3 * median_of(samples, "cpu"),
        **model_rates(workload, seconds, jax.devices()[0].device_kind),
    }


class _TrainSide:
    """The side of `zerojax.train` and its trainer's `fit`, timed between two of its reports.

    The time between reports includes prefetch and files, but not start and end of `fit`.
    """

    def __init__(self, workload: Workload, folder: str, *, unroll: bool = False) -> None:
        self._source = make_source(workload)
        self._every = max(1, workload.steps // 2)
        self._times: list[tuple[int, float, float]] = []
        self.losses: dict[int, float] = {}
        self.trainer = zerojax.train(
            make_factory(workload),
            {"data": 1, "unroll": unroll},
            self._source,
            optimizer=make_optimizer(),
            precision="bf16",
            steps=1,
            run_dir=folder,
            log=LogConfig(console="quiet", every=self._every),
            callbacks=[self._note],
        )

    def _note(self, _: zerojax.Trainer, report: dict[str, float]) -> None:
        step = int(report["step"])
        self.losses[step] = report["loss"]
        self._times.append((step, time.perf_counter(), time.process_time()))

    def run(self, steps: int) -> Sample:
        """Runs steps in whole intervals between reports; times none before the first report."""
        intervals = -(-steps // self._every)
        first = (self.trainer.num_steps // self._every + 1) * self._every
        last = first + intervals * self._every
        self._times.clear()
        # One more step: the report of step `last` is made while the next step runs.
        self.trainer.fit(self._source, steps=last + 1)
        times = {step: (wall, cpu) for step, wall, cpu in self._times}
        (wall_a, cpu_a), (wall_b, cpu_b) = times[first], times[last]
        return Sample((wall_b - wall_a) / (last - first), (cpu_b - cpu_a) / (last - first))

    def predicted(self) -> dict[str, Any] | None:
        """Returns the prediction for the program that `run` times; None without a GPU."""
        return predict_step(self.trainer.step_plan, self.trainer.jitted_step)

    def traced(self) -> dict[str, Any]:
        """Returns `busy_ms` and the longest kernels of some more steps."""
        if jax.default_backend() != "gpu":
            return {}
        with tempfile.TemporaryDirectory() as folder:
            before = self.trainer.num_steps
            with jax.profiler.trace(folder):
                self.trainer.fit(self._source, steps=before + TRACED_STEPS)
            events = device_events(folder)
        found = {"traced_steps": TRACED_STEPS, **busy_ms(events)}
        return found | {"kernels": longest_kernels(events)}


class _BareSide:
    """The side of the hand-written step; starts from the trainer's state after one step."""

    def __init__(self, workload: Workload, trainer: zerojax.Trainer) -> None:
        self._source = make_source(workload)
        self._done = trainer.num_steps
        self.params = jax.tree.map(jnp.copy, trainer.state["params"])
        self.opt_state = jax.tree.map(jnp.copy, trainer.state["opt_state"])
        self.losses: dict[int, Any] = {}
        step = plain_jax.build_step(
            make_factory(workload), make_optimizer(), compute_dtype=jnp.bfloat16
        )
        example = self._source.batch(0)
        self._step = step.lower(self.params, self.opt_state, example).compile()

    def run(self, steps: int) -> Sample:
        def run() -> None:
            for index in range(self._done, self._done + steps):
                batch = jax.device_put(self._source.batch(index))
                self.params, self.opt_state, loss = self._step(self.params, self.opt_state, batch)
                self.losses[index + 1] = loss
            jax.block_until_ready(self.params)

        taken = sample(run, steps)
        self._done += steps
        return taken

    def memory(self) -> int:
        analysis = self._step.memory_analysis()
        return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes


def _stored_scores_row(workload: Workload, params: Any, opt_state: Any) -> dict[str, Any]:
    """Returns the row of the bare step with stored scores instead of the choice of `auto`."""
    side = "bare jit, stored scores"
    if jax.default_backend() != "gpu":
        return {"way": side, "note": "needs a GPU"}
    source = make_source(workload)
    step = plain_jax.build_step(
        make_factory(workload, attention="xla"), make_optimizer(), compute_dtype=jnp.bfloat16
    )
    state = [params, opt_state]

    def run(steps: int) -> Sample:
        def one_after_the_other() -> None:
            for index in range(steps):
                batch = jax.device_put(source.batch(index))
                state[0], state[1], _ = step(state[0], state[1], batch)
            jax.block_until_ready(state)

        return sample(one_after_the_other, steps)

    try:
        samples = interleave({side: run}, warm_up=WARM_UP, steps=workload.steps, rounds=2)
    except Exception as error:  # out of memory must not lose the two main rows
        return {"way": side, "note": f"{type(error).__name__}: {error}"[:200]}
    return _row(side, samples[side], workload)


def _check_losses(train: dict[int, float], bare: dict[int, Any]) -> None:
    """Checks that both ways compute the same losses."""
    common = sorted(set(train) & set(bare))
    if not common:
        raise RuntimeError(f"no step of {sorted(train)} was taken by the bare side as well")
    a, b = train[common[-1]], float(bare[common[-1]])
    if not abs(a - b) <= LOSS_TOLERANCE * abs(b):
        raise RuntimeError(f"step {common[-1]}: zerojax.train has loss {a}, the bare step {b}")


if __name__ == "__main__":
    main()
