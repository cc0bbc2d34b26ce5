"""Several objectives that take turns equal a loop with one optimizer for each, on one device."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.support.refusals import table
from zerojax import Average, Objective, make_joint_plan
from zerojax.checkpoint.export import export
from zerojax.checkpoint.inspection import saved_steps

ROWS, NOISE, SIZE = 16, 4, 5
NEAR = 3e-6
"""Other orders of float32 sums after ten updates."""


class Net(nnx.Module):
    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(inputs, 24, rngs=rngs)
        self.last = nnx.Linear(24, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.tanh(self.first(x)))


class Gan(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.generator = Net(NOISE, SIZE, rngs)
        self.discriminator = Net(SIZE, 1, rngs)


def real_or_not(model: Any, batch: Any) -> jax.Array:
    made = model.discriminator(model.generator(batch["noise"]))
    return jnp.mean(nnx.softplus(made) + nnx.softplus(-model.discriminator(batch["real"])))


def deceives(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(nnx.softplus(-model.discriminator(model.generator(batch["noise"]))))


class ActorCritic(nnx.Module):
    """A trunk that both losses train, and a head for each."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.trunk = Net(SIZE, 12, rngs)
        self.actor, self.critic = nnx.Linear(12, 3, rngs=rngs), nnx.Linear(12, 1, rngs=rngs)


def acts(model: Any, batch: Any) -> jax.Array:
    features = model.trunk(batch["real"])
    value = jax.lax.stop_gradient(model.critic(features))[:, 0]
    chosen = jax.nn.log_softmax(model.actor(features))[:, 0]
    return -jnp.mean(chosen * (batch["real"][:, 0] - value))


def values(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model.critic(model.trunk(batch["real"]))[:, 0] - batch["real"][:, 1]) ** 2)


class Pair(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.student, self.teacher = Net(SIZE, 3, rngs), Net(SIZE, 3, rngs)


def follows(model: Any, batch: Any) -> jax.Array:
    target = jax.lax.stop_gradient(model.teacher(batch["real"])) + batch["real"][:, :3]
    return jnp.mean((model.student(batch["real"]) - target) ** 2)


CASES: dict[str, tuple[Any, dict[str, Objective], tuple[Average, ...]]] = {
    "gan": (
        Gan,
        {
            "d": Objective(loss=real_or_not, trains="^discriminator/", optimizer=optax.adam(1e-2)),
            "g": Objective(loss=deceives, trains="^generator/", optimizer=optax.sgd(0.1)),
        },
        (),
    ),
    "actor and critic": (
        ActorCritic,
        {
            "actor": Objective(loss=acts, trains="trunk|actor", optimizer=optax.adam(1e-2)),
            "critic": Objective(loss=values, trains="trunk|critic", optimizer=optax.adam(3e-3)),
        },
        (),
    ),
    "teacher": (
        Pair,
        {"student": Objective(loss=follows, trains="^student/", optimizer=optax.adam(1e-2))},
        (Average(into="teacher/", of="student/", decay=0.9),),
    ),
}


def batch_of(number: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(number)
    shapes = {"noise": (ROWS, NOISE), "real": (ROWS, SIZE)}
    return {name: draws.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def joint(case: str, mesh: Mapping[str, int] | Any, **options: Any) -> zerojax.JointPlan:
    model, objectives, averages = CASES[case]
    given = {"example_batch": batch_of(0), "averages": averages, "precision": "fp32", **options}
    return make_joint_plan(model, mesh, objectives, **given)


def run(plan: zerojax.JointPlan, state: Any, rounds: range) -> tuple[Any, list[float]]:
    """Trains each objective in turn, the first one twice."""
    steps, losses = plan.build_steps(), []
    names = [next(iter(steps)), *steps]
    for number in rounds:
        for name in names:
            batch = zerojax.shard_batch(plan.plans[name], batch_of(number))
            state, metrics = steps[name](state, batch)
            losses.append(float(metrics["loss"]))
    return state, losses


def by_hand(case: str, rounds: range) -> tuple[dict[str, Any], list[float]]:
    """The same in plain JAX: one tree of weights, an optax state for each objective."""
    model, objectives, averages = CASES[case]
    plan = joint(case, zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1]))
    weights = dict(jax.device_get(plan.init_state(seed=0)["weights"]))
    graph, state = nnx.split(nnx.eval_shape(lambda: model(nnx.Rngs(0))))
    paths = {"/".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}

    def as_model(values: Any) -> Any:
        flat = [(path, nnx.Param(values[name])) for name, path in paths.items()]
        return nnx.merge(graph, nnx.from_flat_state(flat))

    own = {}
    for name, one in objectives.items():
        trained = plan.plans[name].abstract_state["params"].keys()
        own[name] = one.optimizer.init({n: weights[n] for n in trained})
    losses = []
    for number in rounds:
        for name in [next(iter(objectives)), *objectives]:
            one, trained = objectives[name], plan.plans[name].abstract_state["params"].keys()

            def loss(part: Any, rest: Any, one: Any = one, number: int = number) -> Any:
                return one.loss(as_model({**rest, **part}), batch_of(number))

            part = {n: weights[n] for n in trained}
            value, grads = jax.value_and_grad(loss)(part, weights)
            updates, own[name] = one.optimizer.update(grads, own[name], part)
            weights |= optax.apply_updates(part, updates)
            for average in averages:
                for n in [n for n in weights if n.startswith(average.into)]:
                    other = weights[average.of + n.removeprefix(average.into)]
                    weights[n] = average.decay * weights[n] + (1 - average.decay) * other
            losses.append(float(value))
    return weights, losses


@pytest.mark.sampled(4)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("case", CASES)
def test_turns_equal_a_loop_with_several_optimizers(case, zero):
    plan = joint(case, {"data": 8}, zero=zero, persistence_threshold=0)
    state, losses = run(plan, plan.init_state(seed=0), range(4))
    weights, expected = by_hand(case, range(4))
    np.testing.assert_allclose(losses, expected, rtol=NEAR)
    found = jax.device_get(plan.to_portable(state)["weights"])
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2 * NEAR, err_msg=name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_from_a_checkpoint_on_another_mesh(case, tmp_path):
    plan = joint(case, {"data": 8}, zero=3, persistence_threshold=0)
    _, straight = run(plan, plan.init_state(seed=0), range(4))
    state, first = run(plan, plan.init_state(seed=0), range(2))
    with zerojax.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, plan.to_portable(state), data_state={}, config={}, plan={})
    for mesh, near in (({"data": 8}, 0), ({"data": 2, "model": 1, "replica": 4}, NEAR)):
        other = joint(case, mesh, zero=3 if near == 0 else 1, persistence_threshold=0)
        with zerojax.Checkpointer(tmp_path) as checkpointer:
            found = checkpointer.restore(other.abstract_portable)
        _, rest = run(other, other.from_portable(found.state), range(2, 4))
        np.testing.assert_allclose([*first, *rest], straight, rtol=near)


def test_the_model_of_a_state_has_its_noise_and_an_average_follows_a_schedule(tmp_path):
    class Noisy(Pair):
        def __init__(self, rngs: nnx.Rngs) -> None:
            super().__init__(rngs)
            self.drop, self.norm = nnx.Dropout(0.5, rngs=rngs), nnx.BatchNorm(SIZE, rngs=rngs)

    def loss(model: Any, batch: Any) -> jax.Array:
        x = model.drop(model.norm(batch["real"]))
        return jnp.mean((model.student(x) - batch["real"][:, :3]) ** 2)

    one = {"student": Objective(loss=loss, trains="^student/", optimizer=optax.sgd(0.1))}
    follows = Average(into="teacher/", of="student/", decay=lambda step: 0.5 * step)
    options = {"example_batch": batch_of(0), "zero": 3, "persistence_threshold": 0}
    plan = make_joint_plan(Noisy, {"data": 8}, one, averages=follows, **options)
    state, step = plan.init_state(seed=0), plan.build_steps()["student"]
    first = jax.device_get(plan.to_portable(state)["weights"]["student/last/kernel"])
    students = []
    for number in range(2):
        state, _ = step(state, zerojax.shard_batch(plan.plans["student"], batch_of(number)))
        students.append(plan.to_model(state).student.last.kernel[...])
    model = plan.to_model(state)
    assert not np.array_equal(first, students[0])
    # The first step copies (0), the second keeps a half.
    expected = 0.5 * students[0] + 0.5 * students[1]
    np.testing.assert_allclose(model.teacher.last.kernel[...], expected, rtol=1e-6)
    assert model.norm.mean[...].any()
    with zerojax.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(2, plan.to_portable(state), data_state={}, config={}, plan=plan.as_dict())
    saved = saved_steps(tmp_path / "run")[-1]
    assert export(saved, tmp_path / "out").num_arrays >= 8


def test_an_average_of_another_type_is_refused():
    with pytest.raises(TypeError, match=r"averages has a str; use zerojax\.Average\("):
        planned(averages=("teacher/",))


def test_an_average_stays_where_a_step_is_skipped():
    precision = zerojax.Precision(compute_dtype="float16", loss_scale=zerojax.LossScale())
    plan = joint("teacher", {"data": 8}, precision=precision)
    state = plan.init_state(seed=0)
    step, before = plan.build_steps()["student"], jax.device_get(state["weights"])
    batch = {name: 60000 * np.ones_like(x) for name, x in batch_of(0).items()}
    state, metrics = step(state, zerojax.shard_batch(plan.plans["student"], batch))
    assert metrics["skipped"]
    for name, value in jax.device_get(state["weights"]).items():
        np.testing.assert_array_equal(value, before[name])


def test_objectives_draw_other_noise():
    plan = joint("gan", {"data": 8})
    found = [x["rng"] for x in jax.device_get(plan.init_state(seed=0))["objectives"].values()]
    assert not np.array_equal(*found)


def planned(**changes: Any) -> zerojax.JointPlan:
    given: dict[str, Any] = {"trains": "^student/", "optimizer": optax.sgd(0.1), **changes}
    averages, offload = given.pop("averages", ()), given.pop("options", {})
    one = {"student": Objective(loss=follows, **given)}
    options = {"example_batch": batch_of(0), "averages": averages, "precision": "fp32", **offload}
    return make_joint_plan(Pair, {"data": 8}, one, **options)


FOLLOWS = Average(into="teacher/", of="student/", decay=0.9)
REFUSED = table(
    """
planned(trains="pupil") | student pupil student/first | plan.table() | planned()
planned(trains=".", averages=(FOLLOWS,)) | teacher/first is trained | into | planned()
planned(averages=(Average(into="taught/", of="student/", decay=0.9),)) | taught/ | student/first
  | planned()
planned(averages=(Average(into="teacher/", of="pupil/", decay=0.9),)) | pupil/first | of=
  | planned(averages=(FOLLOWS,))
planned(options={"offload": {"opt_state": "host"}}, optimizer=zerojax.adamw(1e-3))
  | student masters | offload | planned(optimizer=zerojax.adamw(1e-3))
Average(into="a", of="b", decay=1.0) | decay=1.0 | below | Average(into="a", of="b", decay=0.0)
"""
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_take_turns_is_refused(row):
    REFUSED[row].check(lambda text: eval(text, globals()))
