"""FLOPs and bytes of device memory, counted by hand."""

import json

import pytest

from zerojax.forecasting.hlo import hbm_bytes, matmul_flops, opaque_calls, read_program


def program_of(lines: str, *, computations: str = ""):
    """x is [8, 16] and w [16, 32], float32; `stack` is 10 times [16, 32]; i a number."""
    return read_program(
        "HloModule m, is_scheduled=true\n\n"
        f"{computations}\n"
        "ENTRY %main (x: f32[8,16], w: f32[16,32], stack: f32[10,16,32], i: s32[]) -> f32[] {\n"
        "  %x = f32[8,16]{1,0} parameter(0)\n"
        "  %w = f32[16,32]{1,0} parameter(1)\n"
        "  %stack = f32[10,16,32]{2,1,0} parameter(2)\n"
        "  %i = s32[] parameter(3)\n"
        f"{lines}\n"
        "}\n"
    )


X, W, Y = 8 * 16 * 4, 16 * 32 * 4, 8 * 32 * 4
FLOPS = 2 * 8 * 32 * 16

# --- FLOPs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        ("f32[8,32] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}", FLOPS),
        # Both dimensions of x: a number per column of nothing.
        ("f32[] dot(%x, %x), lhs_contracting_dims={0,1}, rhs_contracting_dims={0,1}", 2 * 8 * 16),
        # A batch of 10: [10, 16, 32] with itself over 32.
        (
            "f32[10,16,16] dot(%stack, %stack), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
            "rhs_batch_dims={0}, rhs_contracting_dims={2}",
            10 * 2 * 16 * 16 * 32,
        ),
        # 10 rows of 16 places and 16 features; each output element meets a window of 8.
        ("f32[10,16,16] convolution(%stack, %x), dim_labels=b0f_0o->b0f", 2 * 10 * 16 * 16 * 8),
        ("f32[8,16] add(%x, %x)", 0),
    ],
)
def test_flops(line, flops):
    assert matmul_flops(program_of(f"  ROOT %out = {line}")) == flops


def library_call(target: str, config: dict, line: str) -> str:
    return (
        f'  %call = {line}, custom_call_target="{target}", '
        f"backend_config={json.dumps(config)}\n"
        "  ROOT %out = f32[8,32] get-tuple-element(%call), index=0"
    )


NUMBERS = {
    "lhs_contracting_dimensions": ["1"],
    "rhs_contracting_dimensions": ["0"],
    "lhs_batch_dimensions": [],
    "rhs_batch_dimensions": [],
}


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_products_of_cublas(target):
    call = library_call(
        target,
        {"operation_queue_id": "0", "gemm_backend_config": {"dot_dimension_numbers": NUMBERS}},
        "(f32[8,32]{1,0}, s8[4194304]{0}) custom-call(%x, %w)",
    )
    program = program_of(call)
    assert matmul_flops(program) == FLOPS
    # The workspace of 4 MiB is scratch.
    assert hbm_bytes(program) == X + W + Y
    assert opaque_calls(program) == {}


@pytest.mark.parametrize(
    ("target", "line"),
    [
        # A window of 3 x 3, 4 features to 6, 2 images of 5 x 5.
        ("__cudnn$convForward", "(f32[2,5,5,6], u8[0]) custom-call(%image, %kernel)"),
        ("__cudnn$convBackwardInput", "(f32[2,5,5,4], u8[0]) custom-call(%gradient, %kernel)"),
        ("__cudnn$convBackwardFilter", "(f32[6,3,3,4], u8[0]) custom-call(%image, %gradient)"),
    ],
)
def test_convolutions_of_cudnn(target, line):
    program = program_of(
        "  %image = f32[2,5,5,4] broadcast(%i), dimensions={}\n"
        "  %gradient = f32[2,5,5,6] broadcast(%i), dimensions={}\n"
        "  %kernel = f32[6,3,3,4] broadcast(%i), dimensions={}\n"
        f'  ROOT %call = {line}, custom_call_target="{target}", dim_labels=b01f_o01i->b01f'
    )
    assert matmul_flops(program) == 2 * (2 * 5 * 5 * 6) * (3 * 3 * 4)


@pytest.mark.parametrize(("target", "products"), [("Softmax", 2), ("SoftmaxBackward", 5)])
def test_attention_of_cudnn(target, products):
    """2 sequences, 4 heads of 64, 128 queries and 256 keys."""
    config = {"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"dimensions": []}}}
    shape = config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]
    shape["dimensions"] = ["2", "4", "128", "256"]
    program = program_of(
        "  %q = bf16[2,128,4,64] broadcast(%i), dimensions={}\n"
        "  ROOT %call = (bf16[2,128,4,64], u8[0]) custom-call(%q, %q, %q), "
        f'custom_call_target="__cudnn$fmha{target}", backend_config={json.dumps(config)}'
    )
    assert matmul_flops(program) == products * 2 * (2 * 4 * 128 * 256) * 64


GEMM_FUSION = """
%gemm (gx: f32[8,16], gw: f32[16,32]) -> f32[8,32] {
  %gx = f32[8,16]{1,0} parameter(0)
  %gw = f32[16,32]{1,0} parameter(1)
  ROOT %gdot = f32[8,32]{1,0} dot(%gx, %gw), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%outer (ox: f32[8,16], ow: f32[16,32]) -> f32[8,32] {
  %ox = f32[8,16]{1,0} parameter(0)
  %ow = f32[16,32]{1,0} parameter(1)
  ROOT %nested = f32[8,32]{1,0} fusion(%ox, %ow), kind=kCustom, calls=%gemm
}

%body (b: (f32[8,16], f32[16,32])) -> (f32[8,16], f32[16,32]) {
  %b = (f32[8,16], f32[16,32]) parameter(0)
  %b0 = f32[8,16] get-tuple-element(%b), index=0
  %b1 = f32[16,32] get-tuple-element(%b), index=1
  %product = f32[8,32] fusion(%b0, %b1), kind=kCustom, calls=%outer
  ROOT %b.out = (f32[8,16], f32[16,32]) tuple(%b0, %b1)
}

%condition (c: (f32[8,16], f32[16,32])) -> pred[] {
  %c = (f32[8,16], f32[16,32]) parameter(0)
  ROOT %go = pred[] constant(true)
}

%one (o1: (f32[8,16], f32[16,32])) -> f32[8,32] {
  %o1 = (f32[8,16], f32[16,32]) parameter(0)
  %o2 = f32[8,16] get-tuple-element(%o1), index=0
  %o3 = f32[16,32] get-tuple-element(%o1), index=1
  ROOT %o.out = f32[8,32] dot(%o2, %o3), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%none (n1: (f32[8,16], f32[16,32])) -> f32[8,32] {
  %n1 = (f32[8,16], f32[16,32]) parameter(0)
  %n2 = f32[8,16] get-tuple-element(%n1), index=0
  ROOT %n.out = f32[8,32] pad(%n2, %n2), padding=0_0x0_16
}
"""


def test_products_inside_fusions_and_loops():
    program = program_of(
        "  %init = (f32[8,16], f32[16,32]) tuple(%x, %w)\n"
        "  ROOT %loop = (f32[8,16], f32[16,32]) while(%init), condition=%condition, body=%body, "
        'backend_config={"known_trip_count":{"n":"9"}}',
        computations=GEMM_FUSION,
    )
    assert matmul_flops(program) == 9 * FLOPS
    assert hbm_bytes(program) == 9 * (X + W + Y)


def test_of_a_conditional_the_dearest_branch_counts():
    program = program_of(
        "  %both = (f32[8,16], f32[16,32]) tuple(%x, %w)\n"
        "  ROOT %c = f32[8,32] conditional(%i, %both, %both, %both), "
        "branch_computations={%none, %one, %none}",
        computations=GEMM_FUSION,
    )
    assert matmul_flops(program) == FLOPS
    assert hbm_bytes(program) == X + W + Y


def test_calls_whose_work_the_text_does_not_tell_are_listed():
    program = program_of(
        '  %a = f32[8,16] custom-call(%x), custom_call_target="mosaic_gpu"\n'
        '  ROOT %b = f32[8,16] custom-call(%a), custom_call_target="mosaic_gpu"'
    )
    assert opaque_calls(program) == {"mosaic_gpu": 2}
    assert matmul_flops(program) == 0
    assert hbm_bytes(program) == 4 * X


# --- bytes ------------------------------------------------------------------------------------

SLICE = 16 * 32 * 4
FUSIONS = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %ab = f32[] add(%a, %b)
}

%read.one (s.1: f32[10,16,32], i.1: s32[]) -> f32[16,32] {
  %s.1 = f32[10,16,32]{2,1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %z.1 = s32[] constant(0)
  %double.1 = f32[10,16,32]{2,1,0} add(%s.1, %s.1)
  %d.1 = f32[1,16,32]{2,1,0} dynamic-slice(%double.1, %i.1, %z.1, %z.1)
  ROOT %r.1 = f32[16,32]{1,0} bitcast(%d.1)
}

%write.one (s.2: f32[10,16,32], w.2: f32[16,32], i.2: s32[]) -> f32[10,16,32] {
  %s.2 = f32[10,16,32]{2,1,0} parameter(0)
  %w.2 = f32[16,32]{1,0} parameter(1)
  %i.2 = s32[] parameter(2)
  %z.2 = s32[] constant(0)
  %v.2 = f32[1,16,32]{2,1,0} bitcast(%w.2)
  ROOT %u.2 = f32[10,16,32]{2,1,0} dynamic-update-slice(%s.2, %v.2, %i.2, %z.2, %z.2)
}

%write.new (w.3: f32[16,32], i.3: s32[]) -> f32[10,16,32] {
  %w.3 = f32[16,32]{1,0} parameter(0)
  %i.3 = s32[] parameter(1)
  %z.3 = s32[] constant(0)
  %f.3 = f32[] constant(0)
  %s.3 = f32[10,16,32]{2,1,0} broadcast(%f.3), dimensions={}
  %v.3 = f32[1,16,32]{2,1,0} bitcast(%w.3)
  ROOT %u.3 = f32[10,16,32]{2,1,0} dynamic-update-slice(%s.3, %v.3, %i.3, %z.3, %z.3)
}

%halves (w.4: f32[16,32]) -> (f32[8,32], f32[8,32]) {
  %w.4 = f32[16,32]{1,0} parameter(0)
  %top.4 = f32[8,32]{1,0} slice(%w.4), slice={[0:8], [0:32]}
  %low.4 = f32[8,32]{1,0} slice(%w.4), slice={[8:16], [0:32]}
  ROOT %t.4 = (f32[8,32]{1,0}, f32[8,32]{1,0}) tuple(%top.4, %low.4)
}

%top (w.5: f32[16,32], unused.5: f32[8,16]) -> f32[8,32] {
  %w.5 = f32[16,32]{1,0} parameter(0)
  %unused.5 = f32[8,16]{1,0} parameter(1)
  ROOT %top.5 = f32[8,32]{1,0} slice(%w.5), slice={[0:8], [0:32]}
}

%norm (w.6: f32[16,32]) -> f32[16] {
  %w.6 = f32[16,32]{1,0} parameter(0)
  %zero.6 = f32[] constant(0)
  %square.6 = f32[16,32]{1,0} multiply(%w.6, %w.6)
  ROOT %n.6 = f32[16]{0} reduce(%square.6, %zero.6), dimensions={1}, to_apply=%add
}

%spread (n.7: f32[16]) -> f32[16,32] {
  %n.7 = f32[16]{0} parameter(0)
  ROOT %s.7 = f32[16,32]{1,0} broadcast(%n.7), dimensions={0}
}
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("f32[8,16] copy(%x)", 2 * X),
        ("f32[8,16] add(%x, %x)", 3 * X),
        ("f32[8,16] bitcast(%x)", 0),
        ("f32[16,32] fusion(%stack, %i), kind=kLoop, calls=%read.one", 2 * SLICE + 4),
        ("f32[10,16,32] fusion(%stack, %w, %i), kind=kLoop, calls=%write.one", 2 * SLICE + 4),
        ("f32[10,16,32] fusion(%w, %i), kind=kLoop, calls=%write.new", 11 * SLICE + 4),
        ("(f32[8,32], f32[8,32]) fusion(%w), kind=kLoop, calls=%halves", 2 * W),
        ("f32[8,32] fusion(%w, %x), kind=kLoop, calls=%top", W),
        ("f32[16] fusion(%w), kind=kInput, calls=%norm", W + 16 * 4),
        ("f32[1,16,32] dynamic-slice(%stack, %i, %i, %i)", 2 * SLICE + 3 * 4),
        ("f32[10,16,32] dynamic-update-slice(%stack, %w, %i, %i, %i)", 2 * SLICE + 3 * 4),
        # Read and written in host memory: the device's own memory sees one of the two.
        ("f32[8,16]{1,0:S(5)} copy(%x)", X),
        # What is gathered is read once and written eight times as large.
        ("f32[64,16] all-gather(%x), replica_groups=[1,8]<=[8], dimensions={0}", 9 * X),
    ],
)
def test_bytes_of_a_kernel(line, expected):
    assert hbm_bytes(program_of(f"  ROOT %out = {line}", computations=FUSIONS)) == expected


def test_broadcasts_inside_a_fusion_read_what_they_spread():
    program = program_of(
        "  %n = f32[16] fusion(%w), kind=kInput, calls=%norm\n"
        "  ROOT %out = f32[16,32] fusion(%n), kind=kLoop, calls=%spread",
        computations=FUSIONS,
    )
    assert hbm_bytes(program) == (W + 64) + (64 + W)


@pytest.mark.parametrize(
    "lines",
    [
        "  %s = ((f32[8,16]), f32[64,16]) all-gather-start(%x), dimensions={0}\n"
        "  ROOT %d = f32[64,16] all-gather-done(%s)",
        "  %s = ((f32[8,16]), f32[64,16], u32[]) async-start(%x), calls=%wrapped\n"
        "  %u = ((f32[8,16]), f32[64,16], u32[]) async-update(%s)\n"
        "  ROOT %d = f32[64,16] async-done(%u)",
        "  %s = ((f32[8,16]), f32[64,16], u32[]) fusion-start(%x), calls=%wrapped\n"
        "  ROOT %d = f32[64,16] fusion-done(%s)",
    ],
)
def test_what_runs_asynchronously_counts_once(lines):
    wrapped = (
        "%wrapped (v: f32[8,16]) -> f32[64,16] {\n"
        "  %v = f32[8,16] parameter(0)\n"
        "  ROOT %g = f32[64,16] all-gather(%v), replica_groups=[1,8]<=[8], dimensions={0}\n"
        "}\n"
    )
    assert hbm_bytes(program_of(lines, computations=wrapped)) == 9 * X
