"""Lists of layers that are written in other ways, of which some layers differ, and the proof.

A rolled model is compared with the model as it was written: loss and all gradients.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import zerojax
from zerojax.forecasting import remedies
from zerojax.models.adapt import as_loss, as_model
from zerojax.tracing.rolling import RolledModel, find_loops, finding, stack_name
from zerojax.tracing.rolling.equality import Equality
from zerojax.tracing.rolling.flat_program import Mismatch
from zerojax.tracing.rolling.proof import check_unrolled
from zerojax.tracing.trace import trace_model

WIDTH, LAYERS = 8, 6
ROUNDING = 2e-6
"""Of the largest gradient: XLA sums in another order where layers share a program."""


def linear(rngs: nnx.Rngs, out: int = WIDTH) -> nnx.Linear:
    return nnx.Linear(WIDTH, out, rngs=rngs)


def linears(rngs: nnx.Rngs, number: int = LAYERS) -> nnx.List:
    return nnx.List([linear(rngs) for _ in range(number)])


class Net(nnx.Module):
    """A model with the loss of a regression; styles say what its layers are."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = linears(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x

    def loss(self, batch: Any) -> jax.Array:
        return jnp.mean((self(batch["x"]) - batch["y"]) ** 2)


class Zipped(Net):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.mlps = linears(rngs)

    def __call__(self, x):
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(jnp.tanh(norm(x)))
        return x


class OneNameBeginsTheOther(Net):
    def __init__(self, rngs):
        for i in range(LAYERS):
            setattr(self, f"block_{i}", linear(rngs))
            setattr(self, f"block_out_{i}", linear(rngs))

    def __call__(self, x):
        for name in ("block_", "block_out_"):
            for i in range(LAYERS):
                x = x + jnp.tanh(getattr(self, f"{name}{i}")(x))
        return x


class FromOne(Net):
    def __init__(self, rngs):
        for i in range(1, LAYERS + 1):
            setattr(self, f"layer{i}", linear(rngs))

    def __call__(self, x):
        for i in range(1, LAYERS + 1):
            x = x + jnp.tanh(getattr(self, f"layer{i}")(x))
        return x


class WithActivationsBetween(Net):
    """The numbers of the layers with parameters are 0, 2, 4, ..."""

    def __init__(self, rngs):
        both = [x for _ in range(LAYERS) for x in (linear(rngs), jnp.tanh)]
        self.net = nnx.Sequential(*both)

    def __call__(self, x):
        return self.net(x)


class LastOfItsOwn(Net):
    def __call__(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x) if i == LAYERS - 1 else x + jnp.tanh(layer(x))
        return x


class LastOfAnotherShape(Net):
    def __init__(self, rngs):
        self.layers = nnx.List([*(linear(rngs) for _ in range(LAYERS - 1)), linear(rngs, 2)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return jnp.tile(x, 4)


class EndsOfAnotherKind(Net):
    def __init__(self, rngs):
        norms = [nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)]
        self.layers = nnx.List([norms[0], *(linear(rngs) for _ in range(LAYERS)), norms[1]])

    def __call__(self, x):
        for i, layer in enumerate(self.layers):
            x = jnp.sin(layer(x)) if i in (0, LAYERS + 1) else x + jnp.tanh(layer(x))
        return x


class MiddleOfItsOwn(Net):
    def __init__(self, rngs):
        self.layers = linears(rngs, 2 * LAYERS)

    def __call__(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x) if i == 4 else x + jnp.tanh(layer(x))
        return x


class ActivationFirst(Net):
    def __call__(self, x):
        for layer in self.layers:
            x = layer(jax.nn.relu(x))
        return x


class Inline(linen.Module):
    """Linen's own numbers: two `Dense` in each block, and a norm more than blocks."""

    @linen.compact
    def __call__(self, batch):
        x = batch["x"]
        for _ in range(LAYERS):
            y = linen.Dense(2 * WIDTH)(linen.LayerNorm()(x))
            x = x + linen.Dense(WIDTH)(jnp.tanh(y))
        return jnp.mean((linen.LayerNorm()(x) - batch["y"]) ** 2)


def runs(prefix: str, start: int, count: int) -> set[tuple[str, int, int, int]]:
    return {(prefix, start, 1, count)}


STYLES: dict[str, tuple[Any, set[tuple[str, int, int, int]]]] = {
    "zipped": (Zipped, runs("mlps/+norms/", 0, LAYERS)),
    "one name begins the other": (
        OneNameBeginsTheOther,
        runs("block_", 0, LAYERS) | runs("block_out_", 0, LAYERS),
    ),
    "numbers from 1": (FromOne, runs("layer", 0, LAYERS)),
    "activations between": (WithActivationsBetween, runs("net/layers/", 0, LAYERS)),
    "last of its own": (LastOfItsOwn, runs("layers/", 0, LAYERS - 1)),
    "last of another shape": (LastOfAnotherShape, runs("layers/", 0, LAYERS - 1)),
    "ends of another kind": (EndsOfAnotherKind, runs("layers/", 1, LAYERS)),
    "middle of its own": (MiddleOfItsOwn, runs("layers/", 5, 2 * LAYERS - 5)),
    "activation first": (ActivationFirst, runs("layers/", 0, LAYERS)),
    "inline": (Inline, runs("Dense_+LayerNorm_", 0, LAYERS)),
}


def batch_of(seed: int = 0) -> Any:
    x = np.random.default_rng(seed).normal(size=(8, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


@functools.cache
def traced(style: str) -> tuple[Any, ...]:
    """(model, loss, parameters, extras, trace, loops found)."""
    kind = STYLES[style][0]
    model = as_model(kind() if style == "inline" else kind(nnx.Rngs(0)))
    loss = as_loss((lambda model, batch: model(batch)) if style == "inline" else None, model)
    arrays = model.initial_arrays() or model.init(jax.random.key(0), batch_of(), loss)
    params, extras = arrays
    trace = trace_model(model, *jax.eval_shape(lambda: (params, extras, batch_of())), loss)
    return model, loss, params, extras, trace, find_loops(trace, params)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("style", STYLES)
def test_finds_the_longest_equal_run_of_layers(style):
    found = traced(style)[-1]
    places = {(loop.prefix, loop.start, loop.period, loop.count) for loop in found.loops}
    assert places == STYLES[style][1]


@pytest.mark.thorough
@pytest.mark.parametrize("style", STYLES)
def test_gives_the_loss_and_gradients_of_the_model(style):
    model, loss, params, extras, _, found = traced(style)
    rolled = RolledModel(model, found.loops, jax.eval_shape(lambda: params))
    rows = {name for names in rolled.stacks.values() for name in names}
    stacked = {s: jnp.stack([params[n] for n in names]) for s, names in rolled.stacks.items()}
    stacked |= {name: x for name, x in params.items() if name not in rows}

    def mean(model: Any, params: Any) -> jax.Array:
        call = lambda bound: loss(bound, batch_of())  # noqa: E731
        return model.run(params, extras, jax.random.key(0), call)[0]

    expected, grads = jax.jit(jax.value_and_grad(functools.partial(mean, model)))(params)
    value, own = jax.jit(jax.value_and_grad(functools.partial(mean, rolled)))(stacked)
    np.testing.assert_allclose(value, expected, rtol=ROUNDING)
    largest = max(float(jnp.abs(x).max()) for x in grads.values())
    for name, x in rolled.rows(own).items():
        np.testing.assert_allclose(x, grads[name], rtol=0, atol=ROUNDING * largest, err_msg=name)


def test_the_plan_says_why_layers_are_not_of_the_loop():
    plan = plan_of(LastOfItsOwn)
    [line] = [line for line in plan.reasons if line.startswith("layers:")]
    assert "layers/0..4" in line
    assert "other layers stay" in line


# --- rows of which something else is asked --------------------------------------------------------


def plan_of(model: Any = Net, **options: Any) -> zerojax.Plan:
    options = {"zero": 3, "precision": "fp32", "optimizer": optax.sgd(0.1), **options}
    options = {"example_batch": batch_of(), **options}
    return zerojax.make_plan(model, {"data": 8}, **options)


def by_layer(path: Any, _: Any) -> str:
    return "low" if path[1].key < 2 else "high"


def two_groups() -> optax.GradientTransformation:
    groups = {"low": optax.sgd(0.0, momentum=0.9), "high": optax.adam(0.1)}
    labels = lambda params: jax.tree.map_with_path(by_layer, params)  # noqa: E731
    return optax.multi_transform(groups, labels)


def decays(params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, x: by_layer(path, x) == "high", params)


ASKED = {
    "frozen": {"freeze": "layers/[01]/"},
    "groups": {"optimizer": two_groups()},
    "mask": {"optimizer": zerojax.adamw(0.1, mask=decays)},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", ASKED.values(), ids=ASKED)
def test_rolls_the_layers_of_which_the_same_is_asked(options):
    plan = plan_of(**options)
    assert sorted(plan.stacks) == ["layers/2..5/bias", "layers/2..5/kernel"]


@pytest.mark.thorough
@pytest.mark.parametrize("options", ASKED.values(), ids=ASKED)
def test_what_is_asked_of_layers_stays_theirs_in_a_loop(options):
    losses = [run(plan_of(roll=roll, **options)) for roll in ("auto", "off")]
    np.testing.assert_allclose(*losses, rtol=ROUNDING)


def run(plan: zerojax.Plan) -> list[float]:
    state, step, losses = zerojax.init_state(plan, seed=0), zerojax.build_step(plan), []
    for i in range(3):
        state, metrics = step(state, zerojax.shard_batch(plan, batch_of(i)))
        losses.append(float(metrics["loss"]))
    return losses


# --- the proof ------------------------------------------------------------------------------------


def rolled_of(style: str) -> tuple[Any, Equality]:
    """What a loop is made of, and how its equations are compared."""
    _, _, params, _, trace, found = traced(style)
    [loop] = found.loops
    kept: list[Any] = []

    def keep(program: Any, equality: Equality, *run: Any) -> Any:
        kept.append((finding.roll(program, equality, *run), equality))
        return kept[-1][0]

    names = sorted(params)
    rest = [None] * (len(trace.program.jaxpr.invars) - len(names))
    named = finding.NamedProgram(finding.open_calls(trace.program), (*names, *rest))
    program = finding._program(named, loop.layers)
    keep(program, Equality(finding._within(loop.layers)), loop.start, loop.period, loop.count)
    return kept[0]


def swapped(values: Any, first: int = 0, second: int = 1) -> tuple[Any, ...]:
    values = list(values)
    values[first], values[second] = values[second], values[first]
    return tuple(values)


def with_other_operands(rolled: Any) -> Any:
    """The last equation of two operands in the body takes the first one twice."""
    jaxpr = rolled.body.jaxpr
    place = max(
        n
        for n, e in enumerate(jaxpr.eqns)
        if len(e.invars) == 2 and e.invars[0].aval == e.invars[1].aval
    )
    one = jaxpr.eqns[place]
    other = one.replace(invars=[one.invars[0], one.invars[0]])
    equations = [*jaxpr.eqns[:place], other, *jaxpr.eqns[place + 1 :]]
    return rolled.body.replace(jaxpr=jaxpr.replace(eqns=equations))


WRONG = {
    "rows of two stacks": lambda x: {"rows": (swapped(x.rows[0]), *x.rows[1:])},
    "another first value": lambda x: {"inits": (x.program.closed.jaxpr.invars[-1],)},
    "no equations before": lambda x: {"before": x.before[:-1]},
    "other operands": lambda x: {"body": with_other_operands(x)},
    "another result": lambda x: {"finals": (x.before[0].outvars[0],)},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_loop_is_noticed_by_unrolling_it(what):
    rolled, equality = rolled_of("ends of another kind")
    check_unrolled(rolled, equality)
    wrong = dataclasses.replace(rolled, **WRONG[what](rolled))
    with pytest.raises(Mismatch):
        check_unrolled(wrong, equality)


def test_names_of_stacks_tell_all_numbers_where_steps_differ():
    names = [f"layers/{i}/w" for i in (1, 4, 5)]
    assert stack_name(names) == "layers/1,4,5/w"


# --- what the backward pass keeps -----------------------------------------------------------------


class Wide(Net):
    """Activations take more than weights, most of them elementwise results."""

    def __call__(self, x):
        for layer in self.layers:
            y = layer(x)
            x = x + jnp.tanh(y) * jnp.sin(y) * jnp.exp(-(y**2))
        return x


def plan_of_wide(rows: int, **options: Any) -> zerojax.Plan:
    batch = {name: np.resize(x, (rows, WIDTH)) for name, x in batch_of().items()}
    return plan_of(Wide, example_batch=batch, **options)


def test_a_loop_computes_elementwise_results_again_where_they_outweigh_weights():
    plans = plan_of_wide(1024), plan_of_wide(8)
    said = [any("elementwise" in line for line in plan.reasons) for plan in plans]
    assert said == [True, False]


@pytest.mark.thorough
def test_a_loop_that_does_so_needs_no_more_memory_than_layers_by_themselves():
    def temporaries(**options: Any) -> int:
        plan = plan_of_wide(1024, **options)
        lowered = zerojax.build_step(plan).lower(plan.abstract_state, plan.abstract_batch)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    auto = temporaries()
    assert auto <= temporaries(roll="off")
    assert auto < 0.75 * temporaries(roll_remat="model")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("roll_remat", "found"), [("auto", True), ("none", True), ("dots", True), ("full", False)]
)
def test_roll_remat_is_a_remedy_unless_layers_keep_their_inputs_alone(roll_remat, found):
    plan = plan_of(zero=3, roll_remat=roll_remat)
    assert plan.stacks
    sizes = {"activations": 2**30}
    words = [remedy.words for remedy in remedies.all_remedies(plan, None, sizes)]
    assert ("mesh.roll_remat=full" in words) is found
    assert not [word for word in words if "nnx.remat" in word]
