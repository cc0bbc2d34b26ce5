"""Bytes of device memory that each instruction reads and writes."""

from __future__ import annotations

import functools

from zerojax.forecasting.hlo.program import Computation, Instruction, Program
from zerojax.forecasting.hlo.schedule import Total
from zerojax.forecasting.hlo.types import HOST_MEMORY_SPACE, Array

# They name values, or order them, without touching memory.
_FREE = frozenset(
    """
    parameter constant tuple get-tuple-element bitcast opt-barrier after-all add-dependency
    partition-id replica-id send-done
    """.split()  # noqa: SIM905, as a list it takes a screen
)
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
_UPDATES = frozenset(("dynamic-update-slice", "scatter"))
# Every element of their result needs several of their operand.
_COMBINE = frozenset(
    """
    reduce reduce-window select-and-scatter dot ragged-dot scaled-dot convolution sort topk fft
    cholesky triangular-solve custom-call fusion
    """.split()  # noqa: SIM905
)
_RENAMES = frozenset(("bitcast", "reshape"))
_SCRATCH_DTYPES = ("s8", "u8")


def hbm_bytes(program: Program) -> int:
    """Bytes of device memory that one step reads and writes on one device, loops counted.

    Each kernel reads its operands once and writes its result once. Of an operand that a fusion only
    slices, the slice counts; of one it updates in place, the update. Workspaces of libraries, and
    what caches save or spill, are not in it. Host memory is not device memory.
    """
    return Traffic(program).total.of_program()


class Traffic:
    """Bytes per instruction."""

    def __init__(self, program: Program):
        self._program = program

    @functools.cached_property
    def total(self) -> Total:
        return Total(self._program, self.of_kernel)

    def of_kernel(self, where: Computation, instruction: Instruction) -> int:
        """One execution of an instruction that is no control flow.

        Of what runs asynchronously the start reads and the done writes, but a fusion does both at
        its start.
        """
        opcode = instruction.opcode
        if opcode in _FREE:
            return 0
        if opcode in ("fusion", "fusion-start"):
            return self._of_fusion(where, instruction)
        if opcode.endswith(("-update", "-done")):
            return 0 if opcode.endswith("-update") else self._of_done(where, instruction)
        reads = _bytes(where.operand_arrays(instruction))
        if opcode.endswith("-start") or opcode in ("send", "recv"):
            return reads
        if opcode in _SLICES or opcode in _UPDATES:
            return _of_slice(where, instruction)
        return reads + _bytes(_without_workspace(instruction))

    def _of_done(self, where: Computation, done: Instruction) -> int:
        """Nothing if the start wraps a computation: it was counted there."""
        start = done.operands[0]
        while start in where and where[start].opcode.endswith("-update"):
            start = where[start].operands[0]
        wraps = start in where and where[start].callees.get("calls")
        return 0 if wraps else _bytes(done.arrays)

    def _of_fusion(self, where: Computation, fusion: Instruction) -> int:
        body = self._program.computations[fusion.callees["calls"][0]]
        in_place = _updated_in_place(body)
        needed = _elements_needed(body, in_place)
        read = sum(
            _bytes(operand.arrays) * needed.get(parameter.name, 0) // max(1, _size(parameter))
            for parameter, operand in zip(body.parameters, where.operands_of(fusion), strict=True)
        )
        written = sum(
            _update_bytes(body, result) if result.name in in_place else _written(body, result)
            for result in _results(body)
        )
        return read + written


def _bytes(arrays: tuple[Array, ...] | list[Array]) -> int:
    return sum(array.bytes for array in arrays if array.memory_space != HOST_MEMORY_SPACE)


def _without_workspace(instruction: Instruction) -> tuple[Array, ...]:
    """The result, less what cuBLAS and cuDNN return as their scratch memory."""
    arrays = instruction.arrays
    target = instruction.attributes.get("custom_call_target", "") if len(arrays) > 1 else ""
    is_library = target.startswith(('"__cublas', '"__cudnn'))
    return arrays[:-1] if is_library and arrays[-1].dtype in _SCRATCH_DTYPES else arrays


def _written(body: Computation, result: Instruction) -> int:
    """Bytes of a fusion's result that is no update in place."""
    if result.opcode == "get-tuple-element":
        source = body[result.operands[0]]
        if int(result.attributes["index"]) >= len(_without_workspace(source)):
            return 0
    return _bytes(_without_workspace(result))


def _of_slice(where: Computation, instruction: Instruction) -> int:
    """A slice, gather, update or scatter that is a kernel of its own."""
    if instruction.opcode in _UPDATES:
        return _update_bytes(where, instruction) + _operand_bytes(where, instruction)
    return 2 * instruction.bytes + _operand_bytes(where, instruction)


def _operand_bytes(where: Computation, instruction: Instruction) -> int:
    """Of all operands but the first: indices and updates."""
    return sum(_bytes(operand.arrays) for operand in where.operands_of(instruction)[1:])


def _update_bytes(where: Computation, update: Instruction) -> int:
    """What an update in place touches of its first operand: written, for a scatter also read."""
    is_scatter = update.opcode == "scatter"
    return (2 if is_scatter else 1) * _bytes(_update_operand(where, update).arrays)


def _update_operand(where: Computation, update: Instruction) -> Instruction:
    index = -1 if update.opcode == "scatter" else 1
    return where[update.operands[index]]


def _results(body: Computation) -> list[Instruction]:
    """What a fusion writes, one instruction per array, bitcasts removed."""
    roots = body.operands_of(body.root) if body.root.opcode == "tuple" else [body.root]
    return [_renamed(body, root) for root in roots]


def _renamed(body: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in _RENAMES:
        instruction = body[instruction.operands[0]]
    return instruction


def _updated_in_place(body: Computation) -> set[str]:
    """Results of a fusion that write an update into the memory of a parameter."""
    return {
        result.name
        for result in _results(body)
        if result.opcode in _UPDATES
        and _renamed(body, body[result.operands[0]]).opcode == "parameter"
    }


def _elements_needed(body: Computation, in_place: set[str]) -> dict[str, int]:
    """Name -> how many elements of that value a fusion needs to compute its results."""
    needed = {result.name: _size(result) for result in _results(body)}
    pieces: dict[str, int] = {}
    for user in reversed(body.instructions):
        of_user = needed.get(user.name)
        if not of_user:
            continue
        for index, operand in enumerate(body.operands_of(user)):
            is_target = index == 0 and user.name in in_place
            part = 0 if is_target else _part_needed(user, index, operand, of_user)
            if user.opcode in _SLICES or user.opcode in _RENAMES:
                # The pieces of a split are different ones; `x * exp(x)` needs the same x twice.
                part = pieces[operand.name] = pieces.get(operand.name, 0) + part
            needed[operand.name] = min(_size(operand), max(part, needed.get(operand.name, 0)))
    return needed


def _part_needed(user: Instruction, index: int, operand: Instruction, of_user: int) -> int:
    """How many elements of its operand an instruction needs for `of_user` of its own."""
    size = _size(operand)
    if (user.opcode in _SLICES or user.opcode in _UPDATES) and index > 0:
        return size
    if user.opcode in _COMBINE and len(user.arrays) > 1:
        return size
    if user.opcode in _COMBINE:
        return -(-size * of_user // max(1, _size(user)))
    return min(size, of_user)


def _size(instruction: Instruction) -> int:
    return sum(array.size for array in instruction.arrays)
