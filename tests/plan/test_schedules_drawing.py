"""Schedules as CSV, as a picture for a terminal, and as SVG."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest

from zerojax.schedules import (
    SCHEDULES,
    Costs,
    ScheduleError,
    make_schedule,
    read_csv,
    simulate,
    write_csv,
)
from zerojax.schedules.drawing import LEFT, MAX_LINES, WIDTH, describe, draw, draw_svg

SVG = "{http://www.w3.org/2000/svg}"
CASES = [
    make_schedule(name, stages=stages, microbatches=microbatches)
    for name in SCHEDULES
    for stages, microbatches in [(1, 1), (2, 4), (4, 8), (4, 32), (16, 32)]
]
GOOD = "# name: mine\ntick,stage 0,stage 1\n0,F0,.\n\n1,F1,F0+B0\n2,B0,F1+B1\n3,B1,\n"


@pytest.fixture(params=CASES, ids=lambda s: f"{s.name}-{s.num_stages}-{s.num_microbatches}")
def schedule(request):
    return request.param


@pytest.mark.sampled(6)
def test_what_is_written_is_read(schedule, tmp_path):
    path = write_csv(schedule, tmp_path / "table.csv")
    assert read_csv(path) == schedule
    assert make_schedule(str(path)) == schedule
    assert len(path.read_text().splitlines()) == schedule.num_ticks + 3


def test_a_file_written_by_hand(tmp_path):
    path = tmp_path / "hand.csv"
    path.write_text(GOOD)
    schedule = read_csv(path)
    assert schedule.name == "mine"
    assert schedule.table == make_schedule("1f1b", stages=2, microbatches=2).table
    path.write_bytes(b"\xef\xbb\xbf" + b'F0,.\r\n"F1","B0+F0"\r\nB0,F1+B1\r\nB1,.\r\n')
    assert read_csv(path).table == schedule.table
    assert read_csv(path).name == "hand"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("F1+B1", "F1+X1", r":6: stage 1: 'F1\+X1' is not a cell"),
        ("3,B1,\n", "3,.,B1\n", ":7: tick 3, stage 1: B1 appears twice"),
        ("2,B0,F1+B1", "2,B0,F1+F2", r":6: tick 2, stage 1: F1\+F2 has 2 operations in the F"),
        (
            "1,F1,F0+B0\n2,B0",
            "1,F1+B0,F0+B0\n2,.",
            (":5: tick 1, stage 0: B0 needs the result of B0 of stage 1"),
        ),
    ],
)
def test_a_mistake_in_a_file_names_the_line(old, new, reason, tmp_path):
    path = tmp_path / "bad.csv"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ScheduleError, match=reason) as error:
        read_csv(path)
    assert str(error.value).startswith(str(path))


def test_a_file_that_is_not_there_is_refused_with_the_remedy(tmp_path):
    for path, reason in ((tmp_path / "none.csv", "No such file"), (tmp_path, "is a folder")):
        with pytest.raises(ScheduleError, match=f"{path}: {reason}.*mine.csv"):
            read_csv(path)


def test_the_picture_of_1f1b():
    assert draw(make_schedule("1f1b", stages=2, microbatches=3)).splitlines() == [
        "tick      0 1 2 3 4",
        "stage 0 F 0 1 2 . .",
        "        B . . 0 1 2",
        "stage 1 F . 0 1 2 .",
        "        B . 0 1 2 .",
    ]


def test_chunks_are_letters():
    picture = draw(make_schedule("interleaved", stages=1, microbatches=2)).splitlines()
    assert picture[1:] == ["stage 0 F 0a 0b 1a 1b  .", "        B  . 0b 0a 1b 1a"]


@pytest.mark.sampled(6)
def test_the_picture_fits_and_shows_every_operation(schedule):
    picture = draw(schedule)
    lines = picture.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert picture.isascii()
    assert len(lines) <= MAX_LINES + 2 * (3 * schedule.num_stages + 2)
    cells = [line[9:] for line in lines if line and not line.startswith(("tick", "..."))]
    num_shown = len(re.findall(r"\d+[ab]?", "\n".join(cells)))
    num_operations = sum(1 for _ in schedule.events())
    if "not shown" in picture:
        assert num_shown < num_operations
    else:
        assert num_shown == num_operations


@pytest.mark.sampled(6)
def test_the_words_say_bubble_ticks_and_memory(schedule):
    simulation = simulate(schedule)
    words = describe(schedule, simulation)
    assert all(len(line) <= WIDTH for line in words.splitlines())
    flat = " ".join(words.split())
    assert f"ticks {schedule.num_ticks} " in flat
    assert f"bubble {simulation.bubble:.1%} " in flat
    assert f"in flight {' '.join(map(str, simulation.in_flight))} " in flat
    assert ("W gradient of weights" in flat) == schedule.splits_backward


@pytest.mark.sampled(6)
def test_the_svg_is_well_formed_and_complete(schedule):
    text = draw_svg(schedule)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    operations = root.findall(f"{SVG}g[@class='operation']")
    titles = {group.findtext(f"{SVG}title") for group in operations}
    assert titles == {
        f"{event.operation}, stage {event.stage}, tick {event.tick}" for event in schedule.events()
    }
    assert len(titles) == len(operations)
    lanes = [t.text for t in root.findall(f"{SVG}text") if (t.text or "").startswith("stage ")]
    assert lanes == [f"stage {stage}" for stage in range(schedule.num_stages)]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.sampled(6)
def test_boxes_stay_inside_and_do_not_overlap(schedule):
    root = ElementTree.fromstring(draw_svg(schedule, Costs(1, 1.5, 0.5)))
    lanes: dict[str, list[tuple[float, float]]] = {}
    for box in root.findall(f"{SVG}g/{SVG}rect"):
        x, width = float(box.attrib["x"]), float(box.attrib["width"])
        lanes.setdefault(box.attrib["y"], []).append((x, x + width))
        assert x >= LEFT
        assert x + width <= float(root.attrib["width"])
    assert len(lanes) == schedule.num_stages
    for lane in lanes.values():
        lane.sort()
        for (_, end), (start, _) in itertools.pairwise(lane):
            assert end <= start + 0.11  # both are rounded to a tenth of a pixel


@pytest.mark.parametrize("costs", [Costs(1, 1000, 1e-300), Costs(0, 1, 0), Costs(1e-9, 1e9, 1)])
def test_lopsided_costs_do_not_make_the_svg_endless(costs):
    schedule = make_schedule("zb_h1", stages=4, microbatches=8)
    root = ElementTree.fromstring(draw_svg(schedule, costs))
    # 14 ticks of three slots, the dearest 220 pixels wide.
    assert float(root.attrib["width"]) <= 14 * 3 * 220 + 100


def test_the_name_of_a_file_cannot_break_the_svg(tmp_path):
    path = tmp_path / "a<b&c.csv"
    path.write_text("F0+B0\n")
    root = ElementTree.fromstring(draw_svg(read_csv(path)))
    assert root.findtext(f"{SVG}title") == "a<b&c: 1 stages, 1 microbatches"
