"""`zerojax.attention` by its own kernels: values, choice, plans and programs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from pallas_kernels import attention as kernels
from pallas_kernels.choice import missing
from tests.operators.test_attention_cudnn import compiled, h100s, kinds_of_collectives, plan_of
from tests.support.marks import needs_compiler
from zerojax.config import BigBirdLayout, SlidingWindowLayout
from zerojax.forecasting.hlo import read_program
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.operators import attending
from zerojax.operators.attention_choice import Device, attention_planned_for
from zerojax.placement.device_mesh import make_abstract_mesh, make_mesh
from zerojax.step.build import build_step
from zerojax.tracing.flops import count_program_flops

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
H100 = Device("NVIDIA H100 80GB HBM3", "gpu", split=1, where="step")
CLOSE = 2**-7
"""Of values up to 1: operands, weights and results are rounded to bfloat16."""


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels run on the CPU, where the choice sees an H100."""
    for name in ("attention_part", "part_gradients"):
        run = functools.partial(getattr(kernels, name), interpret=True)
        monkeypatch.setattr(kernels, name, run)
    monkeypatch.setattr(attending, "device_here", lambda: H100)


def operands(tokens=100, heads=2, kv_heads=1):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(1, tokens, heads, 64), (1, tokens, kv_heads, 64), (1, tokens, kv_heads, 64)]
    return [
        (0.5 * jax.random.normal(key, shape)).astype(jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def texts(tokens):
    found = np.arange(tokens) // 37
    found[-9:] = -1
    return jnp.asarray(found[None], jnp.int32)


CALLS = {
    "packed, window": {"causal": True, "window": 30, "segments": texts(100)},
    "layout": {"causal": True, "layout": SlidingWindowLayout(block=32)},
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CALLS)
def test_it_computes_what_stored_scores_compute(case, interpreted):
    arrays = operands()

    def loss(*arrays, implementation):
        out = zerojax.attention(*arrays, implementation=implementation, **CALLS[case])
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    results = {}
    for name in ("mosaic_gpu", "xla"):
        run = functools.partial(loss, implementation=name)
        (_, out), slopes = jax.value_and_grad(run, (0, 1, 2), has_aux=True)(*arrays)
        results[name] = out, *slopes
    for found, expected in zip(*results.values(), strict=True):
        assert found.dtype == jnp.bfloat16
        found, expected = (np.asarray(x, np.float64) for x in (found, expected))
        size = max(np.abs(expected).max(), 1)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2 * CLOSE * size)


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def refused(words, gpu="h100", heads=4, compiler_axes=(), mesh=None, dtype=jnp.bfloat16, **options):
    mesh = mesh or make_abstract_mesh({"data": 8}, 8, gpu=find_gpu(gpu))
    x = struct(1, 64, heads, 64, dtype=dtype)
    with (
        attention_planned_for(mesh, compiler_axes),
        pytest.raises(ValueError, match=f"attention by Mosaic GPU: .*{words}.* or 'chunked'"),
    ):
        jax.eval_shape(
            lambda x: zerojax.attention(x, x, x, implementation="mosaic_gpu", **options), x
        )


def test_what_it_cannot_is_refused_with_what_can():
    refused("needs an NVIDIA GPU.* CPUs", mesh=make_mesh({"data": 8}))
    refused(r"9.0 \(Hopper\), not 8.0", gpu="a100-80gb")
    refused("not float32", dtype=jnp.float32)
    refused("multiple of 16 tokens, not of 8", layout=SlidingWindowLayout(block=8))
    split = make_abstract_mesh({"data": 4, "model": 2}, 8, gpu=find_gpu("h100"))
    over = {"mesh": split, "compiler_axes": ["model"]}
    refused("3 key/value heads cannot be split over 2", heads=3, **over)
    own = BigBirdLayout(block=16, different_layout_per_head=True, num_random_blocks=1,
                        num_sliding_window_blocks=1)  # fmt: skip
    refused("heads are split over 2 devices", layout=own, **over)


def test_auto_never_takes_it_before_a_gpu_has_measured_it():
    plan = plan_of(make_abstract_mesh({"data": 8}, 8, gpu=find_gpu("h100")))
    assert not any("mosaic_gpu" in reason for reason in plan.reasons)


@pytest.mark.thorough
def test_a_plan_says_so_and_its_step_is_counted():
    mesh = make_abstract_mesh({"data": 8}, 8, gpu=find_gpu("h100"))
    flops = {}
    for name in ("mosaic_gpu", "cudnn"):
        plan = plan_of(mesh, attention=name, head_dim=64)
        flops[name] = count_program_flops(
            build_step(plan).trace(plan.abstract_state, plan.abstract_batch).jaxpr
        )
        (said,) = [reason for reason in plan.reasons if reason.startswith("attention ")]
        assert said.startswith(
            f"attention {name} (set by the call): stores none of the 192 x 192 scores"
        )
    # 6 tiles of 64 x 64 of 192 x 192 causal scores, 9 products of each in place of 7.
    assert 1 < flops["mosaic_gpu"] / flops["cudnn"] < 1.5


WAYS = {
    "packed": ({"data": 8}, {}),
    "tensor parallel": ({"data": 4, "model": 2}, {}),
    "layout": ({"data": 8}, {"attention_layout": SlidingWindowLayout(block=16)}),
}


@needs_compiler
@pytest.mark.gpu_programs
def test_the_kernels_compile_for_h200s_too():
    devices = compile_client.gpu_devices(find_gpu("h200"), 8)
    plan = plan_of(make_mesh({"data": 8}, devices), attention="mosaic_gpu", head_dim=64)
    assert len(re.findall(r"custom_call_target=\"mosaic_gpu\w*\"", compiled(plan).text)) >= 3


@needs_compiler
@pytest.mark.gpu_programs
@pytest.mark.parametrize("way", WAYS)
def test_a_step_for_h100s_holds_it_and_sends_nothing_more(way):
    sizes, options = WAYS[way]
    options = {"remat": "attention", "head_dim": 64, "segments": way != "layout", **options}
    options["tokens"] = 272  # no width of this model
    text = compiled(plan_of(h100s(**sizes), attention="mosaic_gpu", **options)).text
    program = read_program(text)
    kernels_there = re.findall(r"custom_call_target=\"(mosaic_gpu\w*)\"", text)
    assert len(kernels_there) == 3, "forward once, and two backward"
    assert not re.search(r"\[[\d,]*272,272\]\{", text), "no array of tokens by tokens"
    stored = read_program(compiled(plan_of(h100s(**sizes), attention="xla", **options)).text)
    assert kinds_of_collectives(program, 8) == kinds_of_collectives(stored, 8)
