"""Finds the collectives of an HLO program: their bytes, number of executions and groups of devices,
in all notations of XLA."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

from zerojax.config.late_dataclasses import dataclass
from zerojax.forecasting.hlo.program import Computation, Instruction, Program

PERMUTE = "collective-permute"
KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    PERMUTE,
)
# With a channel but without global ids, these interpret a group of replicas as all partitions of
# each (XLA's CollectiveOpGroupMode kCrossReplicaAndPartition); the others name partitions.
_OVER_REPLICAS = ("all-reduce", "all-gather", "reduce-scatter")
_SEND_PAIRS = re.compile(r'_xla_send_recv_source_target_pairs="?(\{.*?\}\}|\{\})')

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?P<order>.*?)\{(?P<axes>[^{}]*)\}$")
_MESH_AXIS = re.compile(r"\s*(.+?)=(\d+)\s*")
_AXIS = re.compile(r"(.+?)(?::\((\d+)\)(\d+))?")
Group = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction of a program.

    Attributes:
      kind: one of `KINDS`.
      dtype: dtype of the sent arrays; "bf16/f32" if arrays of several dtypes are sent together.
      payload_bytes: size in bytes of the whole arrays in one execution: the gathered array of an
        all-gather, the array before a reduce-scatter; for other kinds the bytes that one device
        holds for the others.
      wire_bytes: bytes that one device sends in one execution; for a permute the busiest device.
        For a ring of g devices: all-reduce 2 (g-1)/g of the payload; all-gather, reduce-scatter and
        all-to-all (g-1)/g; permute and broadcast 1. A ragged all-to-all counts as if every row was
        sent.
      group: devices of the first group, as positions in the mesh; for a permute, all devices that
        are reachable from its first pair.
      group_size: number of devices in `group`.
      times: number of executions per step; loops of `Program.unknown_loops` count as one iteration.
      loop_depth: number of loops around the instruction.
      in_branch: whether the instruction runs only in some branch of a conditional.
      op_name: name of the traced operation from which the instruction was compiled.
      name: name of the instruction.
      start: name of the instruction that starts the collective asynchronously; None if the program
        waits for it.
      arrays: number of arrays that are sent together.
    """

    kind: str
    dtype: str
    payload_bytes: int
    wire_bytes: int
    group: Group
    group_size: int
    times: int = 1
    loop_depth: int = 0
    in_branch: bool = False
    op_name: str
    name: str
    start: str | None
    arrays: int

    @property
    def is_async(self) -> bool:
        return self.start is not None


def find_collectives(program: Program, num_devices: int) -> list[Collective]:
    """Finds all collectives that a step executes, in the order in which the step first reaches
    them.

    Collectives in loops, calls, fusions and asynchronous starts are included. Of a conditional's
    branches only the branch that sends the most bytes counts.

    Args:
      program: program compiled for `num_devices` devices.
      num_devices: number of devices that run the program.

    Raises:
      ValueError: the program was compiled for another number of devices.
    """
    stated = program.num_partitions * program.num_replicas
    if stated not in (1, num_devices):
        raise ValueError(
            f"num_devices={num_devices}, but the program was compiled for {stated} "
            f"({program.num_replicas} replicas of {program.num_partitions} partitions); pass "
            f"num_devices={stated}"
        )
    return list(_Finder(program, num_devices).inside(program.entry.name).values())


def find_in_branches(program: Program, num_devices: int) -> list[Collective]:
    """Finds the collectives inside branches of conditionals, in all branches and at any depth.

    Devices that take different branches would wait for each other forever, so a pipeline's step
    must have no such collectives. `times` is always 1, even inside loops.

    Args:
      program: program compiled for `num_devices` devices.
      num_devices: number of devices that run the program.
    """
    finder = _Finder(program, num_devices)
    waiting = [
        name
        for computation in program.computations.values()
        if program.times_run(computation.name)
        for instruction in computation.instructions
        for name in instruction.branches
    ]
    seen = set(waiting)
    found = []
    while waiting:
        computation = program.computations[waiting.pop()]
        for instruction in computation.instructions:
            if _kind(instruction):
                one = finder.read(computation, instruction)
                found.append(dataclasses.replace(one, in_branch=True))
            callees = {name for names in instruction.callees.values() for name in names} - seen
            seen |= callees
            waiting += callees
    return sorted(found, key=lambda one: one.name)


def find_groups(program: Program, num_devices: int) -> dict[str, list[Group]]:
    """Returns {name of a collective: all of its groups of devices}; names are unique.

    Devices of a permute are in one group if transfers connect them, directly or through others.

    Args:
      program: program compiled for `num_devices` devices.
      num_devices: number of devices that run the program.
    """
    finder = _Finder(program, num_devices)
    return {
        instruction.name: finder.groups(kind, instruction)
        for computation in program.computations.values()
        for instruction in computation.instructions
        if (kind := _kind(instruction))
    }


class _Finder:
    """Finds the collectives of a program, one computation after the other, and stores the
    results."""

    def __init__(self, program: Program, num_devices: int):
        self._program = program
        self._num_devices = num_devices
        # One computation can be called from many places; without the store the search repeats each
        # one.
        self._found: dict[str, dict[str, Collective]] = {}

    def inside(self, name: str) -> dict[str, Collective]:
        if name not in self._found:
            found: dict[str, Collective] = {}
            computation = self._program.computations[name]
            for instruction in computation.instructions:
                for inner in self._of_instruction(computation, instruction):
                    earlier = found.get(inner.name)
                    # The same computation may be called twice, and its instructions then run more
                    # often.
                    times = inner.times + (earlier.times if earlier else 0)
                    found[inner.name] = dataclasses.replace(inner, times=times)
            self._found[name] = found
        return self._found[name]

    def _of_instruction(self, where: Computation, instruction: Instruction) -> list[Collective]:
        if _kind(instruction):
            return [self.read(where, instruction)]
        if instruction.opcode == "conditional":
            branches = [list(self.inside(name).values()) for name in instruction.branches]
            dearest = max(branches, key=lambda branch: sum(c.wire_bytes * c.times for c in branch))
            return [dataclasses.replace(c, in_branch=True) for c in dearest]
        is_loop = instruction.opcode == "while"
        # The start belongs to the wrapper: the collective inside has no start of its own.
        starts = instruction.name if instruction.opcode.endswith("-start") else None
        return [
            dataclasses.replace(
                inner,
                times=inner.times * times,
                loop_depth=inner.loop_depth + is_loop,
                start=inner.start or starts,
            )
            for name, times in instruction.runs()
            for inner in self.inside(name).values()
        ]

    def read(self, where: Computation, instruction: Instruction) -> Collective:
        """Parses a collective instruction as if it was executed once and outside of all loops."""
        kind = _kind(instruction)
        sent = where.operand_arrays(instruction)
        if instruction.opcode == "send" or kind == "ragged-all-to-all":
            # Operands after the first are a token, or offsets of rows.
            sent = list(where[instruction.operands[0]].arrays)
        held = sum(array.bytes for array in sent)
        if kind == PERMUTE:
            pairs = _pairs(instruction)
            group = connected(pairs)
            # A pair of a device with itself is a copy on the device and sends nothing.
            sources = [source for source, target in pairs if source != target]
            # A permute is as slow as the device that sends most often.
            payload, wire = held, held * max(map(sources.count, sources), default=0)
        else:
            group = self.groups(kind, instruction)[0]
            payload = held * len(group) if kind == "all-gather" else held
            wire = ring_bytes(kind, payload, len(group))
        return Collective(
            kind=kind,
            dtype="/".join(sorted({array.dtype for array in sent})),
            payload_bytes=payload,
            wire_bytes=wire,
            group=group,
            group_size=len(group),
            op_name=instruction.op_name,
            name=instruction.name,
            start=instruction.name if _is_started(instruction) else None,
            arrays=len(sent),
        )

    def groups(self, kind: str, instruction: Instruction) -> list[Group]:
        """Returns all groups of devices of a collective, as positions in the mesh; of a permute,
        the sets of devices that its pairs connect."""
        if kind == PERMUTE:
            found: list[Group] = []
            pairs = _pairs(instruction)
            while pairs:
                found.append(connected(pairs))
                # Only the source decides: a target is connected to its source, which is in the
                # set.
                pairs = [pair for pair in pairs if pair[0] not in found[-1]]
            return found
        attributes = instruction.attributes
        text = attributes.get("replica_groups", "{}")
        if "device_ids" in attributes:
            # This attribute is part of the mesh notation, after a comma.
            text = f"{text}, device_ids={attributes['device_ids']}"
        groups = read_groups(text, self._num_devices)
        by_replica = kind in _OVER_REPLICAS and "channel_id" in attributes
        is_everyone = len(groups[0]) == self._num_devices
        # A group of all devices is the same in both interpretations.
        if not by_replica or attributes.get("use_global_device_ids") == "true" or is_everyone:
            return groups
        partitions = self._program.num_partitions
        return [
            # Devices are numbered replica by replica.
            tuple(r * partitions + p for r in group for p in range(partitions))
            for group in groups
        ]


def ring_bytes(kind: str, payload: int, group_size: int) -> int:
    """Returns the number of bytes, rounded up, that one device of a ring of `group_size` devices
    sends in a collective of `payload` bytes; `kind` is any of `KINDS` except `PERMUTE`."""
    if kind == "collective-broadcast":
        return payload if group_size > 1 else 0
    factor = 2 if kind == "all-reduce" else 1
    return -(-factor * (group_size - 1) * payload // group_size)


def _kind(instruction: Instruction) -> str:
    """Returns the kind of collective that an instruction is or starts; "" for any other
    instruction."""
    kind = instruction.opcode.removesuffix("-start")
    if kind in KINDS:
        return kind
    # XLA may split a permute into a `send` and a `recv` with this attribute; only one counts.
    return PERMUTE if kind == "send" and _SEND_PAIRS.search(instruction.attribute_text) else ""


def _is_started(instruction: Instruction) -> bool:
    if instruction.opcode == "send":
        return True
    # The compiler marks a started collective as synchronous if nothing runs beside it.
    settings = instruction.backend_config.get("collective_backend_config", {})
    return instruction.opcode.endswith("-start") and not settings.get("is_sync", False)


def _pairs(permute: Instruction) -> list[tuple[int, int]]:
    text = permute.attributes.get("source_target_pairs")
    if text is None:
        found = _SEND_PAIRS.search(permute.attribute_text)
        text = found[1] if found else ""
    return read_pairs(text)


def read_groups(text: str, num_devices: int) -> list[Group]:
    """Parses the device groups of a collective.

    Args:
      text: value of `replica_groups`: `{{0,1},{2,3}}`, `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)` or
        `mesh['data'=4,'model'=2] {'data'}`; `{}` is one group of all devices.
      num_devices: number of devices that run the program.

    Returns:
      Groups as positions of devices in the mesh for which the program was compiled.

    Raises:
      ValueError: the text is in another notation.
    """
    if not text.strip("{} "):
        return [tuple(range(num_devices))]
    if text.startswith("mesh"):
        return _read_mesh(text)
    if found := _IOTA.fullmatch(text):
        shape, source, order = (_integers(part or "") for part in found.groups())
        ids = _transposed(range(math.prod(source)), source, order or range(len(source)))
        return _cut(ids, shape[-1])
    if text.startswith("{{"):
        return [_integers(group) for group in re.findall(r"\{([\d,\s]*)\}", text)]
    raise ValueError(
        f"replica_groups={text!r} has an unknown notation; "
        "extend zerojax/forecasting/hlo/communication.py"
    )


def read_pairs(text: str) -> list[tuple[int, int]]:
    """Parses the (source, target) devices of a permute's transfers, such as `{{0,1},{1,0}}`."""
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),\s*(\d+)\}", text)]


def connected(pairs: Sequence[tuple[int, int]]) -> Group:
    """Returns the devices that are reachable from the first pair of a permute through any number of
    pairs; () without pairs."""
    group = set(pairs[0]) if pairs else set()
    # Pairs come in any order, so the group grows until a pass over them adds no device.
    while more := {d for pair in pairs if group.intersection(pair) for d in pair} - group:
        group |= more
    return tuple(sorted(group))


def _read_mesh(text: str) -> list[Group]:
    """Parses device groups in mesh notation, `mesh['a'=4,'b'=2] {'b','a':(1)2}`: groups along axes,
    or along parts of axes.

    `'a':(2)2` is a part of axis `a`: an axis of 8 devices is read as [2, 2, 2], and this is its
    middle dimension. Between mesh and axes the text may have the order of the devices: as ids in
    `device_ids=([[0,2],[1,3]])`, or as `device_ids=([2,4]T(1,0))`, which means ids counted in shape
    [2, 4] and transposed.

    Source: MeshAxesReplicaGroupList in OpenXLA's xla/hlo/ir/replica_group.cc.
    """
    found = _MESH.fullmatch(text)
    if found is None:
        raise ValueError(
            f"replica_groups={text!r} is not a mesh with axes such as mesh['a'=2] {{'a'}}"
        )
    axes = [_MESH_AXIS.fullmatch(axis) for axis in found[1].split(",")]
    sizes = {axis[1]: int(axis[2]) for axis in axes if axis}
    wanted = [_AXIS.fullmatch(axis.strip()) for axis in found["axes"].split(",")]
    # Each axis is cut into as many dimensions as its parts need; `grouped` are the requested ones.
    parts = [(part[1], part[2], part[3]) for part in wanted if part]
    dims: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        for stride, length in _cut_axis(
            size, [(int(pre), int(n)) for axis, pre, n in parts if axis == name and pre]
        ):
            place[name, stride] = len(dims)
            dims.append(length)
    grouped = [place[name, int(pre or 1)] for name, pre, _ in parts]
    rest = [dim for dim in range(len(dims)) if dim not in grouped]
    ids = _transposed(_mesh_order(found["order"], math.prod(dims)), dims, [*rest, *grouped])
    return _cut(ids, math.prod(dims[dim] for dim in grouped))


def _cut_axis(size: int, parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Splits an axis of `size` devices at `parts`, which are (product of the dimensions before the
    part, length). Returns such a pair for each dimension that results."""
    cut, before = [], 1
    for pre, length in sorted(parts):
        # Between two requested parts lies a part of the axis that nobody named.
        if pre > before:
            cut.append((before, pre // before))
        cut.append((pre, length))
        before = pre * length
    if before < size or not cut:
        cut.append((before, size // before))
    return cut


def _mesh_order(text: str, count: int) -> Sequence[int]:
    iota = re.search(r"<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text) or re.search(
        r"\(\[([\d,]+)\]T\(([\d,]+)\)", text
    )
    if iota:
        source = _integers(iota[1])
        return _transposed(range(count), source, _integers(iota[2] or "") or range(len(source)))
    ids = _integers(text.partition("device_ids=")[2])
    if text.strip() and len(ids) != count:
        raise ValueError(f"the order {text!r} has {len(ids)} devices, but the mesh has {count}")
    return ids or range(count)


def _integers(text: str) -> Group:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _transposed(ids: Sequence[int], shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Computes `numpy.reshape(ids, shape).transpose(order).ravel()` without NumPy."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    places = itertools.product(*(range(shape[dim]) for dim in order))
    return [ids[sum(i * strides[dim] for i, dim in zip(p, order, strict=True))] for p in places]


def _cut(ids: Sequence[int], size: int) -> list[Group]:
    return [tuple(ids[start : start + size]) for start in range(0, len(ids), size)]
