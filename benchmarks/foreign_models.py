"""Models of other projects, rolled: which layers become loops, and whether losses stay equal.

    BONSAI_CHECKOUT=... TUNIX_CHECKOUT=... TRANSFORMERS_CHECKOUT=... FLAX_CHECKOUT=...
    python -m benchmarks.foreign_models

Records a row for each model of `tests/support/foreign_checkouts.py` whose checkout an environment
variable names. With `--smoke` the models are those of `tests/support/foreign_shapes.py`, which need
no checkout.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, save_so_far, write_record
from tests.support.foreign_checkouts import MODELS
from tests.support.foreign_modules import in_64_bits, is_given, load
from tests.support.foreign_shapes import SHAPES, ForeignModel
from zerojax.config import MeshConfig
from zerojax.models.adapt import as_model
from zerojax.operators.marks import inner_programs
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import Plan, make_plan
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.tracing.protocol import Arrays, Model
from zerojax.tracing.rolling import FoundLoops, RolledModel, find_loops
from zerojax.tracing.trace import trace_model

NUM_DEVICES = 8
STEPS = 20
NOISE = 0.1
"""Scale of noise added to every new parameter: some of these models start with weights of zero,
which would make gradients of other parameters zero."""
GRADIENT_LIMIT = 5e-6
"""Tolerance relative to the largest gradient of a model: a loop adds products in another order."""
LOSS_LIMIT = 4e-6
"""Tolerance of losses in float32; summing one device's batch in reversed order changes them by
3.8e-6."""
WIDE_LIMIT = 1e-10
"""Tolerance of losses in float64 in plain JAX; its rounding is 5e8 times less than in float32."""
LIMITS = {"gradients": GRADIENT_LIMIT, "losses": LOSS_LIMIT, "losses in float64": WIDE_LIMIT}
DROPOUT = (
    *("Hugging Face FlaxBert", "Hugging Face FlaxGPT2", "flax LM1B", "flax WMT"),
    *("numbers alone", "numbers alone, remat", "numbers behind a name", "encoder and decoder"),
)
"""Models with dropout; each device draws its own dropout mask."""
IN_64_BITS = {
    "bonsai Gemma3": ("BONSAI_CHECKOUT", "bonsai.models.gemma3.modeling"),
    "bonsai ResNet": ("BONSAI_CHECKOUT", "bonsai.models.resnet.modeling"),
    "tunix Gemma3": ("TUNIX_CHECKOUT", "tunix.models.gemma3.model"),
}
"""Models that are also compared in float64 if float32 is too imprecise, with their modules."""


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
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
    """Returns the environment variables that name checkouts."""
    return sorted({variable for variable, _ in MODELS.values()})


def chosen(smoke: bool) -> Iterator[tuple[str, ForeignModel]]:
    """Returns each model that can be read on this machine, by its name."""
    if smoke:
        yield from ((name, SHAPES[name]()) for name in list(SHAPES)[:2])
        return
    for name, (variable, read) in MODELS.items():
        if is_given(variable):
            yield name, read()


def with_goals(record: Record) -> Record:
    """Adds the goals of every row to the record."""
    goals = [
        Goal(name=f"{row['model']}, {key}", value=row[key], limit=limit)
        for row in record.rows
        for key, limit in LIMITS.items()
        if row.get(key) is not None
    ]
    notes = [
        "equations: of the traced loss, those of nested programs once",
        "gradients: largest difference, rolled against not rolled, over the model's largest",
        "losses: largest difference in these steps, in float32, of what the plan makes of the "
        f"model at stage 3 on {NUM_DEVICES} devices and of the model as it is at stage 0; the "
        "optimizer is that of the repository's other comparisons, clipped AdamW at a learning rate "
        "of 1e-3 with an eps of 1e-5",
        "devices of the other: on which the model as it is runs: one, but with dropout, of which "
        f"each device draws its own, all {NUM_DEVICES}",
        f"the columns behind it are measured where losses are beyond {LOSS_LIMIT}",
        "losses without rolling: as losses, at stage 3 with roll=off",
        "losses from float64: largest difference of the model as it is, in plain JAX on one "
        "device, in float32 and in float64: what rounding alone does to it",
        "losses in float64: largest difference in plain JAX on one device of the model rolled and "
        "as it is: what is left of rolling where rounding is 5e8 times less",
    ]
    return dataclasses.replace(record, goals=goals, notes=notes)


def measure(name: str, foreign: ForeignModel) -> dict[str, Any]:
    """Measures one model; returns its row of the table."""
    with warnings.catch_warnings(action="ignore"), jax.numpy_rank_promotion("allow"):
        compared = compare(foreign)
        rolled, plain = train(foreign, zero=3, roll="auto"), train_as_it_is(name, foreign)
        difference = distance(rolled.losses, plain.losses)
        sensitivity = {} if difference <= LOSS_LIMIT else why_further(name, foreign, plain.losses)
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
        "steps": len(rolled.losses),
        "first loss": float(rolled.losses[0]),
        "last loss": float(rolled.losses[-1]),
        "losses": difference,
        "devices of the other": devices_of_the_plain_run(name),
        **sensitivity,
    }


def distance(losses: np.ndarray, others: np.ndarray) -> float:
    """Returns the largest difference between the losses of two runs in any step."""
    return float(np.abs(losses - others).max())


def why_further(name: str, foreign: ForeignModel, losses: np.ndarray) -> dict[str, float]:
    """Measures how much of a difference is the model's own rounding error.

    Args:
      name: name of the model; float64 is measured only for names in `IN_64_BITS`.
      foreign: the model.
      losses: of the model as it is.
    """
    sharded = {
        "losses without rolling": distance(train(foreign, zero=3, roll="off").losses, losses)
    }
    if name not in IN_64_BITS:
        return sharded
    exact, rolled = compare_in_64_bits(foreign, load(*IN_64_BITS[name]))
    return sharded | {
        "losses from float64": distance(train_in_32_bits(foreign), exact),
        "losses in float64": distance(rolled, exact),
    }


def titles_of(plan: Plan) -> list[str]:
    """Returns the lists of layers that a plan rolls."""
    model = plan.model
    return [loop.title for loop in model.loops] if isinstance(model, RolledModel) else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A model and its rolled form on the same arrays; each pair is (not rolled, rolled).

    Attributes:
      found: result of the search for layers to roll.
      equations: numbers of equations of the traced losses.
      losses: losses of one batch.
      gradients: gradients by the model's own parameter names.
    """

    found: FoundLoops
    equations: tuple[int, int]
    losses: tuple[float, float]
    gradients: tuple[Arrays, Arrays]

    def largest_difference(self) -> float:
        """Returns the largest difference of gradients, divided by the model's largest gradient."""
        plain, rolled = self.gradients
        differences = {name: np.abs(plain[name] - rolled[name]).max() for name in plain}
        if not np.isfinite(self.losses).all():
            return float("nan")
        largest = np.max([np.abs(x).max() for x in plain.values()])
        return float(np.max(list(differences.values())) / largest)


def compare(foreign: ForeignModel) -> Comparison:
    """Computes loss and gradients of a model on one device, unrolled and fully rolled."""
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
    """Returns each parameter with independent normal noise added."""
    random = np.random.default_rng(0)
    return {
        name: (value + NOISE * random.normal(size=value.shape)).astype(value.dtype)
        for name, value in params.items()
    }


def stack(params: Arrays, stacks: Mapping[str, tuple[str, ...]]) -> Arrays:
    """Returns {name: array}: stacks [layers, ...] of rolled parameters, others unchanged."""
    gone = {name for names in stacks.values() for name in names}
    rest = {name: value for name, value in params.items() if name not in gone}
    made = {one: np.stack([params[name] for name in names]) for one, names in stacks.items()}
    return rest | made


def unstack(values: Arrays, stacks: Mapping[str, tuple[str, ...]]) -> Arrays:
    """Splits stacks into the parameters of single layers, the reverse of `stack`."""
    rows = {
        name: values[one][number]
        for one, names in stacks.items()
        for number, name in enumerate(names)
    }
    return rows | {name: value for name, value in values.items() if name not in stacks}


def value_and_gradients(
    model: Model, params: Arrays, extras: Arrays, foreign: ForeignModel
) -> tuple[float, Arrays]:
    """Returns loss and gradients of the first batch; gradients are {name of `params`: array}."""

    def run(params: Arrays) -> Any:
        batch, key = foreign.batch(0), jax.random.key(1)
        return model.run(params, extras, key, lambda bound: foreign.loss(bound, batch))

    (loss, _), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(params)
    return float(loss), jax.tree.map(np.asarray, gradients)


def count_equations(program: Any) -> int:
    """Counts the equations of a program and of the programs nested in it, each once."""
    inner = (each for equation in program.eqns for each in inner_programs(equation.params))
    return len(program.eqns) + sum(map(count_equations, inner))


def optimizer() -> optax.GradientTransformation:
    """Returns AdamW with clipped gradients.

    Its eps is large, since with a small eps Adam turns the rounding noise of gradients that should
    be zero into full updates.
    """
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-5))


@dataclasses.dataclass(frozen=True)
class Training:
    """A plan and the losses of its first steps."""

    plan: Plan
    losses: np.ndarray


def devices_of_the_plain_run(name: str) -> int:
    """Returns the number of devices: 1, or all for dropout, which depends on the sharding."""
    return NUM_DEVICES if name in DROPOUT else 1


def train_as_it_is(name: str, foreign: ForeignModel) -> Training:
    """Runs the first steps of the unrolled model at stage 0."""
    return train(foreign, zero=0, roll="off", devices=devices_of_the_plain_run(name))


def train(
    foreign: ForeignModel,
    *,
    zero: int,
    roll: str,
    steps: int = STEPS,
    devices: int = NUM_DEVICES,
) -> Training:
    """Runs the first steps of AdamW in float32."""
    plan = make_plan(
        foreign.model,
        make_mesh(MeshConfig(), devices=jax.devices()[:devices]),
        example_batch=foreign.batch(0),
        loss=foreign.loss,
        optimizer=optimizer(),
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


def compare_in_64_bits(foreign: ForeignModel, module: ModuleType) -> tuple[np.ndarray, np.ndarray]:
    """Returns (losses of the unrolled, of the rolled model), in plain JAX on one device, in
    float64.

    Args:
      foreign: a model of `nnx` in which only `Embed` layers keep the dtype of their creation.
      module: module of the model's source, see `foreign_modules.in_64_bits`.
    """

    model, batch = as_model(_in_any_dtype(foreign)), foreign.batch(0)
    params, extras = model.init(jax.random.key(0), batch, foreign.loss)
    with in_64_bits(module):
        params, extras, batch = wider((params, extras, batch))
        trace = trace_model(model, shapes(params), shapes(extras), shapes(batch), foreign.loss)
        rolled = RolledModel(model, find_loops(trace, params).loops, shapes(params))
        stacked = stack(params, rolled.stacks)
        return (
            train_alone(model, params, extras, foreign),
            train_alone(rolled, stacked, extras, foreign),
        )


def train_in_32_bits(foreign: ForeignModel) -> np.ndarray:
    """Returns losses of the unrolled model in plain JAX on one device, in float32."""
    model = as_model(_in_any_dtype(foreign))
    params, extras = model.init(jax.random.key(0), foreign.batch(0), foreign.loss)
    return train_alone(model, params, extras, foreign)


def _in_any_dtype(foreign: ForeignModel) -> Callable[[nnx.Rngs], Any]:
    """Returns the constructor of a model whose embeddings have the dtype of their weights."""

    def build(rngs: nnx.Rngs) -> Any:
        made = foreign.model(rngs)
        for _, layer in made.iter_modules():
            if isinstance(layer, nnx.Embed):
                layer.dtype = None
        return made

    return build


def wider(tree: Any) -> Any:
    """Returns the arrays of a tree as NumPy arrays, with float32 converted to float64."""
    return jax.tree.map(
        lambda x: np.asarray(x, np.float64) if x.dtype == np.float32 else np.asarray(x), tree
    )


def train_alone(model: Model, params: Arrays, extras: Arrays, foreign: ForeignModel) -> np.ndarray:
    """Returns losses [STEPS] of the steps of `train` in plain JAX, in the parameters' dtype."""
    tx = optimizer()

    def loss(params: Arrays, batch: Any) -> Any:
        key = jax.random.key(1)
        return model.run(params, extras, key, lambda bound: foreign.loss(bound, batch))

    @jax.jit
    def step(params: Arrays, state: Any, batch: Any) -> Any:
        (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for index in range(STEPS):
        params, state, value = step(params, state, wider(foreign.batch(index)))
        losses.append(value)
    return np.array(losses)


if __name__ == "__main__":
    main()
