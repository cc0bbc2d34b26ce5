"""Assigns a role, such as weights or activations, to the bytes on a device at the moment of peak
memory.

The role of a value follows from its origin and its uses, through fusions and loops:

- weights are parameters of the state that were only moved (sliced, cast, gathered, or brought into
  another layout), and what forward and backward read that is computed from parameters but not from
  the batch, such as codes and masks of weights;
- forward and backward are the operations under `jax.value_and_grad` (their names contain `jvp(`)
  and everything that these operations read; values that they compute and read again are
  activations;
- values that they compute and never read again are gradients; so are sums of gradients over
  microbatches and devices, until they are combined with the optimizer state or the parameters;
- all other values of the update are temporaries of the optimizer.

Names alone are not enough: a gradient accumulator starts as a constant, a loop carries all
accumulators in one tuple, and a matrix product that the compiler rewrote has no name.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import jax

from zerojax.forecasting.hlo.dataflow import MATMULS, MOVES, Dataflow, Edge, Value
from zerojax.forecasting.hlo.live_buffers import LiveAtPeak
from zerojax.optim import EMA
from zerojax.placement.state import feature_parts
from zerojax.plan.make import Plan

MASTERS = "master weights"
OPTIMIZER = "optimizer state"
AVERAGE = "average of weights"
FROZEN = "frozen"
EXTRAS = "extras"
BATCH = "batch"
STORED = "weights"
WEIGHTS = "gathered weights"
GRADIENTS = "gradients"
ACTIVATIONS = "activations"
UPDATE = "optimizer temporaries"
WORKSPACE = "workspace"
OTHER = "other"
FRAGMENTATION = "fragmentation"

ROLES = (
    MASTERS,
    OPTIMIZER,
    AVERAGE,
    FROZEN,
    EXTRAS,
    BATCH,
    STORED,
    WEIGHTS,
    GRADIENTS,
    ACTIVATIONS,
    UPDATE,
    WORKSPACE,
    OTHER,
    FRAGMENTATION,
)

_ARGUMENTS = {
    "params": MASTERS,
    "masters": MASTERS,
    "opt_state": OPTIMIZER,
    "one_bit": OPTIMIZER,
    "copies": STORED,
    "frozen": FROZEN,
    "extras": EXTRAS,
    "delayed": OPTIMIZER,
}


def bytes_by_role(live: LiveAtPeak, plan: Plan) -> dict[str, int]:
    """Returns the bytes of device memory of each role at the moment of peak memory.

    Args:
      live: values of the plan's training step at its peak, from
        `forecasting.hlo.live_buffers.read_live`.
      plan: plan of the step, which gives the arguments their names.

    Returns:
      {role: bytes} with all of `ROLES`, which add up to `live.peak`. The first seven roles and
      "other" include the arguments, which exist for the whole step; copies and slices of the batch
      or of extras count there, too. "other" also includes outputs with their own memory, counters,
      keys and tables of pointers. "fragmentation" is the part of the temporaries' block that no
      value uses.
    """
    arguments = argument_roles(plan)
    roles = Roles(Dataflow(live.program), arguments)
    counts = dict.fromkeys(ROLES, 0)
    for argument in live.arguments:
        counts[arguments.get(unescape(argument.op_name), OTHER)] += argument.bytes
    for value in live.values:
        counts[roles.of((value.name, value.index))] += value.bytes
    counts[OTHER] += live.outputs
    counts[FRAGMENTATION] += live.fragmentation
    # Each byte has one role; a value that is counted twice or not at all would show here.
    assert sum(counts.values()) == live.peak
    return counts


def argument_roles(plan: Plan) -> dict[str, str]:
    """Returns {name of each argument of the compiled step: its role}.

    The names are paths in the call, such as `state['params']['lm_head/kernel']`.
    """
    roles = {}
    copied, of_features = plan.abstract_state.get("masters", {}), feature_parts(plan.abstract_state)
    for path, _ in jax.tree_util.tree_leaves_with_path(plan.abstract_state):
        role = EXTRAS if path[0].key in of_features else _ARGUMENTS.get(path[0].key, OTHER)
        # With master copies, `params` has both; these are the parameters that have a copy.
        if path[0].key == "params" and path[1].key in copied:
            role = STORED  # the copy that forward and backward read
        if path[0].key == "opt_state" and getattr(path[1], "name", None) == EMA:
            role = AVERAGE
        roles["state" + jax.tree_util.keystr(path)] = role
    for path, _ in jax.tree_util.tree_leaves_with_path(plan.abstract_batch):
        roles["batch" + jax.tree_util.keystr(path)] = BATCH
    return roles


def unescape(op_name: str) -> str:
    """Removes the escapes of an op_name that was written between quotation marks."""
    return op_name.replace("\\'", "'").replace('\\"', '"')


class _Origin(enum.Flag):
    """Origins of a value: the kinds of arguments from which it was copied without computation;
    COMPUTED if it or its source was computed; WORKSPACE for scratch memory of a library."""

    NONE = 0
    PARAMETER = enum.auto()
    STATE = enum.auto()
    BATCH = enum.auto()
    EXTRAS = enum.auto()
    OTHER_ARGUMENT = enum.auto()
    COMPUTED = enum.auto()
    WORKSPACE = enum.auto()


_ORIGINS = {
    MASTERS: _Origin.PARAMETER,
    STORED: _Origin.PARAMETER,
    FROZEN: _Origin.PARAMETER,
    OPTIMIZER: _Origin.STATE,
    AVERAGE: _Origin.STATE,
    BATCH: _Origin.BATCH,
    EXTRAS: _Origin.EXTRAS,
    OTHER: _Origin.OTHER_ARGUMENT,
}
_MOVED_ONLY = {
    _Origin.PARAMETER: WEIGHTS,
    _Origin.BATCH: BATCH,
    _Origin.EXTRAS: EXTRAS,
    _Origin.OTHER_ARGUMENT: OTHER,
}


class Roles:
    """Determines the role of every value of a compiled training step.

    Args:
      flow: dataflow of the program.
      arguments: {name of an argument: its role}.
    """

    def __init__(self, flow: Dataflow, arguments: Mapping[str, str]):
        self._flow = flow
        self._origin = self._find_origins(arguments)
        self._model = self._find_model()
        self._from_weights = self._find_from_weights()
        # Values that forward or backward still read, now or later.
        self._read = self._closure(
            (
                source
                for value in self._model
                for source, link in flow.sources(value)
                if link is Edge.USED
            ),
            flow.sources,
        )
        self._update = self._find_update()

    def of(self, value: Value) -> str:
        """Returns the role of a value, one of `ROLES`; "other" for tables of tuples and values
        without a name."""
        if self._flow.array(value) is None:
            return OTHER
        origin = self._origin[value]
        if not origin:
            # A constant has no origin; what it becomes decides.
            value = self._first_with_origin(value)
            origin = self._origin[value]
        if not origin and self._only_update_reads(value):
            return UPDATE
        return self._role(value, origin)

    def _only_update_reads(self, value: Value) -> bool:
        """Returns whether only the optimizer's update reads a constant, such as a decay factor."""
        readers = {
            target
            for found in self._walk(value)
            for target, link in self._flow.targets(found)
            if link is Edge.USED
        }
        # A constant that nothing reads is no part of the update.
        return bool(readers) and readers <= self._update

    def _role(self, value: Value, origin: _Origin) -> str:
        read = value in self._read
        if _Origin.WORKSPACE in origin:
            return WORKSPACE
        # The update also uses what the model reads, such as weights; these keep the model's role.
        if value in self._update and not read:
            return UPDATE
        if origin in _MOVED_ONLY:
            role = _MOVED_ONLY[origin]
            # A copy of weights that only the update reads, such as a cast, belongs to the update.
            return UPDATE if role == WEIGHTS and not read else role
        if read:
            return WEIGHTS if value in self._from_weights else ACTIVATIONS
        return GRADIENTS if _Origin.COMPUTED in origin else OTHER

    def _first_with_origin(self, value: Value) -> Value:
        """Follows the uses of `value` to the first value whose origin is known, and returns that
        value.

        A constant, such as the start of an accumulator, takes the role of the returned value.
        """
        for found in self._walk(value):
            if self._origin[found]:
                return found
        return value

    def _walk(self, value: Value) -> Iterable[Value]:
        seen, waiting = {value}, [value]
        # The list grows while it is read, so values come in the order of their distance.
        for found in waiting:
            yield found
            for target, link in self._flow.targets(found):
                if link is not Edge.USED and target not in seen:
                    seen.add(target)
                    waiting.append(target)

    # --- computed once ----------------------------------------------------------------------------

    def _find_origins(self, arguments: Mapping[str, str]) -> dict[Value, _Origin]:
        flow = self._flow
        origins: dict[Value, _Origin] = defaultdict(lambda: _Origin.NONE)
        entry = {parameter.name for parameter in flow.program.entry.parameters}
        for value in flow.values:
            name, _ = value
            if name in entry:
                role = arguments.get(unescape(flow.instructions[name].op_name), OTHER)
                origins[value] = _ORIGINS[role]
            elif flow.is_workspace(value):
                origins[value] = _Origin.WORKSPACE
            elif self._computes(value):
                origins[value] = _Origin.COMPUTED
        waiting = list(origins)
        while waiting:
            value = waiting.pop()
            for target, link in flow.targets(value):
                # An origin is a set that only grows, so the loop ends.
                if link is Edge.SAME and origins[value] not in origins[target]:
                    origins[target] |= origins[value]
                    waiting.append(target)
        return origins

    def _computes(self, value: Value) -> bool:
        """Returns whether a value is computed, rather than copied from other values."""
        links = [link for _, link in self._flow.sources(value)]
        return bool(links) and Edge.SAME not in links

    def _find_model(self) -> set[Value]:
        """Returns the values that the forward and backward pass compute, without values that are
        only copied."""
        flow = self._flow
        # JAX names the operations of a differentiated function with `jvp(`, and of its transpose
        # as well.
        named = {name for name, i in flow.instructions.items() if "jvp(" in i.op_name}
        # Compilers drop the name of a product that they rewrite, as for cuBLAS.
        nameless = {name for name, i in flow.instructions.items() if not i.op_name}
        near = self._closure(
            (value for value in flow.values if value[0] in named),
            lambda value: [
                (target, link)
                for target, link in flow.targets(value)
                if target[0] in nameless or link is Edge.SAME
            ],
        )
        found = set()
        for value in flow.values:
            name, opcode = value[0], flow.instructions[value[0]].opcode
            # Moves take the role of what they move, so they are no part of the model itself.
            if opcode in MOVES or not self._computes(value):
                continue
            rewritten = name in nameless and opcode in MATMULS and value in near
            if name in named or rewritten:
                found.add(value)
        return found

    def _find_from_weights(self) -> set[Value]:
        """Returns the values that contain or are computed from weights, and not from the batch,
        such as codes."""
        weights, batch = (
            self._closure(
                (value for value in self._flow.values if kind in self._origin[value]),
                self._flow.targets,
            )
            for kind in (_Origin.PARAMETER, _Origin.BATCH)
        )
        # What depends on the batch is an activation, even if it depends on weights too.
        return weights - batch

    def _find_update(self) -> set[Value]:
        """Returns the values that contain or are computed from the optimizer state or that, outside
        of forward and backward, are computed from weights; values in `_read` that they reach are
        left out."""
        flow, read = self._flow, self._read
        starts = [value for value in flow.values if self._origin[value] is _Origin.STATE]
        for value in flow.values:
            if value in read or value in self._model:
                continue
            for source, link in flow.sources(value):
                # Outside of the model, an operation on a weight that is not a move is weight decay
                # or an update.
                if link is not Edge.SAME and self._origin[source] is _Origin.PARAMETER:
                    starts.append(value)
        return self._closure(
            starts,
            # The walk stops at what the model reads: the new weights are not temporaries of the
            # update.
            lambda value: [pair for pair in flow.targets(value) if pair[0] not in read],
        )

    def _closure(
        self, starts: Iterable[Value], neighbours: Callable[[Value], Iterable[tuple[Value, Edge]]]
    ) -> set[Value]:
        found = set(starts)
        waiting = list(found)
        while waiting:
            for neighbour, _ in neighbours(waiting.pop()):
                if neighbour not in found:
                    found.add(neighbour)
                    waiting.append(neighbour)
        return found
