"""Page for an out-of-memory error, from the error and the plan."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zerojax.forecasting.out_of_memory.living import device_now, largest_arrays, save_profile
from zerojax.forecasting.out_of_memory.message import Asked, what_was_asked
from zerojax.forecasting.out_of_memory.page import Page, draw
from zerojax.forecasting.remedies import SMALL, Remedy, all_remedies
from zerojax.hardware import compile_client
from zerojax.hardware.devices import device_kind
from zerojax.hardware.gpus import gpu_of_device
from zerojax.plan.counts import ACTIVATIONS, GATHERED, GRADIENTS, role_bytes
from zerojax.plan.plan import Plan
from zerojax.runtime.system_memory import TRAINING_STEP, purpose_of

NUM_REMEDIES = 3
COMPILING = f"compiling {TRAINING_STEP}"
_JAX_COMPILER = "jax._src.compiler"
"""The module of JAX whose frames a traceback has, unless JAX leaves its own out, when compiling
failed (tests/test_monitor_memory.py compiles one that does)."""

RunNow = Callable[[], tuple[Plan, Any, int, Any]]
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
    activity = what_was_done(error, asked)
    sizes, source = sizes_by_role(plan, asked, None if activity == COMPILING else step, activity)
    device = device_now()
    excess = _excess(asked, device.free)
    if activity == TRAINING_STEP:
        activity = f"{TRAINING_STEP} (number {max(num_steps, 1)} at the latest)"
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


def what_was_done(error: BaseException, asked: Asked) -> str:
    """What a run was doing: the block of `allocating_for` that the error left."""
    purpose = purpose_of(error)
    if purpose in (TRAINING_STEP, None) and (asked.by_compiler or _left_the_compiler(error)):
        return COMPILING
    return purpose or "the run"


def _left_the_compiler(error: BaseException) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == _JAX_COMPILER for frame in frames)


def sizes_by_role(plan: Plan, asked: Asked, step: Any, activity: str) -> tuple[dict[str, int], str]:
    """({role: bytes per device at the peak}, where activations are known from).

    State is exact, weights and gradients are by formula. Activations no formula knows: they are
    what the compiled step needs beyond these, or what was asked for in one piece beyond them.
    """
    sizes = {role: size for role, size in role_bytes(plan).items() if size}
    passing = sizes.get(GATHERED, 0) + sizes.get(GRADIENTS, 0)
    if activity not in (TRAINING_STEP, COMPILING):
        return sizes, "by formula, without activations"
    temporary = _compiled_temporary(plan, step)
    if temporary is not None:
        rest, source = temporary - passing, "the compiler's account, the rest by formula"
    elif asked.size is not None:
        rest, source = asked.size - passing, "what was asked for, the rest by formula"
    else:
        return sizes, "by formula, without activations"
    return (sizes | {ACTIVATIONS: rest}, source) if rest > 0 else (sizes, source)


def _compiled_temporary(plan: Plan, step: Any) -> int | None:
    if step is None:
        return None
    try:
        compiled = step.lower(plan.abstract_state, plan.abstract_batch).compile()
        return compile_client.memory_of(compiled).temporary
    except Exception:  # memory may be short for this, too; the page does without
        return None


def _excess(asked: Asked, free: int | None) -> int | None:
    if asked.size is None:
        return None
    return max(asked.size - (free or 0), 0)


def cheapest(plan: Plan, sizes: Mapping[str, int], excess: int | None) -> list[Remedy]:
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
