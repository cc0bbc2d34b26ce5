"""Where the seconds of a start go."""

import json

import jax
import jax.numpy as jnp
import pytest

from tests.cli.test_cli import run_cli
from zerojax.runtime import start_clock
from zerojax.runtime.start_clock import StartClock, measure_start, phase


def test_seconds_belong_to_the_innermost_phase():
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 28.0])
    clock = StartClock(lambda: next(now))
    with clock.during("planning"), clock.during("tuning"):
        pass
    with clock.during("planning"):
        pass
    seconds = {one.name: one.seconds for one in clock.stop()[1:]}
    assert seconds == {"planning": 2.0 + 4.0 + 6.0, "tuning": 3.0, "rest": 1.0 + 5.0 + 7.0}


def test_what_jax_compiles_belongs_to_its_phase():
    with measure_start() as clock:
        with phase("step"):
            jax.jit(lambda x: jnp.sin(x) * 3).lower(jnp.ones(7)).compile()
        with phase("nothing"):
            pass
    by_kind = {one.name: one.by_kind for one in clock.stop()}
    assert by_kind["step"].keys() >= {"traced", "lowered", "compiled"}
    assert by_kind["nothing"] == {}


def test_without_a_measurement_a_phase_is_nothing():
    with phase("planning"):
        assert start_clock._running is None


@pytest.mark.slow
def test_the_command_prints_the_phases_of_a_start(tmp_path):
    words = ["profile", "configs/tiny_shakespeare.yaml", "--start", "--json"]
    result = run_cli(*words)
    phases = {one["name"]: one for one in json.loads(result.stdout)}
    assert list(phases) == ["imports", "data", "planning", "initial state", "training step", "rest"]
    assert phases["training step"]["by_kind"]["compiled"] > 0
    assert sum(one["seconds"] for one in phases.values()) > 0
