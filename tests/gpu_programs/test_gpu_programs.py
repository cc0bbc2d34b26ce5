"""ZeRO's promises, read from the very programs that 8, 64 and 512 H100 would run.

Needs the compile-only client (extra `plan`) and no GPU; `pytest -m gpu_programs -n 2` takes about
two minutes of two free cores. One test is one program, and looks at every claim about it.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.plan.test_plan import list_plan
from tests.support import gpu_programs
from tests.support.forecast_samples import sample_row
from tests.support.gpu_plans import compile_step, gpu_mesh
from tests.support.gpu_programs import BF16, LAYERS, SEQ, WIDTH, Case, compile_case
from tests.support.program_claims import Claims
from zerojax.forecasting import hlo
from zerojax.forecasting.roofline import with_network_bytes
from zerojax.hardware import compile_client, gpus
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.counts import role_bytes
from zerojax.plan.wire import wire_bytes
from zerojax.transport import collectives

pytestmark = pytest.mark.gpu_programs

CASES = [
    *(Case(8, zero, parts) for zero in range(4) for parts in (1, 4)),
    *(Case(8, zero, model=2) for zero in (0, 1, 3)),
    *(Case(64, zero) for zero in range(4)),
    Case(64, 3, microbatches=4, model=2),
    Case(512, 3),
]
SLOW = [*(Case(8, zero) for zero in range(4)), Case(8, 0, model=2)]
"""What each shows of its stage, on 8 GPUs with four microbatches and on 64 with one is shown too;
what of tensor parallelism, at stages 1 and 3."""
LAYER_SHARE = LAYERS * gpu_programs.LAYER_PARAMETERS / gpu_programs.gpt_config().num_parameters
"""Parameters in the layers, of all; the rest are tables."""


claim = Claims()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case in SLOW else [])
        for case in CASES
    ],
)
def test_a_program_keeps_every_promise_of_its_stage(case):
    claim.check(case, compile_case(case))


def wire(found):
    return sum(c.wire_bytes * c.times for c in found)


def payload(found):
    return sum(c.payload_bytes * c.times for c in found)


def largest(found):
    return max((c.payload_bytes for c in found), default=0)


def units_sent(built):
    return wire(built.over_data()) / gpu_programs.wire_unit(built)


@claim()
def wire_bytes_are_those_of_the_stage(built):
    assert built.program.unknown_loops == ()
    assert units_sent(built) == pytest.approx(gpu_programs.wire_units(built.case), rel=0.03)
    assert wire(built.over_data()) == pytest.approx(wire_bytes(built.plan), rel=0.005)


@claim()
def weights_and_gradients_travel_as_bfloat16(built):
    large = [c for c in built.over_data() if c.payload_bytes > 1e6]
    assert large
    assert {c.dtype for c in large} == {"bf16"}


@claim()
def only_stage_0_reduces_everywhere(built):
    if built.case.zero == 0:
        assert payload(built.over_data("all-gather", "reduce-scatter")) == 0
    else:
        limit = 0.01 * BF16 * built.parameters
        assert payload(built.over_data("all-reduce")) < limit
    assert not built.over_data("all-to-all", "collective-permute")


@claim(lambda case: case.zero < 2)
def nothing_is_sent_inside_a_loop(built):
    """However many microbatches there are."""
    assert [c for c in built.over_data() if c.loop_depth] == []


@claim(lambda case: case.zero == 2)
def gathers_once_and_scatters_layer_by_layer(built):
    assert [c for c in built.over_data("all-gather") if c.loop_depth] == []
    check_in_loops(built, "reduce-scatter", passes=1)


@claim(lambda case: case.zero == 3)
def gathers_and_scatters_layer_by_layer(built):
    check_in_loops(built, "all-gather", passes=2)
    check_in_loops(built, "reduce-scatter", passes=1)


def check_in_loops(built, kind, *, passes):
    """Never more than a layer and the tables at a time; layers inside their loops.

    The compiler takes the first or last iterations out of a loop whose collectives it starts early:
    of 24 layers at most two, of four microbatches one.
    """
    case, found = built.case, built.over_data(kind)
    split = (gpu_programs.TABLE_PARAMETERS + gpu_programs.LAYER_PARAMETERS) / case.model
    assert largest(found) < 1.01 * BF16 * (split + SEQ * WIDTH)  # 0.6 %: norms and biases
    layers = passes * case.microbatches * BF16 * LAYER_SHARE * built.parameters
    depth = 1 if case.microbatches == 1 else 2
    inside = payload([c for c in found if c.loop_depth >= depth])
    left = (LAYERS - 2) / LAYERS
    if case.microbatches > 1 and case.zero == 3:
        left *= (case.microbatches - 1) / case.microbatches
    assert 0.99 * left * layers < inside < 1.01 * layers


@claim(lambda case: case.model > 1)
def only_activations_pass_between_the_shards_of_a_matrix(built):
    """Weights are never whole: two sums per layer forward, one again, two backward, and the ends.

    So what `data` sends stays 2, 2, 2 and 3 units of the weights that one device holds. Where the
    compiler partitions a manual collective by itself it gathers over `model` first: 4 and 6 units
    (with what a model of 3 million parameters sends as activations 5.15 and 6.26; nested 3.33 and
    3.81).
    """
    found = built.over_model()
    assert {c.kind for c in found} == {"all-reduce"}
    activation = BF16 * SEQ * WIDTH
    assert largest(found) <= 2 * activation  # two may travel together
    sums = (5 * LAYERS + 4) * built.case.microbatches
    assert payload(found) <= sums * activation


def test_collectives_that_are_not_nested_are_seen(monkeypatch):
    """The same accounting of the same step, with the weights' collectives left to the compiler."""
    monkeypatch.setattr(collectives, "over_auto_axes", lambda function, *specs: function)
    case = Case(8, 1, model=2)
    built = compile_case(case)
    assert units_sent(built) > 1.5 * gpu_programs.wire_units(case)
    assert {c.kind for c in built.over_model()} != {"all-reduce"}


@claim()
def the_state_is_twelve_bytes_per_parameter_in_pieces(built):
    assert built.memory.arguments == pytest.approx(gpu_programs.argument_bytes(built), rel=0.01)
    # Donated: the new state lies where the old one was.
    assert built.memory.aliased == pytest.approx(built.memory.arguments, rel=0.01)


@claim()
def the_peak_is_the_formula_and_activations(built):
    limit = 1.05 * gpu_programs.formula_bytes(built) + gpu_programs.activation_bytes(built)
    assert built.memory.peak < limit


@claim(lambda case: case.devices == 512)
def on_512_gpus_little_over_a_gigabyte_each(built):
    """Plain annotations of the same step take 62.9 GiB, and look right on 8."""
    assert built.memory.peak < 1.3 * 2**30
    assert built.memory.arguments < 32e6


def gathered_early(built):
    """Of the bytes that layer loops gather: (one iteration ahead, and behind matrix products)."""
    found = [c for c in built.over_data("all-gather") if c.loop_depth and c.times >= LAYERS - 2]
    early = [c for c in found if built.overlap[c.name].pipelined]
    hidden = [c for c in early if built.overlap[c.name].matmuls]
    return payload(early) / payload(found), payload(hidden) / payload(found)


@claim(lambda case: case.zero == 3 and jax.__version_info__ >= (0, 11))
def the_next_layer_is_gathered_while_this_one_computes(built):
    assert built.plan.program.options
    early, hidden = gathered_early(built)
    assert early > 0.8
    # One collective is under way at a time: of several per layer some are started and waited for.
    assert hidden > 0.45


def test_without_the_option_each_layer_waits_for_its_own_gathers():
    assert gathered_early(compile_case(Case(8, 3, prefetch=False)))[0] == 0


@pytest.mark.parametrize(("regather", "units"), [(True, 3), (False, 2)])
def test_a_model_that_keeps_everything_keeps_no_gathered_weights(regather, units):
    """Without `regather` it would be ZeRO-3 in name only, which the same count sees."""
    built = compile_case(Case(8, 3, remat="none", regather=regather))
    assert units_sent(built) == pytest.approx(units, rel=0.03)


@pytest.mark.parametrize(
    ("zero", "num_microbatches", "precision"),
    [(2, 1, "fp32"), (2, 4, "bf16"), (3, 1, "bf16"), (3, 4, "bf16")],
)
def test_layers_of_a_python_loop_take_what_the_table_says(zero, num_microbatches, precision):
    """Weights once, and at stage 2 their gradients; not the next microbatch's weights as well."""
    plan = list_plan(
        gpu_mesh(), zero=zero, num_microbatches=num_microbatches, precision=precision, width=2048
    )
    compiled = compile_step(plan)
    roles = role_bytes(plan)
    counted = roles["gathered weights"] + roles["gradients"]
    assert counted == pytest.approx(compiled.memory.temporary, rel=0.25)


def network_bytes(sum_of, dtype):
    """(bytes that one of 64 H100 sends, of these between nodes) of a sum of 2^26 numbers."""
    gpu = gpus.find_gpu("h100")
    mesh = make_mesh({"data": 64}, compile_client.gpu_devices(gpu, 64))
    whole = jax.ShapeDtypeStruct((64, 2**20), dtype, sharding=NamedSharding(mesh, P()))
    one = jax.shard_map(sum_of, mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=False)
    text = compile_client.compile_for_gpus(jax.jit(one), whole, sketch=True).text
    (found,) = hlo.find_collectives(hlo.read_program(text), 64)
    row = sample_row(kind=found.kind, wire_bytes=found.wire_bytes, crosses_nodes=True)
    return found.wire_bytes, with_network_bytes(gpu, dict(mesh.shape), row).network_bytes


def test_codes_sent_directly_cost_more_between_nodes_than_a_ring_of_bfloat16():
    """The rows that a plan prints; half the bytes in all, 3.6 times as many between nodes."""
    ring = network_bytes(lambda x: jax.lax.psum_scatter(x, "data", tiled=True), jnp.bfloat16)
    direct = network_bytes(lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True), jnp.uint8)
    assert direct[0] == ring[0] / 2
    assert direct[1] / ring[1] == pytest.approx(3.556, abs=1e-3)
