"""`zerojax deepspeed explain`: the meaning of every key of a ds_config.json."""

from __future__ import annotations

import argparse
import dataclasses
import json

from zerojax.config import ConfigError, to_dict
from zerojax.config.display import show
from zerojax.runtime.exit_codes import BAD_INPUT
from zerojax.training.deepspeed import Given, Translation, explain, explanation


def run(args: argparse.Namespace) -> int:
    """Prints the page, whatever is refused; the exit code says whether something is."""
    for name in ("devices", "steps", "hidden_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    given = Given(steps=args.steps, hidden_size=args.hidden_size)
    translation = explain(args.file, num_devices=args.devices, given=given)
    show(json.dumps(_as_dict(translation)) if args.json else explanation(translation))
    return BAD_INPUT if any(line.verdict == "refused" for line in translation.lines) else 0


def _as_dict(translation: Translation) -> dict[str, object]:
    return {
        "lines": [dataclasses.asdict(line) for line in translation.lines],
        "mesh": to_dict(translation.mesh),
        "train_batch_size": translation.train_batch_size,
        "micro_batch_size": translation.micro_batch_size,
        "num_microbatches": translation.num_microbatches,
        "gradient_clipping": translation.gradient_clipping,
        "precision": translation.precision.describe(),
        "warnings": translation.warnings,
        "reasons": translation.reasons,
    }
