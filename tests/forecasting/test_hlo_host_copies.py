"""What moves between host and device memory, counted by hand in programs as XLA writes them."""

import pytest

from zerojax.forecasting.hlo import find_host_copies, link_bytes, read_program

LINEAR = 'backend_config={"dynamic_slice_config":{"loop_index":"0","linear":{"byte_stride":"128"}}}'
SLICE = 8 * 4 * 4  # f32[1,8,4]
DOT_FLOPS = 2 * 8 * 4 * 8

COMPUTATIONS = """
%load (lp: f32[6,8,4], li: s32[], lz: s32[]) -> f32[1,8,4] {{
  %lp = f32[6,8,4]{{2,1,0:S(5)}} parameter(0)
  %li = s32[] parameter(1)
  %lz = s32[] parameter(2)
  ROOT %ls = f32[1,8,4]{{2,1,0}} dynamic-slice(%lp, %li, %lz, %lz), {load}
}}

%store (sp: f32[6,8,4], su: f32[1,8,4], si: s32[], sz: s32[]) -> f32[6,8,4] {{
  %sp = f32[6,8,4]{{2,1,0:S(5)}} parameter(0)
  %su = f32[1,8,4]{{2,1,0}} parameter(1)
  %si = s32[] parameter(2)
  %sz = s32[] parameter(3)
  ROOT %ss = f32[6,8,4]{{2,1,0:S(5)}} dynamic-update-slice(%sp, %su, %si, %sz, %sz), {store}
}}

%body (b: (s32[], f32[6,8,4], f32[4,8])) -> (s32[], f32[6,8,4], f32[4,8]) {{
  %b = (s32[], f32[6,8,4]{{2,1,0:S(5)}}, f32[4,8]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %state = f32[6,8,4]{{2,1,0:S(5)}} get-tuple-element(%b), index=1
  %w = f32[4,8] get-tuple-element(%b), index=2
  %zero = s32[] constant(0)
{body}
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[6,8,4]{{2,1,0:S(5)}}, f32[4,8]) tuple(%next, %new, %w)
}}

%condition (c: (s32[], f32[6,8,4], f32[4,8])) -> pred[] {{
  %c = (s32[], f32[6,8,4]{{2,1,0:S(5)}}, f32[4,8]) parameter(0)
  %ci = s32[] get-tuple-element(%c), index=0
  %end = s32[] constant(6)
  ROOT %go = pred[] compare(%ci, %end), direction=LT
}}
"""
START_LOAD = (
    "  %load.s = ((f32[6,8,4]{2,1,0:S(5)}, s32[], s32[]), f32[1,8,4]{2,1,0}, u32[]) "
    "fusion-start(%state, %i, %zero), kind=kLoop, calls=%load"
)
LOADED = "  %x = f32[1,8,4]{2,1,0} fusion-done(%load.s)"
START_STORE = (
    "  %store.s = ((f32[6,8,4]{2,1,0:S(5)}, f32[1,8,4], s32[], s32[]), "
    "f32[6,8,4]{2,1,0:S(5)}, u32[]) fusion-start(%state, ACTIVATION, %i, %zero), kind=kLoop, "
    "calls=%store"
)
STORED = "  %new = f32[6,8,4]{2,1,0:S(5)} fusion-done(%store.s)"
DOT = (
    "  %p = f32[1,8,8] dot(%x, %w), lhs_contracting_dims={2}, rhs_contracting_dims={0}\n"
    "  %y = f32[1,8,4]{2,1,0} slice(%p), slice={[0:1],[0:8],[0:4]}"
)
ENTRY = """
ENTRY %main (state: f32[6,8,4], w: f32[4,8]) -> f32[6,8,4] {
  %a = f32[6,8,4]{2,1,0:S(5)} parameter(0)
  %v = f32[4,8] parameter(1)
  %start = s32[] constant(0)
  %all = (s32[], f32[6,8,4]{2,1,0:S(5)}, f32[4,8]) tuple(%start, %a, %v)
  %loop = (s32[], f32[6,8,4]{2,1,0:S(5)}, f32[4,8]) while(%all), condition=%condition, body=%body
  ROOT %done = f32[6,8,4]{2,1,0:S(5)} get-tuple-element(%loop), index=1
}
"""
IN_TURN = [START_LOAD, LOADED, DOT, START_STORE.replace("ACTIVATION", "%y"), STORED]


def copies_of(*body, load=LINEAR, store=LINEAR, entry=ENTRY):
    load = "dynamic_slice_sizes={1,8,4}, " + load
    computations = COMPUTATIONS.format(load=load, store=store, body="\n".join(body or IN_TURN))
    text = f"HloModule m, is_scheduled=true\n{computations}{entry}"
    return {copy.direction: copy for copy in find_host_copies(read_program(text))}


def test_slices_in_a_loop():
    copies = copies_of()
    assert list(copies) == ["to device", "to host"]
    for copy in copies.values():
        assert (copy.bytes, copy.times, copy.loop_depth) == (SLICE, 6, 1)
        assert copy.is_linear
        assert copy.is_async
        assert copy.opposite_bytes == 0
        assert copy.overlap.matmul_flops == 0
    assert copies["to device"].overlap.done == "x"
    assert link_bytes(list(copies.values())) == {"to device": 6 * SLICE, "to host": 6 * SLICE}


def test_products_and_the_other_direction_between_start_and_done():
    """The store of what is there already, beside the load and a product."""
    arrange = [
        "  %y = f32[1,8,4]{2,1,0} broadcast(%zero), dimensions={}",
        START_LOAD,
        START_STORE.replace("ACTIVATION", "%y"),
        LOADED,
        "  %p = f32[1,8,8] dot(%x, %w), lhs_contracting_dims={2}, rhs_contracting_dims={0}",
        STORED,
    ]
    copies = copies_of(*arrange)
    assert copies["to device"].opposite_bytes == copies["to host"].opposite_bytes == SLICE
    assert copies["to device"].overlap.matmul_flops == 0
    assert copies["to host"].overlap.matmul_flops == DOT_FLOPS


@pytest.mark.parametrize(("kernel", "other"), [("load", "to host"), ("store", "to device")])
def test_a_slice_whose_place_is_not_linear_is_a_kernel(kernel, other):
    copies = copies_of(**{kernel: "metadata={}"})
    assert [way for way, copy in copies.items() if copy.is_linear] == [other]
    assert {copy.bytes for copy in copies.values()} == {SLICE}


WHOLE = """
%double (dp: f32[6,8,4]) -> f32[6,8,4] {
  %dp = f32[6,8,4]{2,1,0:S(5)} parameter(0)
  ROOT %sum = f32[6,8,4]{2,1,0} add(%dp, %dp)
}

ENTRY %main (a: f32[6,8,4], d: bf16[16]) -> (f32[6,8,4], f32[6,8,4], bf16[16]) {
  %a = f32[6,8,4]{2,1,0:S(5)} parameter(0)
  %d = bf16[16]{0} parameter(1)
  %c.s = (f32[6,8,4]{2,1,0}, f32[6,8,4]{2,1,0:S(5)}, u32[]) copy-start(%a)
  %c = f32[6,8,4]{2,1,0} copy-done(%c.s)
  %e = bf16[16]{0:S(5)} copy(%d)
  %same = bf16[16]{0} copy(%d)
  %room = bf16[16]{0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %k = f32[6,8,4]{2,1,0} fusion(%a), kind=kLoop, calls=%double
  ROOT %t = (f32[6,8,4], f32[6,8,4], bf16[16]{0:S(5)}) tuple(%c, %k, %e)
}
"""


def test_whole_arrays_and_kernels_that_read_host_memory():
    found = {
        c.name: c
        for c in find_host_copies(read_program(f"HloModule m, is_scheduled=true\n{WHOLE}"))
    }
    assert list(found) == ["c.s", "e", "k"]
    assert [c.bytes for c in found.values()] == [6 * SLICE, 32, 6 * SLICE]
    assert [c.direction for c in found.values()] == ["to device", "to host", "to device"]
    assert [c.is_async for c in found.values()] == [True, False, False]
    assert [c.is_linear for c in found.values()] == [True, True, False]


def test_a_program_without_host_memory_copies_nothing():
    text = f"HloModule m, is_scheduled=true\n{WHOLE}".replace(":S(5)", "")
    assert find_host_copies(read_program(text)) == []
    assert link_bytes([]) == {"to device": 0, "to host": 0}
