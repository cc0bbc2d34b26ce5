"""Rounds of a search: offload only where nothing fits without it, and then as little as fits."""

import dataclasses
from typing import Any

import pytest

from tests.support.forecast_samples import GIB, sample_card, sample_forecast
from zerojax.config.mesh import OffloadConfig
from zerojax.forecasting.settings_search import Candidate, SearchedRun, find_settings, rounds

CARD = sample_card()
LIMIT, ACTIVATIONS, WEIGHTS, STATE = 60, 10, 16, 48
CANDIDATES = [
    Candidate(zero=1, model=1, num_microbatches=number, remat="full") for number in (1, 2)
]


@dataclasses.dataclass(frozen=True)
class World:
    """A run of one device in numbers, GiB; the plan of a candidate is its settings.

    Attributes:
      activations, weights, state: GiB of the plan without offload.
    """

    activations: float = ACTIVATIONS
    weights: float = WEIGHTS
    state: float = STATE

    def plan(self, candidate: Candidate, options: Any) -> tuple[Candidate, OffloadConfig]:
        return candidate, options.get("offload", OffloadConfig())

    def state_on_host(self, offload: OffloadConfig) -> float:
        return self.state * offload.shares.get("host", 0.0)

    def forecast(self, plan: Any) -> Any:
        candidate, offload = plan
        on_host = self.state_on_host(offload)
        peak = self.state - on_host + 0.05 * self.state * (on_host > 0)
        peak += self.weights * (offload.params == "device")
        kept = self.activations * (offload.activations == "device")
        peak += kept / candidate.num_microbatches
        found = sample_forecast()
        seconds = 1 + on_host / self.state + 0.1 * candidate.num_microbatches
        return dataclasses.replace(
            found,
            num_devices=1,
            memory=dataclasses.replace(found.memory, peak=int(peak * GIB)),
            estimate=dataclasses.replace(found.estimate, step_seconds=seconds),
            verdict=dataclasses.replace(
                found.verdict, fits=peak <= LIMIT, headroom=int((LIMIT - peak) * GIB)
            ),
        )


@pytest.fixture(autouse=True)
def bounds(monkeypatch):
    """Formulas that rule nothing out."""
    from zerojax.forecasting.settings_search import searching
    from zerojax.forecasting.settings_search.candidates import Bounds

    known = Bounds(seconds=0.1, wire_seconds=0.0, state=0, peak=0, limit=LIMIT * GIB)
    monkeypatch.setattr(searching, "bounds_on", lambda gpu, make_plan_for: lambda c: known)


def run(world: World, monkeypatch, offload: OffloadConfig | None = None, **options: Any) -> Any:
    def tiers(plan):
        return {"optimizer state": {"host": int(world.state_on_host(plan[1]) * GIB)}}

    monkeypatch.setattr(rounds, "role_tiers", tiers)
    searched = SearchedRun(
        plan_for=world.plan, candidates=CANDIDATES, offload=offload or OffloadConfig()
    )
    return find_settings(searched, CARD, forecast_of=world.forecast, **options)


def test_without_need_nothing_is_offloaded(monkeypatch):
    result = run(World(state=20), monkeypatch)
    assert (result.chosen.status, result.settings) == ("chosen", ())
    assert result.options == {}


def test_the_device_takes_the_state_for_which_it_has_room(monkeypatch):
    """26 GiB of weights and activations and 2.4 of slices leave 31.6, of which 9 in 10 are used."""
    result = run(World(), monkeypatch)
    offload = result.options["offload"]
    assert offload.shares == {"device": 0.59, "host": 0.41}
    assert result.settings == ("mesh.offload.opt_state={device: 0.59, host: 0.41}",)
    assert OffloadConfig(opt_state="{device: 0.59, host: 0.41}") == offload
    assert result.chosen.peak <= LIMIT * GIB
    assert result.chosen.seconds == pytest.approx(1 + 0.41 + 0.1)


def test_what_does_not_fit_with_the_state_on_the_host_offloads_more(monkeypatch):
    result = run(World(activations=200), monkeypatch)
    offload = result.options["offload"]
    assert (offload.opt_state, offload.activations, offload.params) == ("host", "host", "device")
    result = run(World(activations=10, weights=80), monkeypatch)
    offload = result.options["offload"]
    assert (offload.opt_state, offload.activations, offload.params) == ("host", "device", "host")
    result = run(World(activations=200, weights=80), monkeypatch)
    assert result.settings == (
        "mesh.offload.opt_state=host",
        "mesh.offload.params=host",
        "mesh.offload.activations=host",
    )


def test_nothing_fits(monkeypatch):
    result = run(World(activations=200, weights=80, state=2000), monkeypatch)
    assert (result.chosen, result.options) == (None, None)
    assert "mesh.offload.params=host" in result.sentence


def test_a_runs_own_offload_is_kept(monkeypatch):
    own = OffloadConfig(opt_state="host")
    result = run(World(activations=200), monkeypatch, offload=own)
    assert result.chosen is None
    assert result.settings == ()
