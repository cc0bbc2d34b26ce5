"""Collectives in every spelling, against bytes counted by hand."""

import math

import numpy as np
import pytest

from zerojax.forecasting.hlo import find_collectives, read_program
from zerojax.forecasting.hlo.communication import connected, read_groups

ALL = tuple(range(8))


def program_of(lines: str, *, computations: str = "", header: str = ", num_partitions=8"):
    return read_program(
        f"HloModule m, is_scheduled=true{header}\n\n"
        "%add (x: f32[], y: f32[]) -> f32[] {\n"
        "  %x = f32[] parameter(0)\n"
        "  %y = f32[] parameter(1)\n"
        "  ROOT %s = f32[] add(%x, %y)\n"
        "}\n\n"
        f"{computations}\n"
        "ENTRY %main (p: f32[4,64], q: bf16[32]) -> f32[4,64] {\n"
        "  %p = f32[4,64]{1,0} parameter(0)\n"
        "  %q = bf16[32]{0} parameter(1)\n"
        f"{lines}\n"
        "}\n"
    )


def collective(line: str, **options):
    """The only collective of a program with that line; p is 1024 bytes, q 64."""
    (found,) = find_collectives(program_of(line, **options), 8)
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{}", [ALL]),
        ("{{0,1},{2,3},{4,5},{6,7}}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("{{0,2,4,6},{1,3,5,7}}", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("[4,2]<=[2,4]T(1,0)", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("mesh['data'=4,'model'=2] {'model'}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("mesh['data'=4,'model'=2] {'data'}", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("mesh['data'=4,'model'=2] {'data','model'}", [ALL]),
        ("mesh['data'=4,'model'=2] {'model','data'}", [(0, 2, 4, 6, 1, 3, 5, 7)]),
        ("mesh['replica'=1,'data'=8,'model'=1] {'replica','data'}", [ALL]),
        ("mesh['a'=8] {'a':(1)2}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['a'=8] {'a':(2)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("mesh['a'=8] {'a':(4)2}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("mesh['a'=8] {'a':(4)2,'a':(1)2}", [(0, 4, 1, 5), (2, 6, 3, 7)]),
        ("mesh['a'=2,'b'=2], device_ids=([[0, 2], [1, 3]]) {'b'}", [(0, 2), (1, 3)]),
        ("mesh['a'=2,'b'=2], device_ids=(<=[2,2]T(1,0)) {'b'}", [(0, 2), (1, 3)]),
    ],
)
def test_groups(text, groups):
    assert read_groups(text, 8) == groups


def test_groups_of_512_devices_are_numpys():
    ids = np.arange(512).reshape(8, 4, 16).transpose(1, 2, 0).reshape(64, 8)
    assert read_groups("[64,8]<=[8,4,16]T(1,2,0)", 512) == [tuple(row) for row in ids.tolist()]


def test_other_spellings_are_refused():
    with pytest.raises(ValueError, match=r"replica_groups='V9\(8\)' has an unknown notation"):
        read_groups("V9(8)", 8)
    with pytest.raises(ValueError, match="is not a mesh with axes such as"):
        read_groups("mesh(8)", 8)
    with pytest.raises(ValueError, match="2 devices.* 4"):
        read_groups("mesh['a'=2,'b'=2], device_ids=([0, 2]) {'b'}", 8)


def test_connected_devices_of_pairs():
    assert connected([(0, 2), (2, 4), (4, 0), (1, 3), (3, 1)]) == (0, 2, 4)
    assert connected([(5, 4), (4, 3)]) == (3, 4, 5)
    assert connected([]) == ()


GROUP_OF_4 = "replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true, channel_id=1"


@pytest.mark.parametrize(
    ("line", "kind", "payload", "wire"),
    [
        # 2 * 3/4 * 1024
        ("f32[4,64] all-reduce(%p), {g}, to_apply=%add", "all-reduce", 1024, 1536),
        # 4 * 1024 gathered, of which 3/4 arrive; in a ring, as much leaves.
        ("f32[16,64] all-gather(%p), {g}, dimensions={{0}}", "all-gather", 4096, 3072),
        # 3/4 * 1024
        ("f32[1,64] reduce-scatter(%p), {g}, dimensions={{0}}", "reduce-scatter", 1024, 768),
        ("f32[4,64] all-to-all(%p), {g}, dimensions={{0}}", "all-to-all", 1024, 768),
        ("f32[4,64] collective-broadcast(%p), {g}", "collective-broadcast", 1024, 1024),
    ],
)
def test_wire_bytes(line, kind, payload, wire):
    found = collective(f'  ROOT %c = {line.format(g=GROUP_OF_4)}, metadata={{op_name="f/psum"}}')
    assert (found.kind, found.payload_bytes, found.wire_bytes) == (kind, payload, wire)
    assert (found.group, found.group_size) == ((0, 2, 4, 6), 4)
    assert (found.name, found.op_name, found.dtype) == ("c", "f/psum", "f32")
    assert (found.times, found.loop_depth, found.arrays) == (1, 0, 1)
    assert not found.is_async


def test_a_group_of_one_sends_nothing():
    line = "  ROOT %c = f32[4,64] all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add"
    assert collective(line).wire_bytes == 0


def test_several_arrays_travel_together():
    found = collective(
        f"  %c = (f32[4,64], bf16[32]) all-reduce(%p, %q), {GROUP_OF_4}, to_apply=%add\n"
        "  ROOT %r = f32[4,64] get-tuple-element(%c), index=0"
    )
    assert (found.payload_bytes, found.wire_bytes) == (1088, 1632)
    assert (found.dtype, found.arrays) == ("bf16/f32", 2)


def test_an_all_to_all_of_pieces():
    """One operand for each device: together they are what the one operand is elsewhere."""
    found = collective(
        "  %c = (bf16[32], bf16[32], bf16[32], bf16[32]) all-to-all(%q, %q, %q, %q), "
        f"{GROUP_OF_4}\n  ROOT %r = bf16[32] get-tuple-element(%c), index=0"
    )
    assert (found.payload_bytes, found.wire_bytes, found.arrays) == (256, 192, 4)


@pytest.mark.parametrize(
    ("pairs", "group", "wire"),
    [
        ("{{0,1},{1,2},{2,3},{3,0}}", (0, 1, 2, 3), 1024),
        ("{{0,1},{1,2}}", (0, 1, 2), 1024),
        # A device that sends to itself sends nothing.
        ("{{0,0},{1,1}}", (0,), 0),
        ("{{0,0},{1,2},{2,1}}", (0,), 1024),
        ("{}", (), 0),
    ],
)
def test_permutes_count_the_busiest_device(pairs, group, wire):
    found = collective(f"  ROOT %c = f32[4,64] collective-permute(%p), source_target_pairs={pairs}")
    assert (found.kind, found.payload_bytes) == ("collective-permute", 1024)
    assert (found.group, found.group_size, found.wire_bytes) == (group, len(group), wire)


def test_sends_with_pairs_are_permutes():
    found = collective(
        "  %token = token[] after-all()\n"
        "  %recv = (f32[4,64], u32[], token[]) recv(%token), channel_id=1, "
        'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}\n'
        "  %send = (f32[4,64], u32[], token[]) send(%p, %token), channel_id=1, "
        'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}\n'
        "  %recv-done = (f32[4,64], token[]) recv-done(%recv), channel_id=1\n"
        "  %send-done = token[] send-done(%send), channel_id=1\n"
        "  ROOT %r = f32[4,64] get-tuple-element(%recv-done), index=0"
    )
    assert (found.kind, found.wire_bytes, found.group) == ("collective-permute", 1024, (0, 1, 2))
    assert found.start == "send"


def test_groups_of_replicas_hold_all_their_partitions():
    """A channel without global ids: the group names replicas (kCrossReplicaAndPartition)."""
    line = "  ROOT %c = f32[4,64] all-reduce(%p), channel_id=1, replica_groups={groups}"
    one = collective(line.format(groups="{{0}}"))
    assert (one.group, one.wire_bytes) == (ALL, 1792)
    two = collective(
        line.format(groups="{{0,1},{2,3}}"), header=", num_partitions=2, replica_count=4"
    )
    assert two.group == (0, 1, 2, 3)


@pytest.mark.parametrize(
    "lines",
    [
        # With the operand beside the result, in older and in newer types.
        f"  %s = (f32[4,64], f32[16,64]) all-gather-start(%p), {GROUP_OF_4}, dimensions={{0}}\n"
        "  ROOT %d = f32[16,64] all-gather-done(%s)",
        f"  %s = ((f32[4,64]), f32[16,64]) all-gather-start(%p), {GROUP_OF_4}, dimensions={{0}}\n"
        "  ROOT %d = f32[16,64] all-gather-done(%s)",
        # With an explicit computation.
        "  %s = ((f32[4,64]), f32[16,64], u32[]) async-start(%p), calls=%wrapped\n"
        "  %u = ((f32[4,64]), f32[16,64], u32[]) async-update(%s)\n"
        "  ROOT %d = f32[16,64] async-done(%u)",
        # In a kernel of its own.
        "  %s = ((f32[4,64]), f32[16,64]) fusion-start(%p), kind=kCustom, calls=%wrapped\n"
        "  ROOT %d = f32[16,64] fusion-done(%s)",
    ],
)
def test_asynchronous_spellings(lines):
    wrapped = (
        "%wrapped (w: f32[4,64]) -> f32[16,64] {\n"
        "  %w = f32[4,64] parameter(0)\n"
        f"  ROOT %inner = f32[16,64] all-gather(%w), {GROUP_OF_4}, dimensions={{0}}\n"
        "}\n"
    )
    found = collective(lines, computations=wrapped if "%wrapped" in lines else "")
    assert (found.kind, found.payload_bytes, found.wire_bytes) == ("all-gather", 4096, 3072)
    assert found.is_async
    assert found.start == "s"
    assert found.name == ("inner" if "%wrapped" in lines else "s")


def test_a_start_that_the_backend_runs_synchronously():
    found = collective(
        f"  %s = (f32[4,64], f32[16,64]) all-gather-start(%p), {GROUP_OF_4}, dimensions={{0}}, "
        'backend_config={"collective_backend_config":{"is_sync":true}}\n'
        "  ROOT %d = f32[16,64] all-gather-done(%s)"
    )
    assert not found.is_async


LOOPS = """
%condition (c: (s32[], f32[4,64])) -> pred[] {
  %c = (s32[], f32[4,64]) parameter(0)
  ROOT %go = pred[] constant(true)
}

%inner (i: (s32[], f32[4,64])) -> (s32[], f32[4,64]) {
  %i = (s32[], f32[4,64]) parameter(0)
  %i0 = s32[] get-tuple-element(%i), index=0
  %i1 = f32[4,64] get-tuple-element(%i), index=1
  %reduced = f32[4,64] all-reduce(%i1), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  ROOT %i.out = (s32[], f32[4,64]) tuple(%i0, %reduced)
}

%outer (o: (s32[], f32[4,64])) -> (s32[], f32[4,64]) {
  %o = (s32[], f32[4,64]) parameter(0)
  %once = (s32[], f32[4,64]) while(%o), condition=%condition, body=%inner, TRIPS
  %o0 = s32[] get-tuple-element(%once), index=0
  %o1 = f32[4,64] get-tuple-element(%once), index=1
  %moved = f32[4,64] collective-permute(%o1), source_target_pairs={{0,1},{1,0}}
  ROOT %o.out = (s32[], f32[4,64]) tuple(%o0, %moved)
}

%small (a: f32[4,64]) -> f32[4,64] {
  %a = f32[4,64] parameter(0)
  ROOT %a.out = f32[4,64] all-reduce(%a), replica_groups=[4,2]<=[8], to_apply=%add
}

%large (b: f32[4,64]) -> f32[4,64] {
  %b = f32[4,64] parameter(0)
  ROOT %b.out = f32[4,64] all-reduce(%b), replica_groups=[1,8]<=[8], to_apply=%add
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"5"}}')


def test_loops_multiply():
    """Three outer iterations, five inner ones in each."""
    program = program_of(
        "  %zero = s32[] constant(0)\n"
        "  %init = (s32[], f32[4,64]) tuple(%zero, %p)\n"
        "  %loop = (s32[], f32[4,64]) while(%init), condition=%condition, body=%outer, "
        'backend_config={"known_trip_count":{"n":"3"}}\n'
        "  ROOT %out = f32[4,64] get-tuple-element(%loop), index=1",
        computations=LOOPS,
    )
    inner, outer = find_collectives(program, 8)
    assert (inner.name, inner.times, inner.loop_depth) == ("reduced", 15, 2)
    assert (outer.name, outer.times, outer.loop_depth) == ("moved", 3, 1)
    # 2 * 1/2 * 1024 bytes 15 times, 1024 bytes 3 times.
    assert sum(c.wire_bytes * c.times for c in (inner, outer)) == 18 * 1024


def test_of_a_conditional_the_dearest_branch_counts():
    program = program_of(
        "  %which = s32[] constant(0)\n"
        "  ROOT %c = f32[4,64] conditional(%which, %p, %p, %p), "
        "branch_computations={%small, %large, %small}",
        computations=LOOPS,
    )
    (found,) = find_collectives(program, 8)
    assert found.name == "b.out"
    assert found.wire_bytes == math.ceil(2 * 7 / 8 * 1024)
    assert found.in_branch


def test_a_computation_called_twice_counts_twice():
    program = program_of(
        "  %first = f32[4,64] call(%p), to_apply=%small\n"
        "  ROOT %second = f32[4,64] call(%first), to_apply=%small",
        computations=LOOPS,
    )
    (found,) = find_collectives(program, 8)
    assert (found.times, found.in_branch) == (2, False)
