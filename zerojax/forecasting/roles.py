"""Assigns roles to the bytes on a device at the moment of the peak: weights, activations, others.

The role of a value follows from its origin and its uses, through fusions and loops:

- weights are parameters of the state, moved: sliced, cast, gathered, in another layout;
- forward and backward are the operations under `jax.value_and_grad` (their names contain `jvp(`)
  and all that these read; values that they compute and read again are activations;
- values that they compute and never read again are gradients, and so are sums of these, over
  microbatches and over devices, until they meet the optimizer's state or the parameters;
- the other values of the update are the optimizer's temporaries.

Names alone are not enough: a gradient's accumulator starts as a constant, a loop carries all of
them in one tuple, and a matrix product that the compiler rewrote has no name.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import jax

from zerojax.forecasting.hlo.dataflow import MATMULS, MOVES, Dataflow, Edge, Value
from zerojax.forecasting.hlo.live_buffers import LiveAtPeak
from zerojax.optim import EMA
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
}


def bytes_by_role(live: LiveAtPeak, plan: Plan) -> dict[str, int]:
    """Returns the bytes of device memory by role, at the moment when most are in use.

    Args:
      live: of the plan's training step, from `forecasting.hlo.live_buffers.read_live`.
      plan: the plan of the step; names the arguments.

    Returns:
      Every one of `ROLES`. The first seven and "other" hold arguments, for the whole step; copies
      and slices of the batch or of extras count there too. "other" also holds outputs with their
      own memory, counters, keys and tables of pointers; "fragmentation" is the part of the
      temporaries' block that no value uses. The sum is `live.peak`.
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
    assert sum(counts.values()) == live.peak
    return counts


def argument_roles(plan: Plan) -> dict[str, str]:
    """Returns {name of each argument in the compiled step: its role}.

    Names are paths in the call, such as `state['params']['lm_head/kernel']`.
    """
    roles = {}
    copied = plan.abstract_state.get("masters", {})
    for path, _ in jax.tree_util.tree_leaves_with_path(plan.abstract_state):
        role = _ARGUMENTS.get(path[0].key, OTHER)
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
    """Kinds of arguments from which a value was copied without computation."""

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
    """The role of every value of a compiled training step.

    Args:
      flow: dataflow of the program.
      arguments: name of an argument -> its role.
    """

    def __init__(self, flow: Dataflow, arguments: Mapping[str, str]):
        self._flow = flow
        self._origin = self._find_origins(arguments)
        self._model = self._find_model()
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
        """Returns the role of a value, one of `ROLES`; "other" for tuple tables and unnamed
        values.
        """
        if self._flow.array(value) is None:
            return OTHER
        origin = self._origin[value]
        if not origin:
            value = self._first_with_origin(value)
            origin = self._origin[value]
        if not origin and self._only_update_reads(value):
            return UPDATE
        return self._role(value, origin)

    def _only_update_reads(self, value: Value) -> bool:
        """Returns whether the optimizer's update alone reads a constant, such as a decay factor."""
        readers = {
            target
            for found in self._walk(value)
            for target, link in self._flow.targets(found)
            if link is Edge.USED
        }
        return bool(readers) and readers <= self._update

    def _role(self, value: Value, origin: _Origin) -> str:
        read = value in self._read
        if _Origin.WORKSPACE in origin:
            return WORKSPACE
        if value in self._update and not read:
            return UPDATE
        if origin in _MOVED_ONLY:
            role = _MOVED_ONLY[origin]
            return UPDATE if role == WEIGHTS and not read else role
        if read:
            return ACTIVATIONS
        return GRADIENTS if _Origin.COMPUTED in origin else OTHER

    def _first_with_origin(self, value: Value) -> Value:
        """Follows the uses of `value` to the first value whose origin is known.

        A constant, such as the start of an accumulator, has the role of that value.
        """
        for found in self._walk(value):
            if self._origin[found]:
                return found
        return value

    def _walk(self, value: Value) -> Iterable[Value]:
        seen, waiting = {value}, [value]
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
                if link is Edge.SAME and origins[value] not in origins[target]:
                    origins[target] |= origins[value]
                    waiting.append(target)
        return origins

    def _computes(self, value: Value) -> bool:
        """Returns whether a value is computed rather than copied from inputs."""
        links = [link for _, link in self._flow.sources(value)]
        return bool(links) and Edge.SAME not in links

    def _find_model(self) -> set[Value]:
        """Finds the values that forward and backward pass compute, excluding copies and sums."""
        flow = self._flow
        named = {name for name, i in flow.instructions.items() if "jvp(" in i.op_name}
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
            if opcode in MOVES or not self._computes(value):
                continue
            rewritten = name in nameless and opcode in MATMULS and value in near
            if name in named or rewritten:
                found.add(value)
        return found

    def _find_update(self) -> set[Value]:
        """Finds values computed from optimizer state or, outside of the model, from weights."""
        flow, read = self._flow, self._read
        starts = [value for value in flow.values if self._origin[value] is _Origin.STATE]
        for value in flow.values:
            if value in read or value in self._model:
                continue
            for source, link in flow.sources(value):
                if link is not Edge.SAME and self._origin[source] is _Origin.PARAMETER:
                    starts.append(value)
        return self._closure(
            starts,
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
