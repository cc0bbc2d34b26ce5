"""Derives from compiled plans what other candidates need: at least, or as a guess.

Least values rule candidates out. Guesses order the compilations, and end the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerojax.config.late_dataclasses import dataclass
from zerojax.forecasting.forecast_numbers import ForecastNumbers
from zerojax.forecasting.settings_search.candidates import LIST_REMATS, Bounds, Candidate
from zerojax.forecasting.settings_search.search_result import FITS, TOO_LARGE, Trial
from zerojax.tracing.trees import format_bytes

STORED = {"none": 28.0, "elementwise": 10.0, "dots": 9.0, "attention": 2.6, "full": 1.7}
"""Activations of a step by remat, as a multiple of the inputs of all layers: those of a Llama of 3
billion parameters with 8,192 tokens, compiled for an RTX 4090."""
PASSES = {"none": 1.5, "elementwise": 1.4, "dots": 0.85, "attention": 0.95, "full": 1.0}
"""Traffic of device memory by remat, relative to full recomputation, in a loop over layers, which
stores what it does not compute again: that of a Llama of 7 billion parameters for 8 H100."""
UNROLLED = 0.65
"""The same without a loop and without recomputation."""
TOLERANCE = 0.05
"""Accuracy of the time estimate, as a share of the time."""
SLACK = 0.03
"""Share by which kernels of a compiled plan may take less time in another program."""

CAUTION = 0.9
"""Factor of caution for a candidate with fewer rows than a compiled plan: its activations are
assumed to be this factor times the activations in proportion to the rows."""
GROWTH = 0.5
"""Growth of activations that is assumed for a candidate with more rows than a compiled plan, as a
share of the growth in proportion to the rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenCandidate:
    """A candidate that may still be the best, with its bounds."""

    candidate: Candidate
    bounds: Bounds


@dataclass(frozen=True, kw_only=True, eq=False)
class CompiledCandidate:
    """A candidate that was compiled; `forecast` is None if the compiler failed."""

    entry: OpenCandidate
    trial: Trial
    forecast: ForecastNumbers | None


def expected_peak(entry: OpenCandidate, compiled: Sequence[CompiledCandidate]) -> float | None:
    """Estimates the peak memory of a candidate from the activations of a compiled plan; returns
    None if there is no suitable plan.

    At the same number of microbatches activations do not depend on `model`, because a device with a
    smaller part of each layer has as many more rows, nor on `expert`, because a device's experts
    receive as many rows as it sends. The memory of a pipeline says nothing about another number of
    stages.
    """
    mine = entry.candidate
    alike = [
        other
        for other in compiled
        # A plan that the compiler rejected has no memory to learn from.
        if other.forecast is not None
        and (other.entry.candidate.remat, other.entry.candidate.stage) == (mine.remat, mine.stage)
        and other.entry.candidate.unroll == mine.unroll
    ]
    if not alike:
        return None

    def distance(other: CompiledCandidate) -> tuple[int, int, int, float]:
        theirs = other.entry.candidate
        # Microbatches are powers of two, so their distance is that of their exponents.
        far = abs(math.log2(theirs.num_microbatches / mine.num_microbatches))
        expert = theirs.expert != mine.expert
        return (theirs.model != mine.model, expert, theirs.zero != mine.zero, far)

    nearest = min(alike, key=distance)
    beyond, activations = _beyond_formula(nearest)
    rows = nearest.entry.candidate.num_microbatches / mine.num_microbatches
    # Activations grow with the rows of a microbatch; what else is beyond the formula does not.
    return entry.bounds.peak + beyond + activations * (rows - 1)


def guessed_peak(entry: OpenCandidate, compiled: Sequence[CompiledCandidate]) -> float | None:
    """Guesses the peak memory of a candidate from a compiled plan, or else from the inputs of its
    layers; returns None without such inputs."""
    peak = expected_peak(entry, compiled)
    if peak is None and entry.bounds.layer_inputs:
        peak = entry.bounds.peak + STORED[entry.candidate.remat] * entry.bounds.layer_inputs
    return peak


def guessed_seconds(entry: OpenCandidate, compiled: Sequence[CompiledCandidate]) -> float | None:
    """Guesses the expected seconds of a candidate from the most similar compiled plan; returns None
    without such a plan.

    Products change as formulas say; traffic of device memory with the rows, the layers and
    `PASSES`; and the same share of the communication is hidden. Among ten compiled plans of 7
    billion parameters on 8 H100 and of 3 billion on 2 RTX 4090, guesses were 12 % too small to 8 %
    too large from a plan with the same mesh axes. From a plan without pipeline and split tensors to
    one with them they were 33 % too small to 11 % too large, and up to 34 % too large back.
    """
    mine = entry.candidate

    def difference(other: CompiledCandidate) -> tuple[bool | float, ...]:
        theirs = other.entry.candidate
        axes = (theirs.model, theirs.stage, theirs.expert) != (mine.model, mine.stage, mine.expert)
        far = abs(math.log2(theirs.num_microbatches / mine.num_microbatches))
        remat, unroll = theirs.remat != mine.remat, theirs.unroll != mine.unroll
        # False sorts first: a plan that fits and has the same axes is the most similar.
        return other.trial.status != FITS, axes, remat, unroll, theirs.zero != mine.zero, far

    usable = [
        other
        for other in compiled
        if other.forecast is not None
        and other.forecast.estimate.expected is not None
        # Both are divisors below.
        and min(_inputs(other.entry), other.entry.bounds.products_seconds) > 0
    ]
    near = min(usable, key=difference, default=None)
    if near is None or not _inputs(entry):
        return None
    assert near.forecast is not None
    time, theirs = near.forecast.estimate.expected, near.entry
    assert time is not None
    products = entry.bounds.products_seconds / theirs.bounds.products_seconds
    traffic = passes(mine) * _inputs(entry) / (passes(theirs.candidate) * _inputs(theirs))
    memory = time.memory_seconds * traffic
    wire = theirs.bounds.wire_seconds
    # More may be waited for than the formula sends; the share must not exceed the whole.
    shown = min(1.0, time.wire_seconds / wire) if wire else 1.0
    work = (time.product_seconds + time.attention_seconds) * products + memory
    other = time.host_seconds + time.disk_seconds
    # A guess below what is certain would be wrong in any case.
    return max(work + shown * entry.bounds.wire_seconds + other, least_seconds(entry, compiled))


def passes(candidate: Candidate) -> float:
    """Returns the traffic of device memory relative to a loop with full recomputation."""
    return UNROLLED if candidate.unroll else PASSES[candidate.remat]


def _inputs(entry: OpenCandidate) -> int:
    """Returns the bytes per device of the inputs of all layers in a step."""
    return entry.bounds.layer_inputs * entry.candidate.num_microbatches


def least_seconds(entry: OpenCandidate, compiled: Sequence[CompiledCandidate]) -> float:
    """Returns a lower bound of a candidate's expected time, by formula or from compiled plans."""
    bounds = entry.bounds
    by_compiled = least_busy_seconds(entry.candidate, bounds.products_seconds, compiled)
    return max(bounds.seconds, by_compiled)


def least_busy_seconds(
    mine: Candidate, products_seconds: float, compiled: Sequence[CompiledCandidate]
) -> float:
    """Returns a lower bound of the seconds in which kernels of a candidate run, from compiled
    plans; 0 without any.

    A compiled plan counts if it fits (in a plan that does not fit, the compiler adds its own
    recomputation), and has

    - the same remat, or none and no loop over layers, because recomputation only adds kernels (in a
      loop it replaces what the loop would store);
    - the same number of pipeline stages or no pipeline, because a pipeline divides the layers but
      gives each device more rows;
    - no more experts on a device, because these are fewer weights to read;
    - the same mesh axes if its optimizer state is whole, because others have less to update.

    The time of products depends neither on microbatches nor on tensor parallelism. Bytes of device
    memory may fall in proportion to both, because each microbatch reads all weights, and devices
    that split tensors repeat activations.

    Args:
      mine: the candidate.
      products_seconds: seconds of its products by formula, or less; 0 if unknown.
      compiled: the compiled plans.
    """
    least = 0.0
    for other in compiled:
        theirs = other.entry.candidate
        if (
            other.trial.status != FITS
            or other.forecast is None
            or theirs.stage not in (1, mine.stage)
            or not (theirs.unroll or theirs.remat == mine.remat)
            or theirs.expert < mine.expert
            or mine.unroll > theirs.unroll
        ):
            continue
        axes = (theirs.model, theirs.stage) == (mine.model, mine.stage)
        # Without ZeRO the update touches the whole state, which other plans divide.
        if theirs.zero == 0 and not (axes and mine.zero == 0):
            continue
        memory = min(1.0, mine.num_microbatches / theirs.num_microbatches)
        memory *= min(1.0, mine.model / theirs.model)
        their_products = other.entry.bounds.products_seconds
        # Products may only take longer than those of the compiled plan, or the bound would be
        # none.
        products = max(1.0, products_seconds / their_products) if their_products else 1.0
        time = other.forecast.estimate
        # A forecast by formula has no replay; the roofline's longer part is then the bound.
        if time.expected is None:
            compute, traffic = time.compute_seconds or 0.0, time.memory_seconds or 0.0
            busy = max(compute * products, traffic * memory)
        else:  # kernels follow one another, so their times add
            kernels = time.expected.product_seconds + time.expected.attention_seconds
            busy = kernels * products + time.expected.memory_seconds * memory
        least = max(least, busy * (1 - SLACK))
    return least


def why_too_large(entry: OpenCandidate, other: CompiledCandidate) -> str | None:
    """Returns the reason why `entry` cannot fit, derived from a compiled plan with at least as much
    remat; None if it may fit.

    With less remat activations do not shrink. They shrink at most as much as the rows in flight,
    and at most as much as tensor parallelism splits them; because that also gives each device more
    rows, a larger `model` saves nothing at the same number of microbatches. All of this holds for
    plans with the same number of pipeline stages.
    """
    mine, theirs = entry.candidate, other.entry.candidate
    if other.forecast is None or LIST_REMATS.index(mine.remat) > LIST_REMATS.index(theirs.remat):
        return None
    if mine.stage != theirs.stage or mine.unroll > theirs.unroll:
        return None
    number = other.trial.number
    same_mesh = (mine.model, mine.expert) == (theirs.model, theirs.expert)
    as_many_rows = mine.num_microbatches <= theirs.num_microbatches
    as_much_state = mine.zero <= theirs.zero and entry.bounds.peak >= other.entry.bounds.peak
    # With more state, no fewer rows and no more recomputation nothing can be smaller.
    if other.trial.status == TOO_LARGE and as_many_rows and as_much_state and same_mesh:
        return f"needs no less than #{number}, which does not fit"
    rows = theirs.num_microbatches / mine.num_microbatches
    # Rows and activations are not in exact proportion, so the bound is on the careful side.
    share = CAUTION * rows if rows <= 1 else 1 + GROWTH * (rows - 1)
    share *= min(1.0, mine.model / theirs.model)
    least = entry.bounds.state + share * _activations(other.forecast)
    # The formula's bytes can be compared only between plans that shard in the same way.
    if mine.zero == theirs.zero and same_mesh:
        least = max(least, entry.bounds.peak + share * _beyond_formula(other)[1])
    limit = entry.bounds.limit
    if least <= limit:
        return None
    sizes = f"{format_bytes(least)} of {format_bytes(limit)}"
    return f"needs at least {sizes}, by the activations of #{number}"


def only_adds_work(entry: OpenCandidate, other: CompiledCandidate) -> bool:
    """Returns whether `entry` has the mesh axes and ZeRO stage of a compiled plan that fits, and at
    least as many microbatches and as much remat. `unroll` is not compared, since it follows from
    the other settings (`list_candidates`)."""
    mine, theirs = entry.candidate, other.entry.candidate
    return (
        other.trial.status == FITS
        and (mine.zero, mine.model, mine.stage) == (theirs.zero, theirs.model, theirs.stage)
        and mine.expert == theirs.expert
        and mine.num_microbatches >= theirs.num_microbatches
        and LIST_REMATS.index(mine.remat) >= LIST_REMATS.index(theirs.remat)
    )


def _beyond_formula(compiled: CompiledCandidate) -> tuple[int, int]:
    """Returns (bytes of a compiled plan beyond its formula, the part of these bytes that is
    activations).

    The other part, such as gathered weights that wait for use, does not grow with the number of
    rows.
    """
    beyond = max((compiled.trial.peak or 0) - compiled.entry.bounds.peak, 0)
    forecast = compiled.forecast
    # Without roles everything beyond the formula may be activations.
    return beyond, beyond if forecast is None else min(beyond, _activations(forecast))


def _activations(forecast: ForecastNumbers) -> int:
    return sum(row.bytes or 0 for row in forecast.memory.roles if row.role == "activations")


def is_no_larger(compiled: CompiledCandidate, candidate: Candidate) -> bool:
    """Returns whether `candidate` needs at least as much memory as a compiled plan that does not
    fit.

    This holds if it has the same mesh axes without a pipeline, the same `unroll`, and no higher
    ZeRO stage, no more remat and no more microbatches than the compiled plan.
    """
    mine, theirs = candidate, compiled.entry.candidate
    return (
        compiled.trial.status == TOO_LARGE
        and (mine.model, mine.stage, mine.expert) == (theirs.model, theirs.stage, theirs.expert)
        and mine.stage == 1
        and mine.unroll == theirs.unroll
        and mine.zero <= theirs.zero
        and LIST_REMATS.index(mine.remat) <= LIST_REMATS.index(theirs.remat)
        and mine.num_microbatches <= theirs.num_microbatches
    )
