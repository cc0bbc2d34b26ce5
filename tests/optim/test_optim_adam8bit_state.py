"""The state of 8-bit AdamW: its two forms, its size, and how both follow shards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import adam8bit as codes
from pallas_kernels import optimizers
from pallas_kernels.rounding import seed_of
from tests.support.adam8bit_steps import CODED, RATE, assert_same, context_of, stepped, tree
from zerojax.optim import adamw, coding_of
from zerojax.optim.adam8bit import adam8bit
from zerojax.optim.adam8bit_state import SMALLEST_CODED, part_of
from zerojax.tracing import trees


@pytest.mark.thorough
def test_the_portable_form_is_the_state_of_adamw():
    for tx in (adam8bit(1e-2, clip_norm=1.0), adam8bit(optax.constant_schedule(1e-2))):
        bfloat16 = {name: x.astype(jnp.bfloat16) for name, x in tree(0).items()}
        coding = coding_of(tx)
        for params in (tree(0), bfloat16):
            fresh = coding.to_portable_state(tx.init(params))
            assert_same(fresh, coding.portable_init(params))
            assert {x.dtype for x in jax.tree.leaves(fresh)} == {
                np.dtype("float32"),
                np.dtype("int32"),
            }
    assert_same(adamw(**RATE).init(tree(0)), coding_of(adam8bit(**RATE)).portable_init(tree(0)))
    assert coding_of(adamw(1e-2)) is None


@pytest.mark.thorough
def test_portable_moments_are_those_of_float32_up_to_their_codes():
    """After 40 steps. Neighbouring codes of mu differ by up to 1.6 % of the block's scale, which is
    about 4 standard deviations: 0.03 of one where rounding is stochastic and ten steps count."""
    tx, plain = adam8bit(**RATE), adamw(**RATE)

    def run(tx):
        step = jax.jit(
            lambda grads, params, state, n: tx.apply(grads, state, params, context_of(n))
        )
        params, state = tree(0), tx.init(tree(0))
        for count in range(40):
            params, state = step(tree(1 + count), params, state, count)
        return state

    state, exact = run(tx), run(plain)
    found, exact = coding_of(tx).to_portable_state(state)[1][0], exact[1][0]
    assert int(found.count) == int(exact.count) == 40
    for moment, spread in (("mu", 0.04), ("nu", 0.03)):
        for name in CODED:
            a, b = (np.asarray(getattr(x, moment)[name], np.float64) for x in (found, exact))
            scale = np.sqrt(np.mean(b**2))
            assert np.sqrt(np.mean((a - b) ** 2)) < spread * scale
            assert abs(np.mean(a - b)) < 4 * spread * scale / np.sqrt(a.size)
        np.testing.assert_array_equal(
            getattr(found, moment)["norm/scale"], getattr(exact, moment)["norm/scale"]
        )


@pytest.mark.thorough
def test_what_was_stored_comes_back_to_the_bit():
    tx = adam8bit(**RATE)
    coding, params = coding_of(tx), tree(0)
    structs, state = jax.eval_shape(tx.init, params), tx.init(params)
    for number in range(4):
        stored = jax.jit(coding.to_portable_state)(state)
        back = jax.jit(lambda x: coding.from_portable_state(x, structs))(stored)
        assert_same(back, state)
        params, state = stepped(tx, params, state, first=5 * number, steps=5)


@pytest.mark.thorough
def test_adamw_goes_on_where_adam8bit_stopped_and_the_other_way():
    eight, plain = adam8bit(**RATE), adamw(**RATE)
    coding = coding_of(eight)
    params, state = stepped(eight, tree(0), eight.init(tree(0)), steps=5)
    after, exact = stepped(plain, params, coding.to_portable_state(state), first=5)
    back = coding.from_portable_state(exact, jax.eval_shape(eight.init, params))
    after, state = stepped(eight, after, back, first=8)
    assert int(part_of(state).count) == 11
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).mean()), after, params)
    assert all(0 < distance < 6 * 1e-2 for distance in moved.values()), moved


def test_state_takes_two_bytes_and_a_64th_per_parameter():
    params = {"w": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    state = jax.eval_shape(adam8bit(1e-3).init, params)
    size = 4096 * 1024
    assert trees.num_bytes(state) == 2 * size + size // 64 + 4
    assert trees.num_bytes(jax.eval_shape(adamw(1e-3).init, params)) == 8 * size + 4


MESH_SHAPES = {"stacked": (2, 64, 48), "odd": (61, 72), "whole": (70, 60), "small": (64, 63)}
SPECS = {"stacked": P(None, "data", "model"), "odd": P("data"), "whole": P(), "small": P("data")}


@dataclasses.dataclass
class Split:
    """A mesh with parameters on it ("odd" padded to 64 rows) and the state of an optimizer."""

    tx: object
    data: int
    model: int

    def __post_init__(self):
        devices = np.array(jax.devices()[: self.data * self.model])
        self.mesh = Mesh(devices.reshape(self.data, self.model), ("data", "model"))
        self.shapes = MESH_SHAPES | {"odd": (64, 72)}
        self.params = {
            name: jax.ShapeDtypeStruct(
                self.shapes[name], jnp.float32, sharding=NamedSharding(self.mesh, SPECS[name])
            )
            for name in SPECS
        }
        sizes = {name: int(np.prod(shape)) for name, shape in MESH_SHAPES.items()}
        self.coding = coding_of(self.tx)
        self.state = self.coding.abstract_state(self.params, sizes)
        self.shardings = jax.tree.map(lambda x: x.sharding, (self.params, self.state))
        self.specs = jax.tree.map(lambda x: x.sharding.spec, (self.params, self.state))

    def canonical_specs(self):
        structs = jax.eval_shape(self.coding.portable_init, self.params)
        is_moment = lambda x: isinstance(x, dict)  # noqa: E731
        return jax.tree.map(lambda x: SPECS if is_moment(x) else P(), structs, is_leaf=is_moment)

    def on_shards(self, function, in_specs, out_specs):
        more = {"mesh": self.mesh, "in_specs": in_specs, "out_specs": out_specs}
        return jax.jit(jax.shard_map(function, check_vma=False, **more))

    def begin(self):
        values = {name: jnp.zeros(self.shapes[name]) for name in self.shapes}
        for name, shape in MESH_SHAPES.items():
            values[name] = values[name].at[tuple(map(slice, shape))].set(tree(0, MESH_SHAPES)[name])
        make = jax.jit(
            lambda params: (params, self.coding.new_state(self.state, params)),
            out_shardings=self.shardings,
        )
        return make(values)

    def axes(self):
        return {
            name: tuple(axis for axis in spec if axis and self.mesh.shape[axis] > 1)
            for name, spec in SPECS.items()
        }

    def steps(self, params, state, steps=3):
        def local(grads, params, state, key_data):
            context = dataclasses.replace(
                context_of(0, names=SPECS, axes=self.axes()), key=jax.random.wrap_key_data(key_data)
            )
            return self.tx.apply(grads, state, params, context)

        program = self.on_shards(local, (self.specs[0], *self.specs, P()), self.specs)
        for count in range(steps):
            grads = tree(count + 1, self.shapes)
            grads["odd"] = grads["odd"].at[61:].set(0)
            key_data = jax.random.key_data(jax.random.key(count))
            params, state = program(grads, params, state, key_data)
        return params, state


def test_scales_follow_the_shards():
    split = Split(adam8bit(**RATE), 4, 2)
    state = part_of(split.state)
    shard = 2 * 16 * 24
    assert state.mu["stacked"].dtype == jnp.int8
    assert state.mu["stacked"].sharding == split.params["stacked"].sharding
    assert state.mu_scale["stacked"].shape == (8 * codes.num_blocks(shard),)
    assert state.mu_scale["stacked"].sharding.spec == P(("data", "model"))
    assert state.nu_scale["odd"].shape == (4 * codes.num_blocks(16 * 72),)
    assert state.nu_scale["whole"].shape == (codes.num_blocks(4200),)
    assert state.nu_scale["whole"].sharding.spec == P()
    assert state.count.sharding.spec == P()


def test_the_true_size_decides_what_is_small():
    """64 rows of 63 are 4032 elements, below the limit, also where they are stored as 64 by 64."""
    assert SMALLEST_CODED == 4096
    state = part_of(Split(adam8bit(**RATE), 4, 2).state)
    assert state.nu["small"].dtype == jnp.float32
    assert isinstance(state.nu_scale["small"], optax.MaskedNode)
    stored = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    abstract = coding_of(adam8bit(1e-2)).abstract_state
    assert part_of(abstract(stored, {"w": 64 * 63})).mu["w"].dtype == jnp.float32
    assert part_of(abstract(stored, {"w": 64 * 64})).mu["w"].dtype == jnp.int8


@pytest.mark.thorough
def test_every_shard_is_a_leaf_of_its_own():
    """Split parameters are updated in blocks of their shards, with random bits of the shard."""
    split = Split(adam8bit(**{**RATE, "clip_norm": None}), 4, 2)
    params, state = split.steps(*split.begin())
    shape = jax.tree.map(lambda x: (x.shape, x.sharding), (params, state))
    assert shape == jax.tree.map(lambda x: (x.shape, x.sharding), (split.params, split.state))
    part = part_of(state)
    name, rows = "stacked", slice(16, 32)
    begun = split.begin()[0][name]
    columns = slice(24, 48)
    param, moments = begun[:, rows, columns], codes.init_moments((2, 16, 24))
    for count in range(3):
        key = jax.random.fold_in(jax.random.key(count), sorted(SPECS).index(name))
        key = jax.random.fold_in(jax.random.fold_in(key, 1), 1)
        param, moments, _ = jax.jit(codes.reference_adam8bit)(
            param,
            moments,
            tree(count + 1, split.shapes)[name][:, rows, columns],
            optimizers.adam_scalars(1e-2, count=count + 1, b2=0.95, weight_decay=0.1),
            seed=seed_of(key),
        )
    np.testing.assert_allclose(params[name][:, rows, columns], param, rtol=1e-5, atol=1e-7)
    differ = np.asarray(part.nu[name][:, rows, columns]) != np.asarray(moments.nu)
    assert differ.mean() < 0.01  # a contraction of product and sum may tip a code
    blocks = codes.num_blocks(2 * 16 * 24)
    scales = np.asarray(part.nu_scale[name]).reshape(4, 2, blocks)[1, 1]
    np.testing.assert_allclose(scales, moments.nu_scale, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [(4, 2), (8, 1)], ids=str)
def test_a_split_state_comes_back_to_the_bit_and_moves_to_another_mesh(mesh):
    tx = adam8bit(**{**RATE, "clip_norm": None})
    split = Split(tx, *mesh)
    params, state = split.steps(*split.begin())
    canonical_specs = split.canonical_specs()
    decode = split.on_shards(split.coding.to_portable_state, (split.specs[1],), canonical_specs)
    stored = decode(state)
    # What is stored has no padding, and what comes back is padded with 0.
    for moment in (stored[0].mu, stored[0].nu):
        moment["odd"] = moment["odd"].at[61:].set(0)
    encode = lambda split: split.on_shards(  # noqa: E731
        lambda x: split.coding.from_portable_state(x, split.state),
        (canonical_specs,),
        split.specs[1],
    )
    assert_same(encode(split)(stored), state)
    other = Split(tx, 2, 1)
    moved = jax.device_put(
        stored, jax.tree.map(lambda s: NamedSharding(other.mesh, s), canonical_specs)
    )
    again = encode(other)(moved)
    params = jax.device_put(params, other.shardings[0])
    params, _ = other.steps(params, again)
    assert all(bool(jnp.isfinite(x).all()) for x in params.values())
    decode = other.on_shards(other.coding.to_portable_state, (other.specs[1],), canonical_specs)
    for name, after in decode(again)[0].nu.items():
        before = np.asarray(stored[0].nu[name])
        # Half a code of another block: 2 / 256 of the fourth root of the largest value.
        off = np.abs(np.asarray(after) - before)
        assert (off <= 0.01 * before.max() ** 0.25 * np.maximum(before, 1e-9) ** 0.75 + 1e-12).all()
