"""Norms by layer (`log.per_layer`): equal to NumPy's at every stage, and nearly free."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.refusals import refused
from tests.support.trajectories import plan_for
from zerojax.config import OptimizerConfig
from zerojax.passes import layer_norms
from zerojax.passes.layer_norms import KINDS, layer_of, layer_rows, norms_of_layers
from zerojax.plan.make import plan_of
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.trained_model import model_of
from zerojax.training.metrics import read_metrics, write_report
from zerojax.training.metrics.heatmaps import layers_panel
from zerojax.training.metrics.metric_files import MetricsFile

WIDTH, DEPTH = 12, 3
TOLERANCE = 2e-6
"""Relative: float32 gradients of 8 shards are summed in another order than those of one device, and
each sum of up to 300 squares rounds to 6e-8 of itself some times."""


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Scanned(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(Block)(rngs.split(DEPTH))
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        run = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.last(run(self.blocks, self.first(x)))


def rows(index):
    x = np.random.default_rng(index).normal(size=(32, 4)).astype(np.float32)
    return {"x": x, "y": 3 * x.sum(1, keepdims=True)}


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def plan_with(model, *, layers=True, devices=8, mesh=None, **options):
    options = {"optimizer": OptimizerConfig(learning_rate=0.01, clip_norm=0.1), **options}
    plan = plan_for(model, devices=devices, batch=rows, loss=loss, mesh=mesh, **options)
    inputs = dataclasses.replace(plan.inputs, layer_norms=layers)
    return plan_of(inputs, plan.mesh, zero=plan.zero)


def by_layer(tree):
    """Returns {layer: its values as one vector} of a tree like the model's."""
    parts = {}
    for path, value in nnx.to_flat_state(nnx.state(tree, nnx.Param)):
        name, x = "/".join(map(str, path)), np.asarray(value[...], np.float64)
        stack = name.startswith(("blocks/up", "blocks/down"))
        for row, part in enumerate(x) if stack else [(None, x)]:
            layer = layer_of(name) if row is None else f"blocks/{row}"
            parts.setdefault(layer, []).append(part.ravel())
    return {layer: np.concatenate(values) for layer, values in parts.items()}


def norms(values):
    return {layer: float(np.sqrt((x * x).sum())) for layer, x in values.items()}


@functools.cache
def expected(model):
    """{kind: {layer: norm}} of the first step, by NumPy from arrays of one device."""
    plan = plan_with(model, layers=False, devices=1)
    state = init_state(plan, 0)
    before = model_of(plan, state)
    gradients = by_layer(nnx.grad(loss)(before, rows(0)))
    state, _ = build_step(plan)(state, jax.device_put(rows(0), plan.batch_sharding))
    old, new = by_layer(before), by_layer(model_of(plan, state))
    changes = {layer: new[layer] - old[layer] for layer in new}
    return dict(zip(KINDS, map(norms, (gradients, changes, new)), strict=True))


def measured(plan, state=None):
    """{kind: {layer: norm}} of a step."""
    state = init_state(plan, 0) if state is None else state
    _, metrics = build_step(plan)(state, jax.device_put(rows(0), plan.batch_sharding))
    return norms_of_layers(layer_rows(plan), np.asarray(metrics["layer_sums"]))


CASES = {
    "zero=0": {"zero": 0},
    "zero=1": {"zero": 1},
    "zero=2, accumulated": {"zero": 2, "num_microbatches": 4},
    "zero=3": {"zero": 3},
    "zero=3, tensors split": {"zero": 3, "mesh": {"data": 2, "model": 4}},
    "a pipeline": {"zero": 1, "mesh": {"data": 2, "stage": 3}, "devices": 6},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", [Listed, Scanned])
@pytest.mark.parametrize("case", CASES)
def test_norms_equal_those_of_one_device(model, case):
    found, wanted = measured(plan_with(model, **CASES[case])), expected(model)
    assert list(found["gradient"]) == ["blocks/0", "blocks/1", "blocks/2", "first", "last"]
    for kind in KINDS:
        assert found[kind].keys() == wanted[kind].keys()
        for layer, norm in found[kind].items():
            assert norm == pytest.approx(wanted[kind][layer], rel=TOLERANCE), (kind, layer)


def compiled(plan):
    return build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile().as_text()


def num_collectives(text):
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return len(re.findall(rf" (?:{kinds})\(", text))


@pytest.mark.parametrize("model", [Listed, Scanned])
def test_norms_take_one_more_collective_for_all_layers(model):
    plain, with_norms = (plan_with(model, layers=x, zero=3) for x in (False, True))
    assert num_collectives(compiled(with_norms)) == num_collectives(compiled(plain)) + 1


def test_without_the_setting_the_step_has_none_of_it(monkeypatch):
    def fail(*_):
        raise AssertionError("called without log.per_layer")

    monkeypatch.setattr(layer_norms, "_rows_of_stacks", fail)
    plan = plan_with(Scanned, layers=False, zero=3)
    state, batch = plan.abstract_state, plan.abstract_batch
    assert "layer_sums" not in jax.eval_shape(build_step(plan).compiled, state, batch)[1]
    with pytest.raises(AssertionError):
        build_step(plan_with(Scanned, zero=3))


def test_a_skipped_step_changes_no_layer():
    found = measured(plan_with(Listed, zero=2, precision="fp16"))
    assert set(found["update"].values()) == {0.0}
    assert not all(map(math.isfinite, found["gradient"].values()))


@pytest.mark.parametrize(
    ("mesh", "options", "value"),
    [
        ({"deterministic": "mesh"}, {}, "deterministic=mesh"),
        ({"offload": {"opt_state": "host"}}, {}, "offload.opt_state=host"),
        ({"offload": {"opt_state": "host", "params": "host"}}, {}, "offload.params=host"),
        ({}, {"optimizer": zerojax.optim.one_bit_adam(1e-2, freeze_step=9)}, '"1-bit Adam"'),
    ],
)
def test_what_has_no_norms_of_layers_is_refused_before_the_first_step(
    mesh, options, value, tmp_path
):
    def start():
        train(tmp_path, mesh={"zero": 1, **mesh}, **options)

    refused(start, f"log.per_layer=True {value}", '"leave one of them out"')


def train(folder, *, mesh, steps=5, **options):
    return zerojax.train(
        Listed,
        mesh,
        rows,
        loss=loss,
        steps=steps,
        run_dir=folder,
        log=zerojax.LogConfig(every=2, per_layer=True, console="quiet"),
        **{"optimizer": zerojax.adamw(1e-2), **options},
    )


def test_reports_of_a_run_have_the_norms_of_each_layer(tmp_path):
    trainer = train(tmp_path, mesh={"zero": 3})
    found = read_metrics(tmp_path)
    assert [row["step"] for row in found.layers] == [row["step"] for row in found.train]
    assert [row["step"] for row in found.layers] == [1, 2, 4, 5]
    for row, report in zip(found.layers, trainer.history, strict=True):
        of_layers = {key: value for key, value in report.items() if "_norm/" in key}
        assert of_layers == {key: row[key] for key in of_layers}
        total = sum(v * v for k, v in of_layers.items() if k.startswith("gradient_norm/"))
        assert math.sqrt(total) == pytest.approx(report["grad_norm"], rel=TOLERANCE)
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"update_norm/blocks/2" in events.read_bytes()
    page = write_report(tmp_path).read_text()
    assert "Norms by layer" in page
    assert page.count("blocks/2</span>") == 3


def test_a_resumed_run_replaces_the_norms_of_repeated_steps(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for kind, step, norm in [
        ("start", 0, 0.0),
        ("layers", 1, 1.0),
        ("layers", 3, 2.0),
        ("start", 2, 0.0),
        ("layers", 3, 3.0),
    ]:
        file.write({"kind": kind, "step": step, "gradient_norm/first": norm})
    file.close()
    found = [(one["step"], one["gradient_norm/first"]) for one in read_metrics(tmp_path).layers]
    assert found == [(1, 1.0), (3, 3.0)]


def test_a_layer_is_named_up_to_its_number():
    names = {
        "blocks/3/attention/kernel": "blocks/3",
        "encoder/stages/0/blocks/2/kernel": "encoder/stages/0",
        "embed/embedding": "embed",
        "scale": "scale",
        "0/kernel": "0",
    }
    assert {name: layer_of(name) for name in names} == names


def test_a_map_of_many_layers_and_steps_stays_small():
    layers, steps = 48, 2000
    row = {f"{kind}_norm/blocks/{x}": float(x % 9) for kind in KINDS for x in range(layers)}
    records = [{**row, "step": step} for step in range(1, steps + 1)]
    records[700]["gradient_norm/blocks/3"] = None
    page = layers_panel(records)
    assert len(page) < 60_000
    assert page.count("<svg") == 3
    assert page.count("blocks/47</span>") == 3
    assert page.count("red: not finite") == 1
