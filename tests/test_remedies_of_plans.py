"""What a refusal of a schedule or plan tells to write is written, and is taken.

Each remedy is read from the sentence where it can be, so that another sentence is another deed. No
step is compiled: plans and shapes are enough, and where tokens would be drawn nothing draws them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.remedies import told
from tests.test_remedies_of_options import line, text
from zerojax import models
from zerojax.cli import main
from zerojax.config import OffloadConfig
from zerojax.plan.device_mesh import make_abstract_mesh
from zerojax.plan.leaf_placement import tensor_parallel_axes
from zerojax.plan.offload_tiers import check_durable
from zerojax.plan.pipeline import partition_layers
from zerojax.plan.refusals import check_batch
from zerojax.plan.schedules import (
    Operation,
    Schedule,
    check_schedule,
    count_in_flight,
    make_schedule,
)
from zerojax.plan.schedules.known_schedules import MAX_OPERATIONS, read_csv
from zerojax.plan.schedules.lowering import lower
from zerojax.plan.schedules.simulation import Costs
from zerojax.plan.state import run_key_data

# --- schedules by name ----------------------------------------------------------------------------


def scheduled(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
    return make_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)


NAMED = {
    "a name that is nearly known": (
        ("1flb", 4, 8),
        r"did you mean '(\w+)'\?",
        lambda name: [(name, 4, 8)],
    ),
    "another name": (
        ("xyzzy", 4, 8),
        r"; use (\w+), (\w+), (\w+), (\w+), (\w+) or (\w+)\. A file of one's own ends in \.csv$",
        lambda *names: [(name, 4, 8) for name in names],
    ),
    "chunks said twice": (
        ("interleaved(3)", 4, 8, 2),
        r"; use (\S+) without chunks, or (\w+) with chunks=(\d)$",
        lambda first, second, chunks: [(first, 4, 8), (second, 4, 8, int(chunks))],
    ),
    "chunks of a schedule that has one": (
        ("1f1b", 4, 8, 2),
        r"; use chunks=(\d) or (\S+)$",
        lambda chunks, name: [("1f1b", 4, 8, int(chunks)), (name, 4, 8)],
    ),
    "chunks of a schedule that has two": (
        ("zb_v", 4, 8, 3),
        r"; use chunks=(\d) or (\S+)$",
        lambda chunks, name: [("zb_v", 4, 8, int(chunks)), (name, 4, 8)],
    ),
    "groups of microbatches": (
        ("interleaved", 4, 10),
        r"; use (\d+) or (\d+) microbatches, or (1f1b)$",
        lambda low, high, name: [
            *(("interleaved", 4, int(number)) for number in (low, high)),
            (name, 4, 10),
        ],
    ),
    "fewer microbatches than stages": (
        ("interleaved", 4, 2),
        r"; use (\d) microbatches or (1f1b)$",
        lambda number, name: [("interleaved", 4, int(number)), (name, 4, 2)],
    ),
    "too many stages": (
        ("1f1b", 1000, 1),
        r"the limit is (\d+); use fewer stages$",
        lambda limit: [("1f1b", int(limit), 1)],
    ),
}


@pytest.mark.parametrize("row", NAMED)
def test_schedules_by_name(row):
    given, pattern, then = NAMED[row]
    for numbers in then(*told(lambda: scheduled(*given), pattern)):
        scheduled(*numbers)


@pytest.mark.parametrize(
    ("given", "pattern", "sizes"),
    [
        (("1f1b", 4, 50_000), r"; use at most (\d+) microbatches$", lambda m: (4, m, 1)),
        (("interleaved", 7, 7000), r"; use at most (\d+) microbatches$", lambda m: (7, m, 2)),
        (
            ("interleaved(50000)", 4, 8),
            r"; use (\d+) microbatches and at most (\d+) chunks$",
            lambda m, chunks: (4, m, chunks),
        ),
        (
            ("interleaved(9000)", 250, 250),
            r"; use 1f1b with at most (\d+) mi",
            lambda m: (250, m, 1),
        ),
    ],
)
def test_tables_that_are_too_large(given, pattern, sizes, monkeypatch):
    """The largest table that is named is within the limit, and the next one is not."""
    found = told(lambda: scheduled(*given), pattern)
    stages, microbatches, chunks = sizes(*map(int, found))
    name = "1f1b" if "1f1b" in pattern else given[0].partition("(")[0]
    assert stages * microbatches * chunks <= MAX_OPERATIONS
    more = stages if name == "interleaved" else 1
    assert stages * (microbatches + more) * chunks > MAX_OPERATIONS
    # A table of so many takes seconds; whether it would be refused does not.
    monkeypatch.setattr("zerojax.plan.schedules.known_schedules.check_schedule", lambda it: it)
    for build in ("build_1f1b", "build_interleaved"):
        monkeypatch.setattr(f"zerojax.plan.schedules.known_schedules.{build}", lambda *n: n)
    assert scheduled(name, stages, microbatches, chunks)[:2] == (stages, microbatches)


def test_numbers_of_a_schedule(tmp_path, capsys):
    words = told(
        lambda: make_schedule("1f1b"),
        r", such as (stages=\d) and (microbatches=\d) \((--stages \d --microbatches \d)\)$",
    )
    make_schedule("1f1b", **eval(f"dict({words[0]}, {words[1]})"))
    assert main(["schedule", "1f1b", *words[2].split()]) == 0
    table = scheduled("gpipe", 2, 4)
    for numbers in ({"stages": 3}, {"microbatches": 2}, {"chunks": 2}):
        name, value = told(
            lambda numbers=numbers: make_schedule(table, **numbers), r"; use (\w+)=(\d) or another"
        )
        make_schedule(table, **{name: int(value)})


def test_buffers_and_costs():
    table = scheduled("1f1b", 2, 2)
    for stash in told(lambda: lower(table, stash="inputs"), r"; use (\w+) or (\w+)$"):
        lower(table, stash=stash)
    least, none = told(lambda: lower(table, max_runs=0), r"must be at least (1), or (None)$")
    for runs in (int(least), eval(none)):
        lower(table, max_runs=runs)
    for given in ((0, 0, 0), (-1, 1, 1), (1, math.nan, 1)):
        (numbers,) = told(lambda given=given: Costs(*given), r"; use ([\d,]+)$")
        Costs(*map(float, numbers.split(",")))


# --- tables of one's own --------------------------------------------------------------------------

Cells = dict[tuple[int, int], list[str]]


def cells_of(schedule: Schedule) -> Cells:
    return {
        (tick, stage): [str(operation) for operation in cell]
        for tick, row in enumerate(schedule.table)
        for stage, cell in enumerate(row)
    }


def table_of(cells: Cells, placement: str = "loop") -> Schedule:
    ticks, stages = (1 + max(places) for places in zip(*cells, strict=True))
    rows = [["+".join(cells.get((t, s), [])) for s in range(stages)] for t in range(ticks)]
    return Schedule.from_cells("mine", rows, placement=placement)


PLACE = r"tick (\d+), stage (\d+): "


def obey(sentence: str, cells: Cells, times: dict[str, int]) -> None:
    """Does to a table what a sentence tells; `times` has where what is missing is to go."""
    if found := re.search(rf"{PLACE}(\S+) needs .*; put (\S+) at tick (\d+) or later", sentence):
        tick, stage, operation, same, later = found.groups()
        assert same == operation
        cells[int(tick), int(stage)].remove(operation)
        cells.setdefault((int(later), int(stage)), []).append(operation)
    elif found := re.search(rf"{PLACE}\S+ has 2 .* the (\w) slot.*; move one to another", sentence):
        cell = cells[int(found[1]), int(found[2])]
        one = next(name for name in cell if name[0] == found[3] and times[name] != int(found[1]))
        cell.remove(one)
        cells.setdefault((times[one], int(found[2])), []).append(one)
    elif found := re.search(rf"{PLACE}(\S+) is there twice\b.*, remove one$", sentence):
        cells[int(found[1]), int(found[2])].remove(found[3])
    elif found := re.search(r"stage (\d) never does (\S+): .*; add it$", sentence):
        cells.setdefault((times[found[2]], int(found[1])), []).append(found[2])
    elif found := re.search(r"has no operation; write some, such as (\w+)$", sentence):
        cells[0, 0].append(found[1])
    else:
        raise AssertionError(sentence)


def mended(cells: Cells, times: dict[str, int]) -> tuple[int, Schedule]:
    """(how many sentences were obeyed, the table that runs)."""
    for count in range(8):
        try:
            return count, check_schedule(table_of(cells))
        except ValueError as error:
            obey(str(error), cells, times)
    raise AssertionError(cells)


# 1f1b of two stages and microbatches: F0 . | F1 F0+B0 | B0 F1+B1 | B1 .
ON_STAGE_0 = {"F0": 0, "F1": 1, "B0": 2, "B1": 3}


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({(3, 0): []}, 1),
        ({(2, 0): ["B0", "B1"]}, 2),
        ({(1, 0): [], (0, 0): ["F0", "F1"]}, 1),
        ({(2, 0): ["B1"], (3, 0): ["B0"]}, 2),
        ({(3, 0): [], (1, 0): []}, 2),
    ],
)
def test_a_broken_table_is_mended_as_it_is_told(changes, count):
    whole = scheduled("1f1b", 2, 2)
    assert mended({**cells_of(whole), **changes}, ON_STAGE_0) == (
        count,
        dataclasses.replace(whole, name="mine"),
    )


def test_an_empty_table_is_filled_as_it_is_told():
    _, table = mended({(0, 0): []}, {"B0": 0})
    assert table.num_microbatches == 1


def test_placements_and_memory_of_a_table():
    whole, folded = scheduled("1f1b", 2, 2), scheduled("zb_v", 2, 2)
    given = dataclasses.replace(whole, placement="w")
    loop, v = told(lambda: check_schedule(given), r"; use (\w+) or (\w+)$")
    check_schedule(dataclasses.replace(whole, placement=loop))
    check_schedule(dataclasses.replace(folded, placement=v))
    three = dataclasses.replace(scheduled("interleaved(3)", 2, 2), placement="v")
    (other,) = told(lambda: check_schedule(three), r"; use placement (\w+) for more$")
    check_schedule(dataclasses.replace(three, placement=other))
    # The published 1F1B is the same with the forwards of the first stages later.
    usual, late = scheduled("1f1b", 4, 8), scheduled("1f1b_classic", 4, 8)
    (limit,) = told(
        lambda: check_schedule(usual, max_in_flight=max(count_in_flight(late))),
        r"the limit is (\d); start its forwards later or its backwards earlier$",
    )
    assert late.tick_of["F", 0, 7] > usual.tick_of["F", 0, 7]
    check_schedule(late, max_in_flight=int(limit))
    wrong = Schedule("x", (((Operation("Q", 0),),),))
    kinds = told(lambda: check_schedule(wrong), r"; use (F), (B) or (W)$")
    rows = [["+".join(f"{kind}0" for kind in kinds)]]
    check_schedule(Schedule.from_cells("x", rows))


FILE = "tick,stage 0,stage 1\n0,F0,.\n1,F1,F0+B0\n2,B0,F1+B1\n3,B1,.\n"
FILES: dict[str, tuple[str, str, Callable[..., str]]] = {
    "semicolons": (
        FILE.replace(",", ";"),
        r"; separate columns by (commas)$",
        lambda _: FILE,
    ),
    "a cell that was left out": (
        FILE.replace("3,B1,.", "3,B1"),
        r"; write (\.) for an idle stage$",
        lambda idle: FILE.replace("3,B1,.", f"3,B1,{idle}"),
    ),
    "a tick that was left out": (
        FILE.replace("3,B1", "4,B1"),
        r"where tick (\d) is next; ticks count from 0 without gaps$",
        lambda tick: FILE.replace("3,B1", f"{tick},B1"),
    ),
    "a placement": (
        "# placement: u\n" + FILE,
        r"; use (loop) or v$",
        lambda name: f"# placement: {name}\n{FILE}",
    ),
    "a cell": (
        FILE.replace("F1+B1", "F1,B1").replace("0,F0,.", "0,F0,.,.").replace("3,B1,.", "3,B1,.,."),
        r"columns where the first line has (3)",
        lambda _: FILE,
    ),
    "an operation": (
        FILE.replace("F0+B0", "f0 b0"),
        r"; write F, B or W, the microbatch and, behind a point, the chunk, joined by (\+), such "
        r"as F4\.1\+B0, or \. for idle$",
        lambda plus: FILE.replace("F0+B0", f"F0{plus}B0"),
    ),
}


@pytest.mark.parametrize("row", FILES)
def test_files_of_schedules(row, tmp_path):
    given, pattern, then = FILES[row]
    path = tmp_path / "mine.csv"
    path.write_text(given)
    path.write_text(then(*told(lambda: read_csv(path), pattern)))
    assert read_csv(path).table == scheduled("1f1b", 2, 2).table


@pytest.mark.parametrize("given", [None, "", "tick,stage 0,stage 1\n"])
def test_a_command_writes_a_table_to_begin_with(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if given is not None:
        Path("mine.csv").write_text(given)
    (words,) = told(lambda: read_csv("mine.csv"), r"\(`zerojax (.*)` writes")
    assert main(words.split()) == 0
    assert read_csv("mine.csv").num_stages == 4


@pytest.mark.parametrize("heading", ["", "tick,stage 0,stage 1"])
def test_a_line_for_each_tick(heading, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(heading)
    (first,) = told(lambda: read_csv(path), r"with a cell for each stage, such as (\S+) \(")
    rows = [row if heading else row[2:] for row in FILE.splitlines()[1:]]
    assert rows[0] == first
    path.write_text("\n".join([heading or "# mine", *rows]))
    assert read_csv(path).table == scheduled("1f1b", 2, 2).table


# --- plans ----------------------------------------------------------------------------------------


def test_a_parameter_that_is_not_in_a_plan():
    plan = line()
    (name,) = told(lambda: plan.explain("out/kernl"), r"did you mean '(.*)'\?$")
    assert name in plan.explain(name)
    (table,) = told(lambda: plan.explain("#"), r"; (plan\.table\(\)) lists all$")
    assert name in eval(table, {"plan": plan})


RULE = "out/kernel"


def placed(*axes: str | None, model: int = 2) -> dict[str, Any]:
    return tensor_parallel_axes({RULE: (8, 4)}, {"model": model}, [(RULE, axes)])


def test_rules_of_tensor_parallelism():
    names = told(lambda: placed("data"), r"; use '(\w+)' or (null)$")
    assert [placed(None if n == "null" else n)[RULE] for n in names] == [
        (None, "model"),
        (None, None),
    ]
    told(lambda: placed("model", None, None), r"; give at most one axis per trailing dimension$")
    placed("model", None)
    (size,) = told(
        lambda: placed("model", model=8), r"choose a model size that divides (\d), or change its"
    )
    placed("model", model=int(size))
    placed("model", None, model=8)


@pytest.mark.thorough
def test_a_rule_that_splits_the_layers_of_a_pipeline():
    mesh = {"stage": 2, "model": 2}
    name = "attention/query/kernel"
    rules = lambda *axes: {**mesh, "rules": [[name, list(axes)]]}  # noqa: E731
    (stage,) = told(
        lambda: text(rules("model", None, None, None)),
        r"; give the rule one entry fewer, or use stage=(1)$",
    )
    text(rules(None, "model", None))
    text({**rules("model", None, None, None), "stage": int(stage)})


@pytest.mark.parametrize("metric", ["loss", "memory_mine"])
def test_a_metric_with_a_name_of_every_run(metric):
    def plan(name: str) -> zerojax.Plan:
        def loss(model, batch):
            total = jnp.mean(model(batch["x"]) ** 2)
            return total, {name: total}

        return line_with(loss)

    (name,) = told(lambda: plan(metric), r"; give it another name, such as '(\w+)'$")
    plan(name)


def line_with(loss: Any, rows: int = 48, mesh: Any = None, **options: Any) -> zerojax.Plan:
    batch = {"x": np.zeros((rows, 8), np.float32)}
    factory = lambda rngs: nnx.Linear(8, 4, rngs=rngs)  # noqa: E731
    return zerojax.make_plan(factory, mesh or {}, example_batch=batch, loss=loss, **options)


def test_slices_of_offloaded_state():
    def plan(**sizes: int) -> zerojax.Plan:
        config = models.GPT2Config(
            vocab_size=2048, num_layers=2, num_heads=2, embed_dim=256, max_seq_len=16
        )
        tokens = np.zeros((16, 8), np.int32)
        return zerojax.make_plan(
            lambda rngs: models.GPT2(config, rngs=rngs),
            {"offload": {"opt_state": "host", "min_elements": 1, **sizes}},
            example_batch={"tokens": tokens, "targets": tokens},
        )

    size, usual = told(
        lambda: plan(slice_elements=1),
        r"; use slice_elements=(\d+) or more \(the default is (\d+)\)$",
    )
    for number in (size, usual):
        plan(slice_elements=int(number))


def test_durable_state_of_several_processes():
    config = OffloadConfig(opt_state="nvme", durable=True, folder="files")
    check = lambda processes: check_durable(config, zerojax.Precision(), processes)  # noqa: E731
    (word,) = told(lambda: check(2), r"; use (one) process, or leave durable out: ")
    check({"one": 1}[word])
    config = dataclasses.replace(config, durable=False)
    check(2)


def test_parts_of_a_pipeline():
    split = lambda method, layers=8: partition_layers(method, layers, 4)  # noqa: E731
    (near,) = told(lambda: split("flop"), r"did you mean '(\w+)'\?$")
    *names, _ = told(lambda: split("even"), r"; use (\w+), (\w+), (\w+) or a (list)$")
    for method in (near, *names, [3, 2, 2, 1]):
        assert sum(split(method)) == 8
    (parts,) = told(lambda: split("flops", 3), r"; use at most (\d) parts, or more layers$")
    partition_layers("flops", 3, int(parts))


def test_numbers_of_microbatches_and_rows():
    mesh, batch = line({"data": 8}).mesh, {"x": np.zeros((48, 8), np.float32)}
    (number,) = told(lambda: check_batch(batch, mesh, 0), r"; use (\d) to leave batches whole$")
    check_batch(batch, mesh, int(number))
    loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)  # noqa: E731
    (rows,) = told(lambda: line_with(loss, 4, {"data": 8}), r"= 8; use (\d+) rows$")
    line_with(loss, int(rows), {"data": 8})


def test_shards_that_the_devices_do_not_divide():
    def mesh(devices: int) -> jax.sharding.Mesh:
        return zerojax.make_mesh(zerojax.MeshConfig(data=devices), devices=jax.devices()[:devices])

    plan = lambda devices, shards: zerojax.make_plan(  # noqa: E731
        lambda rngs: nnx.Linear(8, 4, rngs=rngs),
        mesh(devices),
        example_batch={"x": np.zeros((48, 8), np.float32)},
        loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        deterministic="mesh",
        virtual_shards=shards,
    )
    (fewer,) = told(lambda: plan(3, 4), r"; use \d devices \(data=(\d)\)$")
    plan(int(fewer), 4)
    shards, fewer = told(
        lambda: plan(8, 4), r"; use virtual_shards=(\d), or \d devices \(data=(\d)\)$"
    )
    plan(8, int(shards))
    plan(int(fewer), 4)


VALUES = {
    "a number": ("return float(total)", r"leave the array as it is, without float\(\)", "total"),
    "an item": ("return total.item()", r"leave the array as it is, without item\(\)", "total"),
    "NumPy": ("return np.sqrt(total)", r"or use (jax\.numpy)$", "jax.numpy.sqrt(total)"),
    "a choice": (
        "if total > 1: return total",
        r"use (jnp\.where), jax\.lax\.cond or a static argument there$",
        "jnp.where(total > 1, total, 2 * total)",
    ),
}


@pytest.mark.parametrize("row", VALUES)
def test_a_value_where_only_the_shape_is_known(row, tmp_path):
    def loss_of(statement: str) -> Any:
        path = tmp_path / f"loss_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(
            "import jax\nimport jax.numpy as jnp\nimport numpy as np\n"
            "def loss(model, batch):\n    total = jnp.mean(model(batch['x']) ** 2)\n"
            f"    {statement}\n    return 2 * total\n"
        )
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.loss

    given, pattern, then = VALUES[row]
    told(lambda: line_with(loss_of(given)), rf"loss_0\.py:6, `{re.escape(given)}`.*; .*{pattern}")
    line_with(loss_of(f"return {then}"))


def test_seeds():
    least, most = told(lambda: run_key_data(2**70), r"; use (\d+) to (\d+)$")
    for seed in (least, most):
        run_key_data(int(seed))
    (word,) = told(lambda: run_key_data("x"), r"as in seed=(\d)$")
    run_key_data(int(word))


def test_a_state_for_absent_devices():
    abstract = make_abstract_mesh(None, 8)
    (mesh,) = told(
        lambda: zerojax.init_state(line(abstract)), r"; plan with (zerojax\.make_mesh\(\.\.\.\)) to"
    )
    here = eval(mesh.replace("...", ""), {"zerojax": zerojax})
    assert set(zerojax.init_state(line(here))["params"]) == {"out/kernel", "out/bias"}


@pytest.mark.parametrize("axes", [("rows",), ("data", "cols")])
def test_axes_of_a_mesh_of_ones_own(axes):
    here = lambda axes: jax.make_mesh((1,) * len(axes), axes)  # noqa: E731
    absent = lambda axes: jax.sharding.AbstractMesh(  # noqa: E731
        tuple(1 if name in ("stage", "context", "expert") else 2 for name in axes), axes
    )
    for mesh in here, absent:
        (listed,) = told(
            lambda mesh=mesh: line(mesh(axes)), r"is not one of (.*); rename the axes of the mesh$"
        )
        for name in listed.split(", "):
            assert line(mesh((name,))).mesh.shape[name] == mesh((name,)).size


def mean(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]) ** 2)


def test_what_a_loss_returns():
    whole = lambda model, batch: mean(model, batch).astype(int)  # noqa: E731
    told(lambda: line_with(whole), r": compute it without a (cast to integers), an argmax or a com")
    line_with(mean)
    row = lambda model, batch: (mean(model, batch), {"rows": model(batch["x"])[:, 0]})  # noqa: E731
    (call,) = told(lambda: line_with(row), r"that the loss saw, such as x(\.mean\(\)), or a pair")
    line_with(lambda m, b: (mean(m, b), {"rows": eval(f"x{call}", {"x": m(b["x"])[:, 0]})}))
    pair = lambda model, batch: (mean(model, batch), mean(model, batch))  # noqa: E731
    logged, weighed = told(
        lambda: line_with(pair), r"names: return (.*\}). For .* a constant: return (.*\))$"
    )
    for result in (logged, weighed):

        def loss(model, batch, result=result):
            total = mean(model, batch)
            names = {"loss": total, "accuracy": total, "loss_sum": total, "weight": total}
            return eval(result, {**names, "jax": jax})

        line_with(loss)


def test_batches_of_other_rows():
    plan = lambda rows: zerojax.make_plan(  # noqa: E731
        lambda rngs: nnx.Linear(8, 4, rngs=rngs),
        {},
        example_batch={"x": np.zeros((48, 8), np.float32), "y": np.zeros(rows, np.float32)},
        loss=mean,
    )
    (rows,) = told(lambda: plan(40), r"40 rows, others have (\d+); .*: give every leaf the same n")
    plan(int(rows))


def test_names_of_frozen_parameters():
    plan = lambda name: line(freeze=[name])  # noqa: E731
    (name,) = told(
        lambda: plan("out/kernal"), r"\(such as (\S+), out/bias\); the names are listed by"
    )
    assert name == "out/kernel"
    assert plan(name).placement.leaves[name].frozen


def test_a_configuration_of_deepspeed_as_a_mesh():
    config = {"train_batch_size": 16, "gradient_clipping": 1.0}
    batch = {"x": np.zeros((16, 8), np.float32)}
    plan = lambda mesh: zerojax.make_plan(model, mesh, example_batch=batch)  # noqa: E731
    (call,) = told(lambda: plan(config), r"; its plan is (zerojax\.initialize\(.*\)\.plan)$")
    names = {"zerojax": zerojax, "model": model, "config": config, "batch": batch}
    assert isinstance(eval(call, names), zerojax.Plan)


def model(rngs: nnx.Rngs) -> nnx.Module:
    """A factory of a model that brings its loss."""

    class WithLoss(nnx.Linear):
        def loss(self, batch):
            return mean(self, batch)

    return WithLoss(8, 4, rngs=rngs)


def test_axes_that_would_change_the_order_of_sums():
    axis, size = told(
        lambda: text({"data": 4, "model": 2}, deterministic="mesh"),
        r"; use (\w+)=(1), or leave deterministic out$",
    )
    text({"data": 8, axis: int(size)}, deterministic="mesh")
    text({"data": 4, "model": 2})


SIZES = {"vocab_size": 64, "num_layers": 1, "num_heads": 2, "embed_dim": 16, "max_seq_len": 16}


def test_products_of_an_unknown_dtype():
    def config(matmul_dtype: str | None) -> models.GPT2Config:
        return models.GPT2Config(**SIZES, matmul_dtype=matmul_dtype)

    fast, plain = told(lambda: config("fp4"), r"; use ('fp8') for .*, or (None) for products in")
    for name in (fast, plain):
        config(eval(name))


def test_update_in_backward_with_a_loss_scale():
    offload = {"opt_state": "host", "params": "host", "update_in_backward": True}
    plan = lambda precision: text(  # noqa: E731
        {"offload": offload}, precision=precision, optimizer=zerojax.adamw(1e-3, clip_norm=None)
    )
    for name in told(lambda: plan("fp16"), r"; use precision (\w+) or (\w+)$"):
        plan(name)


@pytest.mark.parametrize("given", [[4, 4], [8, 0, 0, 0], [1, 1, 1, 1]])
def test_lists_of_layers(given):
    (rows,) = told(lambda: partition_layers(given, 8, 4), r", such as (\[.*\])$")
    assert sum(partition_layers(json.loads(rows), 8, 4)) == 8


def test_a_schedule_as_its_fields():
    table = scheduled("1f1b", 2, 2)
    told(
        lambda: make_schedule({"name": "x"}),
        r"; it has name, table and placement, as (dataclasses\.asdict) of a Schedule gives them$",
    )
    assert make_schedule(dataclasses.asdict(table)) == table


def test_complex_parameters():
    def plan(kind: Any) -> zerojax.Plan:
        return zerojax.make_plan(
            (lambda key, batch: {"w": jnp.ones(8, kind)}, lambda params, x: x @ params["w"].real),
            {},
            example_batch={"x": np.zeros((16, 8), np.float32)},
            loss=mean,
        )

    (kind,) = told(lambda: plan(jnp.complex64), r"; use (real) parameters$")
    plan({"real": jnp.float32}[kind])


# --- layers of a pipeline -------------------------------------------------------------------------


def layer(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.tanh(x @ kernel)


def in_order(params: Any, x: jax.Array, *, reverse: bool = False) -> jax.Array:
    step = lambda x, kernel: (layer(x, kernel), None)  # noqa: E731
    return jax.lax.scan(step, x, params["layers"], reverse=reverse)[0]


def with_sums(params: Any, x: jax.Array, *, carried: bool) -> jax.Array:
    def step(carry, kernel):
        x, total = carry
        x = layer(x, kernel)
        return (x, total + jnp.sum(x)), None if carried else jnp.sum(x)

    (x, total), sums = jax.lax.scan(step, (x, jnp.float32(0)), params["layers"])
    return x + (total if carried else jnp.sum(sums))


def computed_again(params: Any, x: jax.Array) -> jax.Array:
    step = lambda x, kernel: (jax.checkpoint(layer)(x, kernel), None)  # noqa: E731
    return jax.lax.scan(step, x, params["layers"])[0]


LOOPS: dict[str, tuple[Any, str, Any]] = {
    "backwards": (
        functools.partial(in_order, reverse=True),
        r": stack them in the order in which they run and scan forwards$",
        in_order,
    ),
    "what each layer returns": (
        functools.partial(with_sums, carried=False),
        r": add it up in the carried value instead$",
        functools.partial(with_sums, carried=True),
    ),
    "a loop inside of a function that is computed again": (
        jax.checkpoint(in_order),
        r": run the loop in the loss itself\. To .* put jax\.checkpoint around the layer, inside",
        computed_again,
    ),
    "parameters that are read elsewhere too": (
        lambda params, x: in_order(params, x) + jnp.sum(params["layers"]),
        r": give that other place a parameter of its own$",
        lambda params, x: in_order(params, x) + jnp.sum(params["other"]),
    ),
    "two loops": (
        lambda params, x: in_order({"layers": params["other"]}, in_order(params, x)),
        r"\. Put all layers into one loop, or train without pipeline stages \(stage=1\)$",
        in_order,
    ),
}


@pytest.mark.parametrize("row", LOOPS)
def test_loops_over_layers(row):
    def plan(apply: Any, stage: int = 2) -> zerojax.Plan:
        init = lambda key, batch: {  # noqa: E731
            name: jnp.ones((4, 8, 8)) for name in ("layers", "other")
        }
        batch = {"x": np.zeros((16, 8), np.float32)}
        return zerojax.make_plan(
            (init, apply), {"stage": stage}, example_batch=batch, loss=mean, num_microbatches=2
        )

    given, pattern, then = LOOPS[row]
    told(lambda: plan(given), f"({pattern})")
    assert plan(then).pipeline is not None
    plan(given, stage=1)


def test_a_sum_over_rows():
    losses = lambda model, batch: jnp.sum(model(batch["x"]) ** 2, axis=-1)  # noqa: E731
    (pair,) = told(
        lambda: line_with(lambda *given: jnp.sum(losses(*given))),
        r"Return the mean over the rows, or the sum and .* by: return (.*)\. zerojax\.check names",
    )
    line_with(lambda *given: jnp.mean(losses(*given)))
    line_with(lambda *given: eval(pair, {"jnp": jnp, "losses": losses(*given)}))


def test_a_loss_of_a_model_from_outside():
    outside = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    told(
        lambda: line_with(lambda model, batch: mean(outside, batch)),
        r"has to call the model that it is given, not one from outside$",
    )
    line_with(lambda model, batch: mean(model, batch))
