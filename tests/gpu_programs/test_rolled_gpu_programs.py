"""A rolled step and its scanned twin, compiled for 8 H100: memory, wire and what hides it.

Needs the compile-only client (extra `plan`) and no GPU: pytest -m gpu_programs. About a minute of
processor time. The model is that of `benchmarks.rolled_layers`, at a small width.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rolled_layers import (
    NUM_DEVICES,
    ROLLED,
    SCANNED,
    UNROLLED,
    GpuStep,
    Sizes,
    compile_for_h100,
    plan_form,
)
from zerojax.forecasting.hlo.live_buffers import LiveAtPeak, LiveValue, read_live
from zerojax.hardware import compile_client, gpus
from zerojax.passes import rewrite
from zerojax.step.build import build_step

pytestmark = pytest.mark.gpu_programs
SMALL = Sizes(width=256, heads=4, vocab=512, tokens=256, rows=4, precision="bf16")
FEW, MANY = 4, 12
SAME_BYTES = 0.02
"""Buffers lie at multiples of some bytes, and whether two share a place hangs on their order."""
SAME_WIRE = 0.01
"""The twin's norms may be gathered in another bucket."""


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROJAX_CACHE", str(tmp_path_factory.mktemp("forecasts")))
        yield


@functools.cache
def compiled(form: str, num_layers: int, zero: int) -> GpuStep:
    return compile_for_h100(form, num_layers, SMALL, zero=zero)


CASES = [(FEW, 3), (MANY, 3), (FEW, 2)]


@pytest.mark.parametrize(("num_layers", "zero"), CASES)
def test_temporaries_are_those_of_the_twin(num_layers: int, zero: int) -> None:
    rolled, twin = (compiled(form, num_layers, zero) for form in (ROLLED, SCANNED))
    assert rolled.temporary <= twin.temporary * (1 + SAME_BYTES)


def test_a_layer_adds_to_temporaries_what_it_adds_to_the_twins() -> None:
    """Its input and its piece of gradients and weights, not its weights or what it computed."""
    few, many = (compiled(ROLLED, number, 3).temporary for number in (FEW, MANY))
    twins = compiled(SCANNED, MANY, 3).temporary - compiled(SCANNED, FEW, 3).temporary
    assert many - few <= twins + SAME_BYTES * few
    assert many - few < 2 * (MANY - FEW) * SMALL.inherent_bytes


@pytest.mark.parametrize(("num_layers", "zero"), CASES)
def test_as_much_is_sent_as_by_the_twin(num_layers: int, zero: int) -> None:
    rolled, twin = (compiled(form, num_layers, zero) for form in (ROLLED, SCANNED))
    assert rolled.wire_units == pytest.approx(twin.wire_units, rel=SAME_WIRE)
    assert rolled.wire_units == pytest.approx(zero, rel=0.04)  # shared with the head: a gather


@pytest.mark.parametrize(("num_layers", "zero"), CASES)
def test_as_much_is_hidden_as_in_the_twin(num_layers: int, zero: int) -> None:
    rolled, twin = (compiled(form, num_layers, zero) for form in (ROLLED, SCANNED))
    assert rolled.hidden >= twin.hidden * (1 - SAME_WIRE)
    assert twin.hidden > 0 or zero == 2


@pytest.mark.slow
def test_unrolled_layers_hold_more() -> None:
    """The control of the tests above."""
    assert compiled(UNROLLED, MANY, 3).temporary > 1.1 * compiled(ROLLED, MANY, 3).temporary


BEFORE_THE_LOOP = dataclasses.replace(SMALL, vocab=1024)
"""The cotangents of its logits, 2 MiB, are less than a layer needs: the peak is in the loop."""


@functools.cache
def peak(num_layers: int, *, ordered: bool) -> LiveAtPeak:
    """What lives at the peak of a rolled step at stage 3."""
    devices = compile_client.gpu_devices(gpus.find_gpu("h100"), NUM_DEVICES)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        if not ordered:
            patch.setattr(rewrite, "with_gradients_first", lambda run, *_: run)
        plan = plan_form(ROLLED, num_layers, BEFORE_THE_LOOP, devices)
        lowered = build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
        options = compile_client.FAST_OPTIONS
        compile_client.compile_for_gpus(lowered, options=options, dump=Path(folder))
        live = read_live(Path(folder))
    assert live is not None
    return live


def live_bytes(live: LiveAtPeak) -> int:
    return sum(value.bytes for value in live.values)


def cotangents_of_logits(live: LiveAtPeak) -> list[LiveValue]:
    sizes = BEFORE_THE_LOOP
    shape = f"bf16[{sizes.rows},{sizes.tokens},{sizes.vocab}]"
    return [v for v in live.values if v.shape.startswith(shape) and "/while/" not in v.op_name]


def test_the_cotangents_of_logits_do_not_live_through_the_backward_loop() -> None:
    """The head's gradient is there before, in pieces; without that order both wait for it."""
    sizes = BEFORE_THE_LOOP
    with_order, without = peak(FEW, ordered=True), peak(FEW, ordered=False)
    assert not cotangents_of_logits(with_order)
    assert len(cotangents_of_logits(without)) == 1
    saved = 2 * sizes.rows * sizes.tokens * (sizes.vocab + sizes.width)
    scattered = 2 * sizes.width * sizes.vocab // NUM_DEVICES
    assert live_bytes(without) - live_bytes(with_order) >= saved - scattered - 2**16


def test_what_lives_at_the_peak_does_not_depend_on_depth() -> None:
    """But for what a layer keeps in any form. What is reserved depends on the gaps of packing."""
    few, many = (
        live_bytes(peak(number, ordered=True)) - number * BEFORE_THE_LOOP.inherent_bytes
        for number in (FEW, MANY)
    )
    assert many == pytest.approx(few, rel=SAME_BYTES)
