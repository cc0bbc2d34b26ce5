"""Models that nobody here wrote, rolled: what became a loop, what did not, and the same losses.

    BONSAI_CHECKOUT=... TUNIX_CHECKOUT=... TRANSFORMERS_CHECKOUT=... FLAX_CHECKOUT=...
    python -m benchmarks.foreign_models

A row for each model of `tests/foreign_checkouts.py` whose checkout the environment names. With
`--smoke` the models are those of `tests/foreign_shapes.py`, which need none.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, save_so_far, write_record
from tests.foreign_checkouts import MODELS
from tests.foreign_modules import is_given
from tests.foreign_shapes import SHAPES, ForeignModel
from zerojax.config import MeshConfig
from zerojax.models.adapt import as_model
from zerojax.models.jaxpr import inner_programs
from zerojax.models.protocol import Arrays, Model
from zerojax.models.rolling import FoundLoops, RolledModel, find_loops
from zerojax.models.trace import trace_model
from zerojax.parallel.initialization import init_state
from zerojax.parallel.step import build_step
from zerojax.plan.device_mesh import make_mesh
from zerojax.plan.make import Plan, make_plan

NUM_DEVICES = 8
STEPS = 5
NOISE = 0.1
"""Added to every new parameter: some of these models begin with weights of zero, of which the
gradients of others would be zero as well."""
GRADIENT_LIMIT = 5e-6
"""Of the largest gradient of a model: products inside of a loop are added in another order."""
LOSS_LIMIT = 4e-6
"""Of float32 runs: the noise of summing one device's batch in reversed order is 3.8e-6."""


def main(argv: list[str] | None = None) -> None:
    """Measures and records."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)  # values are compared, not times
    record = Record(name="foreign_models", rows=[])
    for name, model in chosen(arguments.smoke):
        record = dataclasses.replace(record, rows=[*record.rows, measure(name, model)])
        save_so_far(record, arguments, load_before)
    if not record.rows:
        raise SystemExit("no checkout: set BONSAI_CHECKOUT or another of " + ", ".join(variables()))
    write_record(with_goals(record), arguments, load_before)


def variables() -> list[str]:
    """Of the environment, that name checkouts."""
    return sorted({variable for variable, _ in MODELS.values()})


def chosen(smoke: bool) -> Iterator[tuple[str, ForeignModel]]:
    """Each model that can be read here, by its name."""
    if smoke:
        yield from ((name, SHAPES[name]()) for name in list(SHAPES)[:2])
        return
    for name, (variable, read) in MODELS.items():
        if is_given(variable):
            yield name, read()


def with_goals(record: Record) -> Record:
    """What every row has to keep to."""
    goals = [
        Goal(name=f"{row['model']}, {key}", value=row[key], limit=limit)
        for row in record.rows
        for key, limit in (("gradients", GRADIENT_LIMIT), ("losses", LOSS_LIMIT))
    ]
    notes = [
        "equations: of the traced loss, those of nested programs once",
        "gradients: largest difference, rolled against not rolled, over the model's largest",
        f"losses: largest difference in {STEPS} steps of AdamW on {NUM_DEVICES} devices, what the "
        "plan makes of the model at stage 3 against stage 0 with roll=off",
        f"losses without rolling: the same at stage 3 with roll=off, measured where losses are "
        f"beyond {LOSS_LIMIT}: how much of it is the model's own sensitivity",
    ]
    return dataclasses.replace(record, goals=goals, notes=notes)


def measure(name: str, foreign: ForeignModel) -> dict[str, Any]:
    """One row of the table."""
    with warnings.catch_warnings(action="ignore"), jax.numpy_rank_promotion("allow"):
        compared = compare(foreign)
        rolled, plain = train(foreign, zero=3, roll="auto"), train(foreign, zero=0, roll="off")
        difference = float(np.abs(rolled.losses - plain.losses).max())
        is_near = difference <= LOSS_LIMIT
        noise = None if is_near else noise_of(foreign, plain.losses)
    return {
        "model": name,
        "rolled": "; ".join(loop.describe() for loop in compared.found.loops),
        "left": "; ".join(compared.found.left),
        "recomputed by itself": all(loop.is_checkpointed for loop in compared.found.loops),
        "in the plan": ", ".join(titles_of(rolled.plan)),
        "equations": compared.equations[0],
        "equations rolled": compared.equations[1],
        "loss": compared.losses[0],
        "loss rolled": compared.losses[1],
        "gradients": compared.largest_difference(),
        "first loss": float(rolled.losses[0]),
        "last loss": float(rolled.losses[-1]),
        "losses": difference,
        "losses without rolling": noise,
    }


def noise_of(foreign: ForeignModel, losses: np.ndarray) -> float:
    """How far these losses at stage 0 are from those at stage 3, nothing being rolled."""
    sharded = train(foreign, zero=3, roll="off").losses
    return float(np.abs(sharded - losses).max())


def titles_of(plan: Plan) -> list[str]:
    """The lists of layers that a plan rolls."""
    model = plan.model
    return [loop.title for loop in model.loops] if isinstance(model, RolledModel) else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A model and its rolled form on the same arrays; the first of each pair is not rolled.

    Attributes:
      found: what rolling found.
      equations: of the traced losses.
      losses: on one batch.
      gradients: by the user's names.
    """

    found: FoundLoops
    equations: tuple[int, int]
    losses: tuple[float, float]
    gradients: tuple[Arrays, Arrays]

    def largest_difference(self) -> float:
        """Of any gradient, in units of the largest gradient of the model."""
        plain, rolled = self.gradients
        differences = {name: np.abs(plain[name] - rolled[name]).max() for name in plain}
        if not np.isfinite(self.losses).all():
            return float("nan")
        largest = np.max([np.abs(x).max() for x in plain.values()])
        return float(np.max(list(differences.values())) / largest)


def compare(foreign: ForeignModel) -> Comparison:
    """Loss and gradients of a model, and of all of it that can be rolled, on one device."""
    model, batch = as_model(foreign.model), foreign.batch(0)
    params, extras = jax.jit(lambda key: model.init(key, batch, foreign.loss))(jax.random.key(0))
    params = noisy(params)
    trace = trace_model(model, shapes(params), shapes(extras), shapes(batch), foreign.loss)
    found = find_loops(trace, params)
    rolled = RolledModel(model, found.loops, shapes(params))
    stacked = stack(params, rolled.stacks)
    after = trace_model(rolled, shapes(stacked), shapes(extras), shapes(batch), foreign.loss)
    loss, gradients = value_and_gradients(model, params, extras, foreign)
    other, by_stack = value_and_gradients(rolled, stacked, extras, foreign)
    return Comparison(
        found=found,
        equations=(count_equations(trace.jaxpr.jaxpr), count_equations(after.jaxpr.jaxpr)),
        losses=(loss, other),
        gradients=(gradients, unstack(by_stack, rolled.stacks)),
    )


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def noisy(params: Arrays) -> Arrays:
    """Each parameter with normal noise of its own."""
    random = np.random.default_rng(0)
    return {
        name: (value + NOISE * random.normal(size=value.shape)).astype(value.dtype)
        for name, value in params.items()
    }


def stack(params: Arrays, stacks: Mapping[str, tuple[str, ...]]) -> Arrays:
    """Parameters by the names of stacks, [turns, ...], and the user's for the rest."""
    gone = {name for names in stacks.values() for name in names}
    rest = {name: value for name, value in params.items() if name not in gone}
    made = {one: np.stack([params[name] for name in names]) for one, names in stacks.items()}
    return rest | made


def unstack(values: Arrays, stacks: Mapping[str, tuple[str, ...]]) -> Arrays:
    """The other way round."""
    rows = {
        name: values[one][number]
        for one, names in stacks.items()
        for number, name in enumerate(names)
    }
    return rows | {name: value for name, value in values.items() if name not in stacks}


def value_and_gradients(
    model: Model, params: Arrays, extras: Arrays, foreign: ForeignModel
) -> tuple[float, Arrays]:
    """The loss of the first batch, and NumPy arrays by the names of `params`."""

    def run(params: Arrays) -> Any:
        batch, key = foreign.batch(0), jax.random.key(1)
        return model.run(params, extras, key, lambda bound: foreign.loss(bound, batch))

    (loss, _), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(params)
    return float(loss), jax.tree.map(np.asarray, gradients)


def count_equations(program: Any) -> int:
    """Those of a program and of the programs in it, each once."""
    inner = (each for equation in program.eqns for each in inner_programs(equation.params))
    return len(program.eqns) + sum(map(count_equations, inner))


@dataclasses.dataclass(frozen=True)
class Training:
    """A plan and the losses of its first steps."""

    plan: Plan
    losses: np.ndarray


def train(foreign: ForeignModel, *, zero: int, roll: str, steps: int = STEPS) -> Training:
    """The first steps of AdamW in float32 on all devices.

    AdamW's eps is large, since Adam would blow the rounding noise of gradients that are truly zero
    up to full updates.
    """
    plan = make_plan(
        foreign.model,
        make_mesh(MeshConfig(), devices=jax.devices()[:NUM_DEVICES]),
        example_batch=foreign.batch(0),
        loss=foreign.loss,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-5)),
        precision="fp32",
        zero=zero,
        roll=roll,
        persistence_threshold=0,
    )
    step, state = build_step(plan), init_state(plan, seed=0)
    losses = []
    for index in range(steps):
        state, metrics = step(state, jax.device_put(foreign.batch(index), plan.batch_sharding))
        losses.append(float(metrics["loss"]))
    return Training(plan, np.array(losses))


if __name__ == "__main__":
    main()
