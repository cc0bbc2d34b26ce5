"""One process of a DeepSpeed run that `zerojax deepspeed compare` starts: takes steps on CPUs.

Started as `python deepspeed_reference.py REQUEST.json`, by its path, so that neither JAX nor the
rest of zerojax is imported. Needs the packages torch, deepspeed and transformers. The environment
has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

_PACKAGES = ("torch", "deepspeed", "transformers")
MISSING = 3
"""Exit code if a package is missing."""


def main(request: str) -> int:
    """Takes the steps of a request, and writes losses, gradients and parameters of process 0.

    The request has "model" (folder), "config" (ds_config), "batches" (file with arrays tokens and
    targets, int32 [steps, rows, length]) and "out" (folder).

    Returns:
      Exit code.
    """
    try:
        torch, deepspeed, transformers = map(importlib.import_module, _PACKAGES)
    except ImportError as error:
        print(f"the package {error.name} is missing", file=sys.stderr)
        return MISSING
    given = json.loads(Path(request).read_text(encoding="utf-8"))
    torch.manual_seed(0)
    model = _model(torch, transformers, given["model"])
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=given["config"]
    )
    batches, losses = np.load(given["batches"]), []
    for step in range(len(batches["tokens"])):
        rows = {name: batches[name][step] for name in ("tokens", "targets")}
        losses.append(_step(torch, engine, rows, step == 0, Path(given["out"]), deepspeed.utils))
        _write(engine, Path(given["out"], f"parameters-{step + 1}.npz"), deepspeed.utils, "param")
    if engine.global_rank == 0:
        Path(given["out"], "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    return 0


def _model(torch: ModuleType, transformers: ModuleType, folder: str) -> Any:
    """Returns the model in float32, without dropout."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for name, value in vars(config).items():
        if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    loader = transformers.AutoModelForCausalLM
    model = loader.from_pretrained(folder, config=config, dtype=torch.float32)
    model.config.use_cache = False
    return model


def _step(
    torch: ModuleType,
    engine: Any,
    batch: dict[str, np.ndarray],
    is_first: bool,
    out: Path,
    utils: ModuleType,
) -> float:
    """Takes one step; returns the mean loss over all rows of all processes."""
    size, parts = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    total = 0.0
    for part in range(parts):
        low = (engine.global_rank * parts + part) * size
        tokens, targets = (
            torch.tensor(batch[name][low : low + size].astype(np.int64))
            for name in ("tokens", "targets")
        )
        logits = engine(input_ids=tokens).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        engine.backward(loss)
        if is_first and part == parts - 1:
            _write(engine, out / "gradients.npz", utils, "grad")
        engine.step()
        total += loss.detach() / parts
    torch.distributed.all_reduce(total)
    return float(total) / torch.distributed.get_world_size()


def _write(engine: Any, path: Path, utils: ModuleType, what: str) -> None:
    """Writes gradients or float32 parameters of all tensors; every process must call it."""
    read = {"grad": utils.safe_get_full_grad, "param": utils.safe_get_full_fp32_param}[what]
    found = {}
    for name, parameter in engine.module.named_parameters():
        value = read(parameter)
        if value is None:  # stage 0 in float32 has no other copy
            value = parameter.grad if what == "grad" else parameter
        found[name] = value.detach().float().numpy()
    if engine.global_rank == 0:
        np.savez(path, **found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
