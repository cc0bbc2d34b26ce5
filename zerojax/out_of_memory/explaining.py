"""From an error for lack of memory to the page that says what to set.

Knows a plan, what was being done and what lives on the devices; never how a run goes on.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zerojax import compiler
from zerojax.forecast.remedies import SMALL, Remedy, all_remedies
from zerojax.gpus import gpu_of_device
from zerojax.out_of_memory.living import device_now, largest_arrays, save_profile
from zerojax.out_of_memory.message import Asked, what_was_asked
from zerojax.out_of_memory.page import Page, draw
from zerojax.plan_counts import ACTIVATIONS, GATHERED, GRADIENTS, role_bytes
from zerojax.planned import Planned
from zerojax.profile import device_kind

NUM_REMEDIES = 3
COMPILING, STEPPING = "compiling the training step", "the training step"
_ACTIVITIES = (
    # (end of a file's path, function or None for any, what is being done there), the first one
    # that a traceback has, from its end.
    ("jax/_src/compiler.py", None, COMPILING),
    ("zerojax/evaluating.py", None, "an evaluation"),
    ("zerojax/trainer.py", "_step_on_devices", STEPPING),
    ("zerojax/reporting.py", None, STEPPING),  # whoever waits for a step meets its error
    ("zerojax/data/placing.py", None, "placing a batch on the devices"),
    ("zerojax/saved_state.py", "restore_state", "restoring a checkpoint"),
    ("zerojax/saved_state.py", "save_state", "saving a checkpoint"),
    ("zerojax/saved_state.py", "model_of", "handing over the model"),
    ("zerojax/saved_state.py", None, "making the first state"),
    ("zerojax/arrays.py", None, "making the first state"),
)

RunNow = Callable[[], tuple[Planned, Any, int, Any]]
"""() -> (the plan, the state or None, steps done, the jitted step or None)."""


@contextlib.contextmanager
def explaining_memory(now: RunNow, folder: Path | None) -> Iterator[None]:
    """An error for lack of memory in the block leaves with a note: one page on what to do.

    The error itself stays what it is. Nothing is compiled for the page: where the step has been
    compiled, JAX still has what the compiler said of it.

    Args:
      now: asked when it has failed.
      folder: of the run; a memory profile is written there. None: it has none.
    """
    try:
        yield
    except Exception as error:
        asked = what_was_asked(error)
        if asked is not None:
            error.add_note(draw(explain(error, asked, now, folder)))
        raise


def explain(error: BaseException, asked: Asked, now: RunNow, folder: Path | None) -> Page:
    """Everything that the page shows."""
    plan, state, num_steps, step = now()
    activity = what_was_done(error)
    sizes, source = sizes_by_role(plan, asked, None if activity == COMPILING else step, activity)
    device = device_now()
    excess = _excess(asked, device.free)
    if activity == STEPPING:
        activity = f"the training step (number {max(num_steps, 1)} at the latest)"
    return Page(
        asked=asked,
        activity=activity,
        device=device,
        sizes=sizes,
        source=source,
        living=tuple(largest_arrays(state)),
        excess=excess,
        remedies=tuple(cheapest(plan, sizes, excess)),
        profile=save_profile(folder),
    )


def what_was_done(error: BaseException) -> str:
    """What a run was doing, told from the files that the error went through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for file, function, activity in _ACTIVITIES:
            if frame.filename.endswith(file) and function in (None, frame.name):
                return activity
    return "the run"


def sizes_by_role(
    plan: Planned, asked: Asked, step: Any, activity: str
) -> tuple[dict[str, int], str]:
    """({role: bytes per device at the peak}, where activations are known from).

    State is exact, weights and gradients are by formula. Activations no formula knows: they are
    what the compiled step needs beyond these, or what was asked for in one piece beyond them.
    """
    sizes = {role: size for role, size in role_bytes(plan).items() if size}
    passing = sizes.get(GATHERED, 0) + sizes.get(GRADIENTS, 0)
    if activity not in (STEPPING, COMPILING):
        return sizes, "by formula, without activations"
    temporary = _compiled_temporary(plan, step)
    if temporary is not None:
        rest, source = temporary - passing, "the compiler's account, the rest by formula"
    elif asked.size is not None:
        rest, source = asked.size - passing, "what was asked for, the rest by formula"
    else:
        return sizes, "by formula, without activations"
    return (sizes | {ACTIVATIONS: rest}, source) if rest > 0 else (sizes, source)


def _compiled_temporary(plan: Planned, step: Any) -> int | None:
    if step is None:
        return None
    try:
        compiled = step.lower(plan.abstract_state, plan.abstract_batch).compile()
        return compiler.memory_of(compiled).temporary
    except Exception:  # memory may be short for this, too; the page does without
        return None


def _excess(asked: Asked, free: int | None) -> int | None:
    if asked.size is None:
        return None
    return max(asked.size - (free or 0), 0)


def cheapest(plan: Planned, sizes: Mapping[str, int], excess: int | None) -> list[Remedy]:
    """The three settings that cost the least time, those that suffice by themselves first."""
    needed = sum(sizes.values())
    found: dict[str, Remedy] = {}
    for remedy in all_remedies(plan, gpu_of_device(device_kind()), dict(sizes)):
        if remedy.price is None or (remedy.saving or 0) < SMALL * needed:
            continue
        key = remedy.words.partition("=")[0]
        # Of several values of one setting the first that suffices, else the one that saves most.
        if key not in found or not _suffices(found[key], excess):
            found[key] = remedy
    order = sorted(found.values(), key=lambda one: (not _suffices(one, excess), one.price))
    return order[:NUM_REMEDIES]


def _suffices(remedy: Remedy, excess: int | None) -> bool:
    return excess is not None and remedy.saving is not None and remedy.saving >= excess
