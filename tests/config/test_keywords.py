"""A misspelt keyword of a public function is answered with the nearest, whoever is called."""

from __future__ import annotations

import inspect
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax import config

RESULTS = {"ElasticBatch", "Engine", "LoadedRun", "Plan", "Pretrained", "RuleProposal"}
RESULTS |= {"Trainer", "TrainState"}
"""What other public functions make."""
OTHER_WORDS = {"Stages", "from_hugging_face"}
"""Flax's module class calls `__init__`; the other takes the settings of any architecture."""


def with_keywords():
    """(name, callable, its keywords) of everything public that a user calls with keywords."""
    for module in (zerojax, config):
        for name in module.__all__:
            value = getattr(module, name)
            is_error = isinstance(value, type) and issubclass(value, BaseException)
            if not callable(value) or is_error or name in RESULTS | OTHER_WORDS:
                continue
            parameters = inspect.signature(value).parameters.values()
            keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
            if keywords:
                yield pytest.param(value, keywords[-1], id=f"{module.__name__}.{name}")


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("function", "keyword"), [*with_keywords()])
def test_the_nearest_keyword_is_named(function, keyword):
    wrong = f"{keyword}x"
    message = rf"{function.__name__} has no keyword '{wrong}'; did you mean '{keyword}'\?"
    with pytest.raises(TypeError, match=message):
        function(**{wrong: 1})


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ("zero", r"a field of the mesh: zerojax.train\(model, \{'zero': ...\}, ...\)"),
        ("learning_rate", r"optimizer=zerojax.OptimizerConfig\(learning_rate=...\)"),
        ("lr", r"optimizer=zerojax.OptimizerConfig\(learning_rate=...\)"),
        ("epochs", "steps=..."),
        ("batch_size", "global_batch_size=..."),
        ("qqq", "it has model, mesh_config, batches"),
    ],
)
def test_a_keyword_of_another_place_names_the_place(keyword, words):
    with pytest.raises(TypeError, match=f"train has no keyword '{keyword}'; .*{words}"):
        zerojax.train(None, **{keyword: 3})


def test_signatures_and_copies_stay():
    assert [*inspect.signature(zerojax.make_mesh).parameters] == ["config", "devices"]
    assert inspect.signature(config.MeshConfig).parameters["zero"].default == 1
    assert inspect.isfunction(zerojax.train)


def test_numbers_that_yaml_1_1_reads_as_text_are_numbers(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("optimizer:\n  learning_rate: 1e-3\nmesh:\n  reduce_bucket_size: 5e8\n")
    found = config.load(config.RunConfig, file, ["allgather_bucket_size=2.5e7", "beta2=9e-1"])
    assert (found.optimizer.learning_rate, found.optimizer.beta2) == (1e-3, 0.9)
    assert found.mesh.reduce_bucket_size == 500_000_000
    assert found.mesh.allgather_bucket_size == 25_000_000
    file.write_text('mesh:\n  zero: "3"\n')
    with pytest.raises(config.ConfigError, match=r"mesh.zero: '3' is a string; use 3 \(.*:2\)"):
        config.load(config.RunConfig, file)


BLAMED = [
    (["num_microbatches=3"], r"global_batch_size: 32 .*\(command line: num_microbatches=3\)"),
    (["max_seq_len=8", "seed=1"], r"seq_len: .*\(command line: max_seq_len=8\)"),
    (["mesh={zero: 9}"], r"mesh.zero=9 is not valid.*\(command line\)"),
    (["mesh={reduce_bucket_size: 1}", "seed=-1"], r"seed: -1 .*\(command line\)"),
    (["zero"], r"'zero' is not KEY=VALUE.*\(command line\)"),
    (["zeroo=1"], r"did you mean 'mesh.zero'.*\(command line\)"),
]


@pytest.mark.parametrize(("overrides", "words"), BLAMED)
def test_the_command_line_is_blamed_for_what_it_says(overrides, words, tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("mesh:\n  zero: 2\ndata:\n  seq_len: 64\nglobal_batch_size: 32\n")
    with pytest.raises(config.ConfigError, match=words):
        config.load(config.RunConfig, file, overrides)


def test_the_file_is_blamed_for_its_own(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("mesh:\n  zero: 7\n")
    with pytest.raises(config.ConfigError, match=r"mesh.zero=7 .*x.yaml:2"):
        config.load(config.RunConfig, file, ["seed=1", "mesh={data: 2}"])


@pytest.mark.thorough
def test_the_remedy_for_too_small_a_mesh_trains():
    with pytest.raises(ValueError, match=r"needs 3 devices, but found 8") as error:
        zerojax.make_mesh({"data": 3})
    code = re.search(r"zerojax\.make_mesh\(.*\)", str(error.value))
    assert code
    mesh = eval(code[0], {"zerojax": zerojax, "jax": jax})
    rows = [{"x": np.ones((6, 4), np.float32)}]
    trainer = zerojax.train(
        lambda rngs: nnx.Linear(4, 4, rngs=rngs),
        mesh,
        rows,
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        steps=1,
        run_dir=None,
    )
    assert trainer.plan.mesh.shape["data"] == 3
    with pytest.raises(ValueError, match=r"make_plan takes zero=3 beside it"):
        zerojax.make_mesh(zerojax.MeshConfig(data=3, zero=3))
    for make in (zerojax.make_mesh, zerojax.make_abstract_mesh):
        with pytest.raises(ValueError, match=r"zero=3: a mesh has axes .* give make_plan zero="):
            make({"data": 8, "zero": 3})
