"""Several losses that take turns on one model, each with its part and its optimizer.

Each objective is a plan of its own, in which the other parts are frozen. The weights are in one
place: what one objective has trained is what the others read in their next step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax import models, tracing
from zerojax.config.checks import names_keywords
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch
from zerojax.optim.precision import Precision, as_precision, default_precision
from zerojax.placement.state import TrainState, abstract, abstract_model
from zerojax.placement.user_shardings import under_own_mesh
from zerojax.plan.inputs import MESH_OPTIONS, resolve_mesh
from zerojax.plan.make import Plan, make_plan
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import from_portable_state, to_portable_state
from zerojax.step.trained_model import model_of
from zerojax.tracing.protocol import ModelLike
from zerojax.tracing.trees import match_names

JointState = dict[str, Any]
"""{"weights": {name: float32 array} of all parameters, "extras": the model's other state,
"objectives": {name: the parts of its `TrainState` that are its own}}."""
JointStep = Callable[[JointState, Any], tuple[JointState, dict[str, Any]]]
Decay = float | Callable[[jax.Array], jax.Array | float]
"""Share of an average that stays, or a function of the number of updates that gives it."""
_SHARED = ("params", "frozen", "extras")
_OWN = ("step", "skipped", "rng", "opt_state", "loss_scale")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss, the parameters that it trains, and their optimizer.

    Attributes:
      loss: function `loss(model, batch)` as for `zerojax.make_plan`; the model is the whole one.
      trains: regular expression on the names of the parameters that this objective trains.
      optimizer: optimizer of these parameters, as for `zerojax.make_plan`.
      example_batch: a global batch of this objective; None: the batch of the joint plan.
    """

    loss: tracing.Loss
    trains: str
    optimizer: Any = None
    example_batch: Any = None


@dataclass(frozen=True, kw_only=True)
class Average:
    """Parameters that follow the average of others, such as a teacher that follows its student.

    They begin as a copy. After each step of an objective that trains the others, except a skipped
    one, they are `decay * theirs + (1 - decay) * others`. No objective may train them.

    Attributes:
      into: first part of the names of the parameters that follow, such as "teacher/".
      of: first part of the names of the trained parameters; the rest of the names is equal.
      decay: share that stays, at least 0 and below 1; or a schedule, a traceable function of the
        number of updates that the training objective has done before (BYOL, arXiv:2006.07733).
    """

    into: str
    of: str
    decay: Decay

    def __post_init__(self) -> None:
        if callable(self.decay):
            return
        if not isinstance(self.decay, int | float) or not 0 <= self.decay < 1:
            raise ValueError(
                f"decay={self.decay!r} is not a share; use at least 0 and below 1, or a function "
                "of the step"
            )


@dataclass(frozen=True, kw_only=True)
class JointPlan:
    """Plans of several objectives whose states share their weights; made by `make_joint_plan`.

    Attributes:
      plans: {name of an objective: its plan}, for `shard_batch`, `print` and all else that takes a
        plan.
      averages: parameters that follow others, as {name: (name of the other, decay)}.
    """

    plans: Mapping[str, Plan]
    averages: Mapping[str, tuple[str, Decay]]

    def __repr__(self) -> str:
        lines = [f"{name}: {plan.describe()}" for name, plan in self.plans.items()]
        return f"JointPlan({'; '.join(lines)})"

    def as_dict(self) -> dict[str, Any]:
        """Returns {name of an objective: its plan as a JSON-compatible dictionary}."""
        return {name: plan.as_dict() for name, plan in self.plans.items()}

    @property
    def abstract_portable(self) -> JointState:
        """The portable state as `ShapeDtypeStruct`s: what `zerojax.Checkpointer.restore` takes."""
        return self._joined({name: plan.abstract_portable for name, plan in self.plans.items()})

    def init_state(self, seed: int = 0) -> JointState:
        """Creates a new state, as `zerojax.init_state` creates that of one plan.

        Args:
          seed: integer from which parameters, dropout and other noise are drawn.
        """
        states: dict[str, Any] = {}
        for number, (name, plan) in enumerate(self.plans.items()):
            state = init_state(plan, seed)
            if number:  # other noise than in the steps of the first objective
                key = jax.random.fold_in(jax.random.wrap_key_data(state["rng"]), number)
                state["rng"] = jax.device_put(jax.random.key_data(key), state["rng"].sharding)
                # The weights are those of the first; freed before the next ones are made.
                state |= {part: {} for part in _SHARED}
            states[name] = state
        joint = self._joined(states)
        weights = joint["weights"]
        copied = {name: jnp.copy(weights[other]) for name, (other, _) in self.averages.items()}
        return {**joint, "weights": weights | copied}

    def build_steps(self) -> dict[str, JointStep]:
        """Builds {name of an objective: its step}.

        Each is `step(state, batch) -> (state, metrics)` with a batch from `zerojax.shard_batch` of
        its plan; metrics are those of `zerojax.build_step`. A step donates the state.
        """
        return {name: self._step(name) for name in self.plans}

    def view(self, state: JointState, name: str) -> TrainState:
        """Returns the state of one objective, which follows its plan and has the arrays of `state`;
        for an evaluation, for example. The next step frees its arrays.

        Args:
          state: joint state.
          name: name of the objective.
        """
        trained = self.plans[name].abstract_state["params"].keys()
        parts = [{}, {}]
        for weight, value in state["weights"].items():
            parts[weight not in trained][weight] = value
        own = state["objectives"][name]
        shared = dict(zip(_SHARED, (*parts, state["extras"]), strict=True))
        return {**shared, **own}  # type: ignore[return-value]

    def to_model(self, state: JointState) -> Any:
        """Returns the whole model in the user's form: `nnx.Module`, linen variables or a tree.

        Every process gets unsharded arrays, so the model must fit on one device.

        Args:
          state: joint state; it stays valid.
        """
        name, plan = next(iter(self.plans.items()))
        with under_own_mesh(plan.mesh):
            return model_of(plan, self.view(state, name))

    def to_portable(self, state: JointState) -> JointState:
        """Returns a state in the form that is the same for every mesh and ZeRO stage, for
        `zerojax.Checkpointer.save`; see `zerojax.to_portable_state`."""
        found = {n: to_portable_state(plan, self.view(state, n)) for n, plan in self.plans.items()}
        return self._joined(found)

    def from_portable(self, portable: JointState) -> JointState:
        """Returns the inverse of `to_portable`, for the meshes of these plans."""
        states: dict[str, Any] = {}
        for number, (name, plan) in enumerate(self.plans.items()):
            kept = {n: plan.abstract_portable[n].keys() for n in ("params", "frozen")}
            given = {n: {x: portable["weights"][x] for x in names} for n, names in kept.items()}
            own = {**given, "extras": portable["extras"], **portable["objectives"][name]}
            states[name] = from_portable_state(plan, own)  # type: ignore[arg-type]
            if number:
                states[name] |= {part: {} for part in _SHARED}
        return self._joined(states)

    def _joined(self, states: Mapping[str, Any]) -> JointState:
        """Joins states, stored or portable, of which the first has all weights."""
        first = next(iter(states.values()))
        return {
            "weights": {**first["params"], **first["frozen"]},
            "extras": first["extras"],
            "objectives": {
                name: {part: state[part] for part in _OWN} for name, state in states.items()
            },
        }

    def _step(self, name: str) -> JointStep:
        plan, step = self.plans[name], build_step(self.plans[name])
        trained = plan.abstract_state["params"].keys()
        follow = {into: (of, decay) for into, (of, decay) in self.averages.items() if of in trained}
        shardings = {into: plan.state_shardings["frozen"][into] for into in follow}

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
        def averaged(
            old: dict[str, jax.Array],
            new: dict[str, jax.Array],
            skipped: jax.Array,
            done: jax.Array,
        ) -> dict[str, jax.Array]:
            def one(mine: jax.Array, other: jax.Array, decay: Decay) -> jax.Array:
                stays = decay(done) if callable(decay) else decay
                return jnp.where(skipped, mine, stays * mine + (1 - stays) * other)

            return {into: one(old[into], new[into], decay) for into, (_, decay) in follow.items()}

        def run(state: JointState, batch: Batch) -> tuple[JointState, dict[str, Any]]:
            after, metrics = step(self.view(state, name), batch)
            weights = {**after["params"], **after["frozen"]}
            if follow:
                old = {into: weights[into] for into in follow}
                new = {into: weights[of] for into, (of, _) in follow.items()}
                with under_own_mesh(plan.mesh):
                    applied = after["step"] - after["skipped"]
                    weights |= averaged(old, new, metrics["skipped"], applied - 1)
            own = {part: after[part] for part in _OWN}
            joint = {
                "weights": {weight: weights[weight] for weight in state["weights"]},
                "extras": after["extras"],
                "objectives": {**state["objectives"], name: own},
            }
            return joint, metrics

        return run


_PLAN_OPTIONS = ("zero", "reduce_dtype", "accumulate_dtype", "num_microbatches", "steps")
_ELSEWHERE = {
    "freeze": "what no objective trains is frozen; an objective says what it trains: trains=...",
    "loss": "each objective has its own: Objective(loss=...)",
    "optimizer": "each objective has its own: Objective(optimizer=...)",
}


@names_keywords(also=(*_PLAN_OPTIONS, *MESH_OPTIONS), elsewhere=_ELSEWHERE)
def make_joint_plan(
    model: tracing.ModelLike,
    mesh: Any,
    objectives: Mapping[str, Objective],
    *,
    example_batch: Any = None,
    averages: Average | Sequence[Average] = (),
    precision: Precision | str | None = None,
    **options: Any,
) -> JointPlan:
    """Plans several objectives that take turns on one model: GAN, actor and critic, a student with
    a teacher that follows it.

    Several objectives may train the same parameters; each then has moments of its own. Parameters
    that no objective trains keep their values, except those of `averages`.

    Args:
      model: model with all parts, as for `zerojax.make_plan`.
      mesh: mesh of all objectives.
      objectives: {name: objective}, at least one.
      example_batch: a global batch, for objectives without one of their own.
      averages: parameters that follow others: one `Average` or several.
      precision: precision of all objectives; all weights are stored in float32.
      **options: other arguments of `zerojax.make_plan`, such as zero, num_microbatches or rules.

    Raises:
      ValueError: an objective trains nothing, or an average follows nothing or is trained; or
        options that one state of several objectives cannot have (offload, 1-bit optimizers, codes
        of differences, pipelines).
      TypeError: an objective is no `Objective`, or an average no `Average`.
    """
    followers = (averages,) if isinstance(averages, Average) else tuple(averages)
    for follower in followers:
        if not isinstance(follower, Average):
            raise TypeError(
                f"averages has a {type(follower).__name__}; use zerojax.Average(into=..., of=..., "
                "decay=...)"
            )
    if not objectives:
        raise ValueError("objectives is empty; give at least one, as in {'main': Objective(...)}")
    for name, one in objectives.items():
        if not isinstance(one, Objective):
            raise TypeError(
                f"objectives[{name!r}] is a {type(one).__name__}; use zerojax.Objective(loss=..., "
                "trains=..., optimizer=...)"
            )
    if precision is None:
        on = resolve_mesh(mesh, options.get("zero"), {})[1]
        platform = on.devices.flat[0].platform if isinstance(on, Mesh) else None
        precision, _ = default_precision(platform)
    # Frozen and trained parameters then are the same arrays.
    kept = as_precision(precision, freeze_dtype="fp32")
    given = {"example_batch": example_batch, "precision": kept, **options}
    plans = _plans(model, mesh, objectives, given)
    if _differ(plans):
        # A list of layers is a loop in some plans only, because others train a part of it.
        plans = _plans(model, mesh, objectives, {**given, "roll": "off"})
    differs = _differ(plans)
    if differs:
        raise ValueError(
            f"{differs} is stored differently by the objectives' plans; use the same options for "
            "all, and leave out pipelines"
        )
    return JointPlan(plans=plans, averages=_averaged(plans, followers))


def _plans(
    model: ModelLike, mesh: Any, objectives: Mapping[str, Objective], given: Mapping[str, Any]
) -> dict[str, Plan]:
    plans: dict[str, Plan] = {}
    for name, one in objectives.items():
        own = {} if one.example_batch is None else {"example_batch": one.example_batch}
        options: dict[str, Any] = {**given, **own, "loss": one.loss, "optimizer": one.optimizer}
        frozen = _others(model, one, options["example_batch"], f"objectives[{name!r}].trains")
        try:
            plan = make_plan(model, mesh, freeze=frozen, **options)
        except ValueError as error:
            raise ValueError(f"objective {name}: {error}") from error
        extra = plan.abstract_state.keys() - {*_SHARED, *_OWN}
        if extra:
            raise ValueError(
                f"objective {name}: its state has {', '.join(sorted(extra))}, which several "
                "objectives cannot share; leave out offload, 1-bit optimizers, codes of weights "
                "on the wire and features"
            )
        plans[name] = plan
    return plans


def _others(model: ModelLike, one: Objective, batch: Batch, option: str) -> tuple[str, ...]:
    """Returns the patterns of the parameters that an objective does not train: one or none.

    Raises:
      ValueError: it trains nothing; the message names `option`.
    """
    internal = models.as_model(model)
    params, _ = abstract_model(internal, abstract(batch), models.as_loss(one.loss, internal))
    trained = match_names(params, [one.trains], option=option)
    return () if len(trained) == len(params) else (rf"^(?!.*(?:{one.trains}))",)


def _differ(plans: Mapping[str, Plan]) -> str | None:
    """Returns a weight that is not the same array in all plans; None if there is none."""
    first: dict[str, Any] = {}
    for plan in plans.values():
        state = plan.abstract_state
        for name, x in {**state["params"], **state["frozen"]}.items():
            form = x.shape, x.dtype, x.sharding
            if first.setdefault(name, form) != form:
                return name
    counts = dict.fromkeys(first, 0)
    for plan in plans.values():
        for part in ("params", "frozen"):
            for name in plan.abstract_state[part]:
                counts[name] += 1
    return next((name for name, count in counts.items() if count != len(plans)), None)


def _averaged(
    plans: Mapping[str, Plan], averages: tuple[Average, ...]
) -> dict[str, tuple[str, Decay]]:
    """Returns {name: (name of the parameter that it follows, decay)}."""
    trained = {name for plan in plans.values() for name in plan.abstract_state["params"]}
    first = next(iter(plans.values())).abstract_state
    weights = {**first["params"], **first["frozen"]}
    found: dict[str, tuple[str, Decay]] = {}
    for average in averages:
        names = [name for name in weights if name.startswith(average.into)]
        pairs = {name: average.of + name.removeprefix(average.into) for name in names}
        if not pairs:
            raise ValueError(
                f"averages: no parameter begins with into={average.into!r}; the first names are "
                f"{', '.join(list(weights)[:4])}"
            )
        for into, of in pairs.items():
            if into in trained:
                raise ValueError(
                    f"averages: {into} is trained by an objective, so it cannot follow {of}; "
                    "change the objective's trains, or the average's into"
                )
            if of not in trained or weights[of].shape != weights[into].shape:
                raise ValueError(
                    f"averages: {into} follows {of}, which is no trained parameter of its shape; "
                    "change of="
                )
            found[into] = of, average.decay
    return found
