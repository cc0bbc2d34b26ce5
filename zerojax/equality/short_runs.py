"""Runs a model for a few steps in plain JAX and with zerojax, and compares the results."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax.config import MeshConfig
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch, Tree
from zerojax.data import shard_batch
from zerojax.equality.check_result import ComparedRun
from zerojax.hardware.compile_client import keep_known_options
from zerojax.models.adapt import evaluation_mode
from zerojax.models.losses import as_sums
from zerojax.models.step_count import after_step
from zerojax.optim import extra_arguments
from zerojax.passes import model_state
from zerojax.passes.update import stacks_of
from zerojax.placement.device_mesh import make_mesh
from zerojax.placement.state import step_key
from zerojax.plan.make import Plan, make_plan
from zerojax.step.build import build_finish, build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import to_portable_state
from zerojax.tracing.annotated_model import annotated_as
from zerojax.tracing.protocol import Loss, Model, on_batch

Arrays = dict[str, Any]
Prepared = tuple[Plan, Callable[..., Any]]
"""Plan of a run and its jitted training step."""

TOLERANCES = {"loss": 4e-6, "norm": 2e-5, "params": 2e-4}
"""Relative tolerances in float32; `compare` adds the model's own rounding noise.

loss: measured by summing a batch's rows in another order over 20 steps. norm: for a sum of squares
of all gradients. params: for a parameter's total change, in L2 norm."""
NOISE = 8.0
"""Multiple of the measured noise that is added to a tolerance."""
QUICK_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""XLA options for fast compilation of programs that run only a few times. The step of a Transformer
of two layers on 4 devices compiles in 2.3 instead of 9.7 s of processor time. Some versions of XLA
know only some of these options."""
CHAOTIC = 0.02
"""A parameter is not compared if reordering rows changes its update by more than this fraction."""


@dataclass(frozen=True)
class Configuration:
    """Configuration of one run of a check.

    Attributes:
      devices: number of devices on the mesh axis `data`; 0: plain JAX on one device.
      zero, num_microbatches: ZeRO stage and number of microbatches, as for `make_plan`.
      train: whether the model trains in training mode; False trains in evaluation mode.
      optimizer: whether to use the user's optimizer; False uses SGD at rate 1, so that parameters
        change by their gradients.
    """

    devices: int
    zero: int = 0
    num_microbatches: int = 1
    train: bool = True
    optimizer: bool = True

    @property
    def name(self) -> str:
        if self.devices == 0:
            return "plain JAX, 1 device"
        count = f"{self.devices} device" + "s" * (self.devices > 1)
        pieces = f", {self.num_microbatches} microbatches" if self.num_microbatches > 1 else ""
        return f"{count}, zero={self.zero}{pieces}"


@dataclass(frozen=True)
class CheckInputs:
    """Inputs of a check: the model in zerojax's internal form, loss, optimizer, NumPy batches."""

    model: Model
    loss: Loss
    tx: optax.GradientTransformation
    batches: Sequence[Any]
    freeze: tuple[str, ...]
    seed: int
    before: Arrays = dataclasses.field(default_factory=dict)
    """{name: initial parameter}, the same in every run."""


@dataclass(frozen=True)
class RunOutcome:
    """Losses and final arrays of one training run.

    Attributes:
      losses: float64 loss of each step.
      norms: float64 gradient norm of each step.
      after: {name: trained parameter}, with unpadded shapes.
      state: {name: [value on each device]} of the model's other arrays.
      shares: {name: maximum over the steps of the gradient's norm / norm of all gradients}; only
        for runs in plain JAX.
    """

    losses: np.ndarray
    norms: np.ndarray
    after: Arrays
    state: dict[str, list[np.ndarray]]
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)


def with_initial_arrays(model: Model, params: Arrays, extras: Arrays) -> Model:
    """Returns a copy of the model that holds initial arrays, so that no run has to create them."""
    changed: Any = copy.copy(model)
    changed.initial_arrays = lambda: (params, extras)
    return changed


@functools.cache
def quick_options() -> dict[str, Any]:
    """Returns `QUICK_OPTIONS` without options that the installed compiler does not know."""
    mesh = make_mesh(MeshConfig(data=1), devices=jax.devices("cpu")[:1])
    return keep_known_options(mesh, QUICK_OPTIONS)[0]


def plan_of(given: CheckInputs, configuration: Configuration) -> Plan:
    """Builds the plan of one run of a check.

    Raises:
      ValueError, TypeError: an argument is invalid, see `make_plan`.
    """
    devices = jax.devices("cpu")[: configuration.devices]
    model = given.model if configuration.train else evaluation_mode(given.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the check itself tests what a plan would warn about
        plan = make_plan(
            model,
            make_mesh(MeshConfig(data=len(devices)), devices=devices),
            example_batch=given.batches[0],
            loss=given.loss,
            optimizer=given.tx if configuration.optimizer else optax.sgd(1.0),
            zero=configuration.zero,
            precision="fp32",
            num_microbatches=configuration.num_microbatches,
            freeze=given.freeze,
            persistence_threshold=0,
        )
    options = {**plan.program.options, **quick_options()}
    return dataclasses.replace(plan, program=dataclasses.replace(plan.program, options=options))


def prepare(given: CheckInputs, configuration: Configuration) -> Prepared:
    """Builds the plan and the jitted step of one run of a check.

    Raises:
      ValueError, TypeError: an argument is invalid, see `make_plan`.
    """
    plan = plan_of(given, configuration)
    return plan, build_step(plan)


def run_zerojax(
    given: CheckInputs,
    configuration: Configuration,
    *,
    prepared: Prepared | None = None,
    steps: int | None = None,
) -> RunOutcome:
    """Trains with zerojax, one step on each batch of a check.

    Args:
      given: inputs of the check.
      configuration: configuration of the run.
      prepared: result of `prepare`; reusing it avoids a second compilation.
      steps: number of batches to use; None uses all.
    """
    plan, step = prepared or prepare(given, configuration)
    state = init_state(plan, given.seed)
    losses, norms = [], []
    for batch in given.batches[:steps]:
        state, metrics = step(state, shard_batch(plan, batch, check_values=False))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    extras = {
        name: [np.asarray(shard.data) for shard in value.addressable_shards]
        for name, value in state["extras"].items()
    }
    after = _on_host(to_portable_state(plan, build_finish(plan)(state))["params"])
    return RunOutcome(np.array(losses), np.array(norms), after, extras)


class PlainRun:
    """Reference training of a check in plain JAX: `jax.value_and_grad`, then optax.

    Attributes:
      params, frozen, extras: initial trained parameters, frozen parameters and other arrays of the
        model, on one device.
    """

    def __init__(self, given: CheckInputs, plan: Plan, *, train: bool = True):
        """Takes names and initial values from a plan for one device."""
        self.given, self.model = given, annotated_as(plan.model, given.model)
        state = init_state(plan, given.seed)
        portable = to_portable_state(plan, state)
        self.params = _on_host(portable["params"])
        self.frozen = _on_host(portable["frozen"])
        self.extras = _on_host(portable["extras"])
        self._rng = np.asarray(portable["rng"])
        self._train = train
        # On one device no parameter is padded, so this is the user's optimizer, which may not
        # accept extra arguments.
        self._tx = optax.with_extra_args_support(plan.tx)
        self._layers = frozenset(stacks_of(plan))
        self._step = jax.jit(self._advance, compiler_options=quick_options())

    def key(self, step: int) -> jax.Array:
        """Returns the random key that the first device uses in a step."""
        return jax.random.fold_in(step_key(jnp.asarray(self._rng), jnp.int32(step)), 0)

    def loss(
        self,
        params: Arrays,
        extras: Arrays,
        key: jax.Array,
        batch: Batch,
        *,
        train: bool,
        frozen: Arrays | None = None,
    ) -> tuple[tuple[jax.Array, jax.Array | None], Arrays]:
        """Computes ((loss or sum, weight or None), extras after the forward pass); traceable.

        Args:
          params, extras: trained parameters and other arrays of the model.
          key: random key.
          batch: rows to compute the loss of.
          train: whether to run in training mode.
          frozen: frozen parameters, passed as arguments under `jit`, because XLA would spend
            minutes on folding constants of this size. None takes those of this object.
        """
        whole = {**params, **(self.frozen if frozen is None else frozen)}
        result, after = self.model.run(
            {name: jnp.asarray(value) for name, value in whole.items()},
            {name: jnp.asarray(value) for name, value in extras.items()},
            key,
            on_batch(self.given.loss, batch),
            train=train,
        )
        return split_loss(result), after

    def sums(self, key: jax.Array, batch: Batch, *, train: bool) -> dict[str, Any]:
        """Computes the sums (`as_sums`) of the loss for a batch with the initial parameters."""
        if not hasattr(self, "_sums"):

            def sums(
                params: Arrays, extras: Arrays, key: jax.Array, batch: Batch, train: bool
            ) -> Any:
                loss = on_batch(lambda bound, batch: as_sums(self.given.loss(bound, batch)), batch)
                return self.model.run(params, extras, key, loss, train=train)[0]

            self._sums = jax.jit(sums, static_argnums=4, compiler_options=quick_options())
        return self._sums({**self.params, **self.frozen}, self.extras, key, batch, train)

    def _advance(
        self,
        params: Arrays,
        frozen: Arrays,
        opt_state: Tree,
        extras: Arrays,
        key: jax.Array,
        microbatches: Sequence[Any],
    ) -> Any:
        overwritten = self.model.overwritten

        def loss_of(params: Arrays, extras: Arrays) -> Any:
            total, weights = jnp.float32(0), jnp.float32(0)
            for batch in microbatches:
                (loss, weight), extras = self.loss(
                    params, extras, key, batch, train=self._train, frozen=frozen
                )
                total, weights = total + loss, weights + (1 if weight is None else weight)
            # Scales of 8-bit products are computed from gradients of the sum, as in a zerojax step.
            return total if overwritten else total / weights, (weights, extras)

        differentiate = model_state.value_and_grad(loss_of, overwritten)
        (loss, (weight, after)), grads = differentiate(params, extras)
        if overwritten:
            loss, grads = loss / weight, jax.tree.map(lambda leaf: leaf / weight, grads)
        norms = {name: jnp.linalg.norm(leaf.ravel()) for name, leaf in grads.items()}
        norm = jnp.sqrt(sum(jnp.square(leaf) for leaf in norms.values()))
        shares = jax.tree.map(lambda leaf: leaf / norm, norms)
        extra = extra_arguments(grads, norm, loss, self._layers)
        updates, opt_state = self._tx.update(grads, opt_state, params, **extra)
        moved: Any = optax.apply_updates(params, updates)
        return moved, opt_state, after_step(after, self.model.step_rules), loss, norm, shares

    def run(
        self,
        reorder: Callable[[Any], Any] = lambda batch: batch,
        move: Callable[[Arrays], Arrays] = lambda params: params,
        cut: Callable[[Any], Sequence[Any]] = lambda batch: [batch],
    ) -> RunOutcome:
        """Trains in plain JAX, one step on each batch of a check.

        Args:
          reorder: function that may reorder a batch's rows.
          move: function that may change the initial parameters, trained and frozen ones.
          cut: function that splits a batch into microbatches, whose gradients are added.
        """
        params, frozen, extras = move(self.params), move(self.frozen), self.extras
        opt_state = self._tx.init(jax.tree.map(jnp.asarray, params))
        losses, norms, shares = [], [], []
        for number, batch in enumerate(self.given.batches):
            params, opt_state, extras, loss, norm, share = self._step(
                params, frozen, opt_state, extras, self.key(number), cut(reorder(batch))
            )
            losses.append(float(loss))
            norms.append(float(norm))
            shares.append(jax.device_get(share))
        largest = {name: float(max(share[name] for share in shares)) for name in params}
        state = {name: [np.asarray(value)] for name, value in extras.items()}
        after = _on_host(params)
        return RunOutcome(np.array(losses), np.array(norms), after, state, largest)


def split_loss(result: Tree) -> tuple[jax.Array, jax.Array | None]:
    """Splits the result of a loss into (float32 loss or sum, float32 weight or None)."""
    parts = result if isinstance(result, tuple) else (result,)
    if isinstance(parts[-1], Mapping):  # extra metrics
        parts = parts[:-1]
    loss = jnp.asarray(parts[0], jnp.float32)
    return loss, jnp.asarray(parts[1], jnp.float32) if len(parts) > 1 else None


def reversed_rows(batch: Batch) -> Any:
    """Returns a batch with its rows in reverse order."""
    return jax.tree.map(lambda x: x[::-1].copy(), batch)


def cut_rows(batch: Batch, number: int) -> list[Any]:
    """Splits a batch into `number` parts with equally many rows, in order."""
    pieces = jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), batch)
    return [jax.tree.map(lambda x, i=i: x[i], pieces) for i in range(number)]


def microbatches_of(batch: Batch, configuration: Configuration) -> list[Any]:
    """Splits a batch into microbatches, each of which has the same part of each device's rows."""
    count, devices = configuration.num_microbatches, max(configuration.devices, 1)

    def rows(x: np.ndarray, number: int) -> np.ndarray:
        cut = x.reshape(devices, count, -1, *x.shape[1:])
        return cut[:, number].reshape(-1, *x.shape[1:])

    return [jax.tree.map(lambda x, i=i: rows(x, i), batch) for i in range(count)]


@dataclass(frozen=True)
class Noise:
    """Relative differences between runs of the same training that come from rounding alone.

    Attributes:
      loss, norm: relative differences of the loss and of the gradient norm.
      params: {name: relative difference of this parameter's change during the run}.
    """

    loss: float
    norm: float
    params: Mapping[str, float]

    @property
    def chaotic(self) -> list[str]:
        """Names of parameters whose change is only rounding noise."""
        return [name for name, value in self.params.items() if value > CHAOTIC]


NO_NOISE = Noise(0.0, 0.0, {})
NEGLIGIBLE = 1e-6
"""A gradient may be only rounding if its norm is below this fraction of all gradients' norm."""
EIGHT_BITS = 1e-5, 1e-4, 1e-3
"""Minimum noise of (loss, norm, params) for a model with 8-bit products. Neighbouring 8-bit values
are 6 % apart, and the order of a sum decides to which one an operand is rounded. A GPT-2 of two
layers on 4 devices differs by 1.1e-7, 1.7e-5 and 1.3e-3."""


def with_eight_bits(noise: Noise) -> Noise:
    """Returns `noise`, with values below the noise of 8-bit products (`EIGHT_BITS`) raised to
    it."""
    loss, norm, params = EIGHT_BITS
    return Noise(
        max(noise.loss, loss),
        max(noise.norm, norm),
        {name: max(value, params) for name, value in noise.params.items()},
    )


def measure_noise(run: RunOutcome, reordered: RunOutcome, before: Arrays) -> Noise | None:
    """Returns the noise between two runs with different row orders.

    Returns None if the difference is more than rounding; the model then depends on the row order.
    """
    loss, norm = _differences(run, reordered)
    if not loss < 50 * TOLERANCES["loss"]:
        return None
    return Noise(loss, norm, relative_changes(run, reordered, before))


def noise_of(plain: PlainRun, reference: RunOutcome) -> Noise:
    """Measures the rounding noise of training in plain JAX; returns `NO_NOISE` if that is
    impossible.

    Two additional runs measure the noise. The first reverses the rows, which changes the rounding
    of sums over rows, but not of values computed per row. The second changes initial parameters by
    one unit in the last place; this changes values per row as well, about as much as a matrix
    product with half of the rows, or over half of the devices. Such noise matters for optimizers
    that divide by the size of the gradient, such as Adam, while a gradient is still small, as in
    the first steps of LoRA. In LoRA all values come from frozen parameters, so the second run
    changes frozen parameters, too.

    If rows are alike, neither run may change a gradient that is 0 except for rounding, but the
    halves of a batch round it differently. Negligible gradients are therefore also compared with
    the gradients of the halves.
    """
    runs = plain.run(reversed_rows), plain.run(move=one_unit_away)
    noise = largest_noise(reference, runs, plain.params) or NO_NOISE
    negligible = {name for name, share in reference.shares.items() if share < NEGLIGIBLE}
    if not negligible - set(noise.chaotic) or not _have_halves(plain.given.batches):
        return noise
    halves = plain.run(cut=lambda batch: cut_rows(batch, 2))
    changes = relative_changes(halves, reference, plain.params)
    params = {
        name: max(noise.params.get(name, 0.0), change)
        for name, change in changes.items()
        if name in negligible and halves.shares[name] < NEGLIGIBLE
    }
    return dataclasses.replace(noise, params={**noise.params, **params})


def _have_halves(batches: Sequence[Any]) -> bool:
    return all(leaf.shape[0] % 2 == 0 for leaf in jax.tree.leaves(list(batches)))


def largest_noise(run: RunOutcome, others: Sequence[RunOutcome], before: Arrays) -> Noise | None:
    """Returns the largest noise between a run and others; None if no difference is rounding.

    A run with dropout and reordered rows draws other random numbers, which is not rounding.
    """
    found = [noise for x in others if (noise := measure_noise(run, x, before)) is not None]
    if not found:
        return None
    return Noise(
        max(noise.loss for noise in found),
        max(noise.norm for noise in found),
        {name: max(noise.params[name] for noise in found) for name in found[0].params},
    )


def starting_one_unit_away(prepared: Prepared) -> Prepared:
    """Returns a copy of a plan and its step with initial parameters changed by `one_unit_away`."""
    plan, step = prepared
    arrays = plan.model.initial_arrays()
    assert arrays is not None, "use a model with initial arrays"
    model = with_initial_arrays(plan.model, one_unit_away(arrays[0]), arrays[1])
    return dataclasses.replace(plan, model=model), step


def one_unit_away(params: Arrays) -> Arrays:
    """Returns parameters moved at random to the next larger or smaller number of their dtype.

    Zeros, and arrays of dtypes other than float32 and float64, are unchanged.
    """
    random = np.random.default_rng(0)

    def move(value: np.ndarray) -> np.ndarray:
        if value.dtype not in (np.float32, np.float64):
            return value
        towards = np.where(random.random(value.shape, np.float32) < 0.5, -np.inf, np.inf)
        away = np.nextafter(value, towards.astype(value.dtype))
        return np.where(value == 0, value, away)

    return {name: move(np.asarray(value)) for name, value in params.items()}


def compare(
    run: RunOutcome,
    reference: RunOutcome,
    before: Arrays,
    *,
    name: str = "",
    against: str = "",
    noise: Noise,
    mode: str = "training",
) -> ComparedRun:
    """Compares losses, gradient norms and parameters of a run with a reference run.

    The function `differing_state` compares the model's other arrays.

    Args:
      run: outcome of the run.
      reference: outcome of the reference run.
      before: {name: initial parameter}, the same for both runs.
      name: name of the run, for the result.
      against: name of the reference run, for the result.
      noise: rounding noise, which is added to the tolerances.
      mode: "training" or "evaluation", for the result.
    """
    loss, norm = _differences(run, reference)
    changes = relative_changes(run, reference, before)
    limits = {
        name: TOLERANCES["params"] + NOISE * noise.params.get(name, 0.0)
        for name in changes
        if noise.params.get(name, 0.0) <= CHAOTIC
    }
    worst = max(limits, key=lambda name: changes[name] / limits[name], default=None)
    params = changes[worst] if worst is not None else 0.0
    added = {"loss": NOISE * noise.loss, "norm": NOISE * noise.norm}
    agrees = (
        loss <= TOLERANCES["loss"] + added["loss"]
        and norm <= TOLERANCES["norm"] + added["norm"]
        and (worst is None or params <= limits[worst])
    )
    if worst is not None:
        added["params"] = limits[worst] - TOLERANCES["params"]
    return ComparedRun(
        name=name,
        against=against,
        agrees=bool(agrees),
        loss=loss,
        norm=norm,
        params=params,
        worst=worst,
        mode=mode,
        noise={name: float(value) for name, value in added.items()},
    )


def differing_state(run: RunOutcome, reference: RunOutcome) -> tuple[str, ...]:
    """Returns names of the model's other arrays that differ from the reference on any device."""
    found = []
    for name, copies in run.state.items():
        (expected, *_) = reference.state[name]
        if jnp.issubdtype(expected.dtype, jnp.floating):
            expected, given = expected.astype(np.float64), [x.astype(np.float64) for x in copies]
            finite = np.abs(expected[np.isfinite(expected)])  # a mask may contain infinities
            limit = 1e-4 * max(float(finite.max(initial=0.0)), 1e-6)
            same = all(np.allclose(x, expected, rtol=0, atol=limit, equal_nan=True) for x in given)
        else:
            same = all(np.array_equal(x, expected) for x in copies)
        if not same:
            found.append(name)
    return tuple(found)


def _differences(run: RunOutcome, reference: RunOutcome) -> tuple[float, float]:
    scale = np.maximum(1.0, np.abs(reference.losses))
    loss = float(np.max(np.abs(run.losses - reference.losses) / scale))
    scale = np.maximum(np.abs(reference.norms), 1e-30)
    return loss, float(np.max(np.abs(run.norms - reference.norms) / scale))


def relative_changes(run: RunOutcome, reference: RunOutcome, before: Arrays) -> dict[str, float]:
    """Computes {name: |difference| / |change|} in L2 norms, minus the rounding to float32."""
    found = {}
    for name, expected in reference.after.items():
        start = before[name].astype(np.float64)
        expected, value = expected.astype(np.float64), run.after[name].astype(np.float64)
        change = float(np.linalg.norm(expected - start))
        # In each step both runs round the parameters, by at most 2^-24 (6e-8) of their values.
        rounding = 2 * len(run.losses) * 6e-8 * float(np.linalg.norm(expected))
        difference = max(0.0, float(np.linalg.norm(value - expected)) - rounding)
        found[name] = difference / change if change else (1.0 if difference else 0.0)
    return found


def _on_host(arrays: Mapping[str, Any]) -> Arrays:
    return {name: np.asarray(value) for name, value in arrays.items()}
