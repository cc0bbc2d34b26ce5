"""What lies between the start and the done of a collective, counted by hand."""

from zerojax.forecasting.hlo import find_collectives, find_overlap, read_program

# One product of the tests: [8, 16] x [16, 8], and its memory: 512 + 512 read, 256 written.
FLOPS = 2 * 8 * 16 * 8
BYTES = 512 + 512 + 256

DOT = "dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
GROUPS = "replica_groups={{0,1}}, use_global_device_ids=true, channel_id=1, dimensions={0}"
TYPES = "(f32[8,16], f32[16,16])"

HEAD = """HloModule m, is_scheduled=true, num_partitions=2

%condition (c: (s32[], f32[8,16], f32[16,8])) -> pred[] {
  %c = (s32[], f32[8,16], f32[16,8]) parameter(0)
  ROOT %go = pred[] constant(true)
}

%fused (fx: f32[8,16], fw: f32[16,8]) -> f32[8,8] {
  %fx = f32[8,16] parameter(0)
  %fw = f32[16,8] parameter(1)
  ROOT %fdot = f32[8,8] dot(%fx, %fw), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (b: (s32[], f32[8,16], f32[16,8])) -> (s32[], f32[8,16], f32[16,8]) {
  %b = (s32[], f32[8,16], f32[16,8]) parameter(0)
  %b0 = s32[] get-tuple-element(%b), index=0
  %b1 = f32[8,16] get-tuple-element(%b), index=1
  %b2 = f32[16,8] get-tuple-element(%b), index=2
  %bdot = f32[8,8] fusion(%b1, %b2), kind=kCustom, calls=%fused
  ROOT %b.out = (s32[], f32[8,16], f32[16,8]) tuple(%b0, %b1, %b2)
}

"""


def overlap_of(lines: str, *, computations: str = "", name: str = "s"):
    program = read_program(
        f"{HEAD}{computations}"
        "ENTRY %main (x: f32[8,16], w: f32[16,8]) -> f32[16,16] {\n"
        "  %x = f32[8,16] parameter(0)\n"
        "  %w = f32[16,8] parameter(1)\n"
        f"{lines}}}\n"
    )
    return find_overlap(program, find_collectives(program, 2))[name]


def test_what_is_scheduled_between_start_and_done():
    found = overlap_of(
        f"  %before = f32[8,8] {DOT}\n"
        f"  %s = {TYPES} all-gather-start(%x), {GROUPS}\n"
        f"  %first = f32[8,8] {DOT}\n"
        "  %view = f32[128] bitcast(%x)\n"
        f"  %second = f32[8,8] {DOT}\n"
        "  %d = f32[16,16] all-gather-done(%s)\n"
        f"  %after = f32[8,8] {DOT}\n"
        "  ROOT %out = f32[16,16] copy(%d)\n"
    )
    assert (found.matmuls, found.matmul_flops, found.hbm_bytes) == (2, 2 * FLOPS, 2 * BYTES)
    assert found.done == "d"
    assert not found.pipelined


def test_a_loop_in_between_counts_all_its_iterations():
    found = overlap_of(
        f"  %s = {TYPES} all-gather-start(%x), {GROUPS}\n"
        "  %zero = s32[] constant(0)\n"
        "  %init = (s32[], f32[8,16], f32[16,8]) tuple(%zero, %x, %w)\n"
        "  %loop = (s32[], f32[8,16], f32[16,8]) while(%init), condition=%condition, body=%body, "
        'backend_config={"known_trip_count":{"n":"7"}}\n'
        "  ROOT %d = f32[16,16] all-gather-done(%s)\n"
    )
    assert (found.matmuls, found.matmul_flops, found.hbm_bytes) == (7, 7 * FLOPS, 7 * BYTES)


def test_a_synchronous_collective_overlaps_nothing():
    found = overlap_of(
        f"  %first = f32[8,8] {DOT}\n  ROOT %s = f32[16,16] all-gather(%x), {GROUPS}\n"
    )
    assert (found.matmuls, found.hbm_bytes, found.done) == (0, 0, None)


def test_a_wrapped_collective_overlaps_from_its_start_to_its_done():
    wrapped = (
        "%wrapped (v: f32[8,16]) -> f32[16,16] {\n"
        "  %v = f32[8,16] parameter(0)\n"
        f"  ROOT %inner = f32[16,16] all-gather(%v), {GROUPS}\n"
        "}\n\n"
    )
    found = overlap_of(
        "  %s = ((f32[8,16]), f32[16,16], u32[]) async-start(%x), calls=%wrapped\n"
        f"  %first = f32[8,8] {DOT}\n"
        "  %u = ((f32[8,16]), f32[16,16], u32[]) async-update(%s)\n"
        f"  %second = f32[8,8] {DOT}\n"
        "  %d = f32[16,16] async-done(%u)\n"
        f"  %third = f32[8,8] {DOT}\n"
        "  ROOT %out = f32[16,16] copy(%d)\n",
        computations=wrapped,
        name="inner",
    )
    assert (found.matmuls, found.done) == (2, "d")


STATE = f"(s32[], f32[8,16], f32[16,8], {TYPES})"
# In each iteration: the done of what the last one started, one product, the next start, two more.
AHEAD = f"""
%ahead.condition (ac: {STATE}) -> pred[] {{
  %ac = {STATE} parameter(0)
  ROOT %ago = pred[] constant(true)
}}

%ahead (a: {STATE}) -> {STATE} {{
  %a = {STATE} parameter(0)
  %a0 = s32[] get-tuple-element(%a), index=0
  %x.1 = f32[8,16] get-tuple-element(%a), index=1
  %w.1 = f32[16,8] get-tuple-element(%a), index=2
  %first = f32[8,8] dot(%x.1, %w.1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %a3 = {TYPES} get-tuple-element(%a), index=3
  %d.body = f32[16,16] all-gather-done(%a3)
  %second = f32[8,8] dot(%x.1, %w.1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %s.body = {TYPES} all-gather-start(%x.1), {GROUPS}
  %third = f32[8,8] dot(%x.1, %w.1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %fourth = f32[8,8] dot(%x.1, %w.1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %a.out = {STATE} tuple(%a0, %x.1, %w.1, %s.body)
}}

"""
AHEAD_ENTRY = (
    f"  %s = {TYPES} all-gather-start(%x), {GROUPS}\n"
    f"  %zeroth = f32[8,8] {DOT}\n"
    "  %zero = s32[] constant(0)\n"
    f"  %init = {STATE} tuple(%zero, %x, %w, %s)\n"
    f"  %loop = {STATE} while(%init), condition=%ahead.condition, body=%ahead, "
    'backend_config={"known_trip_count":{"n":"6"}}\n'
    f"  %last = {TYPES} get-tuple-element(%loop), index=3\n"
    "  ROOT %d = f32[16,16] all-gather-done(%last)\n"
)


def test_a_start_that_the_next_iteration_awaits():
    """Two products to the end of the iteration, one from the beginning of the next."""
    found = overlap_of(AHEAD_ENTRY, computations=AHEAD, name="s.body")
    assert (found.matmuls, found.matmul_flops) == (3, 3 * FLOPS)
    assert found.done == "d.body"
    assert found.pipelined
    assert found.crosses_iterations


def test_a_start_before_the_loop_that_its_first_iteration_awaits():
    """One product before the loop, one in its first iteration."""
    found = overlap_of(AHEAD_ENTRY, computations=AHEAD)
    assert (found.matmuls, found.done) == (2, "d.body")
    assert found.pipelined
    assert found.crosses_iterations


def test_what_the_compiler_marks_as_pipelined_says_so():
    """The gather of the next iteration, started and done in this one."""
    marked = 'backend_config={"collective_backend_config":{"is_pipelined":true}}'
    body = HEAD[HEAD.index("%body") :].replace("%b", "%m")
    body = body.replace("%mody", "%marked").replace(
        "  %mdot", f"  %s.in = {TYPES} all-gather-start(%m1), {GROUPS}, {marked}\n  %mdot"
    )
    body = body.replace(
        "  ROOT %m.out", "  %d.in = f32[16,16] all-gather-done(%s.in)\n  ROOT %m.out"
    )
    lines = (
        "  %zero = s32[] constant(0)\n"
        "  %init = (s32[], f32[8,16], f32[16,8]) tuple(%zero, %x, %w)\n"
        "  %loop = (s32[], f32[8,16], f32[16,8]) while(%init), condition=%condition, body=%marked, "
        'backend_config={"known_trip_count":{"n":"7"}}\n'
        "  ROOT %out = f32[8,16] get-tuple-element(%loop), index=1\n"
    )
    found = overlap_of(lines, computations=body, name="s.in")
    assert (found.matmuls, found.done) == (1, "d.in")
    assert found.pipelined
    assert not found.crosses_iterations
    unmarked = overlap_of(lines, computations=body.replace("true", "false"), name="s.in")
    assert not unmarked.pipelined


def test_a_start_without_a_done_overlaps_nothing_and_says_so():
    found = overlap_of(
        f"  %s = {TYPES} all-gather-start(%x), {GROUPS}\n  ROOT %first = f32[8,8] {DOT}\n"
    )
    assert (found.matmuls, found.done) == (0, None)
