"""Plans: what is decided before a run, what is refused, and what people are told."""

import html
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import zerojax
from tests.support.small_models import Plain, UserText, reference_model, regression_loss
from tests.support.trajectories import plan_for, regression_batch
from zerojax.config import MeshConfig
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.placement.leaf_placement import Access
from zerojax.plan.counts import role_bytes
from zerojax.plan.make import make_plan
from zerojax.step.build import build_step
from zerojax.tracing.trees import flatten_names

USER = {"loss": regression_loss, "batch": regression_batch}


def plain_plan(**options):
    return plan_for(lambda rngs: Plain(rngs), **{**USER, **options})


# --- what is decided --------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", range(4))
def test_state_of_every_stage(zero):
    plan = plain_plan(zero=zero, persistence_threshold=0, optimizer=optax.adam(1e-3))
    spec = P("data", None) if zero else P(None, None)
    assert plan.abstract_state["params"]["first/kernel"].sharding.spec == (
        P(None, "data") if zero else P(None, None)
    )
    moments = plan.abstract_state["opt_state"][0]
    for tree in (plan.abstract_state["params"], moments.mu, moments.nu):
        assert tree["last/kernel"].sharding.spec == spec
        assert tree["last/kernel"].dtype == jnp.float32
    assert moments.count.sharding.spec == P()
    assert plan.abstract_state["rng"].dtype == jnp.uint32


def test_the_portable_form_has_true_shapes():
    plan = plain_plan(zero=3)
    stored, portable = plan.abstract_state["params"], plan.abstract_portable["params"]
    assert (stored["last/bias"].shape, portable["last/bias"].shape) == ((8,), (5,))
    assert stored["first/kernel"] == portable["first/kernel"]


def test_what_has_no_parameters_shape_is_replicated():
    plan = plain_plan(zero=1, optimizer=optax.adafactor(1e-3, min_dim_size_to_factor=4))
    for leaf in jax.tree.leaves(plan.abstract_state["opt_state"]):
        assert leaf.sharding.spec == P() or leaf.shape in {(12, 16), (16, 5), (16,), (8,)}


def test_parameters_of_other_dtypes():
    class Mixed(Plain):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.table = nnx.Param(jnp.arange(16))
            self.gain = nnx.Param(jnp.ones((16,), jnp.bfloat16))

        def __call__(self, x):
            hidden = jnp.take(self.first(x), self.table[...], axis=1)
            return self.last(hidden * self.gain[...][None])

    plan = plan_for(lambda rngs: Mixed(rngs), zero=3, **USER)
    assert plan.abstract_state["params"]["gain"].dtype == jnp.float32
    assert plan.abstract_state["frozen"].keys() == {"table"}
    assert plan.abstract_state["frozen"]["table"].dtype == jnp.int32
    assert ("table", "int32 has no gradient: frozen and not sharded") in plan.placement.exceptions()


def test_frozen_parameters_have_no_optimizer_state_and_stay_sharded():
    plan = plain_plan(zero=3, freeze=("^first",), persistence_threshold=0)
    assert plan.abstract_state["params"].keys() == {"last/kernel", "last/bias"}
    assert plan.abstract_state["frozen"].keys() == {"first/kernel", "first/bias"}
    assert plan.abstract_state["frozen"]["first/kernel"].sharding.spec == P(None, "data")
    assert not [name for name in flatten_names(plan.abstract_state["opt_state"]) if "first" in name]


def test_the_models_own_tensor_parallel_rules_are_found():
    plan = plan_for(reference_model("llama"), mesh={"model": 2}, zero=3, persistence_threshold=0)
    leaf = plan.placement.leaves["blocks/mlp/up/kernel"]
    assert leaf.stored_spec == P(None, "data", "model")
    assert leaf.stack_dims == 1
    without = plan_for(reference_model("llama"), mesh={"model": 2}, rules=())
    assert any(reason.startswith("model=2 splits nothing") for reason in without.reasons)
    assert without.placement.leaves["blocks/mlp/up/kernel"].axes == (None, None, None)
    other = plan_for(
        reference_model("llama"), mesh={"model": 2}, zero=3, rules=(("lm_head", (None, "model")),)
    )
    assert other.placement.leaves["blocks/mlp/up/kernel"].axes == (None, None, None)
    assert other.placement.leaves["lm_head/kernel"].axes == (None, "model")


@pytest.mark.thorough
def test_stacks_are_found_by_looking_not_by_name():
    plan = plan_for(lambda rngs: UserText(rngs), zero=3)
    stacked = {name for name, leaf in plan.placement.leaves.items() if leaf.stack_dims}
    assert stacked == {name for name in plan.placement.leaves if name.startswith("blocks/")}


def test_a_mesh_config_or_its_fields_do_for_a_mesh():
    for mesh in (MeshConfig(zero=3, data=4, model=2), {"zero": 3, "model": 2}):
        plan = make_plan(Plain, mesh, example_batch=regression_batch(0), loss=regression_loss)
        assert plan.zero == plan.settings.zero == 3
        assert (plan.settings.data, plan.mesh.shape["model"]) == (4, 2)
    assert (
        make_plan(
            Plain, {"zero": 3}, example_batch=regression_batch(0), loss=regression_loss, zero=2
        ).zero
        == 2
    )


def test_the_defaults_are_stage_1_with_adamw_in_the_precision_of_train():
    plan = make_plan(Plain, None, example_batch=regression_batch(0), loss=regression_loss)
    assert plan.zero == 1
    assert plan.precision.compute_dtype == jnp.float32
    assert "precision='fp32': CPUs have no fast bf16" in plan.reasons
    away = make_plan(
        Plain, plan.mesh.abstract_mesh, example_batch=regression_batch(0), loss=regression_loss
    )
    assert away.precision.compute_dtype == jnp.bfloat16
    assert plan.learning_rate is not None
    assert plan.reasons[1] == "zero=1: optimizer state split over 8 devices"


def test_hundreds_of_devices_need_no_devices():
    plan = make_plan(
        reference_model("gpt2", embed_dim=1024, num_heads=16),
        make_abstract_mesh({"model": 4}, 512),
        example_batch={
            name: jax.ShapeDtypeStruct((512, 16), np.int32) for name in ("tokens", "targets")
        },
        zero=3,
    )
    up = plan.placement.leaves["blocks/mlp/up/kernel"]
    assert up.stored_spec == P(None, "data", "model")
    assert plan.placement.shard_elements(up) == 2 * 1024 * 4096 // 512
    assert "data 128 x model 4" in plan.describe()


# --- what is told -----------------------------------------------------------------------------


def test_every_exception_has_a_reason_in_the_table():
    plan = plain_plan(zero=3, freeze=("last/bias",))
    page = plan.table()
    for name, reason in plan.placement.exceptions():
        (line,) = [x for x in page.splitlines() if x.startswith("  ") and x.endswith(reason)]
        assert name in line or "..." in line
    assert "last/bias: dim 0 of 5 is padded to 8" in page
    assert "frozen, gather once" in page
    for reason in plan.reasons:
        assert reason in page
    assert plan.describe() in page


def test_bytes_by_role():
    plan = plain_plan(zero=1, optimizer=optax.adam(1e-3))
    stored = 12 * 16 + 16 + 16 * 5 + 8
    roles = role_bytes(plan)
    assert roles["master weights"] == stored // 8 * 4
    assert roles["optimizer state"] == 2 * stored // 8 * 4 + 4
    assert roles["gathered weights"] == roles["gradients"] == (stored - 3) * 4


def test_a_parameter_that_is_never_read_is_listed():
    def loss(model, batch):
        return jnp.mean(model.first(batch["x"]) ** 2)

    plan = plain_plan(zero=3, loss=loss)
    assert "2 parameters (such as last/bias) are never read by the loss" in plan.reasons
    assert plan.placement.leaves["last/kernel"].access is Access.GATHER_ONCE


def test_a_plan_goes_through_json():
    plan = plain_plan(zero=3)
    described = json.loads(json.dumps(plan.as_dict()))
    assert described["zero"] == 3
    assert described["num_parameters"] == 12 * 16 + 16 + 16 * 5 + 5
    (bias,) = [row for row in described["parameters"] if row["name"] == "last/bias"]
    assert (bias["shape"], bias["stored_shape"], bias["spec"]) == ([5], [8], ["data"])


def test_the_fingerprint_is_of_the_state_not_of_the_mesh():
    plan = plain_plan(zero=3)
    assert plan.fingerprint == plain_plan(zero=0, devices=2).fingerprint
    assert plan.fingerprint != plain_plan(zero=3, freeze=("last",)).fingerprint
    assert plan.fingerprint != plain_plan(zero=3, optimizer=optax.sgd(0.1)).fingerprint


# --- what is refused --------------------------------------------------------------------------


def batch_of(rows, targets=None):
    return {"x": np.zeros((rows, 12), np.float32), "y": np.zeros((targets or rows, 5), np.float32)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch": lambda _: {"x": 3.0}},
            "batch['x'] is a scalar, but dimension 0 of every array must be the rows of the batch; "
            "repeat it: numpy.full(rows, value)",
        ),
        (
            {"mesh": {"model": 2}, "rules": (("last/kernel", (None, "model")),)},
            "last/kernel (LINE: return self.last(jnp.tanh(self.first(x)))): dim 1 of size 5 is not "
            "divisible by model=2; choose a model size that divides 5, or change its "
            "tensor-parallel rule",
        ),
    ],
)
def test_value_limit_and_remedy(options, message):
    with pytest.raises(ValueError) as caught:
        plain_plan(**options)
    assert re.sub(r"[^\s(]*small_models[.]py:\d+", "LINE", str(caught.value)) == message


@pytest.mark.parametrize("shape", [(), (8,)])
def test_random_keys_in_a_batch_are_refused_by_name(shape):
    keys = jax.random.split(jax.random.key(0), shape) if shape else jax.random.key(0)
    with pytest.raises(TypeError, match=r"batch\['k'\] holds random keys .*key_data\(keys\)"):
        plain_plan(batch=lambda _: batch_of(8) | {"k": keys})


def test_unknown_options_name_the_nearest():
    with pytest.raises(TypeError) as caught:
        plain_plan(persistance_threshold=1)
    assert str(caught.value) == (
        "make_plan has no keyword 'persistance_threshold'; did you mean 'persistence_threshold'?"
    )
    with pytest.raises(
        TypeError, match=("make_plan has no keyword 'data'; axis sizes belong to the mesh")
    ):
        plain_plan(data=2)


def test_a_plan_prints_as_one_line():
    plan = plain_plan(zero=3)
    assert (
        str(plan)
        == repr(plan)
        == f"Plan({plan.describe()}; " + ("plan.table() has every parameter and reason)")
    )


class InAList(nnx.Module):
    """Six layers that a Python loop calls, or a scan."""

    def __init__(self, rngs, width=128, scan=False):
        self.scan = scan
        make = lambda rngs: nnx.Linear(width, width, rngs=rngs)  # noqa: E731
        if scan:
            self.layers = nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(6))
        else:
            self.layers = nnx.List([make(rngs) for _ in range(6)])

    def __call__(self, x):
        apply = nnx.remat(lambda layer, x: x + jnp.tanh(layer(x)))
        if self.scan:
            return nnx.scan(apply, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)
        for layer in self.layers:
            x = apply(layer, x)
        return x


def list_plan(mesh=None, zero=3, num_microbatches=1, precision="fp32", settings=None, **options):
    return make_plan(
        lambda rngs: InAList(rngs, **options),
        mesh,
        example_batch={"x": np.ones((32, options.get("width", 128)), np.float32)},
        loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        optimizer=zerojax.adamw(1e-3),
        zero=zero,
        num_microbatches=num_microbatches,
        precision=precision,
        persistence_threshold=1000,
        roll="off",
        **(settings or {}),
    )


@pytest.mark.thorough
def test_layers_of_a_python_loop_are_counted_as_the_program_holds_them():
    """Outside of a loop nothing frees one layer's weights before the next layer's come."""
    plan = list_plan(width=256)
    compiled = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile()
    roles = role_bytes(plan)
    counted = roles["gathered weights"] + roles["gradients"]
    weights = 6 * 256 * 256 * 4
    assert roles["gathered weights"] > weights
    # Activations of eight rows are nothing. Gradients, 1/8 of the weights, are counted beside all
    # of them: XLA:CPU of JAX 0.12 has freed weights by then, and that of 0.10 a part of them.
    assert counted == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=0.2)


@pytest.mark.thorough
def test_gradients_of_a_python_loop_are_counted_as_the_program_holds_them():
    """At stage 2, with microbatches, whose loop keeps the weights as well."""
    plan = list_plan(width=256, zero=2, num_microbatches=4)
    compiled = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile()
    roles = role_bytes(plan)
    counted = roles["gathered weights"] + roles["gradients"]
    assert roles["gradients"] > 6 * 256 * 256 * 4
    assert counted == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=0.2)
    rows = [line for line in plan.table().splitlines() if line.startswith("layers/")]
    assert sum(line.endswith("scatter early, gradients at once") for line in rows) == 12
    assert "gradients at once" not in list_plan(zero=2, scan=True).table()


def test_the_table_says_which_weights_live_together():
    page, rolled = list_plan().table(), list_plan(scan=True).table()
    rows = [line for line in page.splitlines() if line.startswith("layers/")]
    assert sum(line.endswith("gather on use, all at once") for line in rows) == 6
    assert "6 of these are read outside of loops, so that the compiler may gather all" in page
    assert "6 of 12 parameters are gathered on use in the forward pass and again" in page
    assert "6 parameters (layers/0/bias, layers/1/bias, layers/2/bias, ...): fewer elements" in page
    assert "all at once" not in rolled
    assert "outside of loops" not in rolled


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_kept_in_more_bits_than_the_model_has_is_said(precision):
    class Low(Plain):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.last = nnx.Linear(16, 5, param_dtype=jnp.bfloat16, rngs=rngs)

    plan = plan_for(Low, precision=precision, **USER)
    computed = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    assert (
        "2 parameters (such as last/bias) are bfloat16 in the model, stored in float32 and "
        f"computed with in {computed}"
    ) in plan.reasons
    assert not any("in the model, stored" in reason for reason in plain_plan().reasons)


def test_in_a_notebook_a_plan_is_a_line_that_opens():
    plan = plan_for(lambda rngs: Plain(rngs), zero=1, **USER)
    page = plan._repr_html_()
    assert page.startswith("<details><summary>")
    assert plan.describe() in html.unescape(page)
    assert plan.table() in html.unescape(page)
