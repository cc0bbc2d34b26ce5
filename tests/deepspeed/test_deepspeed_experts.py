"""DeepSpeed's section `expert_parallel` is the mesh axis `expert`, and other keys have a line."""

import numpy as np
import pytest

import zerojax
from tests.parallel.test_expert_axis import Mixture
from tests.support.small_models import VOCAB
from tests.zoo.test_moe import llama
from zerojax import deepspeed_config as deepspeed
from zerojax.config import ConfigError, MoEConfig
from zerojax.deepspeed_config.keys_table import TABLE

ROWS, LENGTH = 16, 16


def file(section=None, **more):
    given = {
        "train_batch_size": ROWS,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 1,
        **more,
    }
    return given if section is None else given | {"expert_parallel": section}


def on(**section):
    return {"enabled": True, **section}


def translated(section, num_devices=8, **more):
    return deepspeed.translate(file(section, **more), num_devices=num_devices)


def line_of(says, name):
    return {line.key: line for line in says.lines}[f"expert_parallel.{name}"]


@pytest.mark.parametrize(
    ("section", "more", "sizes"),
    [
        (None, {}, (1, -1)),
        ({}, {}, (1, -1)),
        (on(), {}, (1, -1)),
        (on(autoep_size=4), {}, (4, -1)),
        (on(autoep_size=4, preset_model="mixtral"), {"data_parallel_size": 8}, (4, 2)),
        ({"enabled": False, "autoep_size": 4}, {}, (1, -1)),
        ({"autoep_size": 4}, {}, (1, -1)),
    ],
    ids=str,
)
def test_the_degree_is_a_mesh_axis_where_the_section_is_enabled(section, more, sizes):
    says = translated(section, **more)
    assert (says.mesh.expert, says.mesh.data) == sizes
    assert says.num_data_shards == 8
    assert (says.train_batch_size, says.num_microbatches) == (ROWS, 1)
    if sizes[0] > 1:
        assert f"data=2, expert={sizes[0]}," in deepspeed.explanation(says)
        assert line_of(says, "autoep_size").verdict == "honoured"


def test_a_section_that_is_off_says_that_it_has_no_effect():
    says = translated({"autoep_size": 4, "top_k": 9})
    assert line_of(says, "autoep_size").verdict == line_of(says, "top_k").verdict == "ignored"
    assert any("expert_parallel.autoep_size=4 has no effect" in text for text in says.warnings)
    assert says.router == {}


def test_every_key_of_deepspeeds_section_has_a_line():
    """Those that DeepSpeed 0067b11 reads (`parse_autoep_config`)."""
    assert len(TABLE["expert_parallel"]) == 37
    section = on(
        autoep_size=2,
        preset_model="qwen3_moe",
        moe_layer_pattern="a",
        expert_w1="w1",
        expert_w3=None,
        use_grouped_mm=False,
        comm_backend="deepep",
        combine_impl="legacy_bmm",
        score_apply="post",
        load_balance_coeff=None,
        top_k="auto",
        routed_scaling_factor="auto",
    )
    says = translated(section)
    verdicts = {name: line_of(says, name).verdict for name in section}
    names = ("preset_model", "moe_layer_pattern", "comm_backend", "use_grouped_mm")
    assert {verdicts[name] for name in names} == {"not needed"}
    assert verdicts["load_balance_coeff"] == verdicts["score_apply"] == "honoured"
    assert says.router == {}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("section", "more", "words"),
    [
        (on(autoep_size=0), {}, "autoep_size=0: must be at least 1"),
        (on(autoep_size=3), {}, "autoep_size=3: does not divide the 8 devices"),
        (on(autoep_size=3), {"data_parallel_size": 8}, "does not divide data_parallel_size 8"),
        (on(autoep_size=2), {"data_parallel_size": 4}, "data_parallel_size=4: .* set 8"),
        (on(load_balance_coeff=0.001), {}, "take it out, and set moe.bias_rate"),
        (on(score_apply="pre"), {}, "score_apply='pre': .* use post"),
        (on(score_func="tanh"), {}, "use softmax or sigmoid"),
        (on(expert_activation="gelu"), {}, "gated by silu"),
        (on(expert_tensor_parallel_size=2), {}, "set it to 1, and autotp_size"),
        (on(autoep=4), {}, "did you mean 'autoep_size'"),
        (
            on(autoep_size=2),
            {"zero_optimization": {"stage": 3, "mics_shard_size": 4}},
            "does not work with mics_shard_size",
        ),
        (
            on(autoep_size=2),
            {"elasticity": {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2]}},
            "which elasticity changes; set it to 1",
        ),
    ],
    ids=str,
)
def test_a_section_that_cannot_be_is_refused(section, more, words):
    with pytest.raises(ConfigError, match=words):
        translated(section, **more)


def test_a_section_for_inference_is_refused():
    with pytest.raises(ConfigError, match="moe=.*a section of inference.*autoep_size splits them"):
        translated(None, moe={"ep_size": 2})


# --- the model ------------------------------------------------------------------------------------


def batches():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)
    return [{"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}] * 3


def losses(model, section, **more):
    engine = zerojax.initialize(model, file(section, **more))
    return engine, [float(engine.train_batch(batch)) for batch in batches()]


DEEPSEEK = MoEConfig(
    num_experts=8,
    experts_per_token=2,
    expert_dim=16,
    scores="sigmoid",
    num_groups=4,
    groups_per_token=2,
    renormalize=False,
    scale=2.5,
    shared_dim=8,
)
SAME = on(
    top_k=2,
    score_func="sigmoid",
    num_expert_groups=4,
    num_limited_groups=2,
    route_norm=False,
    route_scale=2.5,
    has_shared_experts=True,
)


def test_a_router_of_the_file_has_to_be_that_of_the_model():
    zerojax.initialize(llama(DEEPSEEK), file(SAME))
    with pytest.raises(ConfigError, match=r"model's moe.experts_per_token=2; build the model"):
        zerojax.train(llama(DEEPSEEK), file(SAME | {"top_k": 4}), batches(), steps=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 4),
        ("score_func", "softmax"),
        ("num_expert_groups", 2),
        ("num_limited_groups", 1),
        ("route_norm", True),
        ("route_scale", 1.0),
        ("routed_scaling_factor", 1.0),
        ("has_shared_experts", False),
    ],
)
def test_a_router_that_is_another_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"expert_parallel.{name}: .*the model's moe."):
        zerojax.initialize(llama(DEEPSEEK), file(on(**{name: value})))


def test_a_router_of_ones_own_is_said_by_the_model_alone():
    own = lambda rngs: Unknown(rngs)  # noqa: E731
    with pytest.raises(ConfigError, match="no zerojax.config.MoEConfig .*remove this key"):
        zerojax.initialize(own, file(on(autoep_size=2, top_k=2)))


class Unknown(Mixture):
    """Without a configuration that could be read."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.own, self.config = self.config, None


@pytest.mark.thorough
def test_a_file_trains_with_experts_on_several_devices_as_on_one():
    """Within rounding of sums in other orders."""
    split, found = losses(llama(DEEPSEEK), on(autoep_size=4))
    assert dict(split.plan.mesh.shape)["expert"] == 4
    assert split.plan.zero == 2
    _, whole = losses(llama(DEEPSEEK), None)
    assert whole[0] - whole[-1] > 0.01
    np.testing.assert_allclose(found, whole, rtol=0, atol=4e-6)
