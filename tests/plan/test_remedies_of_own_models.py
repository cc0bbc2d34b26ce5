"""Refusals of plans for models, losses and layers of one's own. No step is compiled."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.extend.random import define_prng_impl
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import zerojax
from tests.config.test_remedies_of_options import ONE_BIT, line, mean, stages
from tests.parallel.test_expert_axis import (
    DeclaresARouter,
    DeclaresTwoOfThree,
    Mixture,
    Regression,
    Undeclared,
)
from tests.support.inputs_with_features import plan_inputs
from tests.support.refusals import Refusal, table
from zerojax.models.step_count import StepCount
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.plan.make import plan_of
from zerojax.plan.rung_plans import with_rungs

BATCH = {"x": np.ones((16, 8), np.float32)}
TOKENS = np.ones((16, 12), np.int32)
TEXT = {"tokens": TOKENS, "targets": TOKENS}


# --- loops over layers ----------------------------------------------------------------------------


def layer(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.tanh(x @ kernel)


def looped(params: Any, x: jax.Array, **options: Any) -> jax.Array:
    return lax.scan(lambda x, kernel: (layer(x, kernel), None), x, params["layers"], **options)[0]


def unlooped(params: Any, x: jax.Array) -> jax.Array:
    return layer(layer(x, params["layers"][0]), params["layers"][1])


def summed(params: Any, x: jax.Array) -> jax.Array:
    step = lambda x, kernel: (layer(x, kernel), jnp.sum(x))  # noqa: E731
    x, sums = lax.scan(step, x, params["layers"])
    return x + jnp.sum(sums)


def counted(params: Any, x: jax.Array, kind: Any = int) -> jax.Array:
    """Layers that count, in the given dtype, what is above 0."""

    def step(carry: tuple[jax.Array, jax.Array], kernel: jax.Array) -> tuple[Any, None]:
        x, count = carry
        return (layer(x, kernel), count + jnp.sum(x > 0).astype(kind)), None

    (x, count), _ = lax.scan(step, (x, jnp.zeros((), kind)), params["layers"])
    return x + count


def referred(params: Any, x: jax.Array) -> jax.Array:
    total = jax.new_ref(jnp.float32(0))

    def step(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        total[...] = total[...] + jnp.sum(x)
        return layer(x, kernel), None

    return lax.scan(step, x, params["layers"])[0] + total[...]


def from_constants(params: Any, x: jax.Array) -> jax.Array:
    return x + lax.scan(lambda y, w: (layer(y, w), None), jnp.ones_like(x), params["layers"])[0]


def of_vectors(params: Any, x: jax.Array) -> jax.Array:
    """A loop over layers that carry one number only."""
    step = lambda total, kernel: (total + jnp.sum(x @ kernel), None)  # noqa: E731
    return x + lax.scan(step, jnp.float32(0), params["layers"])[0]


def printing(params: Any, x: jax.Array) -> jax.Array:
    jax.debug.print("{}", jnp.sum(x))
    return looped(params, x)


def scaled(params: Any, x: jax.Array, *, inside: bool = False) -> jax.Array:
    """A loop that slices what is computed from a parameter, or computes it inside."""

    def step(x: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        kernel, other = given
        return layer(x, kernel) * other[0, 0] * (2 if inside else 1), None

    other = params["other"] if inside else 2 * params["other"]
    return lax.scan(step, x, (params["layers"], other))[0]


def looping(apply: Callable[..., jax.Array], mesh: Any = None, **options: Any) -> zerojax.Plan:
    layers = jnp.ones((4, 8, 8))
    given = {"loss": mean, "num_microbatches": 2, "optimizer": zerojax.adamw(1e-3), **options}
    init = lambda key, batch: {"layers": layers, "other": layers}  # noqa: E731
    return with_rungs(plan_of(plan_inputs(model=(init, apply), example_batch=BATCH, **given), mesh))


class Block(nnx.Module):
    """A layer with a second product, which it may leave out."""

    def __init__(self, rngs: nnx.Rngs, reads_both: bool) -> None:
        self.reads_both, self.first = reads_both, nnx.Linear(8, 8, rngs=rngs)
        self.second = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.first(x))
        return self.second(x) if self.reads_both else x


class Scanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, reads_both: bool) -> None:
        stack = nnx.vmap(lambda rngs: Block(rngs, reads_both))
        self.layers = nnx.split_rngs(splits=4)(stack)(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        scan = nnx.scan(lambda x, one: one(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(x, self.layers)


def scanning(mesh: Any, reads_both: bool = True, **options: Any) -> zerojax.Plan:
    model = lambda rngs: Scanned(rngs, reads_both)  # noqa: E731
    given = {"loss": mean, "num_microbatches": 2, "optimizer": zerojax.adamw(1e-3), **options}
    return plan_of(plan_inputs(model=model, example_batch=BATCH, **given), mesh)


def staging(mesh: Any, **options: Any) -> zerojax.Plan:
    def model(rngs: nnx.Rngs) -> nnx.Module:
        same = lambda rngs: nnx.Linear(8, 8, rngs=rngs)  # noqa: E731
        return zerojax.Stages(same(rngs), same, same(rngs), num_layers=2, rngs=rngs)

    given = {"loss": mean, "optimizer": zerojax.adamw(1e-3), **options}
    return plan_of(plan_inputs(model=model, example_batch=BATCH, **given), mesh)


ACTIVATIONS = {"offload": {"activations": "host"}}
DROP = {"layer_drop": zerojax.LayerDropConfig(theta=0.5)}
GROUP = zerojax.config.PruningGroup(pattern="layers", dense_ratio=0.5)
PRUNED = zerojax.config.PruningConfig(groups=(GROUP,))
LOOPS = table(
    """
looping(unlooped, ACTIVATIONS) | activations=host | jax.lax.scan activations=device
  | looping(looped, ACTIVATIONS) ; looping(unlooped)
looping(jax.checkpoint(looped), ACTIVATIONS) | 4 remat2 | jax.checkpoint
  | looping(looped, ACTIVATIONS) ; looping(jax.checkpoint(looped))
looping(of_vectors, ACTIVATIONS) | 4 | activations=device | looping(of_vectors)
looping(unlooped, **DROP) | 0 | jax.lax.scan leave | looping(looped, **DROP) ; looping(unlooped)
looping(jax.checkpoint(looped), **DROP) | 4 remat2 | top leave
  | looping(looped, **DROP) ; looping(jax.checkpoint(looped))
looping(from_constants, **DROP) | 4 constants | activations leave
  | looping(looped, **DROP) ; looping(from_constants)
looping(referred, **DROP) | 4 jax.new_ref | carry leave
  | looping(functools.partial(counted, kind=float), **DROP) ; looping(referred)
looping(summed, **DROP) | 4 float32[] | leave | looping(looped, **DROP) ; looping(summed)
looping(counted, **DROP) | 4 int32[] | floating-point leave
  | looping(functools.partial(counted, kind=float), **DROP) ; looping(counted)
looping(looped, **DROP, optimizer=ONE_BIT) | layer_drop.theta 1-bit | adamw
  | looping(looped, **DROP, optimizer=zerojax.adamw(1e-3))
looping(looped, {"zero": 3}, **DROP) | layers zero=3 | nnx.scan zerojax.Stages zero=1
  | scanning({"zero": 3}, **DROP) ; staging({"zero": 3}, **DROP) ;
    looping(looped, {"zero": 1}, **DROP)
scanning({"stage": 2}, False) | layers/second/bias | read stage=1
  | scanning({"stage": 2}, True) ; scanning({"stage": 1}, False)
looping(looped, pruning=PRUNED, optimizer=ONE_BIT) | pruning 1-bit | adamw
  | looping(looped, pruning=PRUNED, optimizer=zerojax.adamw(1e-3))
looping(unlooped, {"unroll": True}) | unroll=True | unroll=False
  | looping(unlooped, {"unroll": False})
looping(printing, {"stage": 2}) | debug_print | remove stage=1
  | looping(looped, {"stage": 2}) ; looping(printing, {"stage": 1})
looping(scaled, {"stage": 2}) | 4 other | layer
  | looping(functools.partial(scaled, inside=True), {"stage": 2})
"""
)
IMPORTED = (functools, make_abstract_mesh, stages, Undeclared, DeclaresARouter, DeclaresTwoOfThree)
IMPORTED += Mixture, line
IMPORTED += (SingleDeviceSharding,)
NAMES = {"ONE_BIT": ONE_BIT, "P": P, **{one.__name__: one for one in IMPORTED}}


def take(call: str) -> None:
    eval(call, globals() | NAMES)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", LOOPS)
def test_loops_over_layers(row):
    LOOPS[row].check(take)


def test_layers_that_change_their_input():
    rngs, same = nnx.Rngs(0), lambda rngs: nnx.Linear(8, 8, rngs=rngs)
    staged = lambda block: zerojax.Stages(same(rngs), block, same(rngs), num_layers=2, rngs=rngs)  # noqa: E731

    class Half(nnx.Linear):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x).astype(jnp.bfloat16)

    class Back(Half):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x).astype(x.dtype)

    def plan(kind: type[nnx.Module]) -> None:
        model = staged(lambda rngs: kind(8, 8, rngs=rngs))
        zerojax.make_plan(model, {}, example_batch=BATCH, loss=mean)

    Refusal(Half, 'Half "float32(2, 8)" "bfloat16(2, 8)"', ".astype(x.dtype)", [Back]).check(plan)
    build = lambda layers: zerojax.Stages(same(rngs), layers, same(rngs))  # noqa: E731
    Refusal([], "empty", "one", [[same(rngs)]]).check(build)
    block = Refusal(3, "int", "function list", [[same(rngs)]], TypeError)
    block.check(build)


# --- experts --------------------------------------------------------------------------------------


def experts(model: Any, expert: int = 2, **options: Any) -> zerojax.Plan:
    mesh = {"data": -1, "expert": expert, **options}
    return zerojax.make_plan(model, mesh, example_batch=TEXT)


class Spare(Mixture):
    """Declares a parameter that nothing reads."""

    expert_parameters = (*Mixture.expert_parameters, "spare$")

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.spare = nnx.Param(jnp.ones((8, 4)))


def kernels(way: str) -> Callable[[nnx.Rngs], nnx.Module]:
    return lambda rngs: Regression(rngs, way)


EXPERTS = table(
    """
experts(Undeclared) | expert=2 | expert_parameters expert=1
  | experts(Mixture) ; experts(Undeclared, 1)
experts(DeclaresARouter) | layers/0/router/kernel | zerojax.experts expert=1
  | experts(Mixture) ; experts(DeclaresARouter, 1)
experts(DeclaresTwoOfThree) | layers/0/experts/down | declare expert=1
  | experts(Mixture) ; experts(DeclaresTwoOfThree, 1)
experts(kernels("idle")) | other_kernel | zerojax.experts expert=1
  | experts(kernels("plain")) ; experts(kernels("idle"), 1)
experts(Spare) | spare | leave expert=1 | experts(Mixture) ; experts(Spare, 1)
experts(kernels("constant")) | "[8, 12, 5]" | pass expert=1
  | experts(kernels("plain")) ; experts(kernels("constant"), 1)
experts(kernels("conditional")) | cond | outside expert=1
  | experts(kernels("plain")) ; experts(kernels("conditional"), 1)
experts(kernels("plain"), deterministic="mesh") | expert=2 deterministic='mesh' | leave expert=1
  | experts(kernels("plain")) ; experts(kernels("plain"), 1, deterministic="mesh")
"""
)


@pytest.mark.thorough
@pytest.mark.parametrize("row", EXPERTS)
def test_experts(row):
    EXPERTS[row].check(take)


# --- sequences that are split ---------------------------------------------------------------------


class Attending(nnx.Module):
    """A language model of one layer, in one of several ways."""

    def __init__(self, rngs: nnx.Rngs, way: str = "plain") -> None:
        self.way, self.embed = way, nnx.Embed(64, 8, rngs=rngs)
        self.sinks = nnx.Param(jnp.zeros(2)) if way == "sinks" else None

    def before_cut(self, batch: Any) -> Any:
        return batch

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        heads = x.reshape(*x.shape[:2], 2, 4)
        keys = jnp.concatenate([heads, heads], 1) if self.way == "longer" else heads
        options: dict[str, Any] = {"causal": self.way != "longer"}
        if self.sinks is not None:
            options["sinks"] = self.sinks[...]
        if self.way == "layout":
            options["layout"] = zerojax.config.FixedLayout(block=4, num_local_blocks=2)
        if self.way != "silent":
            x = x + zerojax.attention(heads, keys, keys, **options).reshape(x.shape)
        return self.embed.attend(x)

    def loss(self, batch: Any) -> Any:
        return zerojax.losses.next_token_of_call(self, batch)


def split(way: str, context: int = 2, batch: Any = None) -> zerojax.Plan:
    batch = TEXT if batch is None else batch
    model = lambda rngs: Attending(rngs, way)  # noqa: E731
    return zerojax.make_plan(model, {"context": context}, example_batch=batch)


@pytest.mark.parametrize("way", ["silent", "longer", "sinks", "layout"])
def test_models_whose_sequences_cannot_be_split(way):
    words = {"silent": "zerojax.attention", "longer": "24", "sinks": "sinks", "layout": "layout"}
    plan = lambda given: split(*given)  # noqa: E731
    Refusal((way, 2), words[way], "context=1", [(way, 1), ("plain", 2)]).check(plan)


def test_batches_whose_sequences_cannot_be_split():
    other = {**TEXT, "other": np.ones((16, 4), np.float32)}
    plan = lambda context: split("plain", context, other)  # noqa: E731
    Refusal(2, "4 12", "context=1", [1]).check(plan)


# --- losses ---------------------------------------------------------------------------------------


class Plain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x)


class Counting(nnx.Module):
    """A line with a bias that a `StepCount` changes once per step."""

    def __init__(
        self, rngs: nnx.Rngs, way: str = "", rule: Any = None, kind: Any = jnp.int32
    ) -> None:
        self.way, self.out = way, nnx.Linear(8, 4, rngs=rngs)
        rule = rule or (lambda old, count: old - 0.1 * jnp.sign(count).astype(old.dtype))
        self.count = StepCount(jnp.zeros(4, kind), changes="bias", rule=rule)
        if way != "absent":
            self.bias = nnx.Variable(jnp.zeros(4))
        if way == "two":
            self.other = StepCount(jnp.zeros(4, kind), changes="bias", rule=rule)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.out(x)
        number = jnp.sum(y > 0, axis=0, dtype=jnp.int32)
        self.count[...] = number if self.way == "set" else self.count[...] + number
        if self.way == "writes":
            self.bias[...] = jnp.mean(y, axis=0)
        return y


def counting(*given: Any, **options: Any) -> zerojax.Plan:
    model = lambda rngs: Counting(rngs, *given, **options)  # noqa: E731
    return zerojax.make_plan(model, {}, example_batch=BATCH, loss=mean)


class Stateful(nnx.Module):
    """A line that keeps a number of the batch, as an integer or not."""

    def __init__(self, rngs: nnx.Rngs, way: str) -> None:
        self.way, self.out = way, nnx.Linear(8, 4, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros((), float if way == "floating" else int))

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.way == "added":
            self.seen[...] += jnp.sum(x[:, 0] > 0)
        elif self.way != "metric":
            self.seen[...] = jnp.max(x).astype(self.seen[...].dtype)
        return self.out(x)


def stateful(way: str) -> zerojax.Plan:
    def loss(model: Any, batch: Any) -> Any:
        return mean(model, batch), ({"seen": jnp.max(batch["x"])} if way == "metric" else {})

    return zerojax.make_plan(lambda rngs: Stateful(rngs, way), {}, example_batch=BATCH, loss=loss)


def with_loss(loss: Any, **options: Any) -> zerojax.Plan:
    return zerojax.make_plan(Plain, {}, example_batch=BATCH, loss=loss, **options)


def over_batch(of: Callable[[Any], Any]) -> Any:
    return lambda model, batch: mean(model, batch) + jnp.sum(of(model(batch["x"])))


def divided(losses: Callable[[Any], Any]) -> Any:
    return lambda model, batch: losses(jnp.sum(model(batch["x"]) ** 2, axis=-1))


def of_parameter(summed: bool) -> Any:
    """A loss with a sum over a parameter, which no row changes."""

    def loss(model: Any, batch: Any) -> Any:
        value = jnp.sum(model.out.bias[...])
        return mean(model, batch) + (zerojax.batch_sum(value) if summed else value)

    return loss


CALLS = table(
    """
counting(kind=jnp.float32) | float32 | "jnp.zeros(4, jnp.int32)" | counting()
counting("absent") | bias | nnx.Variable | counting()
counting("two") | bias | one | counting()
counting("set") | count | +=  | counting()
counting("writes") | bias | rule | counting()
counting(rule=lambda old, count: count) | int32[4] float32[4] | .astype(old.dtype)
  | counting(rule=lambda old, count: count.astype(old.dtype))
stateful("set") | seen int32 | add floating metric
  | stateful("added") ; stateful("floating") ; stateful("metric")
with_loss(over_batch(zerojax.batch_sum)) | zerojax.batch_sum | "jnp.sum(x, axis=0)"
  | with_loss(over_batch(lambda x: zerojax.batch_sum(jnp.sum(x, axis=0))))
with_loss(over_batch(zerojax.batch_mean)) | zerojax.batch_mean | "jnp.mean(x, axis=0)"
  | with_loss(over_batch(lambda x: zerojax.batch_mean(jnp.mean(x, axis=0))))
with_loss(of_parameter(True)) | zerojax.batch_sum 8 | value | with_loss(of_parameter(False))
with_loss(divided(lambda x: x.sum() / 48)) | 8 2 | "jnp.sum(losses), losses.size" losses.mean()
  | with_loss(divided(lambda x: (jnp.sum(x), x.size))) ; with_loss(divided(lambda x: x.mean()))
make_abstract_mesh({"data": -1}) | data=-1 | data 8
  | make_abstract_mesh({"data": 8}) ; make_abstract_mesh({"data": -1}, 8)
zerojax.make_mesh({"zero": 3}) | zero=3 | make_plan train
  | line({"zero": 3}) ; line(zerojax.make_mesh({}), zero=3)
line({"data": 1, "stage": 16}) | stage=16 8 | divides | stages()
line({"stage": 16}) | 16 8 | 16 divides | line(make_abstract_mesh({"data": 8}))
""",
    (ValueError, TypeError),
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("row", CALLS)
def test_losses_and_meshes(row):
    CALLS[row].check(take)


# --- rows that grow, and pieces of pipelines ------------------------------------------------------

SHORT = zerojax.CurriculumConfig(type="seqlen", total_steps=9, min_length=4, length_step=4)
LONG = zerojax.CurriculumConfig(type="seqlen", total_steps=99, min_length=1, length_step=1)


class Causal(nnx.Module):
    """A language model of one product, with state of one kind or another."""

    def __init__(self, rngs: nnx.Rngs, way: str = "") -> None:
        self.way, self.embed = way, nnx.Embed(64, 8, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        if self.way == "state":
            self.count[...] += jnp.mean(tokens.astype(jnp.float32))
        elif self.way == "blocks":
            tokens = tokens.reshape(len(tokens), -1, 8).reshape(tokens.shape)
        return self.embed.attend(self.embed(tokens))


def positioned(size: int | None = None) -> Any:
    """A model of functions with a vector for each position of a row, or for `size` positions."""

    def init(key: jax.Array, batch: Any) -> Any:
        count = size or batch["tokens"].shape[1]
        return {"table": jnp.ones((64, 8)), "positions": jnp.ones((count, 8))}

    def apply(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["table"][tokens] + params["positions"][None, : tokens.shape[1]]
        return x @ params["table"].T

    return init, apply


def growing(
    curriculum: Any = SHORT,
    batch: Any = None,
    loss: Any = None,
    way: str = "",
    keys: Any = (),
    optimizer: Any = None,
    model: Any = None,
) -> zerojax.Plan:
    """Plans every length of a curriculum over 24 tokens."""
    tokens = np.ones((8, 24), np.int32)
    given = dict.fromkeys(("tokens", "targets"), tokens) | (batch or {})
    inputs = plan_inputs(
        model=model or Causal(nnx.Rngs(0), way),
        loss=zerojax.losses.next_token_of_call if loss is None else loss,
        example_batch=given if not isinstance(batch, tuple) else tuple(given.values()),
        curriculum=dataclasses.replace(curriculum, keys=keys),
        optimizer=optimizer or zerojax.adamw(1e-3),
    )
    return with_rungs(plan_of(inputs, {}))


def own_loss(model: Any, batch: Any) -> Any:
    return zerojax.losses.next_token(model(batch["tokens"]), batch["targets"])


def of_pair(model: Any, batch: Any) -> Any:
    return zerojax.losses.next_token(model(batch[0]), batch[1])


def own_mean(model: Any, batch: Any) -> Any:
    total, weight = own_loss(model, batch)
    return total / weight


def weighed(model: Any, batch: Any) -> Any:
    return zerojax.losses.next_token(model(batch["tokens"]), batch["targets"], batch["weights"])


ONES = np.ones((8, 24), np.float32)
KEYS = ("tokens", "targets")
OWN = {"loss": own_loss, "keys": KEYS}
PACKED = {"segments": np.zeros((8, 24), int)}
GROWING = table(
    """
growing(batch=PACKED, loss=own_loss, keys=KEYS) | batch['segments'] | leave
  | growing(loss=own_loss, keys=KEYS) ; growing(zerojax.CurriculumConfig(), PACKED, own_loss)
growing(loss=own_loss) | next-token | curriculum.keys=[...] | growing(loss=own_loss, keys=KEYS)
growing(batch={"more": ONES}) | 'more' | curriculum.keys=[...]
  | growing(batch={"more": ONES}, keys=(*KEYS, "more"))
growing(keys=("tokens", "target")) | 'target' | 'targets' | growing(keys=("tokens", "targets"))
growing(batch={"more": ONES[:, :6]}, keys=(*KEYS, "more")) | 6 24 | one
  | growing(batch={"more": ONES}, keys=(*KEYS, "more"))
growing(LONG, loss=own_loss, keys=KEYS) | 'weights' | length_step add
  | growing(SHORT, loss=own_loss, keys=KEYS) ;
    growing(LONG, batch={"weights": ONES}, loss=weighed, keys=(*KEYS, "weights"))
growing(LONG, batch={"weights": ONES}, loss=own_mean, keys=(*KEYS, "weights")) | mean | length_step
  | growing(SHORT, batch={"weights": ONES}, loss=own_mean, keys=(*KEYS, "weights"))
growing(batch=(), loss=of_pair) | tuple | dict curriculum.keys=[...]
  | growing(loss=own_loss, keys=KEYS)
growing(optimizer=ONE_BIT) | 1-bit | adamw
  | growing(optimizer=zerojax.adamw(1e-3)) ;
    growing(zerojax.CurriculumConfig(), optimizer=ONE_BIT)
growing(way="blocks") | 4 24 | model length_step
  | growing(dataclasses.replace(SHORT, min_length=8, length_step=8), way="blocks") ; growing()
growing(model=positioned(), **OWN) | positions "[24, 8]" "[4, 8]" | setting leave
  | growing(model=positioned(24), **OWN) ;
    growing(zerojax.CurriculumConfig(), model=positioned(), loss=own_loss)
growing(LONG, way="state") | count | length_step | growing(SHORT, way="state")
"""
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", GROWING)
def test_rows_that_grow(row):
    GROWING[row].check(take)


class Empty(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def test_models_without_parameters():
    plan = lambda model: zerojax.make_plan(model, {}, example_batch=BATCH, loss=mean)  # noqa: E731
    Refusal(Empty, "no", "nnx.Param", [Plain]).check(plan)


class Listed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for one in self.layers:
            x = jnp.tanh(one(x))
        return x


def test_models_without_values():
    def new_state(given: Any) -> None:
        model = Listed
        if not callable(given):
            model = Listed(nnx.Rngs(0))
            for number in given:
                kernel = model.layers[number].kernel
                kernel.set_value(jax.ShapeDtypeStruct(kernel.shape, kernel.dtype))
        plan = zerojax.make_plan(model, {"zero": 3}, example_batch=BATCH, loss=mean)
        zerojax.init_state(plan)

    good = [(), lambda rngs: Listed(rngs)]
    Refusal(range(4), "instance jax.ShapeDtypeStruct", "values function", good).check(new_state)
    Refusal((1, 2), "some layers list", "all", [()]).check(new_state)


class Dropping(nnx.Module):
    def __init__(self, key: jax.Array) -> None:
        self.out = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(key))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.out(x))


def test_keys_of_a_generator_of_ones_own():
    zeros = lambda *shape: jnp.zeros(shape, jnp.uint32)  # noqa: E731
    own = define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: zeros(2),
        split=lambda key, shape: zeros(*shape, 2),
        random_bits=lambda key, width, shape: zeros(*shape),
        fold_in=lambda key, data: key,
        name="mine",
    )

    def plan(kind: Any) -> None:
        model = Dropping(jax.random.key(0, impl=kind))
        zerojax.make_plan(model, {}, example_batch=BATCH, loss=mean)

    known = ["threefry2x32", "rbg", "unsafe_rbg"]
    Refusal(own, "random dtype", known, known).check(plan)


def test_codes_of_functions():
    """Weights of a pair of functions cannot be decoded where they are used."""
    kernel = jnp.ones((64, 64))
    pair = (lambda key: {"out": {"kernel": kernel}}, lambda p, x: x @ p["out"]["kernel"])
    batch = {"x": np.ones((8, 64), np.float32)}

    def plan(given: tuple[Any, str]) -> None:
        model, codes = given
        coded = codes in ("nf4", "int8")
        precision = zerojax.Precision(
            freeze_codes=codes if coded else None, freeze_dtype=None if coded else jnp.bfloat16
        )
        options = {"example_batch": batch, "loss": mean, "freeze": "out/kernel"}
        zerojax.make_plan(model, {}, precision=precision, **options)

    class Wide(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.out = nnx.Linear(64, 64, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(x)

    with_scale = (
        lambda key: {**pair[0](key), "scale": jnp.ones(())},
        lambda p, x: pair[1](p, x) * p["scale"],
    )
    good = [(Wide, "nf4"), (with_scale, "bf16")]
    Refusal((with_scale, "nf4"), "nf4 init apply", "nnx linen bf16", good).check(plan)


class Piped(nnx.Module):
    """Layers in one loop, and state that is written and read by several parts of the loss."""

    def __init__(self, rngs: nnx.Rngs, way: str) -> None:
        self.way = way
        self.layers = nnx.Param(jnp.ones((4, 8, 8)))
        self.first, self.last = nnx.Variable(jnp.zeros(())), nnx.Variable(jnp.zeros(()))
        self.rows = nnx.Variable(jnp.zeros(4))

    def loss(self, batch: Any) -> Any:
        x, before = batch["x"], self.first[...]
        if self.way in ("across", "separate"):
            self.first[...] = before + jnp.mean(x)

        def step(carry: Any, kernel: jax.Array) -> Any:
            x, total = carry
            x = layer(x, kernel)
            return (x, total + jnp.mean(x)), jnp.mean(x)

        (x, total), sums = lax.scan(step, (x, jnp.zeros(())), self.layers[...])
        loss = jnp.mean(x**2)
        if self.way == "summed":
            self.last[...] = jnp.sum(sums)
        elif self.way == "carried":
            self.last[...] = total
        elif self.way == "rows":
            self.rows[...] = sums
        if self.way == "across":
            loss = loss + before
        elif self.way == "separate":
            loss = loss + self.last[...]
        numbers = {"metric of rows": jnp.sum(sums), "metric of carry": total}
        return (loss, {"mine": numbers[self.way]}) if self.way in numbers else loss


def in_stages(way: str, stage: int = 2) -> None:
    model = lambda rngs: Piped(rngs, way)  # noqa: E731
    options = {"example_batch": BATCH, "num_microbatches": 2}
    plan = zerojax.make_plan(model, {"stage": stage}, **options)
    zerojax.build_step(plan).trace(plan.abstract_state, plan.abstract_batch)


PIECES = {
    "read by another part": ("across", "first before after", "separate", ["separate"]),
    "computed from rows": ("summed", "last 4", "rows carried", ["rows", "carried"]),
    "a metric of rows": ("metric of rows", "mine 4", "carried", ["metric of carry"]),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("row", PIECES)
def test_state_of_pipelines(row):
    Refusal(*PIECES[row]).check(in_stages)


# --- meshes and shardings of one's own ------------------------------------------------------------

OWN_MESH = {"data": 4, "model": 2}


def on(mesh: Mesh, *spec: str | None) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


def own(*sizes: int) -> Mesh:
    names = ("data", "model")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


def sharded(sharding: Any = None, whole: bool = False) -> None:
    """Plans a model that shards an array; `whole`: with a loss over the whole batch."""

    def apply(params: Any, x: jax.Array) -> jax.Array:
        y = x @ params["w"]
        return y if sharding is None else lax.with_sharding_constraint(y, sharding)

    def loss(model: Any, batch: Any) -> jax.Array:
        loss = jnp.mean(model(batch["x"]) ** 2)
        return zerojax.batch_mean(loss) if whole else loss

    model = (lambda key, batch: {"w": jnp.ones((8, 8))}, apply)
    zerojax.make_plan(model, OWN_MESH, loss=loss, example_batch=BATCH)


NAMED = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))


def named(names: bool = True, **options: Any) -> zerojax.Plan:
    kernel = NAMED if names else nnx.initializers.ones
    model = lambda rngs: nnx.Linear(8, 8, kernel_init=kernel, rngs=rngs)  # noqa: E731
    loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)  # noqa: E731
    return zerojax.make_plan(model, OWN_MESH, loss=loss, example_batch=BATCH, **options)


SHARDED = table(
    """
sharded(SingleDeviceSharding(jax.devices()[0])) | SingleDeviceSharding | leave NamedSharding
  | sharded() ; sharded(on(own(4, 2), None, "model"))
sharded(P("data"), whole=True) | whole batch | leave | sharded(whole=True) ; sharded(P("data"))
sharded(P("nowhere")) | nowhere | leave | sharded()
named(False, logical_axis_rules={"mlp": "model"}) | logical_axis_rules mlp | rules leave
  | named(logical_axis_rules={"mlp": "model"}) ; named(False)
named(rules=(("kernel", (None, "model")),), logical_axis_rules={"mlp": "model"})
  | rules mlp | leave
  | named(logical_axis_rules={"mlp": "model"}) ; named(rules=(("kernel", (None, "model")),))
"""
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", SHARDED)
def test_meshes_and_shardings_of_ones_own(row):
    SHARDED[row].check(take)
