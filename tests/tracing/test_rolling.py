"""Layers that a Python loop calls: found in the traced loss, and rolled into one loop.

Every way to write them is in `listed_decoders` and `listed_calls`. A rolled model is compared with
the model as it was written: the same loss, the same gradient of every parameter, the same state.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr

from tests.support.listed_calls import CALLED_STYLES, build_called, loss_of_call
from tests.support.listed_decoders import STYLES, build_decoder, example_batch
from zerojax.models.adapt import as_loss, as_model
from zerojax.operators.marks import inner_programs
from zerojax.tracing.protocol import Loss, Model
from zerojax.tracing.rolling import FoundLoops, Loop, RolledModel, find_loops, stack_name
from zerojax.tracing.rolling.equality import Equality
from zerojax.tracing.trace import ModelTrace, trace_model

LAYERS = 6
FEW_LAYERS = 4
"""Where gradients are compared, which is a matter of compiling the model as it was written."""
KEY = 7
ROUNDING = 1e-6
"""Of the largest number of an array: XLA sums in another order where layers share a program."""
ROUNDING_OF_MODEL = float(np.finfo(np.float32).eps)
"""Of the model's largest gradient: gradients that are differences of larger numbers, such as those
of biases in front of a softmax, have its rounding."""
BFLOAT16_STEP = 2.0**-8
"""The cotangent of a weight that is cast to bfloat16 is rounded to it; one step of it."""

Place = tuple[str, int, int, int]
WHOLE: tuple[Place, ...] = (("layers", 0, 1, LAYERS),)
BUT_FIRST: tuple[Place, ...] = (("layers", 1, 1, LAYERS - 1),)
IN_PAIRS: tuple[Place, ...] = (("layers", 0, 2, LAYERS // 2),)
REFUSED = {"other_rules": "custom_vjp", "interleaved": "interleaved", "effects": "effect"}
"""Style -> a word of the sentence that says why its list stays as it is."""
LOOPS: dict[str, tuple[Place, ...]] = {
    **dict.fromkeys([style for style in STYLES if style not in (*REFUSED, "tied")], WHOLE),
    **dict.fromkeys(("period", "period_fold_in", "checkpoint_period"), IN_PAIRS),
    **dict.fromkeys(("dense_first", "value_residual", "mix"), BUT_FIRST),
    "encoder_decoder": (("encoder", 0, 1, LAYERS), ("decoder", 0, 1, LAYERS)),
    "unet": (("layers", LAYERS // 2 - 1, 1, LAYERS // 2),),
    "residual": (("narrow", 0, 1, LAYERS), ("wide", 1, 1, LAYERS - 1)),
    **dict.fromkeys(("linen_block", "linen_remat"), (("block", 0, 1, LAYERS),)),
    "linen_h": (("h", 0, 1, LAYERS),),
    "linen_setup": (("blocks", 0, 1, LAYERS),),
    "functions": WHOLE,
    "functions_dotted": (("h", 0, 1, LAYERS),),
    "functions_cast_first": WHOLE,
}
"""Style -> (prefix, start, period, count) of each loop."""
GROWS = {"split_keys", "key_chain", "nnx_dropout", "gate_list", "mix", "batchnorm", "residual"}
"""A few equations per layer stay outside of the loop: those of keys, of a list of losses, and of
statistics, each of which is an array of its own before and afterwards."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its arrays, traced."""

    model: Model
    params: dict[str, jax.Array]
    extras: dict[str, jax.Array]
    batch: Any
    loss: Loss
    trace: ModelTrace

    def find(self) -> FoundLoops:
        return find_loops(self.trace, self.params)

    def rolled(self) -> RolledModel:
        return RolledModel(self.model, self.find().loops, jax.eval_shape(lambda: self.params))


def trace_of(model: Model, params: Any, extras: Any, batch: Any, loss: Loss) -> ModelTrace:
    params, extras, batch = jax.eval_shape(lambda: (params, extras, batch))
    return trace_model(model, params, extras, batch, loss)


def traced(model: Any, loss: Any = None) -> Case:
    """Any model of a user, with the loss that it brings or this one."""
    model, batch = as_model(model), example_batch()
    loss = as_loss(loss, model)
    params, extras = model.initial_arrays() or model.init(jax.random.key(0), batch, loss)
    return Case(model, params, extras, batch, loss, trace_of(model, params, extras, batch, loss))


@functools.cache
def case_of(style: str, layers: int = LAYERS) -> Case:
    if style in CALLED_STYLES:
        return traced(build_called(style, layers=layers), loss_of_call)
    return traced(build_decoder(style, layers=layers))


def place_of(loop: Loop) -> Place:
    return loop.prefix.rstrip("/_."), loop.start, loop.period, loop.count


def stacked(rolled: RolledModel, arrays: dict[str, Any]) -> dict[str, Any]:
    """Arrays of the user's names, those of a stack joined."""
    rows = {name for names in rolled.stacks.values() for name in names}
    joined = {
        stack: jnp.stack([arrays[name] for name in names]) for stack, names in rolled.stacks.items()
    }
    return joined | {name: array for name, array in arrays.items() if name not in rows}


def unstacked(rolled: RolledModel, arrays: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `stacked`."""
    return {
        name: row
        for stack, array in arrays.items()
        for name, row in zip(
            rolled.stacks.get(stack, (stack,)),
            array if stack in rolled.stacks else [array],
            strict=True,
        )
    }


def mean_loss(case: Case, model: Model, *, train: bool = True) -> Callable[[Any], Any]:
    """Function of parameters: (mean loss, extras afterwards) of a model, rolled or not."""

    def mean(params: Any) -> tuple[jax.Array, Any]:
        function = lambda bound: case.loss(bound, case.batch)  # noqa: E731
        key = jax.random.key(KEY)
        (total, weight), after = model.run(params, case.extras, key, function, train=train)
        return total / weight, after

    return mean


def values(case: Case, model: Model, params: Any) -> Any:
    """((mean loss, extras afterwards), gradients)."""
    return jax.jit(jax.value_and_grad(mean_loss(case, model), has_aux=True))(params)


def assert_close(got: Any, expected: Any, rounding: float = ROUNDING) -> None:
    """Each array to a share of its largest number, or of the largest of all."""
    assert got.keys() == expected.keys()
    largest = max(float(jnp.max(jnp.abs(array))) for array in expected.values())
    for name, array in expected.items():
        assert (got[name].shape, got[name].dtype) == (array.shape, array.dtype), name
        own = float(np.max(np.abs(np.asarray(array, np.float64)), initial=0))
        limit = rounding * own + ROUNDING_OF_MODEL * largest
        np.testing.assert_allclose(got[name], array, rtol=0, atol=limit, err_msg=name)


def num_equations(program: Jaxpr) -> int:
    inner = (inner_programs(equation.params) for equation in program.eqns)
    return len(program.eqns) + sum(num_equations(one) for each in inner for one in each)


def num_rolled(style: str, layers: int) -> int:
    """Equations of a rolled model's loss, at any depth."""
    case = case_of(style, layers)
    rolled = case.rolled()
    trace = trace_of(rolled, stacked(rolled, case.params), case.extras, case.batch, case.loss)
    return num_equations(trace.jaxpr.jaxpr)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("style", LOOPS)
def test_finds_the_layers_of_every_style(style):
    found = case_of(style).find()
    places = {place_of(loop) for loop in found.loops}
    if style == "windows":  # two masks as rows, or two layers in each turn
        assert places in (set(WHOLE), set(IN_PAIRS))
    else:
        assert places == set(LOOPS[style])
    assert found.left == ()


@pytest.mark.thorough
@pytest.mark.parametrize("style", LOOPS)
def test_a_rolled_model_gives_the_same_loss_gradients_and_state(style):
    case = case_of(style, FEW_LAYERS)
    rolled = case.rolled()
    assert rolled.loops
    (loss, after), grads = values(case, case.model, case.params)
    (own_loss, own_after), own_grads = values(case, rolled, stacked(rolled, case.params))
    rounding = BFLOAT16_STEP if style == "functions_cast_first" else ROUNDING
    np.testing.assert_allclose(own_loss, loss, rtol=ROUNDING)
    assert_close(unstacked(rolled, own_grads), grads, rounding)
    if after:
        assert_close(own_after, after)


@pytest.mark.thorough
@pytest.mark.parametrize("style", ["nnx_dropout", "batchnorm", "linen_block"])
def test_a_rolled_model_evaluates_like_the_model(style):
    case = case_of(style, FEW_LAYERS)
    rolled = case.rolled()
    own_params = stacked(rolled, case.params)
    loss, _ = jax.jit(mean_loss(case, case.model, train=False))(case.params)
    own_loss, _ = jax.jit(mean_loss(case, rolled, train=False))(own_params)
    in_training, _ = jax.jit(mean_loss(case, rolled))(own_params)
    np.testing.assert_allclose(own_loss, loss, rtol=ROUNDING)
    assert abs(float(in_training - loss)) > 1e-3 * float(loss)


@pytest.mark.thorough
@pytest.mark.parametrize("style", [style for style in LOOPS if style not in (*GROWS, "unet")])
def test_the_rolled_program_is_as_long_for_twice_the_layers(style):
    assert num_rolled(style, 2 * LAYERS) == num_rolled(style, LAYERS)


@pytest.mark.thorough
def test_of_a_unet_the_second_half_is_rolled():
    """The layers before it hand their inputs to it, and stay as they are."""
    whole = num_equations(case_of("unet", 2 * LAYERS).trace.jaxpr.jaxpr)
    assert num_rolled("unet", 2 * LAYERS) < 0.65 * whole


@pytest.mark.thorough
@pytest.mark.parametrize("style", sorted(GROWS))
def test_keys_losses_and_statistics_grow_by_a_few_equations(style):
    whole = num_equations(case_of(style, 2 * LAYERS).trace.jaxpr.jaxpr) / (2 * LAYERS)
    more = (num_rolled(style, 2 * LAYERS) - num_rolled(style, LAYERS)) / LAYERS
    assert more < whole / 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("style", REFUSED)
def test_what_cannot_be_rolled_stays_with_the_first_difference(style):
    found = case_of(style).find()
    assert found.loops == ()
    [sentence] = found.left
    assert "layers" in sentence
    assert REFUSED[style] in sentence


def test_two_layers_of_two_kinds_stay():
    assert case_of("period", layers=2).find().loops == ()


def test_layers_that_are_one_and_the_same_stay():
    """Two blocks that take turns: parameters of each are read in three places."""
    found = case_of("tied").find()
    assert found.loops == ()
    assert all("layers" in sentence for sentence in found.left)


def test_a_shared_projection_is_in_no_stack():
    rolled = case_of("shared_projection").rolled()
    shared = [name for name in case_of("shared_projection").params if "shared" in name]
    rows = {name for names in rolled.stacks.values() for name in names}
    assert shared
    assert rows.isdisjoint(shared)


def test_rules_with_one_number_are_one_rule_and_with_others_are_not():
    """Rules are compared by the program of their derivative, never by where they were written."""
    assert len(case_of("same_rules").find().loops) == 1
    assert case_of("other_rules").find().loops == ()


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (lambda x: x * 0.0, lambda x: x * 0.0, True),
        (lambda x: x * 0.0, lambda x: x * -0.0, False),
        (lambda x: x * jnp.nan, lambda x: x * jnp.nan, True),
        (lambda x: x + np.zeros(3, np.float32), lambda x: x + np.zeros(3, np.float32), True),
        (lambda x: x + np.zeros(3, np.float32), lambda x: x + -np.zeros(3, np.float32), False),
    ],
)
def test_numbers_are_compared_by_their_bits(first, second, same):
    programs = [jax.make_jaxpr(jax.jit(f))(jnp.ones(3)) for f in (first, second)]
    [one], [other] = (program.eqns for program in programs)
    assert (Equality({}).holes(one, other) == set()) == same


def test_equations_of_other_contexts_differ():
    def draw(partitionable):
        with jax.threefry_partitionable(partitionable):
            return jax.make_jaxpr(lambda key: jax.random.bits(key))(jax.random.key(0)).eqns

    for one, other in zip(draw(True), draw(True), strict=True):
        assert Equality({}).holes(one, other) == set()
    pairs = zip(draw(True), draw(False), strict=True)
    assert None in [Equality({}).holes(one, other) for one, other in pairs]


def test_stacks_name_every_layer_in_order():
    loops = case_of("period").find().loops
    [loop] = loops
    names = loop.stacks["layers/0..4:2/up/kernel"]
    assert names == ("layers/0/up/kernel", "layers/2/up/kernel", "layers/4/up/kernel")
    assert "layers/1..5:2/up/kernel" in loop.stacks
    assert all(len(names) == loop.count for names in loop.stacks.values())
    covered = {name for names in loop.stacks.values() for name in names}
    assert covered == {name for name in case_of("period").params if name.startswith("layers/")}


@pytest.mark.thorough
def test_rows_are_in_the_order_of_numbers_and_not_of_letters():
    [loop] = case_of("linen_block", 2 * LAYERS).find().loops
    stacks = [names for names in loop.stacks.values() if names[0].endswith("Dense_0/kernel")]
    assert stacks == [tuple(f"block_{i}/Dense_0/kernel" for i in range(2 * LAYERS))]


@pytest.mark.parametrize(
    ("first", "step", "name"),
    [(0, 1, "layers/0..23/attn/q"), (0, 2, "layers/0..22:2/attn/q"), (1, 1, "layers/1..23/attn/q")],
)
def test_the_name_of_a_stack_tells_its_rows(first, step, name):
    assert stack_name([f"layers/{i}/attn/q" for i in range(first, 24, step)]) == name


def test_a_loop_tells_what_it_costs():
    [plain], [windows] = case_of("plain").find().loops, case_of("windows").find().loops
    rows, length = example_batch()["tokens"].shape
    assert plain.carry_bytes == rows * length * 16 * 4
    assert plain.row_bytes == 0
    if windows.period == 1:
        assert windows.row_bytes >= LAYERS * length * length
    assert "layers/0..5" in plain.describe()
    assert f"{LAYERS} iterations" in plain.describe()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("style", "expected"),
    [
        *[(style, True) for style in ("checkpoint", "nnx_remat", "linen_remat")],
        *[(style, True) for style in ("checkpoint_numbers", "checkpoint_period")],
        *[(style, False) for style in ("plain", "remat_of_attention")],
    ],
)
def test_a_loop_knows_whether_its_layers_are_checkpointed(style, expected):
    [loop] = case_of(style).find().loops
    assert loop.is_checkpointed is expected


@pytest.mark.thorough
def test_a_checkpoint_stays_around_a_rolled_layer():
    """What the forward pass keeps of a turn is its input, as where each layer was checkpointed."""

    def num_kept(style: str) -> int:
        rolled, case = case_of(style).rolled(), case_of(style)
        mean, params = mean_loss(case, rolled), stacked(rolled, case.params)
        kept = jax.eval_shape(lambda params: jax.vjp(mean, params, has_aux=True)[1], params)
        return sum(leaf.size for leaf in jax.tree.leaves(kept))

    assert num_kept("checkpoint") < num_kept("plain") / 2


def test_a_checkpoint_in_a_loop_has_no_guard_against_cse():
    """It is a barrier, which keeps gathers from being sent a turn ahead."""
    case = case_of("checkpoint")
    assert "prevent_cse=True" in str(case.trace.jaxpr)
    rolled = case.rolled()
    params = stacked(rolled, case.params)
    after = trace_of(rolled, params, case.extras, case.batch, case.loss)
    assert "prevent_cse=False" in str(after.jaxpr)
    assert "prevent_cse=True" not in str(after.jaxpr)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("style", ["plain", "nnx_dropout", "linen_setup", "functions"])
def test_new_arrays_are_the_models_own_in_stacks(style):
    case = case_of(style)
    rolled = case.rolled()
    made = rolled.initial_arrays() or rolled.init(jax.random.key(0), case.batch, case.loss)
    expected = stacked(rolled, case.params), case.extras
    for arrays, alike in zip(made, expected, strict=True):
        assert arrays.keys() == alike.keys()
        for name, array in alike.items():
            np.testing.assert_array_equal(as_array(arrays[name]), array, err_msg=name)


def as_array(value: Any) -> np.ndarray:
    """An array, or a lazy one read whole."""
    if hasattr(value, "read"):
        return value.read([(0, size) for size in value.shape])
    return np.asarray(value)


def test_the_users_object_gets_its_own_arrays_back():
    case = case_of("plain")
    rolled = case.rolled()
    doubled = {name: 2 * array for name, array in case.params.items()}
    module = rolled.to_source(stacked(rolled, doubled), case.extras)
    np.testing.assert_array_equal(module.layers[3].up.kernel[...], doubled["layers/3/up/kernel"])
    np.testing.assert_array_equal(module.embed.embedding[...], doubled["embed/embedding"])


def test_a_read_of_a_stack_is_one_row():
    case = case_of("plain")
    rolled = case.rolled()
    trace = trace_of(rolled, stacked(rolled, case.params), case.extras, case.batch, case.loss)
    assert trace.barriers == {}
    stack = "layers/0..5/up/kernel"
    assert trace.read_shapes[stack] == {case.params["layers/0/up/kernel"].shape}
