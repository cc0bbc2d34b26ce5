"""A rolled step and its scanned twin, compiled for 8 H100: memory, wire and what hides it.

Needs the compile-only client (extra `plan`) and no GPU: pytest -m gpu_programs. About a minute of
processor time. The model is that of `benchmarks.rolled_layers`, at a small width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from benchmarks.rolled_layers import (
    ROLLED,
    SCANNED,
    UNROLLED,
    GpuStep,
    Sizes,
    compile_for_h100,
)
from zerojax.hardware import compile_client

MISSING = compile_client.missing()
pytestmark = [
    pytest.mark.gpu_programs,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
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
