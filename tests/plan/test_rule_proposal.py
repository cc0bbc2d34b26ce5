"""Proposed tensor-parallel rules: those of the reference models, of users' models, and refusals."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support import small_models
from tests.support.own_transformers import FusedDecoder, LinenDecoder, Mlp, OwnDecoder
from tests.support.small_models import VOCAB, linen_loss, reference_model
from tests.support.trajectories import plan_for, regression_batch, text_batch
from zerojax.cli import main
from zerojax.config import LoraConfig, MoEConfig
from zerojax.models.losses import mean_squared_error, next_token
from zerojax.placement.leaf_placement import tensor_parallel_axes
from zerojax.plan.rule_proposal import group_names
from zerojax.zoo import T5, Bert, Decoder, DecoderConfig
from zerojax.zoo.bert import BertConfig
from zerojax.zoo.t5 import T5Config

SIZES = {"num_layers": 2, "num_heads": 4, "embed_dim": 32, "max_seq_len": 16, "vocab_size": VOCAB}
MESH = {"data": 4, "model": 2}
KERNEL, BIAS = (None, "model"), ("model",)
KINDS = "python", "text"
X = {"x": jax.ShapeDtypeStruct((16, 32), jnp.float32)}


def decoder(**options):
    config = DecoderConfig(**{**SIZES, "num_kv_heads": 2, **options})
    return lambda rngs: Decoder(config, rngs=rngs)


def bert(rngs):
    return Bert(BertConfig(**SIZES), rngs=rngs)


def t5(rngs):
    sizes = {name: SIZES[name] for name in ("num_layers", "num_heads", "embed_dim", "vocab_size")}
    return T5(T5Config(**sizes, head_dim=8, mlp_dim=64), rngs=rngs)


def with_adapters():
    return zerojax.add_lora(decoder()(nnx.Rngs(0)), LoraConfig(rank=4))


def masked_batch():
    tokens = text_batch(0)["tokens"]
    return {"tokens": tokens, "targets": tokens, "weights": (tokens % 2).astype(np.float32)}


def propose(model, mesh=MESH, batch=None, **options):
    batch = text_batch(0) if batch is None else batch
    return zerojax.propose_rules(model, mesh, example_batch=batch, **options)


def whole(proposal, word):
    """The reasons of the parameters that stay whole and whose pattern contains the word."""
    return [part.why for part in proposal.parts if not part.axes and word in part.pattern]


ZOO = {
    "gpt2": lambda: reference_model("gpt2"),
    "llama": lambda: reference_model("llama"),
    "bert": lambda: bert,
    "t5": lambda: t5,
    "experts": lambda: reference_model("llama", moe=MoEConfig(num_experts=4, shared_dim=32)),
    "adapters": with_adapters,
    "8-bit products": lambda: reference_model("llama", matmul_dtype="fp8"),
    "loss in chunks": lambda: decoder(loss_chunk=8),
    "attention in chunks, remat": lambda: decoder(attention="chunked", remat="full"),
    "norms of heads, sinks": lambda: decoder(query_key_norm="all", attention_sinks=True),
    "parallel, soft caps": lambda: decoder(norm_places="parallel", logit_softcap=30.0),
    "tied, not gated, biases": lambda: decoder(
        tie_embeddings=True, gated=False, qkv_bias=True, output_bias=True, mlp_bias=True
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ZOO)
def test_proposals_are_the_rules_of_the_reference_models(name):
    model = ZOO[name]()
    batch = masked_batch() if name == "bert" else text_batch(0)
    proposal = propose(model, batch=batch)
    plan = plan_for(model, batch=lambda _: batch, mesh={"model": 2}, roll="off")
    own = zerojax.models.bound_attribute(plan.model, "tensor_parallel_rules")
    shapes = {name: leaf.shape for name, leaf in plan.placement.leaves.items()}
    expected = tensor_parallel_axes(shapes, MESH, own)
    assert tensor_parallel_axes(shapes, MESH, proposal.rules) == expected
    assert any("model" in axes for axes in expected.values())


OWN = {
    "^k/embedding$": ("model", None),
    r"^m/\d+/g/a/bias$": BIAS,
    r"^m/\d+/g/a/kernel$": KERNEL,
    r"^m/\d+/g/b/bias$": BIAS,
    r"^m/\d+/g/b/kernel$": KERNEL,
    r"^m/\d+/g/c/bias$": BIAS,
    r"^m/\d+/g/c/kernel$": KERNEL,
    r"^m/\d+/g/d/kernel$": ("model", None),
    r"^m/\d+/h/kernel$": KERNEL,
    r"^m/\d+/i/kernel$": KERNEL,
    r"^m/\d+/j/kernel$": ("model", None),
    "^o/bias$": BIAS,
    "^o/kernel$": KERNEL,
}


def test_layers_of_a_list_are_one_row_each():
    proposal = propose(lambda rngs: OwnDecoder(rngs))
    assert dict(proposal.rules) == OWN
    kinds = {part.pattern: part.kind for part in proposal.parts}
    assert kinds["^k/embedding$"] == kinds["^o/kernel$"] == "vocabulary"
    assert kinds[r"^m/\d+/g/d/kernel$"] == kinds[r"^m/\d+/j/kernel$"] == "row"
    assert kinds[r"^m/\d+/g/d/bias$"] == kinds["^l$"] == kinds["^n/scale$"] == "whole"
    assert kinds[r"^m/\d+/g/a/bias$"] == kinds["^o/bias$"] == "follows"
    assert "m/*/g/a/kernel" in str(proposal)
    assert "3 of 32x32" in str(proposal)
    assert repr(("^o/bias$", BIAS)) in str(proposal)


def test_the_length_of_the_batch_changes_nothing():
    """With short texts the scores are smaller than the results of the layers."""
    short = {name: array[:, :2] for name, array in text_batch(0).items()}
    assert dict(propose(lambda rngs: OwnDecoder(rngs), batch=short).rules) == OWN


def test_linen_layers():
    rules = dict(propose(LinenDecoder(), loss=linen_loss).rules)
    attention = r"^LinenBlock_\d+/MultiHeadDotProductAttention_\d+/"
    assert rules[attention + "query/kernel$"] == (None, "model", None)
    assert rules[attention + "out/kernel$"] == ("model", None, None)
    numbers = [pattern for pattern in rules if "Dense" in pattern and rules[pattern] == KERNEL]
    assert len(numbers) == 1
    assert len(rules) == 11
    assert rules["^Embed_0/embedding$"] == ("model", None)


def test_an_mlp_and_a_pair_of_functions_by_their_products():
    expected = {"^down/bias$": BIAS, "^down/kernel$": KERNEL, "^up/kernel$": ("model", None)}
    assert dict(propose(Mlp, batch=X).rules) == expected
    pair = small_models.init_functions, small_models.apply_functions
    batch = {"x": np.zeros((16, 12), np.float32), "y": np.zeros((16, 5), np.float32)}
    rules = propose(pair, batch=batch, loss=small_models.regression_loss).rules
    assert dict(rules) == {"^in/b$": BIAS, "^in/w$": KERNEL, "^out/w$": ("model", None)}


def test_equal_layers_in_a_row_are_paired():
    class Chain(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(5)])

        def loss(self, batch):
            x = batch["x"]
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return mean_squared_error(x, batch["x"])

    rules = dict(propose(lambda rngs: Chain(rngs), batch=X).rules)
    assert {pattern: axes for pattern, axes in rules.items() if "kernel" in pattern} == {
        "^layers/0/kernel$": KERNEL,
        "^layers/1/kernel$": ("model", None),
        "^layers/2/kernel$": KERNEL,
        "^layers/3/kernel$": ("model", None),
    }


def test_costs_of_a_pair():
    """8 rows of 32 features in float32 on each of two data shards, of a batch of 16."""
    proposal = propose(Mlp, {"data": 2, "model": 4}, batch=X, precision="fp32")
    costs = {p.pattern: (p.saved_bytes, p.forward_bytes, p.forward_sums) for p in proposal.parts}
    kernel = 32 * 256 * 4 * 3 // 4
    assert costs["^down/kernel$"] == (kernel, 0, 0)
    assert costs["^up/kernel$"] == (kernel, 8 * 32 * 4, 1)
    assert proposal.saved_bytes == 2 * kernel + 256 * 4 * 3 // 4
    # Nothing before the first layer has a gradient.
    assert (proposal.forward_bytes, proposal.backward_bytes) == (8 * 32 * 4, 0)


def test_added_gradients_are_reduced_together_but_on_cpus():
    """The compilers differ: GPU programs are compared in tests/gpu_programs."""
    for mesh, times in ((zerojax.make_mesh(MESH), 3), (zerojax.make_abstract_mesh(MESH), 1)):
        proposal = propose(lambda rngs: OwnDecoder(rngs), mesh, precision="fp32")
        parts = [p for p in proposal.parts if p.pattern in OWN and "/g/" in p.pattern]
        one = 8 * 16 * 32 * 4  # rows, tokens and features of one microbatch, for each of 3 layers
        assert sum(part.backward_bytes for part in parts) == times * 3 * one


def test_heads_and_features_that_do_not_divide_stay_whole():
    proposal = propose(lambda rngs: OwnDecoder(rngs), {"data": 2, "model": 4})
    assert not [pattern for pattern, _ in proposal.rules if "/g/" in pattern]
    for reason in whole(proposal, "/g/a/kernel"):
        assert "2 parts" in reason
        assert "model=4" in reason
        assert "use model=2" in reason
    assert whole(proposal, "/g/d/kernel") == whole(proposal, "/g/b/bias")
    assert set(dict(proposal.rules)) >= {r"^m/\d+/h/kernel$", "^o/kernel$"}
    three = propose(lambda rngs: OwnDecoder(rngs, heads=4, kv_heads=4), {"data": 2, "model": 4})
    assert dict(three.rules) == OWN


def test_queries_keys_and_values_in_one_matrix_stay_whole():
    proposal = propose(lambda rngs: FusedDecoder(rngs))
    (reason,) = whole(proposal, "/g/a/kernel")
    assert "`split`" in reason
    assert "separate parameter" in reason
    assert whole(proposal, "/g/d/kernel") == [reason]
    assert r"^m/\d+/h/kernel$" in dict(proposal.rules)


def test_a_dimension_behind_another_one_stays_whole():
    class Behind(nnx.Module):
        """The features of three parts, of which the second dimension is used."""

        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(32, 3 * 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

        def loss(self, batch):
            parts = self.a(batch["x"]).reshape(-1, 3, 64)
            return mean_squared_error(self.b(jnp.sum(parts, axis=1)), batch["x"])

    proposal = propose(lambda rngs: Behind(rngs), batch=X)
    assert proposal.rules == ()
    assert "3 parts" in whole(proposal, "a/kernel")[0]
    assert str(proposal).startswith("nothing can be split over model=2")


def test_one_head_is_not_split_by_features():
    """Splitting what scores are summed over would all-reduce all scores."""

    class OneHead(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = (nnx.Linear(32, 32, rngs=rngs) for _ in range(2))
            self.out = nnx.Linear(32, VOCAB, rngs=rngs)
            self.embed = nnx.Embed(VOCAB, 32, rngs=rngs)

        def loss(self, batch):
            x = self.embed(batch["tokens"])
            scores = jax.nn.softmax(self.a(x) @ self.b(x).swapaxes(1, 2))
            return next_token(self.out(scores @ x), batch["targets"])

    proposal = propose(lambda rngs: OneHead(rngs))
    assert "two activations" in whole(proposal, "a/kernel")[0]
    assert {pattern for pattern, _ in proposal.rules} == {
        "^embed/embedding$",
        "^out/kernel$",
        "^out/bias$",
    }


def test_a_loss_that_needs_the_whole_vocabulary_keeps_the_head_whole():
    class Ranked(OwnDecoder):
        def loss(self, batch):
            logits = self(batch["tokens"])
            best, _ = jax.lax.top_k(logits, 4)
            total, weight = next_token(logits, batch["targets"])
            return total + jnp.mean(best) * weight, weight

    proposal = propose(lambda rngs: Ranked(rngs))
    assert "`top_k`" in whole(proposal, "o/kernel")[0]
    assert dict(proposal.rules) == {k: v for k, v in OWN.items() if not k.startswith("^o/")}


def test_features_of_running_averages_stay_whole():
    model, batch = lambda rngs: small_models.WithStatistics(rngs), regression_batch(0)
    proposal = propose(model, batch=batch, loss=small_models.regression_loss)
    assert proposal.rules == ()
    assert "norm/mean" in whole(proposal, "hidden/kernel")[0]


def test_one_layer_has_nothing_to_pair():
    class One(nnx.Module):
        def __init__(self, rngs):
            self.only = nnx.Linear(32, 32, rngs=rngs)

        def loss(self, batch):
            return mean_squared_error(self.only(batch["x"]), batch["x"])

    proposal = propose(One, batch=X)
    assert proposal.rules == ()
    assert proposal.saved_bytes == 0
    assert "batch['x']" in whole(proposal, "only/kernel")[0]
    text = str(proposal)
    assert "nothing can be split over model=2" in text
    assert "model=1" in text


def test_sizes_of_a_mesh_that_is_not_here():
    elsewhere = propose(Mlp, {"data": 64, "model": 2}, batch={"x": np.zeros((128, 32), np.float32)})
    assert elsewhere.rules == propose(Mlp, batch=X).rules
    staged = propose(Mlp, {"data": 2, "stage": 2, "model": 2}, batch=X)
    assert staged.forward_bytes == propose(Mlp, {"data": 2, "model": 4}, batch=X).forward_bytes


@pytest.mark.thorough
def test_the_command_proposes_rules_for_a_script(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(
        "import numpy as np, zerojax\n"
        "from tests.support.own_transformers import OwnDecoder\n"
        "tokens = np.zeros((32, 16), np.int32)\n"
        "batch = {'tokens': tokens, 'targets': tokens}\n"
        "zerojax.make_plan(lambda rngs: OwnDecoder(rngs), {'zero': 3}, example_batch=batch)\n"
    )
    words = ["plan", str(script), "--devices", "16", "--propose-rules", "model=2"]
    assert main(words) == 0
    assert "m/*/g/a/kernel" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    proposal = json.loads(capsys.readouterr().out)
    assert {pattern: tuple(axes) for pattern, axes in proposal["rules"]} == OWN


def test_a_plan_without_rules_names_the_helper():
    plan = plan_for(lambda rngs: OwnDecoder(rngs), mesh={"model": 2})
    (reason,) = [reason for reason in plan.reasons if reason.startswith("model=2 splits nothing")]
    assert "zerojax.propose_rules(" in reason


def test_the_page_shows_what_is_printed():
    page = (Path(__file__).parents[2] / "docs" / "tensor_parallel.md").read_text()
    python, text = (re.search(rf"^```{kind}\n(.*?)^```", page, re.M | re.S) for kind in KINDS)
    names: dict = {}
    exec(python[1], names)
    assert str(names["proposal"]).startswith(text[1].rstrip())


def test_names_of_layers_are_one_pattern_if_they_are_used_alike():
    same = {f"h_{i}/{name}": name for i in range(12) for name in ("d_0", "d_1")}
    assert list(group_names(same)) == [r"^h_\d+/d_0$", r"^h_\d+/d_1$"]
    assert list(group_names({"a.0": 1, "ab0": 2})) == [r"^a\.0$", "^ab0$"]
