"""What a plan says of experts' rows, further rounds and memory, against its traced step."""

import functools

import jax
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr

import zerojax
from tests.parallel.test_expert_axis import Mixture
from tests.support.small_models import VOCAB
from tests.support.trajectories import plan_for
from tests.zoo.test_moe import llama
from zerojax.forecasting import forecast
from zerojax.models.losses import next_token
from zerojax.operators.marks import FURTHER_ROUNDS, inner_programs
from zerojax.operators.routed_experts import slots_of_further_rounds, slots_per_expert
from zerojax.plan.counts import gradient_bytes
from zerojax.plan.expert_costs import exchange_bytes, expert_costs, expert_names
from zerojax.step.build import build_step
from zerojax.tracing.flops import without_waste

MESH = {"data": 2, "expert": 4}


def sent(program, *, further, inside=False):
    """Bytes that all-to-alls of one device are given in a traced step, in first or in further
    rounds; each loop of these runs once."""
    total = 0
    for equation in program.eqns:
        is_loop = equation.primitive.name == "while"
        enters = is_loop and FURTHER_ROUNDS in str(equation.source_info.name_stack)
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for part in inner_programs(equation.params):
            if is_loop:  # of which no pass over what is needed looks inside
                part = without_waste(ClosedJaxpr(part, [None] * len(part.constvars)))
            total += turns * sent(part, further=further, inside=inside or enters)
        if equation.primitive.name == "all_to_all" and inside == further:
            total += sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars)
    return total


class Narrowing(nnx.Module):
    """Experts that give fewer numbers than they are given, and are kept by a policy, or not."""

    expert_parameters = (r"^experts$",)

    def __init__(self, rngs, policy=None):
        self.embed = nnx.Embed(VOCAB, 16, rngs=rngs)
        self.router = nnx.Linear(16, 8, rngs=rngs)
        self.experts = nnx.Param(jax.random.normal(rngs.params(), (8, 16, 12)))
        self.head = nnx.Linear(12, VOCAB, rngs=rngs)
        self.policy = policy

    def loss(self, batch):
        x = self.embed(batch["tokens"])
        gates, ids = jax.lax.top_k(jax.nn.softmax(self.router(x)), 2)

        def mixed(x, gates, weights):
            apply = lambda weights, rows: jax.numpy.sin(rows @ weights)  # noqa: E731
            return zerojax.experts(x, gates, ids, weights, apply)

        if self.policy is not None:
            mixed = jax.checkpoint(mixed, policy=self.policy)
        return next_token(self.head(mixed(x, gates, self.experts[...])), batch["targets"])


EVERYTHING = jax.checkpoint_policies.everything_saveable
MODELS = {
    "list": lambda rngs: Mixture(rngs),
    "loop": llama(),
    "dots": llama(remat="dots"),
    "attention": llama(remat="attention", attention="chunked"),
    "full": llama(remat="full"),
    "narrow": Narrowing,
    "kept": lambda rngs: Narrowing(rngs, EVERYTHING),
    "again": lambda rngs: Narrowing(rngs, jax.checkpoint_policies.nothing_saveable),
}


@functools.cache
def plan_of(name, **options):
    return plan_for(MODELS[name], mesh=MESH, persistence_threshold=1, **options)


CASES = [(name, {}) for name in MODELS] + [("full", {"num_microbatches": 2, "zero": 3})]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_bytes_of_rows_are_those_of_the_traced_step(name, options):
    plan = plan_of(name, **options)
    traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    program = without_waste(traced.jaxpr)
    costs = expert_costs(plan)
    assert costs.exchange == exchange_bytes(plan) == sent(program, further=False) * 3 / 4 > 0
    assert costs.further_bytes == sent(program, further=True) * 3 / 4 > 0


def test_bytes_of_rows_by_hand():
    """Of a call: 5 travels of rows in a checkpoint, 4 without, gates beside them."""
    narrow, again = exchange_bytes(plan_of("narrow")), exchange_bytes(plan_of("again"))
    tokens = plan_of("narrow").abstract_batch["tokens"]
    rows = tokens.size // 8
    slots = 8 * slots_per_expert(rows, 2, 8, 1.25)
    assert narrow == 3 / 4 * slots * 4 * (2 * 16 + 2 * 12 + 2)
    assert again == 3 / 4 * slots * 4 * (3 * 16 + 2 * 12 + 3)
    quarter = 8 * slots_of_further_rounds(slots // 8)
    costs = expert_costs(plan_of("narrow"))
    assert costs.further_bytes == 3 / 4 * quarter * 4 * (3 * 16 + 2 * 12 + 3)
    # One product forward, again, and two for its derivatives.
    assert costs.further_flops == 4 * 2 * quarter * 16 * 12


def test_nothing_is_sent_without_the_axis_and_a_round_still_costs():
    plan = plan_for(Narrowing, mesh={"data": 8})
    costs = expert_costs(plan)
    assert costs.exchange == costs.further_bytes == 0
    assert costs.further_flops == expert_costs(plan_of("narrow")).further_flops
    assert expert_costs(plan_for(llama(moe=zerojax.config.MoEConfig()), mesh={"data": 8})) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"zero": 0}, {"zero": 3}, {"zero": 2, "num_microbatches": 2}])
def test_memory_of_experts_is_that_of_their_arrays(options):
    plan = plan_of("loop", **options)
    names = ["blocks/mlp/experts/down", "blocks/mlp/experts/gate", "blocks/mlp/experts/up"]
    assert expert_names(plan) == names
    elements = sum(
        leaf.size for name, leaf in plan.abstract_stored["params"].items() if name in names
    )
    own = elements // (8 if options["zero"] else 4)
    costs = expert_costs(plan)
    assert costs.parameters == 4 * own
    assert costs.optimizer_state == 2 * costs.parameters
    leaves = plan.placement.leaves
    assert costs.gradients == sum(gradient_bytes(plan, leaves[name]) for name in names) > 0


@pytest.mark.thorough
def test_pages_say_it():
    plan = plan_of("full", num_microbatches=2, zero=3)
    table, found = plan.table(), forecast(plan, gpu="h100", why_formula="not asked for")
    page = " ".join(found.page().split())
    costs = expert_costs(plan)
    for text in (" ".join(table.split()), page):
        assert "experts, of one device: parameters" in text
        assert "one further round in every layer, not needed with equal loads:" in text
    assert f"{costs.further_share:.1%} of the step's" in table
    assert "experts by formula:" in page
    assert found.traffic.exchange_formula_bytes == costs.exchange
    assert found.as_dict()["plan"]["experts"]["exchange"] == costs.exchange
    without = plan_for(llama(moe=zerojax.config.MoEConfig()), mesh={"data": 8})
    assert "further round" not in without.table()
    assert "EXPERTS" not in forecast(without, gpu="h100", why_formula="not asked for").page()
