"""A run whose sequences are split over `context` has the losses of one device.

The bar is that of every other way of computing (`trajectories.TOLERANCE`).
"""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.support.recipe import RECIPE
from tests.support.small_models import VOCAB, UserText, reference_model
from tests.support.trajectories import TOLERANCE, plan_for, text_batch, train_for
from zerojax.config import ModelConfig
from zerojax.data import Boundary, TokenSource, tokens_of_array
from zerojax.forecasting.transfers import attention_wire_bytes
from zerojax.operators import chunked_attention
from zerojax.operators.context import WAYS, Sizes, wire_bytes
from zerojax.passes import microbatch, parameters
from zerojax.placement.device_mesh import CONTEXT, DATA_AXES
from zerojax.plan.counts import kept_activation_bytes
from zerojax.step.build import build_evaluation, build_step
from zerojax.step.reshard import reshard_state, to_portable_state
from zerojax.transport import collectives
from zerojax.zoo import GPT2, GPT2Config, decoder


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 2)


def packed_batch(index):
    """Random texts of 1 to 16 tokens; a row of padding, one of one text, one with many."""
    batch = text_batch(index)
    random = np.random.default_rng(index % 4)
    begins = random.random(batch["tokens"].shape) < 0.2
    segments = np.cumsum(begins, axis=1).astype(np.int32)
    segments[0] = -1
    segments[1] = 0
    segments[2] = np.arange(16) // 2
    segments[3, 10:] = -1
    weights = (random.random(begins.shape) < 0.8).astype(np.float32)
    return {**batch, "segments": segments, "weights": weights}


BATCHES = {"causal": text_batch, "packed": packed_batch}


@functools.cache
def one_device(name, case, **model):
    return train_for(reference_model(name, **model), devices=1, batch=BATCHES[case])


def assert_equal(name, case, options, **model):
    options = {"persistence_threshold": 0, **options}
    found = train_for(reference_model(name, **model), batch=BATCHES[case], **options)
    expected = one_device(name, case)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=TOLERANCE)
    assert expected.losses[0] - expected.losses[-1] > 0.02
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("zero", range(4))
def test_every_stage_and_way_trains_as_one_device(zero, way, case):
    name = "llama" if zero % 2 else "gpt2"
    mesh = {"data": 2, "context": 4}
    found = assert_equal(name, case, {"zero": zero, "mesh": mesh, "context_parallel": way})
    assert found.plan.context.way == way
    specs = {str(leaf.stored_spec) for leaf in found.plan.placement.leaves.values()}
    assert any("'data', 'context'" in spec for spec in specs) == (zero > 0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "options", "model"),
    [
        ({"context": 8, "data": 1}, {"zero": 3}, {"num_heads": 8}),
        ({"context": 2, "data": 4}, {"zero": 3, "num_microbatches": 4}, {}),
        ({"context": 2, "data": 2, "model": 2}, {"zero": 3}, {}),
        ({"context": 2, "data": 2, "replica": 2}, {"zero": 3}, {}),
        ({"context": 4, "data": 2}, {"zero": 2, "num_microbatches": 2}, {"remat": "full"}),
        ({"context": 4, "data": 2}, {"zero": 3}, {"remat": "attention", "attention": "chunked"}),
        ({"context": 4, "data": 2}, {"zero": 1}, {"loss_chunk": 2}),
    ],
    ids=["8", "accumulation", "tensor parallel", "replicas", "remat", "kept", "chunked loss"],
)
@pytest.mark.parametrize("way", WAYS)
def test_combinations_train_as_one_device(way, mesh, options, model):
    if mesh["context"] == 8:
        expected = train_for(reference_model("gpt2", **model), devices=1, batch=packed_batch)
        options = {"mesh": mesh, "persistence_threshold": 0, "context_parallel": way, **options}
        found = train_for(reference_model("gpt2", **model), batch=packed_batch, **options)
        np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=TOLERANCE)
        return
    options = {"mesh": mesh, "context_parallel": way, **options}
    assert_equal("gpt2", "packed", options, **model)


def speeches(index):
    """Rows of 64 bytes of Shakespeare, packed; each speech is a text."""
    text = (Path(zerojax.__file__).parent / "data" / "shakespeare.txt").read_bytes()
    tokens = np.frombuffer(text.replace(b"\n\n", b"\0"), np.uint8)
    source = TokenSource(
        tokens=tokens_of_array(tokens.astype(np.int32)),
        vocab_size=256,
        boundary=Boundary(end_token=0),
        seq_len=64,
        global_batch_size=8,
    )
    return source.batch(index)


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_a_gpt_learns_packed_shakespeare_as_on_one_device(way):
    assert len({len(set(row)) for row in speeches(0)["segments"].tolist()}) > 1
    sizes = {"num_layers": 2, "num_heads": 4, "embed_dim": 32, "max_seq_len": 64}
    model = zerojax.zoo.build_model(ModelConfig(name="gpt2", **sizes), 256)
    expected = train_for(model, batch=speeches, devices=1)
    options = {"zero": 3, "mesh": {"data": 2, "context": 4}, "persistence_threshold": 0}
    found = train_for(model, batch=speeches, context_parallel=way, **options)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=TOLERANCE)
    assert expected.losses[0] - expected.losses[-1] > 0.3


OFFLOAD = {
    "activations": {"activations": "host"},
    "optimizer state": {"opt_state": "host"},
    "all": {"params": "host", "opt_state": "host", "activations": "host"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", OFFLOAD)
def test_what_lies_on_the_host_is_that_of_the_device(case, way):
    slices = {} if case == "activations" else {"slice_elements": 256, "min_elements": 1}
    options = {
        "zero": 3,
        "mesh": {"data": 1 if case == "all" else 2, "context": 4},
        "devices": 4 if case == "all" else 8,
        "context_parallel": way,
        "offload": {**OFFLOAD[case], **slices},
        "steps": 8,
        "optimizer": zerojax.adamw(1e-2, eps=1e-5, **RECIPE),
    }
    model = reference_model("llama", remat="full")
    found = train_for(model, batch=packed_batch, persistence_threshold=50, **options)
    assert found.plan.offload is not None
    np.testing.assert_allclose(found.losses, by_adamw().losses, rtol=0, atol=TOLERANCE)


def test_what_waits_on_the_host_is_a_part_of_each_sequence():
    model = reference_model("llama", remat="full")
    options = {"offload": {"activations": "host"}, "zero": 3}
    whole = plan_for(model, mesh={"data": 2}, devices=2, **options)
    part = plan_for(model, mesh={"data": 2, "context": 4}, **options)
    assert kept_activation_bytes(whole) == 4 * kept_activation_bytes(part) > 0


@functools.cache
def by_adamw():
    model = reference_model("llama", remat="full")
    tx = zerojax.adamw(1e-2, eps=1e-5, **RECIPE)
    return train_for(model, devices=1, batch=packed_batch, optimizer=tx, steps=8)


@pytest.mark.thorough
def test_a_state_goes_to_another_mesh_and_back_bit_by_bit():
    """Widths of 36 do not divide over 8 devices, so that parameters are padded."""
    model = reference_model("gpt2", embed_dim=36)
    run = train_for(model, mesh={"data": 2, "context": 4}, zero=3, steps=2, persistence_threshold=0)
    assert any(leaf.is_padded for leaf in run.plan.placement.leaves.values())
    expected = jax.tree.map(np.asarray, to_portable_state(run.plan, run.state))
    plan, state = run.plan, run.state
    for mesh in {"data": 8}, {"data": 1, "context": 8}, {"data": 4, "context": 2}:
        old, plan = plan, plan_for(model, mesh=mesh, zero=3, persistence_threshold=0)
        state = reshard_state(old, plan, state)
        found = to_portable_state(plan, state)
        assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))
        largest = max(found["params"].values(), key=lambda x: x.size)
        assert largest.addressable_shards[0].data.size <= largest.size // 4


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["ulysses", *(way for way in WAYS[1:])])
def test_a_traced_step_sends_what_the_formulas_say(way):
    """Of each layer and microbatch; what remat computes again is sent again."""
    sizes = Sizes(
        rows=4, tokens=16, heads=4, kv_heads=2, head_dim=8, itemsize=4, devices=4, causal=True
    )
    forward, backward = wire_bytes(way, sizes)
    for remat, passes in (("none", 1), ("full", 2)):
        plan = plan_for(
            reference_model("llama", remat=remat),
            mesh={"data": 2, "context": 4},
            num_microbatches=4,
            context_parallel=way,
            zero=3,
        )
        traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
        found = attention_wire_bytes(traced.jaxpr, plan.mesh.shape)
        assert found == 2 * 4 * (passes * forward + backward)
        assert attention_wire_bytes(traced.jaxpr, {**plan.mesh.shape, "context": 1}) == 0


# --- mistakes that these tests see ----------------------------------------------------------------


@pytest.mark.thorough
def test_gradients_that_are_not_summed_over_context_are_seen(monkeypatch):
    """At stage 0, where a sum over the data axes alone would leave each device its own."""
    monkeypatch.setattr(collectives.sum_buckets, "__defaults__", (DATA_AXES,))
    monkeypatch.setattr(parameters, "PASS_AXES", DATA_AXES)
    mesh = {"data": 2, "context": 4}
    found = train_for(reference_model("gpt2"), mesh=mesh, batch=packed_batch, steps=4)
    expected = one_device("gpt2", "packed")
    assert np.abs(found.losses - expected.losses[:4]).max() > 1e-4


@pytest.mark.thorough
def test_weights_cut_before_they_know_their_texts_are_seen(monkeypatch):
    """`before_cut` made of parts, in which the next token of the last one is another device's."""
    monkeypatch.setattr(microbatch, "cut_batch", lambda _, batch: (batch, P(DATA_AXES, CONTEXT)))
    monkeypatch.setattr(decoder, "current_split", lambda: None)
    mesh = {"data": 2, "context": 4}
    found = train_for(reference_model("gpt2"), mesh=mesh, batch=packed_batch, steps=2)
    expected = one_device("gpt2", "packed")
    assert np.abs(found.losses - expected.losses[:2]).max() > 1e-4  # the bar is 4e-6


# --- plans ----------------------------------------------------------------------------------------


class Mine(GPT2):
    """A user's subclass, which may do anything."""


def gpt_config():
    return GPT2Config(vocab_size=VOCAB, max_seq_len=16, num_layers=1, num_heads=4, embed_dim=16)


def test_an_evaluation_with_a_loss_of_ones_own_is_refused():
    plan = plan_for(reference_model("gpt2"), mesh={"context": 4})
    with pytest.raises(ValueError, match="use loss=None"):
        build_evaluation(plan, lambda model, batch: model.loss(batch))


def refused(words, model=None, **options):
    with pytest.raises(ValueError, match=words):
        plan_for(model or reference_model("gpt2"), **options)


def test_what_cannot_be_kept_equal_is_refused():
    mesh = {"context": 2}
    refused("stage=2.*use stage=1", mesh={"context": 2, "stage": 2}, num_microbatches=4)
    streamed = {"params": "host", "opt_state": "host", "update_in_backward": True}
    refused("leave update_in_backward out", mesh=mesh, offload=streamed)
    refused("deterministic", mesh=mesh, deterministic="mesh")
    refused("sequence_sharding=False", mesh={**mesh, "model": 2}, sequence_sharding=True)
    refused("before_cut", lambda rngs: UserText(rngs), mesh=mesh)
    refused("loss=None", mesh=mesh, loss=lambda model, batch: model.loss(batch))
    refused("before_cut.* of its own", lambda rngs: Mine(gpt_config(), rngs=rngs), mesh=mesh)
    heads = reference_model("gpt2", num_heads=2)
    refused("2 heads .* use context=2", heads, mesh={"context": 4},
            context_parallel="ulysses")  # fmt: skip
    stored = reference_model("gpt2", attention="xla")
    refused("attention='chunked' or 'auto'", stored, mesh=mesh, context_parallel="ring")
    refused("use sequences of 8 or 16 tokens", mesh={"context": 8}, batch=short_batch)


def short_batch(index):
    return {name: x[:, :15] for name, x in text_batch(index).items()}


def test_the_plan_says_how_a_sequence_lies():
    plan = plan_for(reference_model("gpt2"), mesh={"context": 4}, zero=3)
    assert plan.context.way == "ulysses"
    shown = "\n".join(plan.reasons)
    assert "context=4: each device" in shown
    assert "context_parallel ulysses (auto: " in shown
    assert "split over 8 devices" in shown
