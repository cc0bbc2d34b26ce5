"""A loss cut at its loop over layers gives what the whole loss gives, or is refused in words."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from tests.support import equal_trees
from tests.support.marks import slow
from tests.support.small_models import LinenText, UserText, linen_loss, reference_model
from zerojax.models.adapt import as_model
from zerojax.models.losses import mean_squared_error
from zerojax.tracing.flops import count_program_flops
from zerojax.tracing.loops import LossPieces, cut_loss, find_layer_loop
from zerojax.tracing.trace import trace_model

Arrays = dict[str, Any]
Program = Callable[..., tuple[tuple[jax.Array, jax.Array], Arrays]]

KEY = jax.random.key(7)


def tokens() -> Arrays:
    made = np.random.default_rng(0).integers(0, 60, (2, 2, 8))
    return {"tokens": jnp.asarray(made[0], jnp.int32), "targets": jnp.asarray(made[1], jnp.int32)}


def own_loss(model: Any, batch: Any) -> Any:
    return model.loss(batch)


def model_program(model: Any, loss: Any, batch: Arrays) -> tuple[Program, Arrays, Arrays]:
    """A model's loss as a function of its arrays, and those arrays."""
    bound = as_model(model)
    params, extras = jax.jit(lambda key, batch: bound.init(key, batch, loss))(KEY, batch)

    def run(values: Arrays, extras: Arrays, key: jax.Array, batch: Any) -> Any:
        result, after = bound.run(values, extras, key, lambda model: loss(model, batch))
        value, weight = result if isinstance(result, tuple) else (result, 1.0)
        return (jnp.asarray(value, jnp.float32), jnp.asarray(weight, jnp.float32)), after

    return run, params, extras


def abstract(tree: Any) -> Any:
    return jax.eval_shape(lambda tree: tree, tree)


def cut(program: Program, arguments: Sequence[Any], **options: bool) -> LossPieces:
    def with_sums(*given: Any) -> Any:
        (loss, weight), after = program(*given)
        return {"loss": loss, "weight": weight}, after

    return cut_loss(with_sums, *abstract(tuple(arguments)), **options)


def composed(pieces: LossPieces, chunks: Sequence[Sequence[int]]) -> Program:
    """The loss put together again, the layers in chunks; -1 is a row of padding, zeros."""

    def run(values: Arrays, extras: Arrays, key: jax.Array, batch: Any) -> Any:
        reads = pieces.embed_reads | pieces.layers_reads_outer | pieces.head_reads
        outer = {name: values[name] for name in reads}
        rest = extras, key, batch
        after = dict(extras)
        activations, written = pieces.embed(outer, *rest)
        after |= written | pieces.count(extras)
        for chunk in chunks:
            rows = jnp.asarray(chunk, jnp.int32)
            stacked = {name: take_rows(values[name], rows) for name in pieces.stacked}
            activations, written = pieces.layers(stacked, outer, *rest, rows, activations)
            for name, new in written.items():
                place = jnp.where(rows < 0, pieces.num_layers, rows)
                after[name] = after[name].at[place].set(new, mode="drop")
        sums, written = pieces.head(outer, *rest, activations)
        return (sums["loss"], sums["weight"]), after | written

    return run


def take_rows(value: Any, rows: jax.Array) -> Any:
    def take(x: jax.Array) -> jax.Array:
        present = (rows >= 0).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(present, x[jnp.maximum(rows, 0)], 0)

    return jax.tree.map(take, value)


def differentiated(program: Program) -> Callable[..., Any]:
    def loss(values: Arrays, *rest: Any) -> Any:
        result, after = program(values, *rest)
        return result[0], (result[1], after)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def assert_same(actual: Any, expected: Any) -> None:
    """Up to float32 rounding: the operations are the same, but XLA joins those of a loop of two
    layers and of a loop of four by themselves. Measured: equal in every bit."""
    equal_trees.assert_near(actual, expected, tolerance=1e-6)


def assert_composes(
    program: Program, arguments: Sequence[Any], chunks: Any, **options: bool
) -> LossPieces:
    padding = any(-1 in chunk for chunk in chunks)
    pieces = cut(program, arguments, padding=padding, **options)
    expected = differentiated(program)(*arguments)
    assert_same(differentiated(composed(pieces, chunks))(*arguments), expected)
    return pieces


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "changes", "chunks"),
    [
        ("gpt2", {"remat": "dots"}, [[0, 1], [2, -1]]),
        slow("gpt2", {"remat": "none", "tie_embeddings": False}, [[0], [1], [2]]),
        slow("gpt2", {"remat": "full"}, [[0, 1, 2]]),
        slow("llama", {"remat": "none"}, [[-1, 0], [1, 2]]),
    ],
)
def test_reference_models(name: str, changes: Arrays, chunks: Any) -> None:
    if name == "gpt2":
        changes = {**changes, "dropout": 0.2}
    model = reference_model(name, num_layers=3, **changes)
    program, params, extras = model_program(model, own_loss, tokens())
    pieces = assert_composes(program, (params, extras, KEY, tokens()), chunks)
    assert pieces.num_layers == 3
    assert pieces.stacked == {n for n in params if n.startswith("blocks/")}
    assert pieces.activations == (jax.ShapeDtypeStruct((2, 8, 32), jnp.float32),)
    assert not pieces.layers_reads_outer
    tied = changes.get("tie_embeddings", True) and name == "gpt2"
    assert ("token_embedding/embedding" in pieces.head_reads) == tied
    assert "token_embedding/embedding" in pieces.embed_reads
    if name == "gpt2":
        _, after = jax.jit(program)(params, extras, KEY, tokens())
        np.testing.assert_array_equal(after["blocks/mlp_dropout/rngs/count"], [1, 1, 1])


@pytest.mark.parametrize("kind", [slow("nnx.scan"), slow("linen")])
def test_user_models(kind: str) -> None:
    model, loss = (UserText, own_loss) if kind == "nnx.scan" else (LinenText(), linen_loss)
    factory = (lambda rngs: model(rngs)) if kind == "nnx.scan" else model
    program, params, extras = model_program(factory, loss, tokens())
    pieces = assert_composes(program, (params, extras, KEY, tokens()), [[0], [1]])
    prefix = "blocks/" if kind == "nnx.scan" else "ScanLinenBlock_0/"
    assert pieces.stacked == {name for name in params if name.startswith(prefix)}


class LinenDropout(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        hidden = linen.Dropout(0.3, deterministic=False)(linen.tanh(linen.Dense(6)(x)))
        statistics = self.variable("stats", "mean", lambda: jnp.zeros(()))
        statistics.value = 0.9 * statistics.value + 0.1 * jnp.mean(hidden)
        return x + hidden, None


class LinenStatistics(linen.Module):
    """Each layer drops by a key of its own and keeps a number of its own."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scanned = linen.scan(
            linen.remat(LinenDropout, prevent_cse=False),
            variable_axes={"params": 0, "stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        return scanned()(x, None)[0]


def regression(seed: int = 0) -> Arrays:
    x, y = np.random.default_rng(seed).normal(size=(2, 4, 6)).astype(np.float32)
    return {"x": jnp.asarray(x), "y": jnp.asarray(y)}


def squared_error(model: Any, batch: Arrays) -> Any:
    return mean_squared_error(model(batch["x"]), batch["y"])


@pytest.mark.thorough
def test_linen_state_and_dropout_in_the_layers() -> None:
    program, params, extras = model_program(LinenStatistics(), squared_error, regression())
    extras = jax.tree.map(lambda x: x + 1, extras)
    pieces = assert_composes(program, (params, extras, KEY, regression()), [[0, -1], [1, 2]])
    assert pieces.stacked == set(params)


# --- programs -------------------------------------------------------------------------------------


def layer_values(layers: int = 3, width: int = 6) -> Arrays:
    made = np.random.default_rng(1).normal(size=(layers, width, width)) / width**0.5
    return {
        "blocks/w": jnp.asarray(made, jnp.float32),
        "blocks/b": jnp.full((layers, width), 0.1, jnp.float32),
        "head": jnp.ones((1, width), jnp.float32),
    }


def dense(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    return jnp.tanh(x @ weights[0] + weights[1][None]), None


def finish(values: Arrays, x: jax.Array, batch: Arrays) -> tuple[jax.Array, jax.Array]:
    return jnp.sum((x * values["head"] - batch["y"]) ** 2), jnp.float32(x.shape[0])


def program_of(body: Callable[[Arrays, Arrays], Any]) -> Program:
    """A program without state from `(values, batch) -> (loss, weight)`."""
    return lambda values, extras, key, batch: (body(values, batch), extras)


@pytest.mark.thorough
def test_a_pair_of_functions() -> None:
    def apply(params: Arrays, x: jax.Array) -> jax.Array:
        return lax.scan(dense, x, (params["blocks"]["w"], params["blocks"]["b"]))[0]

    def init(key: jax.Array) -> Arrays:
        w = jax.random.normal(key, (3, 6, 6))
        return {"blocks": {"w": w, "b": jnp.zeros((3, 6))}}

    program, params, extras = model_program((init, apply), squared_error, regression())
    pieces = assert_composes(program, (params, extras, KEY, regression()), [[0, 1], [2, -1]])
    assert pieces.stacked == {"blocks/w", "blocks/b"}


def several_carried(values: Arrays, extras: Arrays, key: jax.Array, batch: Arrays) -> Any:
    """A counter, a key and two arrays go from layer to layer; every layer has its number."""

    def layer(carry: Any, sliced: Any) -> tuple[Any, jax.Array]:
        (x, old), count, key = carry
        weights, number, rate = sliced
        key, now = jax.random.split(key)
        noise = jax.random.normal(now, x.shape) * rate
        new = dense(x, weights)[0] + 0.1 * old * (number + count) + noise
        return ((new, x), count + 2, key), jnp.mean(new)

    numbers = jnp.arange(3), jnp.linspace(0.0, 0.1, 3)
    start = (batch["x"], jnp.zeros_like(batch["x"])), 1, jax.random.fold_in(key, extras["calls"])
    weights = values["blocks/w"], values["blocks/b"]
    ((x, old), count, _), means = lax.scan(layer, start, (weights, *numbers))
    after = {"calls": extras["calls"] + 1, "count": count, "means": means, "kept": extras["kept"]}
    loss, weight = finish(values, x + old, batch)
    return (loss, weight * count), after


@pytest.mark.thorough
def test_a_counter_a_key_and_numbers_of_layers() -> None:
    extras = {
        "calls": jnp.int32(4),
        "count": jnp.int32(0),
        "means": jnp.zeros(3),
        "kept": jnp.ones(2),
    }
    arguments = layer_values(), extras, KEY, regression()
    for chunks in ([[0], [1, 2]], [[0, -1], [-1, 1], [2, -1]]):
        pieces = assert_composes(several_carried, arguments, chunks)
    kinds = [(x.shape, x.dtype.name) for x in pieces.activations]
    assert kinds == [((4, 6), "float32")] * 2 + [((), "int32"), ((2,), "uint32")]
    # The key travels as its data; the layers write their means, the head the count; calls are
    # counted.
    outer = {"head": arguments[0]["head"]}
    _, written = pieces.embed(outer, *arguments[1:])
    assert not written
    assert set(pieces.count(extras)) == {"calls"}
    activations = tuple(jnp.zeros(x.shape, x.dtype) for x in pieces.activations)
    _, written = pieces.head(outer, *arguments[1:], activations)
    assert set(written) == {"count"}
    rows = jnp.asarray([-1, 1])
    stacked = {name: arguments[0][name][:2] for name in pieces.stacked}
    _, written = pieces.layers(stacked, outer, *arguments[1:], rows, activations)
    assert set(written) == {"means"}
    np.testing.assert_array_equal(written["means"] == 0, [True, False])


@pytest.mark.thorough
def test_a_table_with_a_row_for_each_layer() -> None:
    """Which of two kinds each layer is, as the model knows it: a NumPy array, no traced value."""

    def body(values: Arrays, batch: Arrays) -> Any:
        def layer(x: jax.Array, sliced: Any) -> tuple[jax.Array, None]:
            weights, kind = sliced
            change = lax.switch(kind, (jnp.tanh, jnp.sin), dense(x, weights)[0])
            return x + change, None

        kinds = np.array([1, 0, 1], np.int32)
        x, _ = lax.scan(layer, batch["x"], ((values["blocks/w"], values["blocks/b"]), kinds))
        return finish(values, x, batch)

    arguments = layer_values(), {}, KEY, regression()
    for chunks in ([[0], [1, 2]], [[2, 0]], [[0, -1], [1, 2]]):
        if chunks == [[2, 0]]:  # other layers in another order compute something else
            with pytest.raises(AssertionError):
                assert_composes(program_of(body), arguments, chunks)
            continue
        assert_composes(program_of(body), arguments, chunks)


@pytest.mark.thorough
def test_constants_of_the_loop_from_other_parameters() -> None:
    """Padding, too, since a row of padding must add nothing to the gradient of such a constant."""

    def body(values: Arrays, batch: Arrays) -> Any:
        shared = jnp.tanh(values["shared"])

        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return dense(x / jnp.sum(weights[0] ** 2) * shared, weights)

        x, _ = lax.scan(layer, batch["x"], (values["blocks/w"], values["blocks/b"]))
        return finish(values, x, batch)

    values = layer_values() | {"shared": jnp.full((1, 6), 0.7)}
    arguments = values, {}, KEY, regression()
    pieces = assert_composes(program_of(body), arguments, [[0, -1], [1, 2]])
    assert pieces.layers_reads_outer == {"shared"}
    assert pieces.embed_reads == set()
    assert pieces.head_reads == {"head"}


def divided(values: Arrays, batch: Arrays) -> Any:
    """A layer of zeros divides by zero."""

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        w = weights[0] / jnp.sqrt(jnp.sum(weights[0] ** 2))
        return dense(x, (w, weights[1]))

    x, _ = lax.scan(layer, batch["x"], (values["blocks/w"], values["blocks/b"]))
    return finish(values, x, batch)


@pytest.mark.thorough
@pytest.mark.parametrize("masked", [True, False])
def test_padding_of_layers_that_make_nan(masked: bool) -> None:
    values, extras, batch = layer_values(2), {}, regression()
    pieces = cut(program_of(divided), (values, extras, KEY, batch), padding=masked)
    rows = jnp.asarray([0, -1, 1, -1])
    stacked = take_rows({name: values[name] for name in pieces.stacked}, rows)
    given = values, extras, KEY, batch, rows

    @jax.jit
    def forward_and_back(stacked: Arrays, x: jax.Array) -> Any:
        run = lambda stacked, x: pieces.layers(stacked, *given, (x,))[0]  # noqa: E731
        (after,), back = jax.vjp(run, stacked, x)
        return after, *back((jnp.ones_like(after),))

    after, grads, grad_x = forward_and_back(stacked, batch["x"])
    assert np.isfinite(after).all() == masked
    assert np.isfinite(grad_x).all() == masked
    for name, grad in grads.items():
        if masked:
            np.testing.assert_array_equal(grad[1::2], np.zeros_like(grad[1::2]), err_msg=name)
            assert np.abs(grad[::2]).min(axis=tuple(range(1, grad.ndim))).all(), name
        else:
            assert not np.isfinite(grad).all(), name
    if masked:
        assert_composes(program_of(divided), given[:4], [[0, -1], [-1, 1]])


@pytest.mark.thorough
def test_padding_may_be_passed_over() -> None:
    """Then a layer that would make NaN of its zeros is not computed; its gradients are zeros."""
    values, batch = layer_values(2), regression()
    chunks = [[0, -1], [-1, 1]]
    pieces = assert_composes(program_of(divided), (values, {}, KEY, batch), chunks, skips=True)
    rows = jnp.asarray([-1, -1, -1])
    stacked = take_rows({name: values[name] for name in pieces.stacked}, rows)

    def run(stacked: Arrays, x: jax.Array) -> Any:
        return pieces.layers(stacked, values, {}, KEY, batch, rows, (x,))[0]

    (after,), back = jax.vjp(run, stacked, batch["x"])
    np.testing.assert_array_equal(after, batch["x"])
    grads, grad_x = back((jnp.ones_like(after),))
    np.testing.assert_array_equal(grad_x, jnp.ones_like(after))
    assert not any(np.any(grad) for grad in jax.tree.leaves(grads))
    # Under the checkpoint around the `cond` nothing but inputs is kept, no copy of a weight.
    kept = jax.eval_shape(lambda: jax.vjp(run, stacked, batch["x"])[1])
    shapes = [leaf.shape for leaf in jax.tree.leaves(kept)]
    assert shapes.count(stacked["blocks/w"].shape) <= 1


@pytest.mark.thorough
def test_counters_and_who_may_read_what_another_wrote() -> None:
    """What only counts is known for each microbatch before any goes through the layers."""
    values, batch = layer_values(2), regression()
    extras = {"seen": jnp.int32(3), "twice": jnp.int32(6), "mean": jnp.float32(0)}

    def loss(place: str) -> Program:
        def program(values: Arrays, extras: Arrays, key: jax.Array, batch: Any) -> Any:
            seen = extras["seen"].astype(jnp.float32)
            mean = extras["mean"]
            x = batch["x"] + (mean if place == "embed" else 0)
            x, _ = lax.scan(dense, x, (values["blocks/w"], values["blocks/b"]))
            result = finish(values, x * (1 + 0.1 * seen) + (mean if place == "head" else 0), batch)
            new = jnp.mean(batch["x"]) if place != "embed" else jnp.mean(x)
            after = {"seen": extras["seen"] + 1, "twice": 2 * (extras["seen"] + 1), "mean": new}
            return result, after

        return program

    pieces = assert_composes(loss("nowhere"), (values, extras, KEY, batch), [[0], [1]])
    assert pieces.count(extras) == {"seen": 4, "twice": 8}
    with pytest.raises(ValueError, match="mean is written before the layers and read after the la"):
        cut(loss("head"), (values, extras, KEY, batch))
    with pytest.raises(ValueError, match="mean is written after the layers and read before the la"):
        cut(loss("embed"), (values, extras, KEY, batch))


@pytest.mark.thorough
def test_several_arrays_of_one_parameter_dtypes_and_marks() -> None:
    """As the pass binds parameters: (whole, shard), a mark at the read, a change of dtype."""

    def body(values: Arrays, batch: Arrays) -> Any:
        whole, shard = values["blocks/w"]
        bias = checkpoint_name(values["blocks/b"], "read").astype(jnp.bfloat16)

        def layer(x: jax.Array, sliced: Any) -> tuple[jax.Array, None]:
            (whole, shard), bias = sliced
            return dense(x, (whole + jnp.sum(shard), bias.astype(jnp.float32)))

        x, _ = lax.scan(layer, batch["x"], ((whole, shard), bias))
        return finish(values, x, batch)

    values = layer_values()
    values["blocks/w"] = values["blocks/w"], values["blocks/w"][:, :2]
    pieces = assert_composes(program_of(body), (values, {}, KEY, regression()), [[0, 1], [2]])
    assert pieces.stacked == {"blocks/w", "blocks/b"}


@pytest.mark.thorough
def test_a_jitted_loss_called_from_another() -> None:
    @jax.jit
    def layers(values: Arrays, x: jax.Array) -> jax.Array:
        return lax.scan(dense, x, (values["blocks/w"], values["blocks/b"]))[0]

    @jax.jit
    def body(values: Arrays, batch: Arrays) -> Any:
        return finish(values, layers(values, jnp.sin(batch["x"])), batch)

    assert_composes(program_of(body), (layer_values(), {}, KEY, regression()), [[0, 1], [2]])


@pytest.mark.thorough
def test_inside_of_a_shard_map_with_arrays_that_are_closed_over() -> None:
    """As the pass cuts it; the scale is a traced value of the surrounding program."""
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    values, batch = layer_values(), regression()

    def local(values: Arrays, batch: Arrays, cutting: bool) -> Arrays:
        scale = 1.0 + lax.axis_index("data").astype(jnp.float32)

        @jax.jit
        def body(values: Arrays, batch: Arrays) -> Any:
            x, _ = lax.scan(dense, batch["x"] * scale, (values["blocks/w"], values["blocks/b"]))
            return finish(values, x, batch)

        program, rest = program_of(body), ({}, KEY, batch)
        if cutting:
            program = composed(cut(program, (values, *rest)), [[0], [1, 2]])
        grads = jax.grad(lambda values: program(values, *rest)[0][0])(values)
        return lax.psum(grads, "data")

    def run(cutting: bool) -> Arrays:
        mapped = jax.shard_map(
            functools.partial(local, cutting=cutting),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=False,
        )
        return jax.jit(mapped)(values, batch)

    assert_same(run(True), run(False))


def test_checkpoints_of_a_layer_stay() -> None:
    """What the backward pass of a chunk keeps is what the model's checkpoint says: its input."""

    def body(values: Arrays, batch: Arrays, wrap: Any) -> Any:
        layer = wrap(lambda x, weights: dense(jnp.sin(jnp.cos(x)), weights))
        x, _ = lax.scan(layer, batch["x"], (values["blocks/w"], values["blocks/b"]))
        return finish(values, x, batch)

    def kept(wrap: Any, padding: bool) -> int:
        """Elements that are kept beside the arguments."""
        values, batch = layer_values(), regression()
        program = program_of(functools.partial(body, wrap=wrap))
        pieces = cut(program, (values, {}, KEY, batch), padding=padding)

        def residuals(stacked: Arrays, x: jax.Array) -> Any:
            run = lambda *args: pieces.layers(args[0], {}, {}, KEY, batch, rows, args[1:])  # noqa: E731
            return jax.vjp(run, stacked, x)[1]

        rows = jnp.arange(3)
        stacked = {name: values[name] for name in pieces.stacked}
        shapes = jax.make_jaxpr(lambda s, x: jax.tree.leaves(residuals(s, x)))(stacked, batch["x"])
        arguments = set(shapes.jaxpr.invars)
        new = {v for v in shapes.jaxpr.outvars if not hasattr(v, "val") and v not in arguments}
        return sum(v.aval.size for v in new if jnp.issubdtype(v.aval.dtype, jnp.floating))

    x = regression()["x"].size
    checkpointed = functools.partial(jax.checkpoint, prevent_cse=False)
    assert kept(checkpointed, False) == 3 * x
    assert kept(checkpointed, True) == 3 * x
    assert kept(lambda layer: layer, False) > 3 * x


def test_what_a_plan_asks() -> None:
    """The pieces' matrix products are those of the whole."""
    batch = abstract(tokens())
    model = as_model(reference_model("gpt2", num_layers=3))
    params, extras = jax.eval_shape(lambda b: model.init(KEY, b, own_loss), batch)
    trace = trace_model(model, params, extras, batch, own_loss)
    rest = len(jax.tree.leaves((extras, batch)))
    loop = find_layer_loop(trace.jaxpr, [*sorted(params), *[None] * rest])
    embed, layer, head = map(count_program_flops, (loop.embed, loop.layer, loop.head))
    assert embed == 0
    assert head == 2 * (2 * 8) * 32 * 64
    assert embed + 3 * layer + head == count_program_flops(trace.jaxpr)
    assert loop.stacked == {name for name in params if name.startswith("blocks/")}
    assert [x.shape for x in loop.activations] == [(2, 8, 32)]


# --- refusals -------------------------------------------------------------------------------------


def scanned(values: Arrays, x: jax.Array, **options: Any) -> jax.Array:
    return lax.scan(dense, x, (values["blocks/w"], values["blocks/b"]), **options)[0]


def with_arithmetic(values: Arrays, batch: Arrays) -> Any:
    weights = jnp.sin(values["blocks/w"]), 2 * values["blocks/b"]
    return finish(values, lax.scan(dense, batch["x"], weights)[0], batch)


def constant_too(values: Arrays, batch: Arrays) -> Any:
    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return dense(x + values["blocks/b"][:1], weights)

    x, _ = lax.scan(layer, batch["x"], (values["blocks/w"], values["blocks/b"]))
    return finish(values, x, batch)


def weighed_by_rows(values: Arrays, batch: Arrays) -> Any:
    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, jax.Array]:
        return dense(x, weights)[0], jnp.sum(x**2)

    x, counts = lax.scan(layer, batch["x"], (values["blocks/w"], values["blocks/b"]))
    return finish(values, x, batch)[0], jnp.sum(counts)


def in_branch(values: Arrays, batch: Arrays) -> Any:
    x = lax.cond(batch["x"][0, 0] > 0, lambda x: scanned(values, x), lambda x: x, batch["x"])
    return finish(values, x, batch)


def in_while(values: Arrays, batch: Arrays) -> Any:
    step = lambda state: (state[0] + 1, scanned(values, state[1]))  # noqa: E731
    _, x = lax.while_loop(lambda state: state[0] < 2, step, (0, batch["x"]))
    return finish(values, x, batch)


def in_another_loop(values: Arrays, batch: Arrays) -> Any:
    x, _ = lax.scan(lambda x, _: (scanned(values, x), None), batch["x"], None, length=2)
    return finish(values, x, batch)


def unused(values: Arrays, batch: Arrays) -> Any:
    scanned(values, batch["x"])
    return finish(values, batch["x"], batch)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            with_arithmetic,
            "only one of 3 steps that slices values computed from blocks/b, blocks/w .*, but",
        ),
        (constant_too, "blocks/b, which .* outside of the layers, by "),
        (weighed_by_rows, "the weight of the loss uses values .* in the carried value"),
        (in_branch, "the loop of 3 layers over blocks/b, blocks/w is inside of a `cond`"),
        (in_while, "is inside of a `while`"),
        (in_another_loop, "is inside of a `scan`"),
        (unused, "the loss does not depend on the loop of 3 layers over blocks/b, blocks/w"),
    ],
)
def test_refused(body: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        cut(program_of(body), (layer_values(), {}, KEY, regression()))


def test_refused_state_that_is_computed_from_all_layers() -> None:
    def program(values: Arrays, extras: Arrays, key: jax.Array, batch: Arrays) -> Any:
        (loss, weight), after = several_carried(values, extras, key, batch)
        return (loss, weight), {**after, "kept": jnp.sum(after["means"]) * extras["kept"]}

    extras = {"calls": 0, "count": 0, "means": jnp.zeros(3), "kept": jnp.ones(2)}
    with pytest.raises(ValueError, match="state kept is computed from .* the loop of 3 layers"):
        cut(program, (layer_values(), extras, KEY, regression()))
