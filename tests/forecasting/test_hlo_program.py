"""The text of a program becomes computations, instructions, types and counts."""

import re
import sys

import pytest

from zerojax.forecasting.hlo import Array, read_program
from zerojax.forecasting.hlo.program import HOST_MEMORY_SPACE, arrays_of, read_type


def trips(text: str) -> str:
    """`TRIPS(4)` as XLA spells it."""
    return re.sub(r"TRIPS\((\d+)\)", r'backend_config={"known_trip_count":{"n":"\1"}}', text)


# Every construct of the grammar that a step's text has, small. Trip counts: the outer loop runs 3
# times, the inner one 4 times in each, so `inner_body` runs 12 times and its condition 3 * 5.
NESTED = trips(r"""
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}) }, num_partitions=8

FileNames
1 "train.py"

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%inner_body (p.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %v.1 = f32[8]{0} get-tuple-element(%p.1), index=1
  %called = f32[8]{0} call(%v.1), to_apply=%twice
  ROOT %t.1 = (s32[], f32[8]{0}) tuple(%i.1, %called)
}

%twice (p.5: f32[8]) -> f32[8] {
  %p.5 = f32[8]{0} parameter(0)
  ROOT %double = f32[8]{0} fusion(%p.5), calls=%fused, metadata={op_name="a/\"b\", calls=%no/{c"}
}

%fused (p.6: f32[8]) -> f32[8] {
  %p.6 = f32[8]{0} parameter(0)
  ROOT %d = f32[8]{0} add(%p.6, %p.6)
}

%condition (p.2: (s32[], f32[8])) -> pred[] {
  %p.2 = (s32[], f32[8]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%condition.2 (p.7: (s32[], f32[8])) -> pred[] {
  %p.7 = (s32[], f32[8]{0}) parameter(0)
  ROOT %yes.2 = pred[] constant(true)
}

%outer_body (p.3: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.3 = (s32[], f32[8]{0}) parameter(0)
  ROOT %inner = (s32[], f32[8]{0}) while(%p.3), condition=%condition, body=%inner_body, TRIPS(4)
}

%left (l: f32[8]) -> f32[8] {
  ROOT %l = f32[8]{0} parameter(0)
}

%right (r: f32[8]) -> f32[8] {
  ROOT %r = f32[8]{0} parameter(0)
}, execution_thread="main"

%never (n: f32[8]) -> f32[8] {
  ROOT %n = f32[8]{0} parameter(0)
}

ENTRY %main (a: f32[8], b: pred[]) -> (s32[], f32[8]) {
  %a = f32[8]{0:S(5)} parameter(0), sharding={devices=[8]<=[8]}, metadata={op_name="state[\'w\']"}
  %b = pred[] parameter(1)
  %table = s32[2,2]{1,0} constant({ { 1, 2 }, { 3, (4) } })
  %chosen = f32[8]{0} conditional(%b, %a, %a), branch_computations={%left, %right}
  %zero = s32[] constant(0)
  %init = (s32[], /*index=1*/f32[8]{0}) tuple(%zero, %chosen), metadata={op_name="loop/init"}
  ROOT %outer = (s32[], f32[8]{0}) while(%init), condition=%condition.2, body=%outer_body, TRIPS(3)
}
""")

# The same grammar as XLA prints it without percent signs and with the types of operands.
CONFIG = r'backend_config="{\"key\": [1, 2]}"'
PLAIN = """
HloModule plain, is_scheduled=true

ENTRY main {
  p = f32[2,3]{1,0} parameter(0)
  q = (f32[2,3]{1,0}, s32[]) custom-call(f32[2,3]{1,0} p, f32[2,3]{1,0} p), CONFIG
  ROOT e = f32[2,3]{1,0} get-tuple-element((f32[2,3]{1,0}, s32[]) q), index=0
}
""".replace("CONFIG", CONFIG)


def test_types():
    assert read_type("f32[16,64]{1,0}") == Array("f32", (16, 64), 32)
    assert read_type("bf16[]") == Array("bf16", (), 16)
    assert read_type("f32[<=16,2]{1,0}").shape == (16, 2)
    assert read_type("bf16[4,256]{1,0:T(8,128)(2,1)S(5)}").memory_space == HOST_MEMORY_SPACE
    assert read_type("((bf16[8]{0}, s32[]), f8e4m3fn[3]{0}, token[])") == (
        (Array("bf16", (8,), 16), Array("s32", (), 32)),
        Array("f8e4m3fn", (3,), 8),
        Array("token", (), 0),
    )
    assert [a.bytes for a in arrays_of("((bf16[8]{0}, s32[]), (), pred[3]{0}, token[])")] == [
        16,
        4,
        3,
    ]


def test_elements_below_a_byte_are_packed_only_where_the_layout_says_so():
    assert read_type("s4[5]{0}").bytes == 5
    assert read_type("s4[5]{0:E(4)}").bytes == 3


def test_bad_types_are_refused():
    with pytest.raises(ValueError, match="dtype 'f7' in the type f7"):
        read_type("f7[3]")
    with pytest.raises(ValueError, match="is not a type in XLA"):
        read_type("(f32[3]")


def test_instructions():
    program = read_program(NESTED)
    assert program.entry.name == "main"
    assert program.is_scheduled
    assert (program.num_partitions, program.num_replicas) == (8, 1)
    main = program.entry
    assert [i.name for i in main.parameters] == ["a", "b"]
    assert main.root.name == "outer"
    assert main["outer"].opcode == "while"
    assert main["outer"].operands == ("init",)
    assert main["outer"].callees == {"condition": ("condition.2",), "body": ("outer_body",)}
    assert main["init"].op_name == "loop/init"
    assert main["outer"].op_name == ""
    assert main["a"].attributes["sharding"] == "{devices=[8]<=[8]}"
    assert main["a"].arrays[0].memory_space == HOST_MEMORY_SPACE
    assert main["table"].operand_text == "{ { 1, 2 }, { 3, (4) } }"
    assert main["table"].operands == ()
    assert main["init"].bytes == 4 + 32
    assert main["chosen"].branches == ("left", "right")
    assert [i.name for i in main.operands_of(main["init"])] == ["zero", "chosen"]
    double = program.computations["twice"]["double"]
    assert double.op_name == r"a/\"b\", calls=%no/{c"
    assert double.callees == {"calls": ("fused",)}
    assert program.find("d")[0].name == "fused"
    with pytest.raises(KeyError, match="no instruction 'nowhere'"):
        program.find("nowhere")


def test_text_without_percent_signs():
    main = read_program(PLAIN).entry
    assert main["q"].operands == ("p", "p")
    assert main["q"].backend_config == {"key": [1, 2]}
    assert main["e"].operands == ("q",)
    assert main["e"].integers("index") == (0,)


@pytest.mark.parametrize(
    ("computation", "times"),
    [
        ("main", 1),
        ("outer_body", 3),
        ("condition.2", 4),
        ("inner_body", 12),
        ("condition", 15),
        ("twice", 12),
        ("fused", 12),
        ("left", 1),
        ("right", 1),
        ("never", 0),
    ],
)
def test_times_run(computation, times):
    assert read_program(NESTED).times_run(computation) == times


def test_a_computation_called_twice_counts_twice():
    program = read_program(
        NESTED.replace(
            "ROOT %double = f32[8]{0} fusion(%p.5)", "%once = f32[8]{0} fusion(%p.5)"
        ).replace(
            '{c"}', '{c"}\n  ROOT %double = f32[8]{0} fusion(%once), kind=kLoop, calls=%fused'
        )
    )
    assert program.times_run("fused") == 24


def test_a_loop_of_unknown_length_is_listed_and_counts_once():
    assert read_program(NESTED).unknown_loops == ()
    program = read_program(NESTED.replace(', backend_config={"known_trip_count":{"n":"4"}}', ""))
    assert program.unknown_loops == ("inner",)
    assert program.times_run("inner_body") == 3


def test_backend_configurations_that_are_no_json_are_empty():
    text = PLAIN.replace(CONFIG, 'backend_config="#mlir<module>"')
    assert read_program(text).entry["q"].backend_config == {}


def events_of_reading(copies: int) -> int:
    """Calls, of Python's functions and of C's, for all there is to know of a program."""
    main = NESTED[NESTED.index("ENTRY") :]
    body = NESTED.removesuffix(main)
    computation = body[body.index("%outer_body") : body.index("%left")]
    more = (computation.replace("%outer_body", f"%outer_body.{i}") for i in range(copies))
    text = "".join([body, *more, main])
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        program = read_program(text)
        assert program.times_run("inner_body") == 12
        for found in program.computations.values():
            for instruction in found.instructions:
                assert instruction.attributes is not None
                assert len(found.operands_of(instruction)) == len(instruction.operands)
    finally:
        sys.setprofile(None)
    assert len(program.computations) > copies
    return count


def test_the_work_of_reading_grows_with_the_text_and_no_faster():
    """Real programs have megabytes. 2.1: twice the text, and a part that does not grow."""
    assert events_of_reading(1000) < 2.1 * events_of_reading(500)


FRAMES = """
HloModule jit_step

FileNames
1 "main.py"
2 "model.py"

FunctionNames
1 "<module>"
2 "Model.loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=0 end_column=9}
2 {file_name_id=2 function_name_id=2 line=30 end_line=31 column=4 end_column=8}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %a = f32[8]{0} add(%x, %x), metadata={op_name="jit(step)/add" stack_frame_id=2}
  ROOT %b = f32[8]{0} add(%a, %x), metadata={op_name="add" source_file="old.py" source_line=3}
}
"""


def test_the_lines_that_traced_an_instruction_innermost_first():
    """As printed by jaxlib 0.12, and in the last line by older ones."""
    program = read_program(FRAMES)
    lines = {name: program.frames_of(program.entry[name]) for name in ("x", "a", "b")}
    assert lines == {"x": [], "a": [("model.py", 30), ("main.py", 7)], "b": [("old.py", 3)]}
