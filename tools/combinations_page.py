"""Writes docs/combinations.md: which settings of a run exclude each other.

python -m tools.combinations_page
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerojax import optim
from zerojax.config import (
    BatchRampConfig,
    CurriculumConfig,
    LayerDropConfig,
    MeshConfig,
    PruningConfig,
    PruningGroup,
)
from zerojax.config.features import Features
from zerojax.features.seam import Combination
from zerojax.optim.precision import as_precision
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.combinations import find_conflicts

PAGE = Path(__file__).resolve().parent.parent / "docs/combinations.md"
DEVICES = 8
GROUP = PruningGroup(pattern="kernel", dense_ratio=0.5)
SETTINGS: dict[str, Mapping[str, Any]] = {
    **{f"zero={stage}": {"mesh": {"zero": stage}} for stage in range(4)},
    "replica=2": {"mesh": {"replica": 2}},
    "model=2": {"mesh": {"model": 2}},
    "stage=2": {"mesh": {"stage": 2}},
    "context=2": {"mesh": {"context": 2}},
    "expert=2": {"mesh": {"expert": 2}},
    "deterministic": {"mesh": {"deterministic": "mesh"}},
    "unroll": {"mesh": {"unroll": True}},
    "lookup=owners": {"mesh": {"lookup": "owners"}},
    "offload.opt_state: host": {"offload": {"opt_state": "host"}},
    "offload.params: host": {"offload": {"opt_state": "host", "params": "host"}},
    "offload.activations: host": {"offload": {"activations": "host"}},
    "offload.opt_state: nvme": {"offload": {"opt_state": "nvme", "folder": "files"}},
    "offload.params: nvme": {"offload": {"opt_state": "nvme", "params": "nvme", "folder": "files"}},
    "offload.update_in_backward": {
        "offload": {"opt_state": "host", "params": "host", "update_in_backward": True}
    },
    "offload.delayed_update": {
        "offload": {"opt_state": "host", "delayed_update": True, "min_elements": 16}
    },
    "offload.update_in_forward": {
        "offload": {"opt_state": "host", "update_in_forward": True, "min_elements": 16}
    },
    "offload.tile_bytes (zero=3)": {"mesh": {"zero": 3}, "offload": {"tile_bytes": 4096}},
    "wire.weights: int8": {"wire": {"weights": "int8"}},
    "wire.weights: delta_int8": {"wire": {"weights": "delta_int8"}},
    "wire.gradients: int8": {"wire": {"gradients": "int8"}},
    "wire.secondary (zero=3)": {"mesh": {"zero": 3, "node": 4}, "wire": {"secondary": True}},
    "curriculum": {"features": {"curriculum": CurriculumConfig(type="seqlen", total_steps=10)}},
    "batch_ramp": {"features": {"batch_ramp": BatchRampConfig(start=8, increment=8, ramp_rows=64)}},
    "layer_drop": {"features": {"layer_drop": LayerDropConfig(theta=0.5)}},
    "pruning": {"features": {"pruning": PruningConfig(groups=(GROUP,))}},
    "log.per_layer": {"layer_norms": True},
    "precision: fp16": {"precision": "fp16"},
    "lion": {"tx": optim.lion(1e-3)},
    "lamb": {"tx": optim.lamb(1e-3)},
    "muon": {"tx": optim.muon(1e-3)},
    "adam8bit": {"tx": optim.adam8bit(1e-3)},
    "one_bit_adam": {"tx": optim.one_bit_adam(1e-3, freeze_step=9)},
    "with_ema": {"tx": optim.with_ema(optim.adamw(1e-3), decay=0.9)},
}
"""{name on the page: settings}; settings beside those of `MeshConfig` have keys of their own."""
HEAD = """# Settings that exclude each other

A run's settings are checked before its loss is traced. `train`, run files, `initialize`,
`zerojax plan` and `zerojax deepspeed explain` share one list of checks
(`zerojax.plan.combinations`). The table has every pair of {number} settings that these checks
refuse: {refused} of {pairs}. The error of a refused pair says what to change. What depends on the
model, the batch or the number of microbatches is refused when the loss is traced.
`python -m tools.combinations_page` writes this page.

| setting | cannot be combined with |
|---|---|
"""
TAIL = """
`python -m tests.equality.fuzz` draws pairs and triples at random, trains those that are not
refused, and compares them with one device.
"""


def combination(*parts: Mapping[str, Any]) -> Combination:
    """Returns a run with settings of `SETTINGS`; of equal keys the last part counts."""
    nested = {
        key: {name: value for part in parts for name, value in part.get(key, {}).items()}
        for key in ("mesh", "offload", "wire", "features")
    }
    of_run = ("precision", "tx", "layer_norms")
    single = {key: part[key] for part in parts for key in of_run if key in part}
    settings = MeshConfig(**nested["mesh"], offload=nested["offload"], wire=nested["wire"])
    return Combination(
        settings=settings,
        mesh=make_abstract_mesh(settings, DEVICES),
        precision=as_precision(single.get("precision", "bf16")),
        tx=single.get("tx", optim.adamw(1e-3)),
        features=Features.of(**nested["features"]),
        layer_norms="layer_norms" in single,
    )


def is_refused(*names: str) -> bool:
    """Returns whether the checks refuse settings together."""
    try:
        return any(find_conflicts(combination(*(SETTINGS[name] for name in names))))
    except ValueError:  # the settings of the mesh refuse it themselves
        return True


def share_key(one: str, other: str) -> bool:
    """Returns whether two settings are values of one key, such as zero=1 and zero=2."""
    first, second = SETTINGS[one], SETTINGS[other]
    same = first.keys() & second.keys()
    if same & {"precision", "tx", "offload"}:
        return True
    return any({*first[key]} & {*second[key]} for key in same)


def page() -> str:
    """Returns the text of the page."""
    refused: dict[str, list[str]] = {name: [] for name in SETTINGS}
    number = 0
    pairs = [x for x in itertools.combinations(SETTINGS, 2) if not share_key(*x)]
    for one, other in pairs:
        if is_refused(one, other):
            refused[one].append(other)
            refused[other].append(one)
            number += 1
    rows = [
        f"| `{name}` | {', '.join(f'`{x}`' for x in found) or 'none of these'} |"
        for name, found in refused.items()
    ]
    head = HEAD.format(number=len(SETTINGS), refused=number, pairs=len(pairs))
    return head + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
