"""Lists what a scheduled program does, in the order of its schedule: kernels, transfers, loops.

Work is counted and has no time yet, since rates differ between cards and machines:
`forecasting.expected_time` replays the list at the rates of one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zerojax.forecasting.hlo.communication import Collective
from zerojax.forecasting.hlo.costs import HbmTraffic, Matmuls, attention_keys
from zerojax.forecasting.hlo.host_copies import HostCopy
from zerojax.forecasting.hlo.overlap import Overlap
from zerojax.forecasting.hlo.program import Computation, Instruction, Program

KERNEL, START, WAIT, LOOP, BRANCHES = "kernel", "start", "wait", "loop", "branches"
"""First word of each entry of a timeline."""
COLLECTIVE, HOST_COPY = "collective", "host copy"
"""Kinds of transfers."""
PRODUCT, ATTENTION, FUSION, COPY = "product", "attention", "fusion", "copy"
"""Kinds of kernels: matrix products, attention by a library, kernels that compute while they read
and write memory, and plain copies."""

Timeline = list[list[Any]]
"""Entries in the order of the schedule, as plain lists that JSON can store:

    ["kernel", kind, times, flops, share of flops in 8-bit floats, bytes, keys, where]
    ["start", name of the wait, "collective" or "host copy", index among these]
    ["wait", name]
    ["loop", iterations, entries]
    ["branches", shares of the iterations, entries of each branch]

`flops` and `bytes` are of one launch; `times` is the number of launches. `keys` is the number of
keys that attention compares each query with, 0 for other kernels. `where` is a number that
`name_of` gave to the instruction.
"""


def read_timeline(
    program: Program,
    collectives: Sequence[Collective],
    copies: Sequence[HostCopy],
    overlap: Mapping[str, Overlap],
    *,
    name_of: Callable[[Instruction], int],
) -> Timeline:
    """Lists the work of one step on one device.

    Args:
      program: scheduled program.
      collectives: of `find_collectives`.
      copies: of `find_host_copies`.
      overlap: of `find_overlap` for the collectives; copies have their own.
      name_of: kernel -> number of the name under which its time is shown.
    """
    reader = _Reader(program, collectives, copies, overlap, name_of)
    return reader.of_computation(program.entry.name)


class _Reader:
    def __init__(
        self,
        program: Program,
        collectives: Sequence[Collective],
        copies: Sequence[HostCopy],
        overlap: Mapping[str, Overlap],
        name_of: Callable[[Instruction], int],
    ):
        self._program, self._name_of = program, name_of
        self._matmuls, self._traffic = Matmuls(program), HbmTraffic(program)
        self._transfers: dict[str, list[tuple[str, str, int]]] = {}
        self._waits: set[str] = set()
        # Several transfers can begin with one instruction: a kernel may copy in both directions.
        for index, one in enumerate(collectives):
            self._add(one.start or one.name, overlap[one.name].done, COLLECTIVE, index)
        for index, copy in enumerate(copies):
            self._add(copy.start or copy.name, copy.overlap.done, HOST_COPY, index)

    def _add(self, begins: str, done: str | None, kind: str, index: int) -> None:
        if done is not None:
            self._waits.add(done)
        # A transfer without a done is waited for by its own instruction.
        self._transfers.setdefault(begins, []).append((done or begins, kind, index))

    def of_computation(self, name: str) -> Timeline:
        found: Timeline = []
        computation = self._program.computations[name]
        for instruction in computation.instructions:
            for entry in self._of_instruction(computation, instruction):
                if not _joins(found, entry):
                    found.append(entry)
        return found

    def _of_instruction(self, where: Computation, one: Instruction) -> Iterator[list[Any]]:
        if one.name in self._waits:  # what arrives was written beside the kernels
            yield [WAIT, one.name]
            return
        if one.name in self._transfers:
            transfers = self._transfers[one.name]
            yield from ([START, done, kind, index] for done, kind, index in transfers)
            if one.opcode == "fusion":  # a kernel that reads or writes host memory as it computes
                yield from self._kernel(where, one)
            yield from ([WAIT, done] for done, _, _ in transfers if done == one.name)
            return
        if one.opcode == "conditional":
            shares = self._program.shares_of(one)
            yield [BRANCHES, shares, [self.of_computation(name) for name in one.branches]]
        elif one.opcode == "while":
            body = self.of_computation(one.callees["body"][0])
            # A loop whose body takes no time would only make the replay longer.
            if body:
                trips = one.trip_count
                yield [LOOP, 1 if trips is None else trips, body]
        elif one.opcode in ("call", "call-start", "async-start") and one.callees:
            for name, _ in one.runs():
                yield from self.of_computation(name)
        else:
            yield from self._kernel(where, one)

    def _kernel(self, where: Computation, one: Instruction) -> Iterator[list[Any]]:
        products = self._matmuls.products(where, one)
        flops = sum(product.flops for product in products)
        moved = self._traffic.of_kernel(where, one)
        # An instruction that computes and moves nothing is no kernel, so it costs no launch
        # either.
        if not flops and not moved:
            return
        eight = sum(product.flops for product in products if product.is_eight_bit)
        kind, keys = FUSION, 0
        # Attention states FLOPs as products do, so it must be asked for first.
        if "fmha" in one.attributes.get("custom_call_target", ""):
            kind, keys = ATTENTION, attention_keys(one)
        elif flops:
            kind = PRODUCT
        elif self._is_copy(one):
            kind = COPY
        share = eight / flops if flops else 0.0
        yield [KERNEL, kind, 1, flops, share, moved, keys, self._name_of(one)]

    def _is_copy(self, one: Instruction) -> bool:
        """Returns whether a copy engine or a plain copy moves the bytes: XLA marks a slice whose
        place in memory it knows in each iteration."""
        if one.opcode.startswith("copy"):
            return True
        if not one.opcode.startswith("fusion"):
            return False
        body = self._program.computations[one.callees["calls"][0]]
        return "dynamic_slice_config" in body.root.backend_config


def _joins(found: Timeline, entry: list[Any]) -> bool:
    """Adds the launches of `entry` to the last entry of `found` if both are the same kernel of the
    same operation; returns whether they are."""
    if not found or entry[0] != KERNEL or found[-1][0] != KERNEL:
        return False
    last = found[-1]
    # All but the number of launches must be the same; flops and bytes are of one launch.
    if [last[1], *last[3:7]] != [entry[1], *entry[3:7]]:
        return False
    last[2] += entry[2]
    return True
