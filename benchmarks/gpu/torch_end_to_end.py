"""Part "torch": the same models in PyTorch, compiled and eager, with the same shapes and optimizer.

PyTorch has two ways to train in bf16, and both are measured: bf16 parameters with float32
masters (the arithmetic of zerojax), and autocast over float32 parameters (what most scripts do).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.workloads import CLIP_NORM, Workload, choose_workload, model_rates
from benchmarks.machine import load_average
from benchmarks.measuring import Sample, interleave, least_of, median_of, sample
from benchmarks.recording import Record, add_arguments, write_record

WARM_UP = 3
TRACED_STEPS = 4
# The most important first; cases after the time limit are left out with a note.
CASES = (
    ("gpt2", "masters", True),
    ("llama", "masters", True),
    ("gpt2", "masters", False),
    ("gpt2", "autocast", True),
    ("llama", "masters", False),
    ("llama", "autocast", True),
)


def main(argv: list[str] | None = None) -> None:
    """Measures the cases, and writes the record after each, so that a late failure loses little."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after this")
    arguments = parser.parse_args(argv)
    load_before = load_average()
    if importlib.util.find_spec("torch") is None:
        note = "left out: torch is not installed (pip install torch)"
        write_record(Record(name="torch", rows=[], notes=[note]), arguments, load_before)
        return
    rows: list[dict[str, Any]] = []
    traces: dict[str, list[dict[str, Any]]] = {}
    began = time.perf_counter()
    for name, precision, compiled in CASES:
        elapsed = time.perf_counter() - began
        if elapsed > arguments.seconds:
            row = {"model": name, "precision": precision, "compiled": compiled}
            rows.append(row | {"note": "left out: time is over"})
        else:
            row = _row(name, precision, compiled, arguments.smoke)
            traces[f"{name}, {precision}, compiled {compiled}"] = row.pop("kernels", [])
            rows.append(row)
        write_record(Record(name="torch", rows=rows), arguments, load_before, traces=traces)


def _row(name: str, precision: str, compiled: bool, smoke: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "precision": precision, "compiled": compiled}
    try:
        workload = choose_workload(name, smoke)
        return row | measure(workload, precision, compile_model=compiled and not smoke)
    except Exception as error:  # the next case may still work
        return row | {"note": f"{type(error).__name__}: {error}"[:300]}


def measure(workload: Workload, precision: str, *, compile_model: bool) -> dict[str, Any]:
    """Times one model, after the state of the previous one is freed."""
    import torch  # only where it is installed

    from benchmarks.gpu.torch_model import Decoder

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.compiler.reset()  # otherwise it would keep the model of the last case
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with device:
        model = Decoder(workload)
    build = _masters_step if precision == "masters" else _autocast_step
    step = build(model, torch.compile(model) if compile_model else model, device)
    shape = (8, workload.batch_size, workload.seq_len + 1)
    data = torch.randint(0, workload.vocab_size, shape).to(device)
    done = 0

    def run(steps: int) -> Sample:
        def one_after_the_other() -> None:
            nonlocal done
            for _ in range(steps):
                tokens = data[done % len(data)]
                loss = step(tokens[:, :-1], tokens[:, 1:])
                done += 1
            float(loss)  # waits

        return sample(one_after_the_other, steps)

    began = time.perf_counter()
    run(1)
    first = time.perf_counter() - began
    sides = {"torch": run}
    samples = interleave(sides, warm_up=WARM_UP, steps=workload.steps, rounds=workload.rounds)
    seconds = median_of(samples["torch"], "wall")
    kind = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    kernels = _longest_kernels(lambda: run(TRACED_STEPS)) if device.type == "cuda" else []
    return {
        "device": device.type,
        "compiled": compile_model,
        "first_step_s": first,
        "step_ms": 1e3 * seconds,
        "least_ms": 1e3 * least_of(samples["torch"], "wall"),
        **model_rates(workload, seconds, kind),
        "peak_GB": None if peak is None else peak / 1e9,
        "kernels": kernels,
    }


def _longest_kernels(run: Callable[[], Any], count: int = 25) -> list[dict[str, Any]]:
    """Returns the kernels that took most time in `TRACED_STEPS` steps: name, runs, milliseconds."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    found = sorted(profile.key_averages(), key=lambda each: -each.device_time_total)
    return [
        {"kernel": each.key[:120], "runs": each.count, "ms": each.device_time_total / 1e3}
        for each in found[:count]
    ]


def _masters_step(model: Any, forward: Any, _: Any) -> Callable[[Any, Any], Any]:
    """Builds a step with bf16 parameters, copied from float32 masters that AdamW updates."""
    import torch

    from benchmarks.gpu.torch_model import make_optimizer

    masters = {name: p.detach().clone().float() for name, p in model.named_parameters()}
    model.bfloat16()
    params = list(model.parameters())
    optimizer = make_optimizer(model, masters=masters)
    wide = list(masters.values())
    for master in wide:
        master.grad = torch.zeros_like(master)
    wide_grads = [master.grad for master in wide]

    def step(tokens: Any, targets: Any) -> Any:
        loss = forward(tokens, targets)
        loss.backward()
        torch._foreach_copy_(wide_grads, [param.grad for param in params])
        for param in params:
            param.grad = None
        torch.nn.utils.clip_grad_norm_(wide, CLIP_NORM)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, wide)
        return loss.detach()

    return step


def _autocast_step(model: Any, forward: Any, device: Any) -> Callable[[Any, Any], Any]:
    """Builds a step with float32 parameters, cast to bf16 for matrix products."""
    import torch

    from benchmarks.gpu.torch_model import make_optimizer

    optimizer = make_optimizer(model)

    def step(tokens: Any, targets: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


if __name__ == "__main__":
    main()
