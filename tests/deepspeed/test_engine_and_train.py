"""A ds_config means the same to `zerojax.initialize` and to `zerojax.train`: one plan, one refusal.

Both are stopped where they would begin to make arrays.
"""

from __future__ import annotations

import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from zerojax.deepspeed_engine.engine import Engine
from zerojax.training import entry

ROWS, WIDTH = 48, 16
SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-2}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


@dataclasses.dataclass(frozen=True)
class Sizes:
    hidden_size: int = WIDTH


class Regression(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(12, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 5, rngs=rngs)

    def loss(self, batch):
        return jnp.mean((self.down(jnp.tanh(self.up(batch["x"]))) - batch["y"]) ** 2)


class Named(Regression):
    """One that says its width as Hugging Face's models do."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.config = Sizes()


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


def scheduled(**params):
    return {"scheduler": SCHEDULE | {"params": SCHEDULE["params"] | params}}


def parallel(pattern):
    spec = {"patterns": [pattern], "partition_type": "column"}
    return {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [spec]}}}


def elastic(rows):
    section = {"enabled": True, "max_train_batch_size": rows, "micro_batch_sizes": [2, 4]}
    return {"elasticity": section | {"version": 0.1, "max_gpus": 16}}


AUTO_SIZES = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
TAKEN = {
    "nothing about batches": {},
    "a micro-batch": {"train_micro_batch_size_per_gpu": 2},
    "a micro-batch and the rest as auto": {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
    },
    "all three": {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
    },
    "stage 1": zero(1),
    "stage 3 with sizes of the model": zero(3, **AUTO_SIZES),
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}} | zero(2),
    "bf16": {"bf16": {"enabled": True}} | zero(2),
    "a schedule": scheduled(total_num_steps=12),
    "a schedule of auto": scheduled(total_num_steps=12, warmup_max_lr="auto"),
    "offload": zero(2, offload_optimizer={"device": "cpu"}),
    "offload that stage 0 ignores": zero(0, offload_optimizer={"device": "cpu"}),
    "elastic": elastic(48),
    "tensor parallel": parallel(r"up\.weight"),
}
REFUSED = {
    "rows": {"train_batch_size": 40},
    "a product of rows": {"train_micro_batch_size_per_gpu": 4},
    "elastic rows": elastic(96),
    "patterns that find nothing": parallel(r"\.q_proj\.weight"),
    "a length that is open": scheduled(total_num_steps="auto"),
    "sizes of no model": zero(3, **AUTO_SIZES),
    "a pipeline of what is none": {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 4},
    "offload of parameters that no loop brings": zero(
        3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}
    ),
    "an unknown key": {"train_batchsize": 48},
}


class Stopped(Exception):
    """Everything is planned."""


def planned(way, model, config, monkeypatch, tmp_path):
    """The plan that a way of taking a file comes to, or the error."""
    x = np.ones((ROWS, 12), np.float32)
    batch = {"x": x, "y": x[:, :5]}
    found = []

    def stop(*arguments, **more):
        found.append(next(x for x in arguments if isinstance(x, zerojax.Plan)))
        raise Stopped

    monkeypatch.setattr(entry, "open_run", stop)
    monkeypatch.setattr(Engine, "_begin", lambda self, runner: stop(runner.plan))
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    try:
        if way == "train":
            zerojax.train(model, path, iter([batch]), run_dir=None)
        else:
            zerojax.initialize(model, path).prepare(batch)
    except Stopped:
        return found[0]
    except Exception as error:
        return error
    raise AssertionError("neither a plan nor an error")


def both(model, config, monkeypatch, tmp_path):
    return [planned(way, model, config, monkeypatch, tmp_path) for way in ("train", "initialize")]


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("name", TAKEN)
def test_one_plan(name, monkeypatch, tmp_path):
    config = {"optimizer": ADAMW, "gradient_clipping": 1.0} | TAKEN[name]
    ours, theirs = both(Named, config, monkeypatch, tmp_path)
    assert isinstance(ours, zerojax.Plan), ours
    assert isinstance(theirs, zerojax.Plan), theirs
    assert ours.as_dict() == theirs.as_dict()
    assert (ours.settings, ours.num_microbatches) == (theirs.settings, theirs.num_microbatches)
    assert ours.precision == theirs.precision
    same = jax.tree.map(lambda one, other: one == other, ours.abstract_state, theirs.abstract_state)
    assert all(jax.tree.leaves(same))
    for count in (0, 2, 7):
        assert float(ours.learning_rate(count)) == float(theirs.learning_rate(count))


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_one_refusal(name, monkeypatch, tmp_path):
    config = {"optimizer": ADAMW, "gradient_clipping": 1.0} | REFUSED[name]
    ours, theirs = both(Regression, config, monkeypatch, tmp_path)
    assert isinstance(ours, ValueError), ours
    assert type(ours) is type(theirs)
    assert str(ours) == str(theirs)


def test_one_wording_of_warnings_at_the_line_of_the_call(tmp_path, monkeypatch):
    config = {"zero_optimization": {"stage": 2}, "_comment": "mine", "optimizer": ADAMW}
    told = []
    for way in ("train", "initialize"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert isinstance(planned(way, Regression, config, monkeypatch, tmp_path), zerojax.Plan)
        told.append([(each.category, str(each.message), each.filename) for each in caught])
    assert told[0] == told[1]
    path = tmp_path / "ds_config.json"
    assert {file for _, _, file in told[0]} == {__file__}
    assert (
        UserWarning,
        f"{path}: _comment: unknown key, which has no effect, as in DeepSpeed",
    ) in [each[:2] for each in told[0]]
