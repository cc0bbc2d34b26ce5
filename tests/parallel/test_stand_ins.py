"""What stands for a parameter while a model is traced answers as the array does.

In Linen a model that reaches for `module.variables` has it in its hands, in NNX it is the variable.
Every public attribute and method of `jax.Array`, its operators and what JAX's functions make of it
are compared with those of the array (NNX: of an ordinary `nnx.Param`) at the stages where reading
does something.
"""

import copy
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

from tests.support.small_models import regression_loss
from tests.support.trajectories import TOLERANCE, plan_for, regression_batch, train_for
from zerojax import passes
from zerojax.placement.leaf_placement import Access
from zerojax.step.build import pass_config
from zerojax.step.initialization import init_state

SHAPE = (6, 5)
OPTIONS = {"loss": regression_loss, "batch": regression_batch, "persistence_threshold": 4}
INDICES = np.array([2, 0])

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "addressable_data": (0,),
    "argpartition": (2,),
    "astype": (jnp.float16,),
    "choose": ([0],),
    "clip": (-0.1, 0.1),
    "compress": (np.array([True, False, True]), 0),
    "dot": (np.ones((5, 2), np.float32),),
    "repeat": (2,),
    "reshape": (3, 10),
    "searchsorted": (0.1,),
    "swapaxes": (0, 1),
    "take": (INDICES,),
    "to_device": (None,),
    "view": (jnp.int32,),
}
"""name -> what a method of an array is given."""

_NAMES = (
    "abs neg pos invert truth index getitem eq ne lt le gt ge add sub mul truediv floordiv mod pow "
    "matmul and_ or_ xor lshift rshift"
)
OPERATORS = {name: getattr(operator, name) for name in _NAMES.split()}
ONE = ("abs", "neg", "pos", "invert", "truth", "index")
OTHERS = {"getitem": 1, "matmul": np.ones((5, 6), np.float32)}

FUNCTIONS = {
    "len": len,
    "iter": list,
    "reversed": lambda x: list(reversed(x)),
    "contains": lambda x: 0.5 in x[0],
    "slice": lambda x: x[1:3, ::2],
    "newaxis": lambda x: x[None, ..., 0],
    "fancy": lambda x: x[INDICES],
    "mask": lambda x: x[np.arange(6) > 2],
    "at": lambda x: x.at[1].add(2.0),
    "divmod": lambda x: divmod(x, 0.3),
    "rdivmod": lambda x: divmod(0.3, x),
    "round": lambda x: round(x, 1),
    "float": float,
    "int": int,
    "complex": complex,
    "bool": bool,
    "copy": copy.copy,
    "hash": hash,
    "with itself": lambda x: x + x * x,
    "on the right of an array": lambda x: jnp.ones(SHAPE) - x,
    "on the right of NumPy": lambda x: np.ones(SHAPE, np.float32) / (x + 3),
    "NumPy's matmul": lambda x: np.ones((2, 6), np.float32) @ x,
    "on the right of a number": lambda x: (1 - x, 2 * x, 2 / (x + 3), 2**x, 3 % (x + 3)),
    "asarray": jnp.asarray,
    "array": jnp.array,
    "numpy": np.asarray,
    "sum": jnp.sum,
    "einsum": lambda x: jnp.einsum("ij,kj->ik", x, x),
    "where": lambda x: jnp.where(x > 0, x, 0),
    "stack": lambda x: jnp.stack([x, x]),
    "concatenate": lambda x: jnp.concatenate([x, x], 1),
    "like": lambda x: (jnp.zeros_like(x), jnp.ones_like(x)),
    "shape of": jnp.shape,
    "type of": jnp.result_type,
    "norm": jnp.linalg.norm,
    "activation": jax.nn.gelu,
    "draw": lambda x: jax.random.normal(jax.random.key(0), x.shape, x.dtype),
    "jit": lambda x: jax.jit(lambda y: y * 2)(x),
    "checkpoint": lambda x: jax.checkpoint(lambda y: jnp.sin(y))(x),
    "cond": lambda x: lax.cond(True, lambda y: y * 2, lambda y: y * 3, x),
}


def _operate(name: str, x: Any) -> Any:
    function = OPERATORS[name]
    return function(x) if name in ONE else function(x, OTHERS.get(name, 2))


def _attribute(name: str, x: Any) -> Any:
    value = getattr(x, name)
    return value(*ARGUMENTS.get(name, ())) if callable(value) else value


ROWS = {
    **{f".{n}": functools.partial(_attribute, n) for n in dir(jax.Array) if not n.startswith("_")},
    **{f"operator {name}": functools.partial(_operate, name) for name in OPERATORS},
    **FUNCTIONS,
    "set": lambda x: operator.setitem(x, 0, 1.0),  # the last, since a variable keeps it
}


def answer(function: Any, x: Any) -> tuple[Any, list[Any]]:
    """(what is known without values, the arrays) of what a function makes of something."""
    try:
        result = function(x)
    except Exception as error:
        return type(error).__name__, []
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    result = jax.tree.map(lambda x: x[...] if is_variable(x) else x, result, is_leaf=is_variable)
    leaves, tree = jax.tree.flatten(result)
    arrays = [jnp.asarray(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]
    known = [
        (leaf.shape, leaf.dtype.name) if isinstance(leaf, jax.Array) else _words(leaf)
        for leaf in leaves
    ]
    return (tree, known), arrays


def _words(leaf: Any) -> str:
    # The helpers behind `.at` and `.flat` have no text of their own.
    text = type(leaf).__name__ if " at 0x" in str(leaf) else str(leaf)
    return text.replace("ReadingParam", "Param")


class LinenWeight(linen.Module):
    """Its loss goes by the metadata box."""

    @linen.compact
    def __call__(self, x):
        self.param("w", linen.initializers.normal(1.0), SHAPE)
        return x[:, :6] @ self.variables["params"]["w"]


class NnxWeight(nnx.Module):
    """Its loss goes by the variable."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), SHAPE))

    def __call__(self, x):
        return x[:, :6] @ self.w


KINDS = {
    "linen": (LinenWeight(), lambda bound: bound.variables["params"]["w"], lambda whole: whole),
    "nnx": (NnxWeight, lambda bound: bound.w, nnx.Param),
}
"""kind: (model, what stands for its parameter, what it would be without zerojax)."""


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_it_answers_as_the_array_does(kind, stage):
    model, stand_in_of, as_users_have_it = KINDS[kind]
    plan = plan_for(model, zero=stage, devices=4, **OPTIONS)
    (leaf,) = plan.placement.leaves.values()
    lazily = Access.GATHER_ON_USE if stage == 3 else Access.GATHER_ONCE_SCATTER_EARLY
    assert leaf.access is lazily
    state, config = init_state(plan), pass_config(plan)
    whole = jnp.asarray(np.asarray(jax.device_get(next(iter(state["params"].values()))))[:6, :5])
    differing = {}

    def local(params, frozen, extras, key_data, batch):
        def look(bound):
            found = {}
            for name, function in ROWS.items():
                known, arrays = answer(function, stand_in_of(bound))
                expected, others = answer(function, as_users_have_it(jnp.sin(whole * 0) + whole))
                found[name] = arrays, others
                if known != expected:
                    differing[name] = known, expected
            return {} if differing else found

        inputs, constants = passes.prepare_parameters(config, params, frozen)
        values = passes.values_to_read(config, inputs, constants, frozen)
        reads = passes.build_reads(config, frozen)
        return plan.model.run(values, extras, jax.random.key(0), look, on_read=reads)[0]

    given = state["params"], state["frozen"], state["extras"], state["rng"]
    found = jax.jit(passes.map_forward(config, local))(*given, {"x": jnp.ones((4, 1))})
    assert not differing
    assert len([name for name, (arrays, _) in found.items() if arrays]) > 80
    for name, (arrays, expected) in found.items():
        for one, other in zip(arrays, expected, strict=True):
            # Sums are added up in another order, and operations fused otherwise.
            np.testing.assert_allclose(one, other, rtol=1e-5, err_msg=name)


class Tied(linen.Module):
    """What Hugging Face's Flax models do with the table of an embedding, and what else one may do
    with `module.variables`."""

    use: str

    @linen.compact
    def __call__(self, x):
        table = linen.Embed(16, 12, name="table", embedding_init=linen.initializers.normal(0.3))
        hidden = linen.Dense(12, name="first")(x) + table(jnp.argmax(x, -1))
        stored = self.variables["params"]["table"]
        if self.use == "transposed":
            head = linen.Dense(16, use_bias=False, parent=None)
            made = head.apply({"params": {"kernel": stored["embedding"].T}}, jnp.tanh(hidden))
        elif self.use == "lax":
            made = lax.dot_general(hidden, stored["embedding"], (((1,), (1,)), ((), ())))
        elif self.use == "carried":
            double = lambda _, carry: carry * 1.2  # noqa: E731
            made = hidden @ lax.fori_loop(0, 2, double, stored["embedding"]).T
        elif self.use == "row by row":
            made = jax.vmap(lambda row: hidden @ row, out_axes=1)(stored["embedding"])
        elif self.use == "tree":
            squares = jax.tree.map(lambda leaf: jnp.mean(leaf**2), self.variables["params"])
            made = hidden @ stored["embedding"].T + sum(jax.tree.leaves(squares))
        else:
            embedding = table.get_variable("params", "embedding")
            assert isinstance(embedding, jax.Array)
            made = hidden @ embedding.mT
        return jnp.asarray(made)[:, :5]


USES = ["transposed", "lax", "carried", "row by row", "tree", "get_variable"]
QUICK = {("transposed", 3), ("transposed", 2), ("lax", 3), ("row by row", 3)}
CASES = [
    pytest.param(use, stage, marks=[] if (use, stage) in QUICK else pytest.mark.slow)
    for use in USES
    for stage in range(4)
]


@functools.cache
def one_device(use):
    return train_for(Tied(use), devices=1, steps=6, **OPTIONS)


@pytest.mark.thorough
@pytest.mark.parametrize(("use", "stage"), CASES)
def test_a_model_that_goes_by_its_variables_equals_one_device(use, stage):
    run = train_for(Tied(use), zero=stage, steps=6, **OPTIONS)
    expected = one_device(use)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(run.norms, expected.norms, rtol=5e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("use", USES)
def test_a_stand_in_is_gathered_where_it_is_used_if_it_can_be(use):
    leaf = plan_for(Tied(use), zero=3, **OPTIONS).placement.leaves["table/embedding"]
    if use in ("lax", "carried", "tree"):
        assert leaf.access is Access.GATHER_ONCE
        assert "its stored value goes into" in leaf.reasons[-1]
    else:
        assert leaf.access is Access.GATHER_ON_USE
        assert leaf.stack_dims == (use == "row by row")


def test_a_models_own_error_is_told_as_it_is_with_arrays():
    class Wrong(linen.Module):
        @linen.compact
        def __call__(self, x):
            self.param("w", linen.initializers.normal(1.0), SHAPE)
            return lax.dot(x, self.variables["params"]["w"].T[:4])

    with pytest.raises(ValueError, match="dimension_numbers must be specified"):
        plan_for(Wrong(), zero=3, **OPTIONS)
