"""What the step's program holds and sends at each ZeRO stage, read from the program itself.

Nothing runs here: plans are traced, lowered, and for bytes compiled. Each collective in the lowered
StableHLO is one that zerojax wrote, inside the manual region.
"""

import collections
import dataclasses
import functools
import math
import re

import jax
import numpy as np
import optax
import pytest

import zerojax
from tests.support import small_models
from tests.support.small_models import reference_model
from tests.support.trajectories import plan_for, regression_batch, text_batch
from zerojax.placement.leaf_placement import Access
from zerojax.step.build import build_evaluation, build_step
from zerojax.tracing.jaxpr import split_scan
from zerojax.tracing.trees import num_elements
from zerojax.transport.collectives import make_buckets

LAYERS = 3
# No activation of a batch of [4, 16] rows per device has the dimensions of a parameter.
SIZES = {"num_layers": LAYERS, "embed_dim": 96, "num_heads": 2}
# Below it are norms, biases and positions.
THRESHOLD = 2000
SIDES = ("invars", "outvars")
REGRESSION = {"loss": small_models.regression_loss, "batch": regression_batch}


def without_regather(plan):
    """The plan of a step whose backward pass keeps what the forward pass gathered."""
    return dataclasses.replace(plan, program=dataclasses.replace(plan.program, regather=False))


def gpt2(zero, *, remat="none", matmul_dtype=None, **options):
    return plan_for(
        reference_model("gpt2", **SIZES, remat=remat, matmul_dtype=matmul_dtype),
        zero=zero,
        **{"persistence_threshold": THRESHOLD, **options},
    )


def lower(plan):
    return build_step(plan).lower(plan.abstract_state, plan.abstract_batch)


# --- walking programs -------------------------------------------------------------------------


@dataclasses.dataclass
class Collectives:
    """How often each collective stands outside of loops, and inside each loop."""

    outside: collections.Counter
    loops: list[collections.Counter]

    @property
    def inside(self):
        return sum(self.loops, collections.Counter())

    def loops_with(self, kind):
        return [index for index, counts in enumerate(self.loops) if counts[kind]]


def count_collectives(lowered) -> Collectives:
    """Follows calls and regions from the entry; a loop is one `stablehlo.while`, nested or not."""
    module = lowered.compiler_ir("stablehlo")
    functions = {
        op.attributes["sym_name"].value: op
        for op in module.body.operations
        if op.operation.name == "func.func"
    }
    found = Collectives(collections.Counter(), [])

    def visit(operation, counts):
        kind = operation.operation.name.removeprefix("stablehlo.")
        if kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            counts[kind] += 1
            return
        if kind == "func.call":
            visit(functions[operation.attributes["callee"].value], counts)
        if kind == "while":
            counts = collections.Counter()
            found.loops.append(counts)
        for region in operation.regions:
            for block in region:
                for inner in block:
                    visit(inner, counts)

    visit(functions["main"], found.outside)
    return found


def inner_programs(equation):
    for value in jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    ):
        value = getattr(value, "jaxpr", value)
        if hasattr(value, "eqns"):
            yield value


def equations_of(program, *, inside=False):
    """Every equation at any depth, and whether it is inside the manual region."""
    for equation in program.eqns:
        yield equation, inside
        manual = inside or equation.primitive.name == "shard_map"
        for inner in inner_programs(equation):
            yield from equations_of(inner, inside=manual)


def shapes_of(atoms):
    return {tuple(sorted(atom.aval.shape)) for atom in atoms if hasattr(atom.aval, "shape")}


def held_shapes(plan):
    """Sorted shapes of what the manual region takes, gives, and what its loops hold."""
    program = build_step(plan).trace(plan.abstract_state, plan.abstract_batch).jaxpr.jaxpr
    held, loops = set(), 0
    for equation, inside in equations_of(program):
        kind = equation.primitive.name
        if inside and kind in ("scan", "while"):
            loops += 1
            held |= shapes_of([*equation.invars, *equation.outvars])
        if not inside and kind == "shard_map":
            (region,) = inner_programs(equation)
            held |= shapes_of([*region.invars, *region.outvars])
    assert loops >= 2, "there has to be a forward and a backward loop over layers"
    return held


def whole_shapes(plan, access=Access.GATHER_ON_USE):
    return {
        name: tuple(sorted(leaf.shape))
        for name, leaf in plan.placement.leaves.items()
        if leaf.access is access
    }


def named_shapes(plan, *, access=Access.GATHER_ON_USE):
    """The parameters that are held whole, stacked or not."""
    held = held_shapes(plan)
    return {name for name, shape in whole_shapes(plan, access).items() if shape in held}


# --- bytes ------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_argument_bytes_are_twelve_per_parameter_over_the_devices(zero):
    """float32 master and two moments; a million parameters, all of which 8 divides."""
    model = reference_model("gpt2", num_layers=5, embed_dim=128)
    batch = lambda index: {name: rows[:8] for name, rows in text_batch(index).items()}  # noqa: E731
    plan = plan_for(model, zero=zero, persistence_threshold=THRESHOLD, batch=batch)
    count = plan.placement.num_parameters()
    assert 0.9e6 < count < 1.1e6
    assert not any(leaf.is_padded for leaf in plan.placement.leaves.values())
    memory = lower(plan).compile().memory_analysis()
    assert memory.argument_size_in_bytes == pytest.approx(12 * count / 8, rel=0.02)
    # What the step adds: from stage 1 whole weights and their bucket, at stage 3 less than once.
    assert (memory.temp_size_in_bytes < 4 * count) == (zero == 3), memory.temp_size_in_bytes


@pytest.mark.thorough
def test_a_small_odd_model_is_padded_and_listed():
    plan = plan_for(small_models.UserText, zero=1)
    padded = [leaf for leaf in plan.placement.leaves.values() if leaf.is_padded]
    assert {leaf.name for leaf in padded} >= {"odd", "conv/kernel", "embed/embedding"}
    assert all("is padded to" in " ".join(leaf.reasons) for leaf in padded)
    masters = sum(
        num_elements(leaf.stored_shape) // (8 if leaf.zero_dim else 1)
        for leaf in plan.placement.leaves.values()
    )
    batch = sum(math.prod(x.shape) // 8 * 4 for x in plan.abstract_batch.values())
    counters = 5 * 4  # step, skipped, two words of the key, and Adam's count
    memory = lower(plan).compile().memory_analysis()
    assert memory.argument_size_in_bytes == 12 * masters + batch + counters


# --- what is held -----------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("remat", "options"),
    [
        ("none", {}),
        ("full", {}),
        ("dots", {}),
        ("none", {"matmul_dtype": "fp8"}),
        ("none", {"matmul_dtype": "fp8", "wire": {"weights": "fp8"}}),
    ],
)
def test_stage_3_holds_no_whole_parameter(remat, options):
    """Neither among inputs and outputs, nor carried, stacked or passed into a loop."""
    plan = gpt2(3, remat=remat, num_microbatches=2, **options)
    assert len(whole_shapes(plan)) == 7
    assert named_shapes(plan) == set()


def test_a_bucket_of_several_parameters_is_not_held_at_stage_3_either():
    """Pieces of a bucket have other shapes than parameters, so elements are counted."""

    def stacked(bucket):
        plan = gpt2(3, allgather_bucket_size=bucket)
        program = build_step(plan).trace(plan.abstract_state, plan.abstract_batch).jaxpr.jaxpr
        scans = [e for e, inside in equations_of(program) if inside and e.primitive.name == "scan"]
        return [sum(x.aval.size for x in e.outvars[split_scan(e)[1] :]) for e in scans]

    assert stacked(4 * 96 * 96) == stacked(1)


@pytest.mark.thorough
def test_padded_parameters_are_not_held_at_stage_3_either():
    """Width 90: the cut after the gather is an operation of its own."""
    plan = plan_for(
        reference_model("llama", **{**SIZES, "embed_dim": 90, "num_heads": 3, "num_kv_heads": 3}),
        zero=3,
        persistence_threshold=THRESHOLD,
    )
    held = held_shapes(plan)
    whole = [leaf for leaf in plan.placement.leaves.values() if leaf.access is Access.GATHER_ON_USE]
    assert sum(leaf.is_padded for leaf in whole) >= 4
    for leaf in whole:
        assert not {tuple(sorted(leaf.shape)), tuple(sorted(leaf.stored_shape))} & held, leaf.name


@pytest.mark.thorough
def test_a_users_stack_of_layers_is_not_held_at_stage_3():
    """nnx.scan over stock layers, without a checkpoint, some read by transposing or reshaping."""
    plan = plan_for(small_models.UserText, zero=3, persistence_threshold=THRESHOLD // 2)
    assert {"blocks/up/kernel", "blocks/attention/query/kernel"} <= set(whole_shapes(plan))
    assert named_shapes(plan) == set()


@pytest.mark.thorough
def test_stage_2_reads_whole_parameters_but_stacks_no_copy():
    plan = gpt2(2)
    whole = set(whole_shapes(plan, Access.GATHER_ONCE_SCATTER_EARLY).values())
    program = build_step(plan).trace(plan.abstract_state, plan.abstract_batch).jaxpr.jaxpr
    loops = [e for e, inside in equations_of(program) if inside and e.primitive.name == "scan"]
    read, made = (set().union(*(shapes_of(getattr(e, side)) for e in loops)) for side in SIDES)
    large = {shape for shape in whole if num_elements(shape) > LAYERS * THRESHOLD}
    assert len(large & read) == 2
    assert not large & made


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_microbatches_are_accumulated_in_the_dtype_asked_for(dtype):
    options = {"precision": "bf16", "accumulate_dtype": dtype, "num_microbatches": 4}
    plan = plan_for(small_models.Layers, **REGRESSION, zero=1, **options)
    program = build_step(plan).trace(plan.abstract_state, plan.abstract_batch).jaxpr.jaxpr
    (loop,) = (
        equation
        for equation, _ in equations_of(program)
        if equation.primitive.name == "scan" and equation.params["length"] == 4
    )
    _, num_carry = split_scan(loop)
    carried = [atom.aval for atom in loop.outvars[:num_carry]]
    found = {x.dtype for x in carried if x.shape == plan.placement.leaves["blocks/kernel"].shape}
    assert found == {plan.precision.accumulate_dtype}


@pytest.mark.thorough
def test_sequence_sharding_splits_what_lies_between_the_matrices():
    """The residual stream of each layer, [rows, sequence, width], over `model` in each loop."""
    split = {}
    for choice in (False, True):
        options = {"mesh": {"model": 2}, "sequence_sharding": choice}
        plan = plan_for(reference_model("gpt2"), zero=1, **options)
        program = build_step(plan).trace(plan.abstract_state, plan.abstract_batch).jaxpr.jaxpr
        split[choice] = [
            equation.outvars[0].aval.shape
            for equation, inside in equations_of(program)
            if equation.primitive.name == "sharding_constraint"
            and inside
            and tuple(equation.params["sharding"].spec)[1:2] == ("model",)
        ]
    assert split[False] == []
    # The embedding and two sums of a layer, and the same once more in the backward pass.
    assert split[True] == [(8, 16, 32)] * 6


@pytest.mark.thorough
def test_the_same_search_finds_what_is_kept_without_gathering_again():
    kept = named_shapes(without_regather(gpt2(3)))
    assert {"blocks/mlp/up/kernel", "blocks/mlp/down/kernel"} <= kept


# --- what is sent -----------------------------------------------------------------------------


@functools.cache
def stage_1() -> Collectives:
    return count_collectives(lower(gpt2(1)))


@pytest.mark.thorough
def test_stage_1_sends_two_buckets():
    found = stage_1()
    assert found.outside["all_gather"] == found.outside["reduce_scatter"] == 1
    assert not found.inside


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_microbatches", "mesh"), [(4, {}), pytest.param(2, {"model": 2}, marks=pytest.mark.slow)]
)
def test_microbatches_and_tensor_parallelism_send_no_more_at_stage_1(num_microbatches, mesh):
    found = count_collectives(lower(gpt2(1, num_microbatches=num_microbatches, mesh=mesh)))
    assert found.outside["all_gather"] == found.outside["reduce_scatter"] == 1
    assert len(found.loops) > len(stage_1().loops)
    assert not found.inside


def test_stage_1_sends_one_collective_per_bucket():
    reduce, gather = 30_000, 100_000
    plan = gpt2(1, reduce_bucket_size=reduce, allgather_bucket_size=gather)
    sizes = {name: num_elements(leaf.shape) for name, leaf in plan.placement.leaves.items()}
    found = count_collectives(lower(plan))
    # The two lists are in the order of sorted names, as dicts go through JAX.
    sizes = dict(sorted(sizes.items()))
    assert found.outside["reduce_scatter"] == len(make_buckets(sizes, reduce)) > 5
    assert found.outside["all_gather"] == len(make_buckets(sizes, gather)) > 2
    assert not found.inside


@pytest.mark.thorough
def test_stage_0_reduces_once_and_gathers_nothing():
    found = count_collectives(lower(gpt2(0)))
    assert found.outside["all_gather"] == found.outside["reduce_scatter"] == 0
    # One for the gradients, one each for the sum and the weight of the loss.
    assert found.outside["all_reduce"] == 3
    assert not found.inside


def test_stage_0_sends_one_collective_per_bucket():
    limit = 400
    plan = plan_for(small_models.Layers, zero=0, reduce_bucket_size=limit, **REGRESSION)
    sizes = {n: num_elements(leaf.shape) for n, leaf in sorted(plan.placement.leaves.items())}
    found = count_collectives(lower(plan))
    assert found.outside["all_reduce"] - 2 == len(make_buckets(sizes, limit)) == 4
    assert not found.inside


def test_stage_2_scatters_inside_the_backward_loop():
    plan = gpt2(2)
    found = count_collectives(lower(plan))
    assert found.outside["all_gather"] == 1
    assert found.inside["all_gather"] == 0
    stacked = [leaf for leaf in plan.placement.leaves.values() if leaf.stack_dims]
    (backward,) = found.loops_with("reduce_scatter")
    assert found.loops[backward]["reduce_scatter"] == 1
    # The rest are read outside of the loop, the tied embedding twice.
    rest = len(plan.placement.leaves) - len(stacked) + 1
    assert found.outside["reduce_scatter"] == rest


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_stage_3_gathers_inside_both_loops_and_scatters_inside_the_second(remat):
    found = count_collectives(lower(gpt2(3, remat=remat)))
    forward, backward = found.loops_with("all_gather")
    assert found.loops_with("reduce_scatter") == [backward]
    assert found.loops[forward]["all_gather"] == 1
    assert found.loops[backward]["all_gather"] == 1
    assert found.loops[backward]["reduce_scatter"] == 1
    # What is small goes in one bucket; the embedding is read at both ends.
    assert found.outside["reduce_scatter"] == 1 + 2


def test_a_layer_sends_one_collective_per_bucket_at_stage_3():
    """Of the six kernels of a layer, four have 96 x 96 elements and two 96 x 384."""
    found = count_collectives(lower(gpt2(3, allgather_bucket_size=4 * 96 * 96)))
    forward, backward = found.loops_with("all_gather")
    assert found.loops[forward]["all_gather"] == found.loops[backward]["all_gather"] == 3
    assert found.loops[backward]["reduce_scatter"] == 3


def layers_in_a_list(number):
    """A list of equal layers as a pair of functions."""

    def init(key):
        return {f"{n}": {"w": jax.numpy.eye(8), "b": jax.numpy.zeros(8)} for n in range(number)}

    def apply(params, x):
        for layer in params.values():
            x = jax.numpy.tanh(x @ layer["w"] + layer["b"][None])
        return x

    return init, apply


@pytest.mark.parametrize("optimizer", [zerojax.adamw(1e-3, clip_norm=1.0), optax.adamw(1e-3)])
def test_more_equal_arrays_need_no_more_kernels_at_stage_1(optimizer):
    """Arrays cut from a bucket at known places would each have kernels of their own."""

    def kernels(number):
        batch = {"x": np.ones((8, 8), np.float32), "y": np.ones((8, 8), np.float32)}
        plan = plan_for(
            layers_in_a_list(number),
            mesh={"data": 8},
            batch=lambda step: batch,
            loss=small_models.regression_loss,
            optimizer=optimizer,
            zero=1,
        )
        text = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile().as_text()
        bodies = re.findall(r"^%fused_computation.*?^}", text, re.MULTILINE | re.DOTALL)
        plain = [re.sub(r"metadata=\{[^}]*\}|%[\w.\-]+", "", body) for body in bodies]
        return len({body.split("->")[1] for body in plain})  # without names of parameters

    assert kernels(13) <= kernels(6) + 4


def test_functions_are_gathered_in_one_bucket_at_stage_3():
    pair = small_models.init_functions, small_models.apply_functions
    plan = plan_for(pair, zero=3, persistence_threshold=0, **REGRESSION)
    assert set(whole_shapes(plan)) == {"in/w", "in/b", "out/w"}
    found = count_collectives(lower(plan))
    assert found.outside["all_gather"] == found.outside["reduce_scatter"] == 1


@pytest.mark.thorough
def test_frozen_parameters_are_gathered_again_too_and_never_scattered():
    found = count_collectives(lower(gpt2(3, freeze=("blocks/",))))
    assert [found.loops[index]["all_gather"] for index in found.loops_with("all_gather")] == [1, 1]
    assert found.inside["reduce_scatter"] == 0
    mixed = count_collectives(lower(gpt2(3, freeze=("blocks/mlp/",))))
    assert [mixed.loops[index]["all_gather"] for index in mixed.loops_with("all_gather")] == [2, 2]
    assert mixed.inside["reduce_scatter"] == 1


@pytest.mark.thorough
def test_evaluation_gathers_in_its_loop_and_scatters_nothing():
    plan = gpt2(3)
    lowered = build_evaluation(plan).lower(plan.abstract_state, plan.abstract_batch)
    found = count_collectives(lowered)
    assert [counts["all_gather"] for counts in found.loops] == [1]
    assert found.inside["reduce_scatter"] + found.outside["reduce_scatter"] == 0
