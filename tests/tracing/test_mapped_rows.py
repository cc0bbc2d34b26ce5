"""Updates that are written for arrays by name, run on stacks whose rows are these arrays.

Each program is traced over arrays by name, as an optimizer sees them, and compared with itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Jaxpr

from zerojax.operators.marks import inner_programs
from zerojax.tracing.rolling import map_rows

SHAPE = (3, 4)
ROUNDING = 1e-6
"""Of the largest number of an array: sums over several dimensions may run in another order."""
Update = Callable[[dict[str, jax.Array], jax.Array], dict[str, jax.Array]]


def arrays_of(num_rows: int, shape: tuple[int, ...] = SHAPE) -> dict[str, jax.Array]:
    """Rows "w/0" ... and a further array "z", random."""
    names = [*[f"w/{index}" for index in range(num_rows)], "z"]
    keys = jax.random.split(jax.random.key(0), len(names))
    return {name: jax.random.normal(key, shape) for name, key in zip(names, keys, strict=True)}


def stack_of(arrays: dict[str, Any], prefix: str = "w/") -> jax.Array:
    number = sum(name.startswith(prefix) for name in arrays)
    return jnp.stack([arrays[f"{prefix}{index}"] for index in range(number)])


class Mapped:
    """An update of arrays by name that runs on the stack of its rows.

    The program's inputs are the arrays in the order of their names, then a number; outputs are the
    same arrays.
    """

    def __init__(self, update: Update, arrays: dict[str, jax.Array]) -> None:
        self.names = sorted(arrays)
        self.rows = tuple(i for i, name in enumerate(self.names) if name != "z")
        self.number = len(self.names)
        given = jax.ShapeDtypeStruct((), jnp.float32)
        shapes = jax.eval_shape(lambda: arrays)
        self.mapped = map_rows(jax.make_jaxpr(update)(shapes, given), [self.rows], [self.rows])

    def __call__(self, stack: jax.Array, z: jax.Array, number: jax.Array) -> dict[str, jax.Array]:
        """The outputs as {"w": stack, "z": array}."""
        others = {self.names.index("z"): z, self.number: number}
        [stacked], rest = self.mapped([stack], others)
        return {"w": stacked, "z": rest[self.names.index("z")]}


def assert_mapped(update: Update, num_rows: int = 5) -> None:
    """The stack of an update's rows is the update of the stack."""
    arrays, number = arrays_of(num_rows), jnp.float32(0.25)
    expected = jax.jit(update)(arrays, number)
    got = jax.jit(Mapped(update, arrays))(stack_of(arrays), arrays["z"], number)
    for array, alike in ((got["w"], stack_of(expected)), (got["z"], expected["z"])):
        assert (array.shape, array.dtype) == (alike.shape, alike.dtype)
        limit = ROUNDING * float(jnp.max(jnp.abs(alike)))
        np.testing.assert_allclose(array, alike, rtol=0, atol=limit)


def num_equations(program: Jaxpr) -> int:
    inner = (inner_programs(equation.params) for equation in program.eqns)
    return len(program.eqns) + sum(num_equations(one) for each in inner for one in each)


def size_of(update: Update, num_rows: int) -> int:
    arrays = arrays_of(num_rows)
    given = stack_of(arrays), arrays["z"], jnp.float32(0.25)
    return num_equations(jax.make_jaxpr(Mapped(update, arrays))(*given).jaxpr)


def scaled(arrays: dict[str, jax.Array], number: jax.Array) -> dict[str, jax.Array]:
    return {name: jnp.tanh(array) * number + 1.0 for name, array in arrays.items()}


def by_own_norm(arrays: dict[str, jax.Array], number: jax.Array) -> dict[str, jax.Array]:
    return {name: number * a / jnp.sqrt(jnp.sum(a * a)) for name, a in arrays.items()}


def by_global_norm(arrays: dict[str, jax.Array], number: jax.Array) -> dict[str, jax.Array]:
    norm = jnp.sqrt(sum(jnp.sum(array * array) for array in arrays.values()))
    return {name: jnp.where(norm > number, a * number / norm, a) for name, a in arrays.items()}


def by_layer(arrays: dict[str, jax.Array], number: jax.Array) -> dict[str, jax.Array]:
    """A rate for each array, as with decay of the learning rate by layer."""
    rates = {name: 0.9**index for index, name in enumerate(sorted(arrays))}
    return {name: array * rates[name] * number for name, array in arrays.items()}


def with_first(arrays: dict[str, jax.Array], number: jax.Array) -> dict[str, jax.Array]:
    """Every array also takes one row of the stack."""
    return {name: array + number * arrays["w/0"] for name, array in arrays.items()}


def to_neighbours(arrays: dict[str, jax.Array], number: jax.Array) -> dict[str, jax.Array]:
    """Each array becomes the one that follows it."""
    names = sorted(arrays)
    return {name: arrays[after] for name, after in zip(names, [*names[1:], names[0]], strict=True)}


def one_otherwise(arrays: dict[str, jax.Array], number: jax.Array) -> dict[str, jax.Array]:
    """Another program for one row, as with a mask that freezes a layer."""
    return {name: a if name == "w/1" else a - number * a**3 for name, a in arrays.items()}


def unchanged(arrays: dict[str, jax.Array], number: jax.Array) -> dict[str, jax.Array]:
    return arrays


def new_zeros(arrays: dict[str, jax.Array], number: jax.Array) -> dict[str, jax.Array]:
    """As an optimizer's `init` makes them: outputs that depend on no input."""
    return jax.tree.map(jnp.zeros_like, arrays)


ALIKE = [scaled, by_own_norm, unchanged]
MIXED = [new_zeros, by_global_norm, by_layer, with_first, to_neighbours, one_otherwise]


@pytest.mark.thorough
@pytest.mark.parametrize("update", [*ALIKE, *MIXED])
def test_rows_of_a_stack_are_updated_like_arrays(update):
    assert_mapped(update)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("update", ALIKE)
def test_what_is_the_same_for_all_rows_is_computed_once(update):
    assert size_of(update, 12) == size_of(update, 6)


def test_only_what_mixes_rows_is_computed_for_each():
    """A global norm adds a number of each row; what is divided by it is one array, besides "z"."""
    arrays = arrays_of(12)
    given = stack_of(arrays), arrays["z"], jnp.float32(0.25)
    program = jax.make_jaxpr(Mapped(by_global_norm, arrays))(*given).jaxpr
    names = [equation.primitive.name for equation in program.eqns]
    assert names.count("div") == 2
    assert names.count("reduce_sum") == 2
    assert names.count("add") >= len(arrays) - 1


def test_a_row_is_computed_under_vmap_and_not_sliced():
    arrays = arrays_of(8)
    given = stack_of(arrays), arrays["z"], jnp.float32(1)
    program = jax.make_jaxpr(Mapped(by_own_norm, arrays))(*given).jaxpr
    names = {equation.primitive.name for equation in program.eqns}
    assert names.isdisjoint(["slice", "dynamic_slice", "gather", "concatenate"])


def _two_stacks(arrays: dict[str, jax.Array], number: jax.Array) -> dict[str, jax.Array]:
    """As parameters and their moments: rows of one stack take rows of the other."""
    rows = [name for name in arrays if name.startswith("w/")]
    moments = {f"m/{n[2:]}": number * arrays[f"m/{n[2:]}"] + arrays[n] for n in rows}
    return moments | {n: arrays[n] - 0.1 * moments[f"m/{n[2:]}"] for n in rows}


def test_rows_of_several_stacks_belong_together():
    firsts = arrays_of(4)
    arrays = {n: a for n, a in firsts.items() if n != "z"}
    arrays |= {f"m/{n[2:]}": 2 * a for n, a in arrays.items()}
    names, number = sorted(arrays), jnp.float32(0.9)
    groups = [tuple(range(4)), tuple(range(4, 8))]  # "m/..." sort before "w/..."
    assert [names[group[0]] for group in groups] == ["m/0", "w/0"]
    mapped = map_rows(jax.make_jaxpr(_two_stacks)(arrays, number), groups, groups)
    outputs, rest = mapped([stack_of(arrays, "m/"), stack_of(arrays)], {8: number})
    assert rest == {}
    expected = _two_stacks(arrays, number)
    for output, prefix in zip(outputs, ("m/", "w/"), strict=True):
        np.testing.assert_allclose(output, stack_of(expected, prefix), rtol=ROUNDING)


TRANSFORMATIONS: dict[str, optax.GradientTransformation] = {
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1e-1, momentum=0.9)),
    "lamb": optax.lamb(1e-2),
    "lion": optax.lion(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "masked": optax.masked(optax.adam(1e-2), dict.fromkeys(arrays_of(4), True) | {"w/1": False}),
}


def positions(leaves: Sequence[tuple[Any, Any]]) -> list[tuple[int, ...]]:
    """Of leaves with paths, those that are rows of one stack, in order."""
    found: dict[str, list[int]] = {}
    for place, (path, _) in enumerate(leaves):
        if getattr(path[-1], "key", "").startswith("w/"):
            found.setdefault(jax.tree_util.keystr(path[:-1]), []).append(place)
    return [tuple(group) for group in found.values()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_an_update_of_optax_on_stacks_is_that_on_arrays(name):
    tx, params = TRANSFORMATIONS[name], arrays_of(4)
    grads = jax.tree.map(jnp.sin, params)
    given = tx.init(params), grads, params

    def update(state: Any, grads: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    expected = jax.tree.leaves(update(*given))
    inputs = jax.tree_util.tree_leaves_with_path(given)
    outputs = jax.tree_util.tree_leaves_with_path(jax.eval_shape(update, *given))
    # A masked state has fewer rows: those are no stack.
    rows = [[g for g in positions(leaves) if len(g) == 4] for leaves in (inputs, outputs)]
    mapped = map_rows(jax.make_jaxpr(update)(*given), *rows)
    taken = {place for group in rows[0] for place in group}
    stacks = [jnp.stack([inputs[place][1] for place in group]) for group in rows[0]]
    others = {place: leaf for place, (_, leaf) in enumerate(inputs) if place not in taken}
    stacked, rest = jax.jit(mapped)(stacks, others)
    for group, stack in zip(rows[1], stacked, strict=True):
        rest |= dict(zip(group, stack, strict=True))
    assert rest.keys() == set(range(len(expected)))
    for place, array in enumerate(expected):
        assert (rest[place].shape, rest[place].dtype) == (array.shape, array.dtype)
        limit = ROUNDING * float(jnp.max(jnp.abs(array)))
        np.testing.assert_allclose(rest[place], array, rtol=0, atol=limit)
