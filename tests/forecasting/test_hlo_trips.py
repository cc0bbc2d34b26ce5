"""Trip counts that the compiler has not written down, from the loop itself."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zerojax.forecasting.hlo import matmul_flops, read_program

LOOP = """HloModule loops, is_scheduled=true

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %step = s32[] constant(STEP)
  %next = s32[] add(%i, %step)
  ROOT %out = (s32[], f32[4]{0}) tuple(%next, %x)
}

%compared (a: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %bound = s32[] constant(BOUND)
  ROOT %less = pred[] compare(ORDER), direction=DIRECTION
}

%condition (q: (s32[], f32[4])) -> pred[] {
  %q = (s32[], f32[4]{0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  ROOT %test = pred[] fusion(%j), kind=kLoop, calls=%compared
}

ENTRY %main (x0: f32[4], n: s32[]) -> (s32[], f32[4]) {
  %x0 = f32[4]{0} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(START)
  %copied = s32[] copy(FROM)
  %begin = (s32[], f32[4]{0}) tuple(%copied, %x0)
  ROOT %loop = (s32[], f32[4]{0}) while(%begin), condition=%condition, body=%body
}
"""


def loop(start=0, bound=10, step=1, order="%a, %bound", direction="LT", source="%zero"):
    text = LOOP.replace("ORDER", order).replace("DIRECTION", direction).replace("FROM", source)
    for word, value in (("START", start), ("BOUND", bound), ("STEP", step)):
        text = text.replace(word, str(value))
    return read_program(text)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 10),
        ({"start": 1, "bound": 4}, 3),
        ({"bound": 10, "step": 4}, 3),
        ({"order": "%bound, %a", "direction": "GT"}, 10),
        ({"start": 7, "bound": 5}, 0),
    ],
)
def test_a_counter_below_a_constant(options, count):
    program = loop(**options)
    assert program.times_run("body") == count
    assert program.unknown_loops == ()


@pytest.mark.parametrize(
    "options",
    [{"source": "%n"}, {"direction": "NE"}, {"order": "%bound, %a"}, {"step": 0}, {"step": -1}],
)
def test_other_loops_are_unknown_and_said_so(options):
    program = loop(**options)
    assert program.unknown_loops == ("loop",)
    assert program.times_run("body") == 1


def test_the_same_as_the_compiler_writes_down():
    """Nested loops compiled for the CPU, with and without what the compiler says of them."""

    def inner(x, w):
        return jnp.tanh(x @ w), None

    def outer(x, _):
        return lax.scan(inner, x, jnp.ones((5, 8, 8)))[0], None

    lowered = jax.jit(lambda x: lax.scan(outer, x, None, length=7)[0]).lower(jnp.ones((8, 8)))
    text = lowered.compile().as_text()
    known = read_program(text)
    bare = read_program(re.sub(r'"known_trip_count":\{[^}]*\},?', "", text))
    assert "known_trip_count" in text
    assert bare.unknown_loops == ()
    assert matmul_flops(bare) == matmul_flops(known) == 35 * 2 * 8**3
