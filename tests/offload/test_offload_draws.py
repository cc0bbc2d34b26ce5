"""First values of layers in files, drawn one layer of one parameter at a time.

They are, to the bit, the values of a state on the device, for which all layers are drawn at once.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.offload.test_offload_pages import options_of, paged
from tests.support.offload_disk_runs import close, differing, portable
from tests.support.pipeline_runs import small
from tests.support.refusals import check_words
from tests.support.small_models import VOCAB, LinenText, linen_loss, reference_model
from tests.support.trajectories import plan_for
from zerojax.models.losses import next_token
from zerojax.offload.layer_draws import LayerDraws, find_draws
from zerojax.placement.state import run_key_data
from zerojax.plan.make import Plan
from zerojax.step.build import build_step
from zerojax.step.initialization import build_layer_draw, init_state

WIDTH, LAYERS = 32, 3


def init_stack(key: jax.Array) -> dict[str, Any]:
    """Draws the weights of all layers by one call."""
    embed, layers = jax.random.split(key)
    shape = (LAYERS, WIDTH, WIDTH)
    return {
        "embed": jax.random.normal(embed, (VOCAB, WIDTH)),
        "layers": jax.random.normal(layers, shape) / 8,
    }


def init_carried(key: jax.Array) -> dict[str, Any]:
    """Adds to each layer's weights those of the layer before it."""
    params = init_stack(key)
    return {**params, "layers": jnp.cumsum(params["layers"], axis=0)}


def init_list(key: jax.Array) -> dict[str, Any]:
    """Draws layer after layer, and stacks them."""
    keys = [jax.random.fold_in(key, index) for index in range(LAYERS)]
    drawn = [jax.random.normal(own, (WIDTH, WIDTH)) / 8 for own in keys]
    return {**init_stack(key), "layers": jnp.stack(drawn)}


def apply_layers(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weight: jax.Array) -> Any:
        return x + jnp.tanh(x @ weight), None

    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    return x @ params["embed"].T


def text_loss(model: Any, batch: dict[str, Any]) -> Any:
    return next_token(model(batch["tokens"]), batch["targets"])


MODELS: dict[str, dict[str, Any]] = {
    "nnx": {"model": small(layers=LAYERS, width=WIDTH)},
    "gpt2": {"model": reference_model("gpt2")},
    "linen": {"model": LinenText(width=WIDTH), "loss": linen_loss},
    "one draw": {"model": (init_stack, apply_layers), "loss": text_loss},
    "list": {"model": (init_list, apply_layers), "loss": text_loss},
    "carried": {"model": (init_carried, apply_layers), "loss": text_loss},
}
CASES = [("nnx", 4, 3), ("gpt2", 1, 0), ("linen", 2, 2), ("one draw", 4, 3), ("list", 2, 1)]


def plan_of(name: str, folder: Path | None, devices: int = 1, zero: int = 0) -> Plan:
    place = {} if folder is None else {"offload": paged(folder)}
    return plan_for(**MODELS[name], **place, **options_of(zero, devices=devices))


def draws_of(plan: Plan) -> LayerDraws:
    names = plan.offload.paged_order
    return find_draws(plan.model, plan.abstract_batch, plan.loss, names)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "devices", "zero"), [*CASES, ("carried", 2, 3)])
def test_the_bits_of_a_state_on_the_device(tmp_path, monkeypatch, name, devices, zero):
    """With limits so low that no stack of layers is drawn whole, but for layers that need it."""
    monkeypatch.setattr("zerojax.tracing.rolling.single_rows._SMALL", 256)
    plan = plan_of(name, tmp_path, devices, zero)
    assert plan.offload.paged
    assert set(draws_of(plan).whole) == ({"layers"} if name == "carried" else set())
    state = init_state(plan, 5)
    device = plan_of(name, None, devices, zero)
    found, expected = portable(plan, state), portable(device, init_state(device, 5))
    assert found.keys() == expected.keys()
    assert differing(found, expected) == []
    close(state)


@pytest.mark.thorough
def test_one_program_draws_every_layer_in_the_memory_of_one(tmp_path):
    """Compiled: temporaries and result do not depend on the number of layers."""
    sizes = []
    for layers in (3, 12):
        plan = plan_for(
            small(layers=layers, width=512),
            offload=paged(tmp_path / str(layers), slice_elements=2**16),
            **options_of(3, devices=4),
        )
        draws, name = draws_of(plan), "blocks/linear/kernel"
        draw = build_layer_draw(plan, name, draws.rows[name])
        key = np.asarray(run_key_data(0))
        drawn = [np.asarray(draw(np.int32(layer), key)) for layer in range(layers)]
        assert draw._cache_size() == 1
        assert len({one.tobytes() for one in drawn}) == layers
        memory = draw.lower(np.int32(0), key).compile().memory_analysis()
        sizes.append(memory.temp_size_in_bytes + memory.output_size_in_bytes)
    assert sizes[0] == pytest.approx(sizes[1], abs=4096)  # keys of the layers
    assert sizes[0] < 4 * 512 * 512 * 4


def test_the_plan_says_what_a_new_run_draws_at_once(tmp_path, monkeypatch):
    """One layer of 32x32 float32 values, or where a layer needs the others, all three."""
    monkeypatch.setattr("zerojax.tracing.rolling.single_rows._SMALL", 256)
    [line] = [
        reason for reason in plan_of("nnx", tmp_path).reasons if "one layer at a time" in reason
    ]
    check_words(line, "blocks/linear/kernel", ["4.0 KiB"])
    [line] = [reason for reason in plan_of("carried", tmp_path).reasons if "at once" in reason]
    check_words(line, "layers", ["12.0 KiB", "cumsum", "vmap"])


@pytest.mark.thorough
def test_layers_of_an_instance_and_of_files_are_copied_one_by_one(tmp_path, monkeypatch):
    """And no file is read for all layers at once."""
    made = small(layers=LAYERS, width=WIDTH)(nnx.Rngs(0))
    options = options_of(devices=1)
    device = plan_for(made, **options)
    expected = portable(device, init_state(device))
    plan = plan_for(made, offload=paged(tmp_path / "a"), **options)
    state = init_state(plan)
    assert differing(portable(plan, state), expected) == []
    close(state)
    read = _in_files(plan, monkeypatch)
    state = init_state(plan)
    assert differing(portable(plan, state), expected) == []
    assert {shape[0] for shape in read["blocks/linear/kernel"]} == {1}
    state, metrics = build_step(plan)(state, jax.device_put(batch(), plan.batch_sharding))
    assert np.isfinite(float(metrics["loss"]))
    close(state)


def batch() -> Any:
    tokens = np.arange(16 * 9, dtype=np.int32).reshape(16, 9) % 32
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


class _Stored:
    """An array in a file, which notes what is read of it."""

    is_stacked = True

    def __init__(self, value: np.ndarray, read: list[tuple[int, ...]]) -> None:
        self.shape, self.dtype = value.shape, value.dtype
        self._value, self._read = value, read

    def read(self, index: Any) -> np.ndarray:
        self._read.append(tuple(stop - start for start, stop in index))
        return np.array(self._value[tuple(slice(*part) for part in index)])


def _in_files(plan: Plan, monkeypatch: Any) -> dict[str, list[tuple[int, ...]]]:
    """Gives the plan's model its values in files; returns the shapes read by parameter."""
    params, extras = plan.model.initial_arrays()
    read: dict[str, list[tuple[int, ...]]] = {name: [] for name in params}
    stored = {name: _Stored(np.asarray(x), read[name]) for name, x in params.items()}
    monkeypatch.setattr(type(plan.model), "initial_arrays", lambda self: (stored, extras))
    return read
