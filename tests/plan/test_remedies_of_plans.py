"""Refusals of schedules and plans. No step is compiled: plans and shapes are enough."""

import dataclasses
import functools
import importlib.util
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.config.test_remedies_of_options import line, mean, text
from tests.support.refusals import Refusal, code_in, refused, table
from zerojax import zoo
from zerojax.cli import main
from zerojax.pipeline.planning import partition_layers
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.placement.leaf_placement import tensor_parallel_axes
from zerojax.plan.refusals import check_batch
from zerojax.schedules import Operation, Schedule, check_schedule, count_in_flight, make_schedule
from zerojax.schedules.known_schedules import MAX_OPERATIONS, read_csv
from zerojax.schedules.lowering import lower
from zerojax.schedules.simulation import Costs

wrong_type = functools.partial(refused, error=TypeError)

# --- schedules by name ----------------------------------------------------------------------------


def scheduled(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
    return make_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)


def by_words(words: str) -> Schedule:
    """NAME STAGES MICROBATCHES CHUNKS."""
    name, *numbers = words.split()
    return scheduled(name, *map(int, numbers))


NAMED = table(
    """
1flb 4 8 | 1flb | 1f1b | $ 4 8
xyzzy 4 8 | xyzzy | 1f1b gpipe interleaved zb_h1 zb_v 1f1b_classic | $ 4 8
interleaved(3) 4 8 2 | interleaved(3) chunks=2 | interleaved(3) interleaved
  | interleaved(3) 4 8 ; interleaved 4 8 2
1f1b 4 8 2 | chunks=2 1f1b | chunks=1 interleaved(2) | 1f1b 4 8 1 ; interleaved(2) 4 8
zb_v 4 8 3 | chunks=3 zb_v | chunks=2 interleaved(3) | zb_v 4 8 2 ; interleaved(3) 4 8
interleaved 4 10 | microbatches=10 4 | 8 12 1f1b
  | interleaved 4 8 ; interleaved 4 12 ; 1f1b 4 10
interleaved 4 2 | microbatches=2 4 | 4 1f1b | interleaved 4 4 ; 1f1b 4 2
1f1b 1000 1 | stages=1000 | 256 | 1f1b $ 1
1f1b 0 8 | stages=0 | 1 | 1f1b $ 8
1f1b 4 0 | microbatches=0 | 1 | 1f1b 4 $
interleaved 4 8 1 | 1 | interleaved(2) 1f1b | $ 4 8
"""
)


@pytest.mark.parametrize("row", NAMED)
def test_schedules_by_name(row):
    NAMED[row].check(by_words)


@pytest.mark.parametrize(
    ("bad", "value", "remedy", "good"),
    [
        ("1f1b 4 50000", "4 50000 200,000", "12500", ("1f1b", 4, 12500, 1)),
        ("interleaved 7 7000", "7 7000 2 98,000", "3570", ("interleaved", 7, 3570, 2)),
        ("interleaved(50000) 4 8", "4 8 50000 1,600,000", "4 3125", ("interleaved", 4, 4, 3125)),
        ("interleaved(9000) 250 250", "250 9000", "1f1b 200", ("1f1b", 250, 200, 1)),
    ],
)
def test_tables_that_are_too_large(bad, value, remedy, good, monkeypatch):
    """The largest table that is named is within the limit, and the next one is not."""
    refused(lambda: by_words(bad), [*value.split(), f"{MAX_OPERATIONS:,}"], remedy)
    name, stages, microbatches, chunks = good
    assert stages * microbatches * chunks <= MAX_OPERATIONS
    more = stages if name == "interleaved" else 1
    assert stages * (microbatches + more) * chunks > MAX_OPERATIONS
    # A table of so many takes seconds; whether it would be refused does not.
    monkeypatch.setattr("zerojax.schedules.known_schedules.check_schedule", lambda it: it)
    for build in ("build_1f1b", "build_interleaved"):
        monkeypatch.setattr(f"zerojax.schedules.known_schedules.{build}", lambda *n: n)
    assert scheduled(*good)[:2] == (stages, microbatches)


def test_numbers_of_a_schedule():
    command = "--stages 4 --microbatches 8"
    refused(lambda: make_schedule("1f1b"), "1f1b", ["stages=4", "microbatches=8", command])
    make_schedule("1f1b", stages=4, microbatches=8)
    assert main(["schedule", "1f1b", *command.split()]) == 0
    whole = scheduled("gpipe", 2, 4)
    again = lambda numbers: make_schedule(whole, **numbers)  # noqa: E731
    for name, bad, good in (("stages", 3, 2), ("microbatches", 2, 4), ("chunks", 2, 1)):
        value = f"{name}={bad} gpipe"
        Refusal({name: bad}, value, f"{name}={good}", [{name: good}]).check(again)


def test_buffers_and_costs():
    lowered = lambda options: lower(scheduled("1f1b", 2, 2), **options)  # noqa: E731
    good = [{"stash": "residuals"}, {"stash": "input"}]
    Refusal({"stash": "inputs"}, "stash='inputs'", "residuals input", good).check(lowered)
    good = [{"max_runs": 1}, {"max_runs": None}]
    Refusal({"max_runs": 0}, "max_runs=0", "1 None", good).check(lowered)
    costs = [((0, 0, 0), "0,0,0"), ((-1, 1, 1), "forward=-1"), ((1, math.nan, 1), "backward=nan")]
    for bad, value in costs:
        Refusal(bad, value, "1,1,1", [(1, 1, 1)]).check(lambda given: Costs(*given))


# --- tables of one's own --------------------------------------------------------------------------

Cells = dict[tuple[int, int], list[str]]


def table_of(cells: Cells) -> Schedule:
    ticks, stages = (1 + max(places) for places in zip(*cells, strict=True))
    rows = [["+".join(cells.get((t, s), [])) for s in range(stages)] for t in range(ticks)]
    return Schedule.from_cells("mine", rows, placement="loop")


# 1f1b of two stages and microbatches, by (tick, stage).
WHOLE = {
    (0, 0): ["F0"],
    (1, 0): ["F1"],
    (1, 1): ["F0", "B0"],
    (2, 0): ["B0"],
    (2, 1): ["F1", "B1"],
    (3, 0): ["B1"],
    (3, 1): [],
}
MISSING_B1 = ({(3, 0): []}, '"stage 0" B1')
TWO_AT_3 = ({(2, 0): [], (3, 0): ["B0", "B1"]}, '"tick 3" "stage 0" B0+B1 2')
BROKEN = {
    # what is changed, and what is said of it, until the table is whole
    "one is missing": [MISSING_B1],
    "two are missing": [({(3, 0): [], (1, 0): []}, '"stage 0" F1'), MISSING_B1],
    "one twice": [
        ({(2, 0): ["B0", "B1"]}, '"tick 2" "stage 0" B0+B1 2'),
        ({(2, 0): ["B0"], (3, 0): ["B1", "B1"]}, '"tick 3" "stage 0" B1 twice'),
    ],
    "two at one tick": [({(1, 0): [], (0, 0): ["F0", "F1"]}, '"tick 0" "stage 0" F0+F1 2')],
    "too early": [
        ({(2, 0): ["B1"], (3, 0): ["B0"]}, '"tick 2" "stage 0" B1 "stage 1" "tick 3"'),
        TWO_AT_3,
    ],
}


@pytest.mark.parametrize("row", BROKEN)
def test_a_broken_table_is_mended_as_it_is_told(row):
    for changes, words in BROKEN[row]:
        refused(lambda changes=changes: check_schedule(table_of(WHOLE | changes)), words)
    mended = check_schedule(table_of(WHOLE))
    assert mended == dataclasses.replace(scheduled("1f1b", 2, 2), name="mine")


def test_an_empty_table_is_filled_as_it_is_told():
    cells: Cells = {(0, 0): []}
    for added in ("F0", "B0"):
        refused(lambda: check_schedule(table_of(cells)), "", [added])
        cells[0, 0].append(added)
    assert check_schedule(table_of(cells)).num_microbatches == 1


def test_placements_and_memory_of_a_table():
    whole, folded = scheduled("1f1b", 2, 2), scheduled("zb_v", 2, 2)
    bad = dataclasses.replace(whole, placement="w")
    good = [dataclasses.replace(whole, placement="loop"), folded]
    Refusal(bad, "w", "loop v", good).check(check_schedule)
    three = scheduled("interleaved(3)", 2, 2)
    bad = dataclasses.replace(three, placement="v")
    Refusal(bad, '"stage 0" "chunk 2" v', "loop", [three]).check(check_schedule)
    # The published 1F1B is the same with the forwards of the first stages later.
    usual, late = scheduled("1f1b", 4, 8), scheduled("1f1b_classic", 4, 8)
    assert late.tick_of["F", 0, 7] > usual.tick_of["F", 0, 7]
    limited = functools.partial(check_schedule, max_in_flight=max(count_in_flight(late)))
    Refusal(usual, '"stage 0" 7', "4 forwards later", [late]).check(limited)
    bad = Schedule("x", (((Operation("Q", 0),),),))
    good = [Schedule.from_cells("x", [["F0+B0+W0"]])]
    Refusal(bad, '"tick 0" "stage 0" Q', "F B W", good).check(check_schedule)
    bad = Schedule("x", (((Operation("F", -1),),),))
    Refusal(bad, '"tick 0" "stage 0"', "0 negative", good).check(check_schedule)


FILE = "tick,stage 0,stage 1\n0,F0,.\n1,F1,F0+B0\n2,B0,F1+B1\n3,B1,.\n"
SEPARATED = FILE.replace("F1+B1", "F1,B1").replace("F0,.", "F0,.,.").replace("B1,.", "B1,.,.")
COMMAND = "zerojax schedule 1f1b --stages 4 --microbatches 8 --csv mine.csv"
FILES = {
    # the file, line and value, remedy
    "semicolons": (FILE.replace(",", ";"), 'mine.csv:1 "tick;stage 0;stage 1"', "commas"),
    "a cell that was left out": (FILE.replace("3,B1,.", "3,B1"), "mine.csv:5 2", "3 ."),
    "a tick that was left out": (FILE.replace("3,B1", "4,B1"), "mine.csv:5 4", "3"),
    "a placement": ("# placement: u\n" + FILE, "mine.csv:1 u", "loop v"),
    "a cell": (SEPARATED, "mine.csv:2 4", "3"),
    "an operation": (FILE.replace("F0+B0", "f0 b0"), 'mine.csv:3 "f0 b0"', "F B W + F4.1+B0 ."),
}


@pytest.mark.parametrize("row", FILES)
def test_files_of_schedules(row, tmp_path):
    path = tmp_path / "mine.csv"

    def take(text: str) -> None:
        path.write_text(text)
        assert read_csv(path).table == scheduled("1f1b", 2, 2).table

    Refusal(*FILES[row], [FILE]).check(take)
    take("# placement: loop\n" + FILE)


def test_a_schedule_that_is_no_text(tmp_path):
    (tmp_path / "mine.csv").write_bytes(b"\xff" + FILE.encode())
    read = lambda: read_csv(tmp_path / "mine.csv")  # noqa: E731
    refused(read, "mine.csv 0", "table")
    (tmp_path / "mine.csv").write_text(FILE)
    assert read().num_stages == 2


def test_tables_with_gaps_and_operations_that_run_twice():
    table = list(scheduled("1f1b", 2, 2).table)
    make = lambda table: check_schedule(Schedule("mine", tuple(table)))  # noqa: E731
    Refusal([], "'mine' empty", "row", [table]).check(make)
    Refusal([*table[:-1], table[-1][:1]], [len(table) - 1, 1, 2], ".", [table]).check(make)
    Refusal([*table, table[0]], [len(table), 0], "remove", [table]).check(make)


@pytest.mark.parametrize("heading", [None, "", "tick,stage 0,stage 1\n"])
def test_a_table_to_begin_with(heading, tmp_path, monkeypatch):
    """A command writes one; or a file has a line for each tick."""
    monkeypatch.chdir(tmp_path)
    path, example = Path("mine.csv"), []
    if heading is not None:
        path.write_text(heading)
        rows = [row if heading else row[2:] for row in FILE.splitlines()[1:]]
        example = [rows[0]]
    refused(lambda: read_csv("mine.csv"), "mine.csv", [COMMAND, *example])
    assert main(COMMAND.split()[1:]) == 0
    assert read_csv("mine.csv").num_stages == 4
    if heading is not None:
        path.write_text("\n".join([heading.strip() or "# mine", *rows]))
        assert read_csv(path).table == scheduled("1f1b", 2, 2).table


def test_a_schedule_as_its_fields():
    whole = scheduled("1f1b", 2, 2)
    remedy = "name table placement dataclasses.asdict"
    Refusal({"name": "x"}, "name", remedy, [dataclasses.asdict(whole)]).check(make_schedule)
    assert make_schedule(dataclasses.asdict(whole)) == whole


# --- plans ----------------------------------------------------------------------------------------


def line_with(loss: Any = mean, rows: int = 48, mesh: Any = None, **options: Any) -> zerojax.Plan:
    batch = options.pop("batch", {"x": np.zeros((rows, 8), np.float32)})
    factory = lambda rngs: nnx.Linear(8, 4, rngs=rngs)  # noqa: E731
    return zerojax.make_plan(factory, mesh or {}, example_batch=batch, loss=loss, **options)


def test_a_parameter_that_is_not_in_a_plan():
    plan = line()
    refused(lambda: plan.explain("out/kernl"), "out/kernl", "out/kernel")
    assert "out/kernel" in plan.explain("out/kernel")
    refused(lambda: plan.explain("#"), "#", "plan.table()")
    assert "out/kernel" in plan.table()


RULE = "out/kernel"


def placed(axes: Any, model: int = 2) -> Any:
    return tensor_parallel_axes({RULE: (8, 4)}, {"model": model}, [(RULE, axes)])[RULE]


def test_rules_of_tensor_parallelism():
    refused(lambda: placed(["data"]), "out/kernel data", "'model' null")
    assert [placed([axis]) for axis in ("model", None)] == [(None, "model"), (None, None)]
    good = [["model", None]]
    Refusal(["model", None, None], '3 2 "[8, 4]"', "trailing", good).check(placed)
    eight = lambda axes: placed(axes, 8)  # noqa: E731
    Refusal(["model"], "out/kernel model=8", "4", [["model", None]]).check(eight)
    placed(["model"], 4)


@pytest.mark.thorough
def test_a_rule_that_splits_the_layers_of_a_pipeline():
    name = "attention/query/kernel"
    rules = lambda stage, *axes: {"stage": stage, "model": 2, "rules": [[name, axes]]}  # noqa: E731
    bad, good = rules(2, "model", None, None, None), rules(2, None, "model", None)
    Refusal(bad, [f"blocks/{name}", "model"], "stage=1", [good, {**bad, "stage": 1}]).check(text)


@pytest.mark.parametrize("metric", ["loss", "memory_mine"])
def test_a_metric_with_a_name_of_every_run(metric):
    def plan(name: str) -> zerojax.Plan:
        return line_with(lambda model, batch: (mean(model, batch), {name: mean(model, batch)}))

    Refusal(metric, metric, f"my_{metric}", [f"my_{metric}"]).check(plan)


def test_slices_of_offloaded_state():
    def plan(size: int) -> zerojax.Plan:
        config = zoo.GPT2Config(
            vocab_size=2048, num_layers=2, num_heads=2, embed_dim=256, max_seq_len=16
        )
        tokens = np.zeros((16, 8), np.int32)
        return zerojax.make_plan(
            lambda rngs: zoo.GPT2(config, rngs=rngs),
            {"offload": {"opt_state": "host", "min_elements": 1, "slice_elements": size}},
            example_batch={"tokens": tokens, "targets": tokens},
        )

    value, remedy = "slice_elements=1 263,552 65,536", "slice_elements=8 16777216"
    Refusal(1, value, remedy, [8, 16777216]).check(plan)


def test_parts_of_a_pipeline():
    split = lambda method: partition_layers(method, 8, 4)  # noqa: E731
    Refusal("flop", "partition='flop'", "flops", ["flops"]).check(split)
    good = ["uniform", "parameters", "flops", [3, 2, 2, 1]]
    Refusal("even", "partition='even'", "uniform parameters flops list", good).check(split)
    few = lambda parts: partition_layers("flops", 3, parts)  # noqa: E731
    Refusal(4, "4 3", "3", [3]).check(few)
    given = lambda given: partition_layers(given[0], 10, given[1])  # noqa: E731
    good = [("uniform", 2), ("uniform", 5), ("flops", 4), ([3, 3, 2, 2], 4)]
    Refusal(("uniform", 4), "10 4", ["2", "5", 'partition="flops"', [3, 3, 2, 2]], good).check(
        given
    )
    for bad in ([4, 4], [8, 0, 0, 0], [1, 1, 1, 1]):
        Refusal(bad, [bad], '"[2, 2, 2, 2]"', [[2, 2, 2, 2]]).check(split)


def test_numbers_of_microbatches_and_rows():
    mesh, batch = line({"data": 8}).mesh, {"x": np.zeros((48, 8), np.float32)}
    check = lambda number: check_batch(batch, mesh, number)  # noqa: E731
    Refusal(0, "num_microbatches=0", "1", [1]).check(check)
    made = lambda rows: line_with(rows=rows, mesh={"data": 8})  # noqa: E731
    Refusal(4, "4 8", "8", [8]).check(made)


def test_shards_that_the_devices_do_not_divide():
    def plan(sizes: tuple[int, int]) -> zerojax.Plan:
        devices, shards = sizes
        config = zerojax.MeshConfig(data=devices)
        mesh = zerojax.make_mesh(config, devices=jax.devices()[:devices])
        return line_with(mesh=mesh, deterministic="mesh", virtual_shards=shards)

    Refusal((3, 4), "data=3 virtual_shards=4", "data=2", [(2, 4)]).check(plan)
    remedy = "virtual_shards=8 data=4"
    Refusal((8, 4), "data=8 virtual_shards=4", remedy, [(8, 8), (4, 4)]).check(plan)


VALUES = {
    # what is in line 6 of a file; the remedy; the expression that it makes of it
    "return float(total)": ("float() jax.numpy", "total"),
    "return total.item()": ("item() jax.numpy", "total"),
    "return np.sqrt(total)": ("jax.numpy", "jax.numpy.sqrt(total)"),
    "if total > 1: return total": (
        "jnp.where jax.lax.cond",
        "jnp.where(total > 1, total, 2 * total)",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("statement", VALUES)
def test_a_value_where_only_the_shape_is_known(statement, tmp_path):
    def plan(statement: str) -> Any:
        path = tmp_path / f"loss_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(
            "import jax\nimport jax.numpy as jnp\nimport numpy as np\n"
            "def loss(model, batch):\n    total = jnp.mean(model(batch['x']) ** 2)\n"
            f"    {statement}\n    return 2 * total\n"
        )
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return line_with(module.loss)

    remedy, good = VALUES[statement]
    value = ["loss_0.py:6", statement]
    Refusal(statement, value, remedy, [f"return {good}"], TypeError).check(plan)


def test_a_state_for_absent_devices():
    plan = line(make_abstract_mesh(None, 8))
    refused(lambda: zerojax.init_state(plan), "abstract devices", "zerojax.make_mesh(...)")
    here = line(zerojax.make_mesh())
    assert set(zerojax.init_state(here)["params"]) == {"out/kernel", "out/bias"}


@pytest.mark.parametrize("axes", [("rows",), ("data", "cols")])
def test_axes_of_a_mesh_of_ones_own(axes):
    known = ["replica", "data", "expert", "context", "stage", "model"]
    here = lambda axes: jax.make_mesh((1,) * len(axes), axes)  # noqa: E731
    absent = lambda axes: jax.sharding.AbstractMesh(  # noqa: E731
        tuple(1 if name in ("stage", "context", "expert") else 2 for name in axes), axes
    )
    for mesh in here, absent:
        refused(lambda mesh=mesh: line(mesh(axes)), [axes[-1]], [*known, "rename"])
        for name in known:
            assert line(mesh((name,))).mesh.shape[name] == mesh((name,)).size


def test_what_a_loss_returns():
    cast = lambda model, batch: mean(model, batch).astype(int)  # noqa: E731
    Refusal(cast, "int32", "cast", [mean]).check(line_with)
    row = lambda model, batch: (mean(model, batch), {"rows": model(batch["x"])[:, 0]})  # noqa: E731
    one = lambda m, batch: (mean(m, batch), {"rows": m(batch["x"])[:, 0].mean()})  # noqa: E731
    Refusal(row, "float32[6] rows", "x.mean()", [one]).check(line_with)
    pair = lambda model, batch: (mean(model, batch), mean(model, batch))  # noqa: E731
    message = refused(lambda: line_with(pair), "bias weight", "has_aux=True")
    for start in ("loss, {", "loss_sum, jax"):
        written = code_in(message, start)

        def loss(model, batch, written=written):
            total, sizes = mean(model, batch), jnp.abs(model(batch["x"])).sum()
            names = {"loss": total, "accuracy": total, "loss_sum": sizes, "weight": sizes}
            return eval(written, {**names, "jax": jax})

        line_with(loss)


def test_a_sum_over_rows():
    losses = lambda model, batch: jnp.sum(model(batch["x"]) ** 2, axis=-1)  # noqa: E731
    bad = lambda *given: jnp.sum(losses(*given))  # noqa: E731
    good = [
        lambda *given: jnp.mean(losses(*given)),
        lambda *given: (jnp.sum(losses(*given)), losses(*given).size),
    ]
    remedy = 'mean "jnp.sum(losses), losses.size" zerojax.check'
    Refusal(bad, "sum 8 6", remedy, good).check(line_with)


def test_a_loss_of_a_model_from_outside():
    outside = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    bad = lambda model, batch: mean(outside, batch)  # noqa: E731
    Refusal(bad, "2 bias", '"loss(model, batch)"', [mean]).check(line_with)


def test_batches_of_other_rows():
    plan = lambda rows: line_with(  # noqa: E731
        batch={"x": np.zeros((48, 8), np.float32), "y": np.zeros(rows, np.float32)}
    )
    Refusal(40, "y 40", "48", [48]).check(plan)


def test_names_of_frozen_parameters():
    plan = lambda name: line(freeze=[name])  # noqa: E731
    refused(lambda: plan("out/kernal"), "freeze out/kernal", "out/kernel out/bias plan.table()")
    assert plan("out/kernel").placement.leaves["out/kernel"].frozen


def with_loss(rngs: nnx.Rngs) -> nnx.Module:
    """A factory of a model that brings its loss."""

    class WithLoss(nnx.Linear):
        def loss(self, batch):
            return mean(self, batch)

    return WithLoss(8, 4, rngs=rngs)


def test_a_configuration_of_deepspeed_as_a_mesh():
    config = {"train_batch_size": 16, "gradient_clipping": 1.0}
    batch = {"x": np.zeros((16, 8), np.float32)}
    plan = lambda: zerojax.make_plan(with_loss, config, example_batch=batch)  # noqa: E731
    message = wrong_type(plan, "mesh DeepSpeed", "zerojax.train")
    names = {"zerojax": zerojax, "model": with_loss, "config": config, "batch": batch}
    assert isinstance(eval(code_in(message, "zerojax.initialize("), names), zerojax.Plan)


def test_axes_that_would_change_the_order_of_sums():
    plan = lambda given: text(given[0], **given[1])  # noqa: E731
    fixed = {"deterministic": "mesh"}
    good = [({"data": 8, "model": 1}, fixed), ({"data": 4, "model": 2}, {})]
    value = "deterministic='mesh' model=2"
    Refusal(({"data": 4, "model": 2}, fixed), value, "model=1", good).check(plan)


def test_products_of_an_unknown_dtype():
    sizes = {"vocab_size": 64, "num_layers": 1, "num_heads": 2, "embed_dim": 16, "max_seq_len": 16}
    config = lambda dtype: zoo.GPT2Config(**sizes, matmul_dtype=dtype)  # noqa: E731
    Refusal("fp4", "matmul_dtype='fp4'", "'fp8' None", ["fp8", None]).check(config)


def test_complex_parameters():
    def plan(kind: Any) -> zerojax.Plan:
        init = lambda key, batch: {"w": jnp.ones(8, kind)}  # noqa: E731
        apply = lambda params, x: x @ params["w"].real  # noqa: E731
        batch = {"x": np.zeros((16, 8), np.float32)}
        return zerojax.make_plan((init, apply), {}, example_batch=batch, loss=mean)

    Refusal(jnp.complex64, "w complex64", "real", [jnp.float32]).check(plan)


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


LOOPS = {
    "backwards": Refusal(
        functools.partial(in_order, reverse=True), "4 layers reverse=True", "forwards", [in_order]
    ),
    "what each layer returns": Refusal(
        functools.partial(with_sums, carried=False),
        "4 layers jax.lax.scan",
        "carried",
        [functools.partial(with_sums, carried=True)],
    ),
    "a loop inside of a function that is computed again": Refusal(
        jax.checkpoint(in_order), "4 layers remat2", "jax.checkpoint inside", [computed_again]
    ),
    "parameters that are read elsewhere too": Refusal(
        lambda params, x: in_order(params, x) + jnp.sum(params["layers"]),
        "4 layers reduce_sum",
        "own",
        [lambda params, x: in_order(params, x) + jnp.sum(params["other"])],
    ),
    "two loops": Refusal(
        lambda params, x: in_order({"layers": params["other"]}, in_order(params, x)),
        "2 4 layers other",
        "one stage=1",
        [in_order],
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", LOOPS)
def test_loops_over_layers(row):
    def plan(apply: Any, stage: int = 2) -> zerojax.Plan:
        layers = jnp.ones((4, 8, 8))
        init = lambda key, batch: {"layers": layers, "other": layers}  # noqa: E731
        return zerojax.make_plan(
            (init, apply),
            {"stage": stage},
            example_batch={"x": np.zeros((16, 8), np.float32)},
            loss=mean,
            num_microbatches=2,
        )

    LOOPS[row].check(plan)
    assert plan(*LOOPS[row].good).pipeline is not None
    plan(LOOPS[row].bad, stage=1)
