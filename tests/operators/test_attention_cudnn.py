"""cuDNN's attention: the custom calls, the choice, what is refused, and programs for GPUs.

No machine of ours runs these calls in a test without a GPU, so they are held to those that JAX
itself makes; `benchmarks/gpu` compares their values where there is a GPU.
"""

import functools
import importlib
import itertools
import json
import re

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.forecasting.test_forecast import needs_compiler
from zerojax import make_mesh, make_plan
from zerojax.forecasting.hlo.communication import find_collectives
from zerojax.forecasting.hlo.costs import matmul_flops, opaque_calls
from zerojax.forecasting.hlo.program import read_program
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import find_gpu
from zerojax.operators.attending import calls_of_attention
from zerojax.operators.attention_choice import Device, attention_planned_for
from zerojax.operators.chunked_attention import Visibility
from zerojax.operators.cudnn_attention import BACKWARD, FORWARD, cudnn_attention, obstacle
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.step.build import build_step
from zerojax.tracing.flops import count_flops


def operands(dtype="bfloat16", *, tokens=64, heads=4, kv_heads=2, head_dim=32, keys=None):
    query = jax.ShapeDtypeStruct((2, tokens, heads, head_dim), dtype)
    key = jax.ShapeDtypeStruct((2, keys or tokens, kv_heads, head_dim), dtype)
    return query, key, key


def gradients(attend):
    """Of the sum of squared results, for the three operands."""
    return jax.grad(lambda *given: (attend(*given).astype(jnp.float32) ** 2).sum(), (0, 1, 2))


def ours(causal, window=None, scale=0.25):
    visibility = Visibility(causal, window)
    return lambda *given: cudnn_attention(*given, visibility=visibility, scale=scale)


# --- the calls ------------------------------------------------------------------------------------

CALL = re.compile(
    r'custom_call @(__cudnn\$\w+)\(.*?backend_config = "((?:[^"\\]|\\.)*)", (.*?)$', re.MULTILINE
)


def calls_of(attend, given):
    """[(target, backend config, layouts and types)] of the program for a GPU."""
    traced = jax.jit(gradients(attend)).trace(*given)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return [
        (target, json.loads(config.replace(r"\22", '"')), rest)
        for target, config, rest in CALL.findall(text)
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("dtype", "causal", "window", "kv_heads"),
    [("bfloat16", True, None, 2), ("bfloat16", False, None, 4), ("float16", True, 9, 1)],
)
def test_the_calls_are_those_of_jax(monkeypatch, dtype, causal, window, kv_heads):
    """JAX's own are asked for a GPU that is not there: the version of libcudnn is given."""
    of_jax = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(of_jax, "check_cudnn_version", lambda: 91200)

    def theirs(*given):
        local = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            *given, is_causal=causal, scale=0.25, local_window_size=local, implementation="cudnn"
        )

    given = operands(dtype, kv_heads=kv_heads)
    expected = calls_of(theirs, given)
    assert [target for target, *_ in expected] == [FORWARD, BACKWARD]
    assert calls_of(ours(causal, window), given) == expected


def test_outside_of_a_mesh_jax_makes_the_calls(monkeypatch):
    """Its own have a rule for arrays that are split over devices."""
    of_jax = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(of_jax, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(Device, "is_gpu", True)
    attend = functools.partial(
        zerojax.attention, causal=True, window=9, scale=0.25, implementation="cudnn"
    )
    monkeypatch.setattr(Device, "capability", 9.0)
    assert calls_of(attend, operands()) == calls_of(ours(True, 9), operands())
    program = jax.make_jaxpr(attend)(*(jnp.zeros(x.shape, x.dtype) for x in operands()))
    assert "custom_partitioning" in str(program) or "_wrapper" in str(program)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), (True, 5), (True, 64), (True, 900)]
)
def test_products_are_counted_over_the_pairs_that_are_seen(causal, window):
    tokens, head_dim = 64, 32
    pairs = itertools.product(range(tokens), repeat=2)
    seen = sum(not causal or 0 <= query - key < (window or tokens) for query, key in pairs)
    per_product = 2 * (2 * 4) * seen * head_dim
    given = operands(tokens=tokens, head_dim=head_dim)
    assert count_flops(ours(causal, window), *given) == 2 * per_product
    assert count_flops(gradients(ours(causal, window)), *given) == 7 * per_product


def test_a_checkpoint_that_keeps_attention_does_not_call_it_again():
    def counted(policy):
        attend = jax.checkpoint(lambda *given: ours(True)(*given) * 2, policy=policy)
        return [target for target, *_ in calls_of(attend, operands())]

    keeps = jax.checkpoint_policies.save_only_these_names("zerojax.attention")
    assert counted(keeps) == [FORWARD, BACKWARD]
    assert counted(None) == [FORWARD, FORWARD, BACKWARD]


# --- the choice -----------------------------------------------------------------------------------


def gpu_mesh(gpu="h100", **sizes):
    return make_abstract_mesh(sizes or {"data": 8}, 8, gpu=find_gpu(gpu))


def taken(mesh, given=None, compiler_axes=(), **options):
    with attention_planned_for(mesh, compiler_axes), calls_of_attention() as calls:
        jax.eval_shape(lambda *x: zerojax.attention(*x, **options), *(given or operands()))
    (call,) = calls
    return call.describe()


def test_auto_takes_it_on_a_gpu_where_it_can():
    assert taken(gpu_mesh(), causal=True) == (
        "attention cudnn (auto: bfloat16 heads of 32 on NVIDIA H100 SXM 80 GB): stores none of the "
        "64 x 64 scores of each head; cuDNN's workspace is not counted"
    )
    assert taken(gpu_mesh(), operands("float32")).startswith(
        "attention xla (auto: cuDNN: cuDNN attention supports bfloat16 and float16, not float32"
    )
    assert taken(gpu_mesh(), operands("float32", tokens=5000)).startswith("attention chunked (auto")
    assert taken(make_mesh({"data": 8})).startswith("attention xla (auto: no more than 4096 keys)")
    assert taken(make_abstract_mesh({"data": 8}, 8)).startswith("attention xla (auto: no more")


@pytest.mark.thorough
@pytest.mark.parametrize("activations", ["device", "host"])
def test_a_plan_and_its_step_know_the_gpu_of_an_abstract_mesh(activations):
    plan = plan_of(gpu_mesh(), remat="full", offload={"activations": activations})
    assert any(reason.startswith("attention cudnn (auto") for reason in plan.reasons)
    traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    assert FORWARD in str(traced.jaxpr)


def test_it_can_be_asked_for_where_the_devices_are_not_known():
    found = taken(make_abstract_mesh({"data": 8}, 8), implementation="cudnn")
    assert found.startswith("attention cudnn (set by the call): stores none")


CANNOT = {
    "dtype": ({"given": operands("float32")}, "not float32"),
    "head_dim": ({"given": operands(head_dim=20)}, "a multiple of 8 and at most 256, not 20"),
    "wide heads": (
        {"given": operands(head_dim=192), "mesh": gpu_mesh("a100-80gb")},
        "at most 128, not 192",
    ),
    "segments": ({"segments": jnp.zeros((2, 64), jnp.int32)}, "not support segments"),
    "positions": ({"positions": jnp.zeros((2, 64), jnp.int32)}, "not support positions"),
    "layout": ({"layout": zerojax.config.FixedLayout()}, "not support layout"),
    "window": ({"window": 4}, "a window only with causal"),
    "keys": ({"given": operands(keys=32), "causal": True}, "as many queries as keys"),
    "split": (
        {"mesh": gpu_mesh(data=2, model=4), "compiler_axes": ("model",)},
        "2 key/value heads cannot be split over 4 devices",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CANNOT)
def test_what_it_cannot_do_is_refused_with_what_works(case):
    options, words = CANNOT[case]
    options = {"mesh": gpu_mesh(), **options}
    with pytest.raises(ValueError, match=words) as refused:
        taken(implementation="cudnn", **options)
    assert "use implementation='auto', or 'chunked'" in str(refused.value)
    assert f"auto: cuDNN: {str(refused.value).split(': ')[1].split(';')[0]}" in taken(**options)
    taken(implementation="chunked", **options)


def test_the_compute_capability_decides():
    query, key, _ = operands(head_dim=256)
    facts = {"given": (), "split": 1}
    found = {
        capability: obstacle(query, key, Visibility(True, None), capability=capability, **facts)
        for capability in (7.0, 8.0, 8.9, 9.0, 10.0, 12.0)
    }
    assert {capability for capability, why in found.items() if why is None} == {9.0, 10.0}
    assert found[7.0] == "cuDNN attention needs compute capability 8.0 or newer, not 7.0"


# --- programs for GPUs ----------------------------------------------------------------------------


def plan_of(
    mesh,
    *,
    attention="auto",
    remat="full",
    zero=3,
    head_dim=None,
    attention_layout=None,
    segments=False,
    tokens=192,
    **options,
):
    """Of a Llama with 4 heads of 16 and 2 for keys; with `head_dim` 2 heads of so many."""
    heads = (4, 2) if head_dim is None else (2, 2)
    sizes = {"num_layers": 4, "num_heads": heads[0], "num_kv_heads": heads[1], "embed_dim": 64}
    sizes["head_dim"] = head_dim
    config = zerojax.zoo.LlamaConfig(
        vocab_size=320,
        max_seq_len=tokens,
        attention=attention,
        attention_layout=attention_layout,
        remat=remat,
        **sizes,
    )
    shape = jax.ShapeDtypeStruct((16, tokens), jnp.int32)
    batch = {"tokens": shape, "targets": shape, **({"segments": shape} if segments else {})}
    return make_plan(
        lambda rngs: zerojax.zoo.Llama(config, rngs=rngs),
        mesh,
        example_batch=batch,
        zero=zero,
        precision="bf16",
        persistence_threshold=0,
        **options,
    )


def h100s(**sizes):
    return make_mesh(sizes, compile_client.gpu_devices(find_gpu("h100"), 8))


def compiled(plan):
    traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    return compile_client.compile_for_gpus(
        traced.lower(),
        devices=list(plan.mesh.devices.flat),
        options=dict(compile_client.SKETCH_OPTIONS),
    )


def kinds_of_collectives(program, size):
    """All but their order, which the rest of the program changes."""
    return sorted(
        (one.kind, one.group, one.payload_bytes, one.times)
        for one in find_collectives(program, size)
    )


WAYS = {"zero 3": ({"data": 8}, {}), "tensor parallel": ({"data": 4, "model": 2}, {})}
MORE_WAYS = {
    "zero 0": ({"data": 8}, {"zero": 0}),
    "microbatches": ({"data": 8}, {"zero": 2, "num_microbatches": 2}),
    "remat attention": ({"data": 8}, {"remat": "attention"}),
    "pipeline": ({"data": 4, "stage": 2}, {"zero": 1, "num_microbatches": 2}),
    "pipeline, tensor parallel": (
        {"data": 2, "stage": 2, "model": 2},
        {"zero": 1, "num_microbatches": 2},
    ),
}


@needs_compiler
@pytest.mark.gpu_programs
@pytest.mark.parametrize(
    "way", [*WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in MORE_WAYS)]
)
def test_a_step_calls_it_and_sends_nothing_more(way):
    sizes, options = {**WAYS, **MORE_WAYS}[way]
    plan = plan_of(h100s(**sizes), **options)
    assert sum(reason.startswith("attention cudnn (auto") for reason in plan.reasons) == 1
    text = compiled(plan).text
    program = read_program(text)
    assert FORWARD in text
    assert BACKWARD in text
    assert not opaque_calls(program).keys() & {FORWARD, BACKWARD}, "their products are counted"
    assert not re.search(r"\[[\d,]*192,192\]\{", text), "no array of tokens by tokens"
    stored = read_program(compiled(plan_of(h100s(**sizes), attention="xla", **options)).text)
    assert kinds_of_collectives(program, 8) == kinds_of_collectives(stored, 8)
    assert matmul_flops(program) < matmul_flops(stored)


@needs_compiler
@pytest.mark.gpu_programs
def test_a_forecast_names_what_is_not_counted(monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", "off")
    monkeypatch.setattr(compile_client, "FAST_OPTIONS", compile_client.SKETCH_OPTIONS)
    pages = [
        " ".join(
            zerojax.forecast(plan_of(gpu_mesh(), attention=name), gpu="h100", fast=True)
            .page()
            .split()
        )
        for name in ("auto", "chunked")
    ]
    assert ["not its workspace" in page for page in pages] == [True, False]
