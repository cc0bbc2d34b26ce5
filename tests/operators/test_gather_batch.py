"""`zerojax.gather_batch`: a loss that compares all rows of the batch is that of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import zerojax
from tests.support.refusals import refused
from tests.support.trajectories import ROWS, TOLERANCE, plan_for, train_for
from zerojax.equality import make_request
from zerojax.equality.check_in_child import check_here
from zerojax.operators.whole_batch import batch_split_over
from zerojax.plan.counts import model_flops

WIDTH = 12
SCALE = 4.0


def init(key):
    """Two towers of two layers."""
    first, second = jax.random.split(key)
    normal = jax.random.normal
    return {
        "image": normal(first, (2, WIDTH, WIDTH)) / 3,
        "text": normal(second, (2, WIDTH, WIDTH)) / 3,
    }


def build_apply(remat=False):
    def layer(rows, layers):
        x, y = rows
        return (x + jnp.tanh(x @ layers["image"]), y + jnp.tanh(y @ layers["text"])), None

    layer = jax.checkpoint(layer) if remat else layer

    def apply(params, x, y):
        towers, _ = jax.lax.scan(layer, (x, y), params)
        return [z / jnp.linalg.norm(z.astype(jnp.float32), axis=-1, keepdims=True) for z in towers]

    return apply


def entropy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(SCALE * logits, labels)
    return jnp.mean(losses)


def plain(model, batch):
    """CLIP's loss of rows that are all there."""
    image, text = model(batch["x"], batch["y"])
    labels = jnp.arange(len(image))
    return entropy(image @ text.T, labels) + entropy(text @ image.T, labels)


def whole(model, batch):
    """Each device compares all rows with all."""
    image, text = map(zerojax.gather_batch, model(batch["x"], batch["y"]))
    labels = jnp.arange(len(image))
    return entropy(image @ text.T, labels) + entropy(text @ image.T, labels)


def own(model, batch):
    """Each device compares its own rows with all."""
    image, text = model(batch["x"], batch["y"])
    images, texts = map(zerojax.gather_batch, (image, text))
    labels = zerojax.row_numbers(image)
    return entropy(image @ texts.T, labels) + entropy(text @ images.T, labels)


def batch_of(index):
    random = np.random.default_rng(index % 4)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": x[:, ::-1] + random.normal(size=x.shape).astype(np.float32) / 4}


def run(loss=own, *, remat=False, steps=6, **options):
    options = {"persistence_threshold": 0, **options}
    return train_for((init, build_apply(remat)), loss=loss, batch=batch_of, steps=steps, **options)


@functools.cache
def on_one_device(**options):
    return run(plain, devices=1, **options).losses


def test_all_rows_are_compared_on_any_number_of_devices():
    """Without it the loss is another one; a plan warns, and names the remedy."""
    expected = on_one_device()
    for loss in (whole, own):
        np.testing.assert_allclose(run(loss, zero=3).losses, expected, rtol=0, atol=TOLERANCE)
    assert expected[0] - expected[-1] > 0.05
    with pytest.warns(RuntimeWarning, match="zerojax.gather_batch"):
        apart = run(plain, zero=1).losses
    assert np.abs(apart - expected).min() > 0.1


WAYS = {
    "zero 0": {"zero": 0},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3, checkpoints": {"zero": 3, "remat": True},
    "replicas": {"zero": 3, "mesh": {"replica": 2}},
    "tensor parallel": {
        "zero": 2, "mesh": {"model": 2}, "rules": [("image", (None, None, "model"))]
    },
    "codes": {"zero": 1, "wire": {"weights": "int8"}, "tolerance": 2e-2},
    "params on the host": {
        "zero": 1, "offload": {"params": "host", "opt_state": "host", "min_elements": 1}
    },
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [whole, own])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_it_is_right_in_every_step(loss, options):
    options = {"optimizer": zerojax.adamw(1e-3, eps=1e-5), **options}
    tolerance = options.pop("tolerance", TOLERANCE)
    expected = on_one_device(optimizer=options["optimizer"])
    np.testing.assert_allclose(run(loss, **options).losses, expected, rtol=0, atol=tolerance)


def gathered(x):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(x):
        with batch_split_over(("data",)):
            return zerojax.gather_batch(x), zerojax.row_numbers(x)

    specs = P(), P("data")
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=specs, check_vma=False)
    )(x)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_rows_keep_their_order_and_dtype(dtype):
    given = jnp.arange(48).reshape(16, 3).astype(dtype)
    rows, numbers = gathered(given)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, given)
    assert numbers.tolist() == list(range(16))


def test_gradients_of_16_bits_are_summed_in_float32():
    """Seven gradients of 1 and one of 256: in bfloat16 256 + 1 is 256."""
    factors = jnp.ones(8, jnp.bfloat16).at[0].set(256)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(x, factor):
        with batch_split_over(("data",)):
            return jnp.sum(zerojax.gather_batch(x) * factor[0]).reshape(1)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(mapped(x, factors))))(jnp.ones(8, jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(gradient, np.float32), 264
    )  # of 263, the nearest that has 8 bits


@pytest.mark.thorough
def test_evaluation_compares_all_rows():
    losses = []
    one = zerojax.make_mesh({}, devices=jax.devices()[:1])
    for mesh, loss in ((one, plain), ({"zero": 3}, own)):
        options = {"loss": loss, "steps": 2, "run_dir": None, "precision": "fp32"}
        trainer = zerojax.train(
            (init, build_apply()), mesh, batch_of, validation=[batch_of(1)], **options
        )
        losses.append(trainer.evaluate()["loss"])
    assert abs(losses[0] - losses[1]) < TOLERANCE


@pytest.mark.thorough
def test_the_check_agrees():
    request = make_request(
        (init, build_apply()), batch_of, loss=own, optimizer=optax.adamw(1e-2, eps=1e-4), devices=4
    )
    result = check_here(request)
    assert result.agrees, result.table()


def plan_of(loss=own, **options):
    return plan_for((init, build_apply()), loss=loss, batch=batch_of, **options)


def test_the_work_with_the_rows_of_other_devices_is_counted():
    one, eight = (model_flops(plan_of(devices=number)) for number in (1, 8))
    assert one == eight


def hardest(model, batch):
    """The eight largest errors of the batch."""
    image, text = model(batch["x"], batch["y"])
    errors = zerojax.gather_batch(jnp.sum((image - text) ** 2, axis=-1))
    return jnp.mean(jax.lax.top_k(errors, ROWS // 2)[0])


def by_targets(model, batch):
    """Cross-entropy with a table of the batch."""
    image, text = model(batch["x"], batch["y"])
    targets = jnp.eye(ROWS)[zerojax.row_numbers(image)]
    logits = SCALE * image @ zerojax.gather_batch(text).T
    return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1))


def by_groups(model, batch):
    """Errors from the means of eight groups of rows of the batch."""
    image, text = model(batch["x"], batch["y"])
    means = jnp.mean(zerojax.gather_batch(text).reshape(8, -1, WIDTH), axis=1)
    return jnp.mean((image[:, None] - means[None]) ** 2)


@pytest.mark.parametrize("loss", [hardest, by_targets, by_groups])
def test_a_loss_may_use_the_number_of_rows_of_the_batch(loss):
    """A plan traces the loss with the rows of one device, and gathers those of all."""
    losses = [run(loss, devices=number, zero=2, steps=2).losses for number in (1, 8)]
    np.testing.assert_allclose(*losses, rtol=0, atol=TOLERANCE)


class Listed(nnx.Module):
    """Towers whose layers a Python loop calls."""

    def __init__(self, rngs):
        self.image = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(6)])
        self.text = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(6)])

    def __call__(self, x, y):
        for image, text in zip(self.image, self.text, strict=True):
            x, y = x + jnp.tanh(image(x)), y + jnp.tanh(text(y))
        return [z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (x, y)]


def test_layers_of_a_list_are_counted_as_on_one_device():
    """At stage 3 they become a loop, for which the loss is traced again."""
    options = {"loss": own, "batch": batch_of, "persistence_threshold": 0, "steps": 4}
    one, eight = (train_for(Listed, devices=number, zero=3, **options) for number in (1, 8))
    np.testing.assert_allclose(one.losses, eight.losses, rtol=0, atol=TOLERANCE)
    assert eight.plan.stacks
    assert model_flops(one.plan) == model_flops(eight.plan)


def numbered(model, batch):
    """Every row has a weight of its own."""
    image, _ = model(batch["x"], batch["y"])
    return jnp.mean(image[:, 0] * zerojax.row_numbers(image))


def test_numbers_of_rows_are_refused_where_several_parts_would_have_the_same():
    parts = "zerojax.row_numbers 2 same numbers"
    refused(lambda: plan_of(numbered, num_microbatches=2), parts, "num_microbatches=1 'row'")
    request = make_request(
        (init, build_apply()), batch_of, loss=numbered, optimizer=optax.sgd(1e-2), devices=2
    )
    result = check_here(request)
    assert result.agrees, result.table()
    assert any("zerojax.row_numbers" in note for note in result.notes)


def test_what_is_not_the_whole_batch_is_refused():
    refused(lambda: plan_of(num_microbatches=2), "zerojax.gather_batch 2", "num_microbatches=1")
    options = {"deterministic": "mesh", "virtual_shards": 8, "optimizer": zerojax.adamw(1e-3)}
    refused(lambda: plan_of(**options), "gather_batch deterministic='mesh'", "leave")
    refused(lambda: zerojax.gather_batch(1.0), "scalar", "[rows, ...]")
