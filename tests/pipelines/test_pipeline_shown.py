"""What a pipeline costs and how that is shown, against numbers counted by hand."""

import dataclasses
import json

import pytest

from tests.support.pipelines import layout_of, plan_of
from zerojax.pipeline import pipeline_costs as costs
from zerojax.pipeline.pipeline_page import pipeline_dict, pipeline_lines
from zerojax.plan.counts import role_bytes, whole_elements
from zerojax.schedules import Schedule, simulate
from zerojax.schedules.drawing import ELLIPSIS, SHORT_ROWS, WIDTH, draw, draw_short
from zerojax.schedules.simulation import bubble_formula

SIZES = [(2, 2), (2, 8), (4, 4), (4, 16)]
NAMES = ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_the_bubble_of_the_runs_is_that_of_the_papers(name, stages, microbatches):
    layout = layout_of(name, stages=stages, microbatches=microbatches)
    chunks = layout.schedule.num_chunks
    times = costs.slot_costs(layout)
    expected = bubble_formula(
        name, stages=stages, microbatches=microbatches, chunks=chunks, costs=times
    )
    if name == "zb_v" and (stages, microbatches) == (4, 16):
        # Its slots change more often than there may be runs: joined ones work in masked slots.
        assert expected < costs.bubble(layout) < expected + 0.1
    else:
        assert costs.bubble(layout) == pytest.approx(expected, abs=1e-12)
    assert costs.field_bubble(layout) == simulate(layout.schedule, times).asynchronous_bubble


def test_a_forward_that_is_computed_again_is_part_of_the_backward_slot():
    whole, again = layout_of("1f1b"), layout_of("1f1b", stash="input")
    assert [costs.slot_costs(x).of(x.schedule)["B"] for x in (whole, again)] == [2, 3]
    split = layout_of("zb_h1", stash="input")
    assert costs.slot_costs(split).of(split.schedule) == {"F": 1, "B": 2, "W": 3}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_what_a_device_computes_for_nothing_is_the_bubble(name, stages, microbatches):
    layout = layout_of(name, stages=stages, microbatches=microbatches, layer_flops=10.0)
    share = costs.useful_flops(layout) / costs.executed_flops(layout)
    assert share == pytest.approx(1 - costs.bubble(layout))


def test_embedding_head_and_padding_are_in_what_a_device_computes():
    # p=2, m=4: ticks 0 (F), 1 to 4 (F and B), 5 (B).
    layout = layout_of(
        stages=2, microbatches=4, layers=(3, 1), layer_flops=10.0, embed_flops=1.0, head_flops=5.0
    )
    forward, backward = 3 * 10, 3 * 20
    embed, head = 1, 3 * 5
    first_run = forward + embed
    second_run = 4 * (forward + embed + head + backward)
    last_run = backward
    # The first stage does B in ticks 2 to 5, so both of the later runs have the embedding's, and
    # its forward again.
    embedding_backward = 3 * 1 * (4 + 1)
    assert costs.executed_flops(layout) == first_run + second_run + last_run + embedding_backward
    assert costs.useful_flops(layout) == 3 * (1 + 40 + 5) * 4 / 2
    assert costs.chunk_flops(layout) == (31, 15)
    # Both stages compute three rows; the second one has the head besides.
    assert costs.balance(layout) == (3 * 10 + 5) / 23


def test_where_padding_is_passed_over_layers_moved_away_from_the_head_save_time():
    numbers = {"stages": 2, "microbatches": 4, "layer_flops": 1000.0, "head_flops": 2000.0}
    even = layout_of(layers=(4, 4), **numbers)
    moved = dataclasses.replace(layout_of(layers=(5, 3), **numbers), skips_padding=True)
    assert costs.balance(moved) == 1
    assert costs.balance(even) == 6 / 5
    # F: five layers on the first stage, or three and the head's 3 x 2 on the last; B: 2 x 5.
    assert costs.executed_flops(moved) == 1000 * (5 + 4 * (9 + 10) + 10)
    assert costs.executed_flops(even) == 1000 * (4 + 4 * (4 + 6 + 8) + 8)


def test_layers_moved_away_from_the_head_save_no_time_where_padding_is_computed():
    """Padding is computed like a layer, so that an even division is the fastest."""
    even = layout_of(stages=2, microbatches=4, layers=(4, 4), head_flops=2000.0)
    moved = layout_of(stages=2, microbatches=4, layers=(5, 3), head_flops=2000.0)
    assert costs.balance(even) == 6 / 5
    assert costs.balance(moved) == 7 / 5
    assert costs.executed_flops(even) < costs.executed_flops(moved)


def test_flops_of_chunks_are_added_where_they_lie():
    layout = layout_of(
        "zb_v", stages=2, microbatches=4, layers=(1, 2, 3, 4), layer_flops=1.0, head_flops=10.0
    )
    assert costs.chunk_flops(layout) == (1, 2, 3, 14)
    assert costs.stage_flops(layout) == (15, 5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "number"),
    [
        # One activation in each tick of a run that receives one, one gradient likewise.
        ("1f1b", 4, 8, 11 + 11),
        ("1f1b", 2, 2, 3 + 3),
        ("gpipe", 2, 4, 5 + 5),
        ("1f1b", 1, 4, 0),
    ],
)
def test_messages_are_counted_in_executed_ticks(name, stages, microbatches, number):
    layout = layout_of(name, stages=stages, microbatches=microbatches)
    assert costs.num_permutes(layout) == number
    assert costs.message_bytes(layout) == number * 2 * 16 * 8 * 2


def test_a_hand_over_between_chunks_of_one_stage_is_free():
    layout = layout_of("zb_v", stages=2, microbatches=4)
    assert any(direction == "local" for _, direction in layout.table.directions)
    ticks = sum(
        (run.stop - run.start) * len([d for _, d in run.receives if d != "local"])
        for run in layout.table.runs
    )
    assert costs.num_permutes(layout) == ticks


def test_buffers_have_a_spare_slot_and_are_the_same_on_every_device():
    layout = layout_of("1f1b", stages=4, microbatches=16, stash_bytes=1000)
    assert costs.in_flight(layout) == (7, 5, 3, 1)
    assert costs.stash_bytes_of_stages(layout) == (7000, 5000, 3000, 1000)
    message = 2 * 16 * 8 * 2
    assert costs.buffer_bytes(layout) == {
        "residuals": (8, 1000),
        "inputs": (2, message),
        "gradients": (2, message),
        "sent": (1, message),
    }
    assert costs.total_buffer_bytes(layout) == 8 * 1000 + 5 * message
    again = costs.buffer_bytes(layout_of("1f1b", stages=4, microbatches=16, stash="input"))
    assert again["inputs"] == (8, message)
    assert "residuals" not in again


def test_the_page_of_a_plan_has_the_picture_and_every_number():
    plan = plan_of(layout_of(layers=(2, 2, 2, 2), head_flops=500.0))
    page = plan.table()
    assert draw(plan.pipeline.schedule).splitlines()[1] in page
    text = " ".join(page.split())
    for words in [
        "pipeline 1f1b, 4 stages, bubble 27.3%",
        "pipeline buffers 34.5 KiB",
        "1f1b, 4 stages, 8 microbatches, 14 ticks, stash residuals",
        "27.3% if",
        "0 2 25.41k 2.00k 7 28.0 KiB",
        "3 2 25.41k 2.50k 1 4.0 KiB",
        "every tick takes 1.18 times the mean stage, as long as the slowest, which has the head",
        "residuals 8 x 4.0 KiB, inputs 2 x 512 B, gradients 2 x 512 B, sent 1 x 512 B = 34.5 KiB",
        "22 x 512 B = 11.0 KiB per step, both directions",
        "zero=1: weights are gathered once per step, gradients scattered once",
        "embedding and head, 2.62k parameters, are",
        "token_embedding/embedding 64x32 data+stage, - ",
    ]:
        assert words in text
    assert "bubble 27.3%" in plan.describe()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", range(4))
def test_what_a_zero_stage_costs_under_the_pipeline_is_one_line(zero):
    text = " ".join(plan_of(zero=zero).table().split())
    words = ["over data once", "scattered once", "in the B slot of every tick", "and again"]
    assert f"zero={zero}: " in text
    assert [word in text for word in words] == [zero == 0, zero == 1, zero == 2, zero == 3]


def test_without_data_shards_no_zero_stage_is_mentioned():
    plan = plan_of(data=1)
    lines = pipeline_lines(plan.pipeline, plan.placement)
    assert not any("zero=" in line for line in lines)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_section_fits_a_terminal_at_any_size(name):
    placement = plan_of().placement
    for stages, microbatches in [(1, 1), (4, 16), (20, 20)]:
        layout = layout_of(name, stages=stages, microbatches=microbatches)
        lines = pipeline_lines(layout, placement)
        assert max(map(len, lines)) <= WIDTH
        assert len(lines) <= 80


def test_of_a_wide_picture_the_middle_is_left_out():
    schedule = layout_of("1f1b", stages=4, microbatches=64).schedule
    picture = draw_short(schedule, 98).splitlines()
    assert len({len(line) for line in picture[:9]}) == 1
    assert all(ELLIPSIS in line for line in picture[:9])
    shown = [int(word) for word in picture[0].replace(ELLIPSIS, "").split()[1:]]
    assert shown[:14] == list(range(14))
    assert shown[-1] == schedule.num_ticks - 1
    assert picture[9] == f"{schedule.num_ticks - len(shown)} ticks are left out"
    assert "zerojax schedule 1f1b --stages 4 --microbatches 64" in picture[10]
    narrow = layout_of("1f1b", stages=4, microbatches=8).schedule
    assert draw_short(narrow) == draw(narrow)


def test_a_picture_with_too_many_rows_is_named_only():
    schedule = layout_of("1f1b", stages=32, microbatches=8).schedule
    assert SHORT_ROWS < 2 * 32
    assert draw_short(schedule).startswith("64 rows are too many to draw here\nsee `zerojax")
    mine = Schedule("mine", schedule.table)
    assert "`zerojax schedule FILE.csv --svg FILE`" in draw_short(mine)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_dictionary_is_json_and_holds_the_table(name):
    plan = plan_of(layout_of(name, stages=2, microbatches=4))
    found = json.loads(json.dumps(plan.as_dict()))["pipeline"]
    schedule = plan.pipeline.schedule
    again = Schedule.from_cells(found["schedule"], found["table"], placement=found["placement"])
    assert again == schedule
    assert found["num_ticks"] == schedule.num_ticks
    assert sum(found["layers"]) == plan.pipeline.num_layers
    total = sum(found["stage_parameters"]) + found["shared_parameters"]
    assert total == plan.placement.num_parameters()
    buffers = sum(buffer["bytes"] for buffer in found["buffers"].values())
    assert plan.as_dict()["bytes_per_device"]["pipeline buffers"] == buffers


def test_a_huge_table_stays_out_of_the_dictionary(monkeypatch):
    layout = layout_of("1f1b", stages=2, microbatches=4)  # 6 ticks x 2 stages
    for most, kept in [(11, False), (12, True)]:
        monkeypatch.setattr("zerojax.pipeline.pipeline_page.MAX_CELLS", most)
        assert (pipeline_dict(layout, plan_of().placement)["table"] is not None) == kept


def test_a_plan_without_a_pipeline_says_nothing_of_one():
    plan = plan_of()
    plain = type(plan)(**{**vars(plan), "pipeline": None})
    assert "pipeline" not in plain.table()
    assert plain.as_dict()["pipeline"] is None
    assert "pipeline buffers" not in role_bytes(plain)


def test_a_device_holds_the_rows_of_its_stage_padding_included():
    plan = plan_of(layout_of(stages=2, microbatches=4, layers=(3, 1)), data=2, zero=1)
    leaf = plan.placement.leaves["blocks/mlp/up/kernel"]
    assert leaf.shape == (4, 32, 128)
    assert whole_elements(plan.placement, leaf) == 3 * 32 * 128
    assert plan.placement.shard_elements(leaf) == 3 * 32 * 128 // 2
    shared = plan.placement.leaves["token_embedding/embedding"]
    assert whole_elements(plan.placement, shared) == 64 * 32
    layer = 12 * 32 * 32 + 13 * 32
    others = 64 * 32 + 16 * 32 + 2 * 32
    assert role_bytes(plan)["gathered weights"] == 2 * (3 * layer + others)
    # The sum in float32 and what one microbatch adds, in bfloat16.
    assert role_bytes(plan)["gradients"] == (4 + 2) * (3 * layer + others)


def test_one_microbatch_adds_the_gradients_of_one_chunk():
    plan = plan_of(layout_of("interleaved(2)", stages=2, microbatches=4), data=2, zero=1)
    layer = 12 * 32 * 32 + 13 * 32
    others = 64 * 32 + 16 * 32 + 2 * 32
    assert role_bytes(plan)["gradients"] == 4 * 2 * layer + 2 * layer + 6 * others
