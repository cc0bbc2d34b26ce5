"""Model whose layers, which a Python loop calls, run as one loop over stacked parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from zerojax.config.tree_types import Batch
from zerojax.operators.equations import Equation
from zerojax.operators.marks import inner_programs, read_name
from zerojax.tracing.jaxpr import evaluate_in_pieces, is_checkpoint, program_of, split_scan
from zerojax.tracing.protocol import Arrays, LazyArray, Loss, Model, OnRead, StepRule
from zerojax.tracing.reads import MarkRead
from zerojax.tracing.rolling.finding import Loop, NamedProgram, read_stacks, roll_program
from zerojax.tracing.rolling.flat_program import Mismatch, open_calls


class RolledModel:
    """Wraps a user's model so that lists of equal layers run as loops.

    Its parameters are stacks [iterations, ...] for the layers of loops, and the user's parameters
    for the rest. The loss is traced as the user wrote it, layer by layer, and then rolled. If that
    fails, as may happen in evaluation, layers run one by one on rows of the stacks.

    Attributes:
      inner: model of the user, not rolled.
      loops: loops in the order in which they are rolled.
      stacks: {name of a stack: names of the parameters that are its rows}, of all loops.
    """

    reads_lazily = True

    def __init__(
        self,
        inner: Model,
        loops: Sequence[Loop],
        params: Mapping[str, Any],
    ) -> None:
        """Stacks the parameters of a model for the given loops.

        Args:
          inner: model of the user, not rolled.
          loops: loops that `find_loops` returned.
          params: {name: value with shape and dtype} of all parameters of `inner`.
        """
        self.inner, self.loops = inner, tuple(loops)
        self.kind, self.source = inner.kind, inner.source
        self.stacks = {s: names for loop in loops for s, names in loop.stacks.items()}
        self._stack_of = read_stacks(loops)
        self._order = list(params)

    @property
    def template(self) -> Any:
        """The template of `inner` (the user's object without arrays); only if `inner` has one."""
        return getattr(self.inner, "template", None)

    @property
    def overwritten(self) -> frozenset[str]:
        return self.inner.overwritten

    @property
    def step_rules(self) -> Mapping[str, StepRule]:
        return self.inner.step_rules

    def parameter_names(self) -> Any:
        """Returns the tree of names of the user's model, whose layers are not stacked."""
        return self.inner.parameter_names()

    def init(self, key: jax.Array, batch: Batch, loss: Loss) -> tuple[Arrays, Arrays]:
        params, extras = self.inner.init(key, batch, loss)
        return self._stack_all(params, jnp.stack), extras

    def initial_arrays(self) -> tuple[Arrays, Arrays] | None:
        arrays = self.inner.initial_arrays()
        if arrays is None:
            return None
        return self._stack_all(arrays[0], stack_rows), arrays[1]

    def _stack_all(
        self, params: Mapping[str, Any], stack: Callable[[Sequence[Any]], Any]
    ) -> Arrays:
        """Stacks the parameters of layers; each stack takes the position of its first row."""
        result: Arrays = {}
        for name in params:
            stack_of_row = self._stack_of.get(name)
            if stack_of_row is None:
                result[name] = params[name]
            elif stack_of_row not in result:
                result[stack_of_row] = stack([params[row] for row in self.stacks[stack_of_row]])
        return result

    def rows(self, params: Mapping[str, Any]) -> Arrays:
        """Converts parameters to the user's names and order: replaces each stack by its rows."""
        rows = {}
        for stack, names in self.stacks.items():
            for number, name in enumerate(names):
                rows[name] = jax.tree.map(lambda x, i=number: x[i], params[stack])
        return {name: rows[name] if name in rows else params[name] for name in self._order}

    def run(
        self,
        params: Arrays,
        extras: Arrays,
        key: jax.Array,
        function: Callable[[Any], Any],
        *,
        train: bool = True,
        on_read: OnRead | None = None,
    ) -> tuple[Any, Arrays]:
        """Runs the model like `Model.run`; `params` and `on_read` use the names of stacks."""
        reads = on_read or {}
        marks = {name: MarkRead(name) for name in self._order if self._stored(name) in reads}

        def traced(values: Arrays) -> Any:
            return self.inner.run(values, extras, key, function, train=train, on_read=marks)

        values = self._abstract_rows(params, reads)
        program, shape = jax.make_jaxpr(traced, return_shape=True)(values)
        try:
            # The inputs of the traced program are the leaves of a dict, in the order of its sorted
            # keys.
            rolled = self._roll(program, sorted(values))
        except Mismatch:
            by_row = {name: reads[self._stored(name)] for name in marks}
            rows = self.rows(params)
            return self.inner.run(rows, extras, key, function, train=train, on_read=by_row)
        inputs = [params[name] for name in rolled.names if name is not None]
        outputs = evaluate_reads(rolled.closed, inputs, self._reads_of(reads))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    def _stored(self, name: str) -> str:
        """Returns the name of the stack of which a parameter is a row; else the parameter's own
        name.
        """
        return self._stack_of.get(name, name)

    def _abstract_rows(self, params: Arrays, reads: OnRead) -> Arrays:
        """Returns the shape and dtype of each parameter as the model reads it."""
        kinds: dict[str, Any] = {}
        # The rows of a stack have one shape and dtype, so one row is enough.
        for stored, value in params.items():
            cut = (lambda x: x[0]) if stored in self.stacks else (lambda x: x)
            read = reads.get(stored, lambda x: x)
            result = jax.eval_shape(lambda v, c=cut, r=read: r(jax.tree.map(c, v)), value)
            kinds[stored] = jax.ShapeDtypeStruct(result.shape, result.dtype)
        return {name: kinds[self._stored(name)] for name in self._order}

    def _roll(self, program: ClosedJaxpr, names: Sequence[str]) -> NamedProgram:
        named = NamedProgram(open_calls(program), tuple(names))
        for loop in self.loops:
            named = roll_program(named, loop)
        return named

    def _reads_of(self, reads: OnRead) -> dict[str, Callable[[Any], jax.Array]]:
        """Returns the read functions by the names of rows, which the marks in the program have."""
        stored = {name: self._stored(name) for name in self._order}
        return {name: reads[holder] for name, holder in stored.items() if holder in reads}

    def to_source(self, params: Arrays, extras: Arrays) -> Any:
        return self.inner.to_source(self.rows(params), extras)


# --- values of stacks -----------------------------------------------------------------------------


class StackedRows:
    """Arrays of several layers as one `LazyArray` [layers, ...], without a copy."""

    is_stacked = True

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows
        self.shape, self.dtype = (len(rows), *rows[0].shape), np.dtype(rows[0].dtype)

    def read(self, index: Sequence[tuple[int, int]]) -> np.ndarray:
        (first, end), inner = index[0], index[1:]
        result = np.empty([stop - start for start, stop in index], self.dtype)
        for place, row in enumerate(self._rows[first:end]):
            result[place] = _read_box(row, inner)
        return result


def _read_box(row: Any, box: Sequence[tuple[int, int]]) -> np.ndarray:
    if isinstance(row, LazyArray):
        return row.read(box)
    return np.asarray(row)[tuple(slice(start, stop) for start, stop in box)]


def stack_rows(rows: Sequence[Any]) -> Any:
    """Stacks the initial values of several layers to one array, `LazyArray` or `ShapeDtypeStruct`.

    Raises:
      ValueError: some rows have values and others have to be created.
    """
    missing = [isinstance(row, jax.ShapeDtypeStruct) for row in rows]
    if all(missing):
        return jax.ShapeDtypeStruct((len(rows), *rows[0].shape), rows[0].dtype)
    if any(missing):
        raise ValueError(
            "some layers of one list have initial weights and others do not; pass initial weights "
            "for all of these layers"
        )
    return StackedRows(rows)


# --- reads in a program ---------------------------------------------------------------------------


def evaluate_reads(
    closed: ClosedJaxpr, inputs: Sequence[Any], reads: Mapping[str, Callable[[Any], jax.Array]]
) -> list[Any]:
    """Evaluates a program; at each mark of a parameter read it applies a function.

    Args:
      closed: program with marks at its top level, in checkpoints and in loops.
      inputs: values of the inputs. An input that is only read at marks may be any pytree that the
        read function takes.
      reads: {name in the mark: function that maps the input to the value that is read}.

    Returns:
      The outputs of the program.
    """

    def is_apart(equation: Equation) -> bool:
        return _marks(equation, reads)

    def run_apart(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        name = read_name(equation)
        if name is not None:
            return [reads[name](operands[0])]
        if equation.primitive.name == "scan":
            return _run_scan(equation, operands, reads)
        closed = program_of(equation)
        if not is_checkpoint(equation):
            return evaluate_reads(closed, operands, reads)
        run = jax.checkpoint(
            lambda *inputs: evaluate_reads(closed, inputs, reads),
            policy=equation.params["policy"],
            prevent_cse=equation.params["prevent_cse"],
        )
        return run(*operands)

    return evaluate_in_pieces(closed, inputs, is_apart=is_apart, run_apart=run_apart)


def _marks(equation: Equation, reads: Mapping[str, Any]) -> bool:
    """Returns whether an equation is a mark of a read, or a loop or checkpoint around one."""
    name = read_name(equation)
    if name is not None:
        return name in reads
    return any(
        _marks(inner, reads)
        for program in inner_programs(equation.params)
        for inner in program.eqns
    )


def _run_scan(
    equation: Equation, operands: Sequence[Any], reads: Mapping[str, Any]
) -> Sequence[Any]:
    params, (num_consts, num_carry) = equation.params, split_scan(equation)
    consts = list(operands[:num_consts])

    def iteration(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = evaluate_reads(params["jaxpr"], [*consts, *carry, *rows], reads)
        return outputs[:num_carry], outputs[num_carry:]

    carry, outputs = lax.scan(
        iteration,
        list(operands[num_consts : num_consts + num_carry]),
        list(operands[num_consts + num_carry :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *outputs]
