"""One batch for many numbers of devices: DeepSpeed's arithmetic, and runs that use it."""

from __future__ import annotations

import dataclasses
import json
import random

import jax
import numpy as np
import pytest

from tests.support.trajectories import TOLERANCE
from zerojax.cli import main
from zerojax.config import ConfigError, ElasticityConfig, RunConfig, load, to_dict
from zerojax.config.elasticity import _highly_composite

# The case of DeepSpeed's own test, tests/unit/elasticity/test_elastic.py: test_basic_10k and
# test_valid_world_size.
DEEPSPEED = {
    "enabled": True,
    "max_global_batch_size": 10_000,
    "micro_batch_sizes": (8, 12, 16, 17),
    "min_devices": 32,
    "max_devices": 1500,
}
# OEIS A002182, up to 50400.
HIGHLY_COMPOSITE = [
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560),
    *(10080, 15120, 20160, 25200, 27720, 45360, 50400),
]


def test_the_case_of_deepspeeds_own_test():
    batch = ElasticityConfig(**DEEPSPEED).choose_batch()
    assert batch.global_batch_size == 9792
    assert len(batch.device_counts) == 23
    assert batch.micro_batch_size(64) == 17


def test_highly_composite_numbers():
    for limit in (*HIGHLY_COMPOSITE, 3, 5, 100, 719, 50399, 55439):
        assert _highly_composite(limit) == max(n for n in HIGHLY_COMPOSITE if n <= limit)


def test_every_count_cuts_the_batch_into_whole_microbatches():
    randomly = random.Random(0)
    for _ in range(60):
        sizes = tuple(randomly.sample(range(1, 20), randomly.randint(1, 4)))
        per_shard, node = randomly.choice([(1, None), (2, None), (2, 8), (4, 8), (1, 4)])
        config = ElasticityConfig(
            max_global_batch_size=randomly.choice([200, 1000, 5000]),
            micro_batch_sizes=sizes,
            devices_per_node=node,
        )
        batch = config.choose_batch(per_shard)
        assert batch.global_batch_size <= config.max_global_batch_size
        assert batch.device_counts == tuple(sorted(set(batch.device_counts)))
        for count in batch.device_counts:
            assert count % (node or per_shard) == 0
            size, parts = batch.micro_batch_size(count), batch.num_microbatches(count)
            assert size in sizes
            assert size * parts * count == batch.global_batch_size * per_shard


def test_no_other_candidate_suits_more_counts():
    config = ElasticityConfig(max_global_batch_size=100, micro_batch_sizes=(2, 3))
    batch = config.choose_batch()
    # Candidates: 2 x 48 = 96, 3 x 24 = 72, 6 x 12 = 72.
    assert batch.global_batch_size == 96
    counts = [n for n in range(1, 101) if any(96 % (n * size) == 0 for size in (2, 3))]
    assert list(batch.device_counts) == counts
    # As many numbers cut 72, and the larger batch is preferred unless the user says otherwise.
    assert len([n for n in range(1, 101) if any(72 % (n * s) == 0 for s in (2, 3))]) == len(counts)
    smaller = dataclasses.replace(config, prefer_larger_batch=False).choose_batch()
    assert smaller.global_batch_size == 72


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"micro_batch_sizes": (0, 2)}, "must be a list of integers >= 1"),
        ({"micro_batch_sizes": (2, 3000)}, "above max_global_batch_size (2000)"),
        ({"min_devices": 9, "max_devices": 8}, "is below min_devices (9)"),
    ],
)
def test_what_cannot_be_cut_is_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        ElasticityConfig(**settings).choose_batch(1)


def test_settings_that_contradict_it_are_refused():
    words = ["elasticity.enabled=true", "elasticity.max_global_batch_size=100"]
    config = load(RunConfig, None, words)
    on_four = config.on_devices(4)
    assert on_four.global_batch_size == config.elasticity.choose_batch().global_batch_size == 96
    assert on_four.num_microbatches == 4
    again = load(RunConfig, None, [*words, "global_batch_size=96", "num_microbatches=4"])
    assert again.on_devices(4) == on_four
    assert load(RunConfig, None, ["seed=1"]).on_devices(3).global_batch_size == 32
    with pytest.raises(ConfigError, match="64.*96"):
        load(RunConfig, None, [*words, "global_batch_size=64"])
    with pytest.raises(ConfigError, match="on 8 devices \\(2\\)"):
        dataclasses.replace(config, num_microbatches=3).on_devices(8)


def test_the_command_lists_every_count(capsys):
    words = ["elastic", "max_global_batch_size=24", "micro_batch_sizes=[2,3]"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["global_batch_size"] == 24
    assert answer["num_microbatches"]["4"] == 2
    assert main([*words, "--devices", "4"]) == 0
    assert "4               6             2          3" in capsys.readouterr().out
    assert main([*words, "--devices", "5"]) == 2
    assert "5 devices cannot divide" in capsys.readouterr().err


TINY = [
    *("num_layers=1", "num_heads=2", "embed_dim=32", "max_seq_len=32", "data.seq_len=32"),
    *("precision=fp32", "schedule=constant", "warmup_steps=1", "eval_every=null", "eval_batches=1"),
    *("log.every=1", "console=quiet", "tensorboard=false", "zero=2", "steps=4"),
    *("elasticity.enabled=true", "max_global_batch_size=24", "micro_batch_sizes=[1,2,3]"),
]


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_batch_on_other_devices(tmp_path, monkeypatch):
    """8 devices, then 6 (which 8 is not a multiple of): the losses are those of 8 throughout."""
    from zerojax.placement import device_mesh
    from zerojax.training import run_file

    def losses(run: str, counts: list[int]) -> list[float]:
        for steps, count in zip((2, 4), counts, strict=True):
            devices = jax.devices()[:count]
            monkeypatch.setattr(jax, "device_count", lambda count=count: count)
            monkeypatch.setattr(jax, "devices", lambda devices=devices: devices)
            words = [*TINY, f"run_dir={tmp_path / run}", f"steps={steps}"]
            config = load(RunConfig, None, words)
            with run_file.run_from_config(config) as trainer:
                assert trainer.plan.global_batch_size == 24
                assert device_mesh.num_data_shards(trainer.plan.mesh) == count
        lines = (tmp_path / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        return [row["loss"] for row in rows if row["kind"] == "train"]

    same, moved = losses("same", [8, 8]), losses("moved", [8, 6])
    assert len(same) == len(moved) == 4
    assert moved[:2] == same[:2]
    # Sums over 6 shards are rounded otherwise than over 8.
    np.testing.assert_allclose(moved[2:], same[2:], rtol=0, atol=TOLERANCE)
    settings = json.loads((tmp_path / "moved" / "config.json").read_text(encoding="utf-8"))
    assert settings["num_microbatches"] == 2  # 24 rows / 6 devices = 4 = 2 x 2
    assert to_dict(RunConfig())["elasticity"]["enabled"] is False
