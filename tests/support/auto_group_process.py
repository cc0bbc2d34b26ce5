"""One of two processes that choose offload and mesh options together (`auto`).

    python -m tests.support.auto_group_process FOLDER

Both processes have two CPU devices, which are taken for H100s. Process 0 compiles and searches; in
process 1 both would fail the test. Each process writes JSON to FOLDER/found-PROCESS: the chosen
settings, the reasons and the losses of each run, and the text of each refusal.
"""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax

from tests.support.process_groups import join

ROOM = 40_000
"""Free host memory of process 1: less than the state, more than what is read at once from files."""


def main(folder: Path) -> None:
    join(2)
    process = jax.process_index()
    found = {"offload": _offload(folder, process), "settings": _settings(process)}
    (folder / f"found-{process}").write_text(json.dumps(found), encoding="utf-8")


def _offload(folder: Path, process: int) -> dict[str, Any]:
    from zerojax.forecasting import offload_choice
    from zerojax.hardware.gpus import find_gpu
    from zerojax.runtime.memory import SPARE, Room
    from zerojax.step import host_budget
    from zerojax.training import run_spec

    real = offload_choice.forecast

    def forecast(plan: Any, **options: Any) -> Any:
        assert process == 0, "only process 0 compiles"
        made = real(plan, gpu=options["gpu"], why_formula="a test")
        fits = not plan.settings.offload.is_off
        return dataclasses.replace(made, verdict=dataclasses.replace(made.verdict, fits=fits))

    offload_choice.forecast = forecast
    run_spec.gpu_of_device = lambda kind: find_gpu("h100")
    known = host_budget.least_room
    if process == 1:
        free = int(ROOM / SPARE)
        host_budget.least_room = lambda: Room(free, free, "the test")
    place = {"auto": True, "min_elements": 1, "folder": str(folder / "files")}
    chosen = _train({"zero": 3, "offload": place})
    alone = _train({"zero": 3, "offload": {**place, "folder": None}}, refuses=True)
    host_budget.least_room = known
    return {"chosen": chosen, "alone": alone, "plain": _train({"zero": 3})}


def _settings(process: int) -> dict[str, Any]:
    from zerojax.hardware.gpus import find_gpu
    from zerojax.training import auto_settings, entry
    from zerojax.training.search_runs import SettingsFound

    options: dict[str, Any] = {}
    reasons: list[str] = []

    def recorded(spec: Any) -> Any:
        found = auto_settings.with_found_settings(spec)
        reasons.extend(found.reasons)
        return found

    entry.with_found_settings = recorded

    def find_for(call: Any, *_: Any, **__: Any) -> SettingsFound:
        assert process == 0, "only process 0 searches"
        result: Any = SimpleNamespace(sentence="the best of a test")
        return SettingsFound(dataclasses.replace(call.settings, **options), 2, result)

    auto_settings.gpu_of_device = lambda kind: find_gpu("h100")
    auto_settings.find_for = find_for
    auto_settings.compile_client = SimpleNamespace(missing=lambda: None)
    options |= {"zero": 2, "reduce_bucket_size": 5000}
    results = {"found": _train("auto")}
    results["given"] = _train(dict(options), num_microbatches=2)
    options |= {"data": 1, "stage": 4}
    results["rows"] = _train("auto", refuses=True)
    return results | {"reasons": reasons}


def _train(mesh: Any, *, refuses: bool = False, **options: Any) -> Any:
    import zerojax
    from tests.support.pipeline_runs import small
    from tests.support.trajectories import text_batch
    from zerojax.config import LogConfig
    from zerojax.config.loader import to_dict

    try:
        trainer = zerojax.train(
            small(layers=16, width=16),
            mesh,
            [text_batch(step) for step in range(3)],
            optimizer=zerojax.adamw(1e-2, eps=1e-5),
            precision="fp32",
            run_dir=None,
            log=LogConfig(console="quiet", every=1),
            **options,
        )
    except ValueError as error:
        assert refuses
        return str(error)
    trainer.close()
    return {
        "settings": to_dict(trainer.plan.settings),
        "microbatches": trainer.plan.num_microbatches,
        "reasons": list(trainer.plan.reasons),
        "losses": [entry["loss"] for entry in trainer.history],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
