"""Trains random pairs and triples of settings, and compares each run with one device.

python -m tests.equality.fuzz [--seed N] [--number N] [--only "zero 3 + pruning"]

A combination passes if its losses and parameters are those of one device with the same optimizer,
precision and features, or if zerojax refuses it. Exit status 1 for a difference, an error that is
not zerojax's own refusal, or a loss that is not finite. Settings that round what devices send, or
that use gradients of an earlier step, are only compared within `CLOSE`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import zerojax  # noqa: E402
from zerojax.config import ModelConfig, MoEConfig, PruningGroup  # noqa: E402
from zerojax.zoo import build_model  # noqa: E402

ROWS, TOKENS, VOCAB, STEPS, RATE = 16, 16, 64, 4, 1e-2
EXACT, ROUNDED, CLOSE = 2e-4, 3e-2, 0.15
"""Largest relative differences of losses: of float32, whose sums have another order on several
devices; of bfloat16 and float16; and of settings that round what is sent."""
SLOW = RATE / 10
OF_WAY = 0.05
"""Largest difference of a parameter in float32, relative to the way that Adam or Lion goes."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting of a run.

    Attributes:
      kind: settings of the same kind exclude each other.
      mesh: mesh options of the run, which one device does not have.
      both: keywords of `train` for the run and for one device.
      model: settings of the model for both.
      rounds: whether results differ from one device by the setting's meaning.
      half: whether both compute in 16 bits.
    """

    kind: str
    mesh: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    both: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rounds: bool = False
    half: bool = False


def mesh(kind: str, rounds: bool = False, **options: Any) -> Setting:
    return Setting(kind, mesh=options, rounds=rounds)


def offload(rounds: bool = False, **options: Any) -> Setting:
    return mesh("offload", rounds, offload={"min_elements": 16, **options})


def optimizer(tx: Any) -> Setting:
    return Setting("optimizer", both={"optimizer": tx})


def wire(**options: Any) -> Setting:
    return mesh("wire", rounds=not options.get("secondary"), wire=options)


MOE = MoEConfig(num_experts=4, experts_per_token=2)
PRUNED = PruningGroup(pattern="mlp/.*/kernel", dense_ratio=0.5, start_step=1)
SETTINGS: dict[str, Setting] = {
    **{f"zero {stage}": mesh("zero", zero=stage) for stage in range(4)},
    "replica": mesh("replica", replica=2),
    "model": mesh("model", model=2),
    "sequence sharding": mesh("model", model=2, sequence_sharding=True),
    "stage": mesh("stage", stage=2),
    "stage, zero bubble": mesh("stage", stage=2, pipeline_schedule="zb-h1"),
    "context": mesh("context", context=2),
    "expert": Setting("expert", mesh={"expert": 2}, model={"moe": MOE}),
    "experts": Setting("expert", model={"moe": MOE}),
    "node": mesh("node", node=4),
    "small leaves sharded": mesh("threshold", persistence_threshold=0),
    "small buckets": mesh("buckets", reduce_bucket_size=100, allgather_bucket_size=100),
    "owners": mesh("lookup", lookup="owners"),
    "deterministic": mesh("deterministic", deterministic="mesh"),
    "unrolled": mesh("unroll", unroll=True),
    "state on the host": offload(opt_state="host"),
    "half of the state on the host": offload(opt_state={"device": 0.5, "host": 0.5}),
    "parameters on the host": offload(params="host", opt_state="host"),
    "update in backward": offload(params="host", opt_state="host", update_in_backward=True),
    "delayed update": offload(True, opt_state="host", delayed_update=True),
    "update in forward": offload(opt_state="host", update_in_forward=True),
    "activations on the host": offload(activations="host"),
    "state in files": offload(opt_state="nvme"),
    "layers in files": offload(opt_state="nvme", params="nvme"),
    "tiles": offload(tile_bytes=4096),
    "weights int8": wire(weights="int8"),
    "weights delta": wire(weights="delta_int8"),
    "gradients int8": wire(gradients="int8"),
    "secondary": wire(secondary=True),
    "layer drop": Setting("drop", both={"layer_drop": zerojax.LayerDropConfig(theta=0.5, gamma=1)}),
    "pruning": Setting("prune", both={"pruning": zerojax.PruningConfig(groups=(PRUNED,))}),
    "curriculum": Setting(
        "curriculum",
        both={
            "curriculum": zerojax.CurriculumConfig(
                type="seqlen", min_length=8, total_steps=3, length_step=8
            )
        },
    ),
    "batch ramp": Setting(
        "ramp", both={"batch_ramp": zerojax.BatchRampConfig(start=8, increment=8, ramp_rows=16)}
    ),
    "accumulation": Setting("parts", both={"num_microbatches": 2}),
    "frozen": Setting("frozen", both={"freeze": "embed"}),
    "bfloat16": Setting("precision", both={"precision": "bf16"}, half=True),
    "float16": Setting("precision", both={"precision": "fp16"}, half=True),
    "remat": Setting("remat", model={"remat": "full"}),
    "sgd": optimizer(zerojax.sgd(RATE, momentum=0.9)),
    "lion": optimizer(zerojax.lion(SLOW)),
    "lamb": optimizer(zerojax.lamb(RATE)),
    "muon": optimizer(zerojax.muon(RATE)),
    "8-bit": optimizer(zerojax.adam8bit(RATE)),
    "1-bit": optimizer(zerojax.optim.one_bit_adam(RATE, freeze_step=2)),
    "average": optimizer(zerojax.with_ema(zerojax.adamw(RATE, eps=1e-3), decay=0.9)),
    "clipped": optimizer(zerojax.adamw(RATE, eps=1e-3, clip_norm=0.5)),
    "optax": optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(RATE, eps=1e-3))),
    "adafactor": optimizer(optax.adafactor(RATE)),
}
ROUNDING = ("1-bit", "8-bit")
"""Optimizers whose update differs from one device's by their meaning, or by codes of blocks."""


def batches() -> list[dict[str, np.ndarray]]:
    values = np.random.default_rng(0).integers(0, VOCAB, (STEPS, ROWS, TOKENS + 1), np.int32)
    return [{"tokens": x[:, :-1], "targets": x[:, 1:]} for x in values]


def merged(parts: Iterator[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def trained(
    chosen: Sequence[Setting], folder: Path, alone: int | None = None
) -> tuple[list[float], Any, int]:
    """Returns (loss of each step, parameters, number of microbatches) of a run with settings.

    Args:
      chosen: settings of the run.
      folder: for files of offload.
      alone: of a run on one device, its number of microbatches; the balance of experts and layer
        drop depend on it.
    """
    model = merged(one.model for one in chosen)
    sizes = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 16}
    options = {"optimizer": zerojax.adamw(RATE, eps=1e-3), "precision": "fp32"}
    options |= merged(one.both for one in chosen)
    settings: Any = merged(one.mesh for one in chosen)
    if alone is not None:
        settings = zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1])
        if "batch_ramp" not in options:  # a ramp chooses them
            options["num_microbatches"] = alone
    elif "nvme" in str(settings.get("offload")):
        settings["offload"] = {**settings["offload"], "folder": str(folder)}
    losses: list[float] = []
    trainer = zerojax.train(
        build_model(ModelConfig(name="llama", **{**sizes, **model}), VOCAB),
        settings,
        batches(),
        steps=STEPS,
        run_dir=None,
        log=zerojax.LogConfig(console="quiet", every=1),
        callbacks=[lambda _, metrics: losses.append(float(metrics["loss"]))],
        **options,
    )
    params = jax.device_get(trainer.to_model(weights="trained"))
    return losses, params, trainer.plan.num_microbatches


def is_refusal(error: BaseException) -> bool:
    """Whether an error is a sentence of zerojax: it was raised there, and not by an operation."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = last.filename.startswith(str(Path(zerojax.__file__).parent))
    is_raised = (last.line or "").lstrip().startswith(("raise ", "refuse("))
    return isinstance(error, ValueError | TypeError) and is_ours and is_raised


def outcome(names: Sequence[str], references: dict[str, Any]) -> str:
    """Trains a combination; returns "equal", "refused: ..." or what is wrong."""
    chosen = [SETTINGS[name] for name in names]
    with tempfile.TemporaryDirectory() as folder:
        try:
            losses, params, parts = trained(chosen, Path(folder))
        except Exception as error:
            first = " ".join(str(error).split())[:160]
            if is_refusal(error):
                return f"refused: {first}"
            return f"ERROR {type(error).__name__}: {first}\n{traceback.format_exc()}"
        key = str((parts, [(one.both, one.model) for one in chosen]))
        if key not in references:
            try:
                references[key] = trained(chosen, Path(folder), alone=parts)
            except Exception as error:
                if is_refusal(error):
                    return f"ALONE REFUSED, several devices trained: {error}"
                return f"ERROR alone {type(error).__name__}: {error}\n{traceback.format_exc()}"
    return compared(names, (losses, params), references[key][:2], parts)


def compared(names: Sequence[str], found: Any, expected: Any, parts: int) -> str:
    chosen = [SETTINGS[name] for name in names]
    (losses, params), (wanted, whole) = found, expected
    if not np.isfinite(losses).all() or len(losses) != len(wanted):
        return f"LOSSES {losses} for {wanted}"
    is_exact = not (any(one.rounds for one in chosen) or {*names} & {*ROUNDING})
    # Experts are balanced and layers are drawn by microbatch, which has other rows on one device.
    by_microbatch = {"moe", "layer_drop"}
    of_rows = parts > 1 and any(by_microbatch & {*one.model, *one.both} for one in chosen)
    in_half = of_rows or any(one.half for one in chosen)
    limit = CLOSE if not is_exact else ROUNDED if in_half else EXACT
    worst = max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True))
    if worst > limit:
        return f"DIFFERS: losses {losses} for {wanted} ({worst:.2g} above {limit})"
    if is_exact and not in_half:
        rate = SLOW if "lion" in names else RATE
        leaves = zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True)
        far = max(float(jnp.max(jnp.abs(a - b))) for a, b in leaves if jnp.size(a))
        if far > OF_WAY * rate * STEPS:
            return f"DIFFERS: parameters by {far:.2g}, above {OF_WAY} of {rate * STEPS}"
    return "equal"


def combinations(rng: random.Random) -> Iterator[list[str]]:
    """Yields random pairs and triples of settings of different kinds, without repetition."""
    seen: set[frozenset[str]] = set()
    while True:
        names = rng.sample(sorted(SETTINGS), rng.choice((2, 3)))
        kinds = {SETTINGS[name].kind for name in names}
        if len(kinds) == len(names) and frozenset(names) not in seen:
            seen.add(frozenset(names))
            yield names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--only", help='names joined by " + "')
    args = parser.parse_args()
    given = combinations(random.Random(args.seed))
    chosen = [args.only.split(" + ")] if args.only else itertools.islice(given, args.number)
    print(f"seed {args.seed}", flush=True)
    counts: collections.Counter[str] = collections.Counter()
    references: dict[str, Any] = {}
    for number, names in enumerate(chosen):
        began = time.monotonic()
        found = outcome(names, references)
        counts[found.split(":")[0].split()[0]] += 1
        seconds = time.monotonic() - began
        print(f"{number:3} {seconds:4.1f} s  {' + '.join(names)}: {found}", flush=True)
    print(dict(counts))
    return 1 if counts.keys() - {"equal", "refused"} else 0


if __name__ == "__main__":
    sys.exit(main())
