"""Counts the costs of an HLO program: FLOPs of its matrix products, bytes of device memory, and
sums over a step."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from zerojax.forecasting.hlo.program import (
    HOST_MEMORY_SPACE,
    Array,
    Computation,
    Instruction,
    Program,
)
from zerojax.operators.cudnn_attention import call_flops
from zerojax.operators.marks import cost_of_branches

# Opcodes whose computation is a list of separate instructions. A `fusion-start` is one kernel, like
# the fusion it starts.
_CALLS = ("call", "call-start", "async-start")

_DOTS = ("dot", "ragged-dot", "scaled-dot")
# Opcodes that only name or order values and access no memory.
_FREE = frozenset(
    """
    parameter constant tuple get-tuple-element bitcast opt-barrier after-all add-dependency
    partition-id replica-id send-done
    """.split()  # noqa: SIM905, as a list it takes a screen
)
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
_UPDATES = frozenset(("dynamic-update-slice", "scatter"))
# Opcodes for which each element of the result needs several elements of the operand.
_COMBINE = frozenset(
    """
    reduce reduce-window select-and-scatter dot ragged-dot scaled-dot convolution sort topk fft
    cholesky triangular-solve custom-call fusion
    """.split()  # noqa: SIM905
)
_RENAMES = frozenset(("bitcast", "reshape"))
_SCRATCH_DTYPES = ("s8", "u8")


class ScheduleSum:
    """Sums the costs of all instructions that a program executes.

    A loop counts as often as it runs, or once if the number of iterations is unknown (see
    `Program.unknown_loops`). A conditional counts as its most expensive branch, or as the mean over
    layers if the kind of layer selects the branch.

    Args:
      program: the program.
      cost: function `cost(computation, instruction)` that returns the cost of one execution of an
        instruction that is not control flow. A fusion is one instruction.
    """

    def __init__(self, program: Program, cost: Callable[[Computation, Instruction], int]):
        self._program = program
        self._cost = cost
        self._computations: dict[str, int] = {}
        self._instructions: dict[Instruction, int] = {}

    def of_program(self) -> int:
        return self.of_computation(self._program.entry.name)

    def of_computation(self, name: str) -> int:
        """Returns the cost of one execution of the computation `name`."""
        if name not in self._computations:
            computation = self._program.computations[name]
            self._computations[name] = sum(
                self.of_instruction(computation, instruction)
                for instruction in computation.instructions
            )
        return self._computations[name]

    def of_instruction(self, computation: Computation, instruction: Instruction) -> int:
        """Returns the cost of one execution of an instruction, including the computations that it
        runs."""
        if instruction.opcode == "conditional":
            costs = [self.of_computation(name) for name in instruction.branches]
            return cost_of_branches(costs, self._program.shares_of(instruction))
        if instruction.opcode == "while" or (instruction.opcode in _CALLS and instruction.callees):
            return sum(times * self.of_computation(name) for name, times in instruction.runs())
        if instruction not in self._instructions:
            self._instructions[instruction] = self._cost(computation, instruction)
        return self._instructions[instruction]


class Product(NamedTuple):
    """FLOPs of one matrix product, and whether both operands are 8-bit floats."""

    flops: int
    is_eight_bit: bool


class Matmuls:
    """Counts the matrix products of a program's instructions.

    A convolution counts as one product. cuDNN's fused attention counts as one product with the
    FLOPs of all its products; for causal attention only scores that are not masked count.
    """

    def __init__(self, program: Program):
        self._program = program
        self._fused: dict[str, list[Product]] = {}

    def flops(self, computation: Computation, instruction: Instruction) -> list[int]:
        """Returns the FLOPs (2 m n k) of each matrix product in one execution of the
        instruction."""
        return [product.flops for product in self.products(computation, instruction)]

    def products(self, computation: Computation, instruction: Instruction) -> list[Product]:
        """Returns each matrix product in one execution of an instruction on one device.

        Products inside fusions are included. Products inside loops, calls and branches are not,
        because `ScheduleSum` visits these computations itself.
        """
        opcode = instruction.opcode.removesuffix("-start")
        if opcode == "fusion":
            return [p for name in instruction.callees["calls"] for p in self._of_fusion(name)]
        if opcode in _DOTS:
            found = [_dot_flops(computation, instruction)]
        elif opcode == "convolution":
            found = [_convolution_flops(computation, instruction)]
        elif opcode == "custom-call":
            found = _library_flops(computation, instruction)
        else:
            return []
        # Without FLOPs the operands are not read: the call may have none.
        operands = [computation[name].arrays[0] for name in instruction.operands[:2] if found]
        small = all(array.dtype.startswith("f8") for array in operands)
        return [Product(flops, small) for flops in found]

    def _of_fusion(self, name: str) -> list[Product]:
        if name not in self._fused:
            computation = self._program.computations[name]
            self._fused[name] = [
                p for i in computation.instructions for p in self.products(computation, i)
            ]
        return self._fused[name]

    @functools.cached_property
    def total_flops(self) -> ScheduleSum:
        return ScheduleSum(self._program, lambda where, one: sum(self.flops(where, one)))

    @functools.cached_property
    def total_eight_bit_flops(self) -> ScheduleSum:
        return ScheduleSum(
            self._program,
            lambda where, one: sum(p.flops for p in self.products(where, one) if p.is_eight_bit),
        )

    @functools.cached_property
    def total_count(self) -> ScheduleSum:
        return ScheduleSum(self._program, lambda where, one: len(self.flops(where, one)))


def matmul_flops(program: Program) -> int:
    """Counts the FLOPs of all matrix products of one step on one device, with every loop iteration.

    Products inside kernels whose computation is not in the program's text are missing;
    `opaque_calls` lists them.
    """
    return Matmuls(program).total_flops.of_program()


def opaque_calls(program: Program) -> dict[str, int]:
    """Counts calls of kernels whose work the program's text does not describe (hand-written
    kernels, sorts, solvers).

    FLOP counts do not include their computation; `hbm_bytes` includes their operands and results.

    Returns:
      {target of the custom call: number of calls per step}.
    """
    found: dict[str, int] = {}
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode.removesuffix("-start") != "custom-call":
                continue
            # A computation that never runs has no calls; without this an unused one would be
            # reported.
            times = program.times_run(computation.name)
            if times and not _library_flops(computation, instruction):
                target = _target(instruction)
                found[target] = found.get(target, 0) + times
    return found


def _dot_flops(computation: Computation, dot: Instruction) -> int:
    left = computation[dot.operands[0]].arrays[0]
    contracted = math.prod(left.shape[dim] for dim in dot.integers("lhs_contracting_dims"))
    return 2 * dot.arrays[0].size * contracted


def _convolution_flops(computation: Computation, convolution: Instruction) -> int:
    kernel = computation[convolution.operands[1]].arrays[0]
    return _products_of_kernel(convolution, kernel, convolution.arrays[0])


def _products_of_kernel(convolution: Instruction, kernel: Array, output: Array) -> int:
    """Counts the FLOPs of a convolution: each output element uses every kernel element of its
    feature, including padding."""
    labels = re.fullmatch(r"\w+_(\w+)->\w+", convolution.attributes["dim_labels"])
    if labels is None:
        raise ValueError(f"{convolution!r} has no dim_labels of a form such as b01f_01io->b01f")
    # The kernel holds every output feature, but one output element uses one of them.
    return 2 * output.size * kernel.size // kernel.shape[labels[1].index("o")]


def _target(call: Instruction) -> str:
    return call.attributes.get("custom_call_target", "").strip('"')


def _library_flops(computation: Computation, call: Instruction) -> list[int]:
    """Returns the FLOPs of a call of cuBLAS, or of cuDNN's convolution or attention, as a list with
    one entry; [] for any other custom call, and if the call does not state its dimensions."""
    target = _target(call)
    if target.startswith("__cudnn$conv"):
        return [_cudnn_convolution_flops(computation, call, target)]
    if target.startswith("__cudnn$fmha"):
        return _attention_flops(computation, call, target)
    if not target.startswith("__cublas$"):
        return []
    numbers = _find_setting(call.backend_config, "dot_dimension_numbers")
    if numbers is None:
        return []
    left = computation[call.operands[0]].arrays[0]
    contracted = math.prod(left.shape[int(d)] for d in numbers["lhs_contracting_dimensions"])
    return [2 * call.arrays[0].size * contracted]


def _cudnn_convolution_flops(computation: Computation, call: Instruction, target: str) -> int:
    first, second = (computation[name].arrays[0] for name in call.operands[:2])
    # cuDNN's calls for gradients have the arrays of the forward convolution in other places.
    kernel, output = {
        "__cudnn$convBackwardInput": (second, first),
        "__cudnn$convBackwardFilter": (call.arrays[0], second),
    }.get(target, (second, call.arrays[0]))
    return _products_of_kernel(call, kernel, output)


def _attention_flops(computation: Computation, call: Instruction, target: str) -> list[int]:
    if _find_setting(call.backend_config, "intermediate_tensor_shape") is None:
        return []
    head_dim = computation[call.operands[0]].arrays[0].shape[-1]
    return [call_flops(target, head_dim, call.backend_config)]


def attention_keys(call: Instruction) -> int:
    """Returns the number of keys with which a call of cuDNN's attention compares each query; 0 if
    the call does not state it."""
    shape = _find_setting(call.backend_config, "intermediate_tensor_shape")
    return 0 if shape is None else int(shape["dimensions"][-1])


def _find_setting(config: dict[str, Any], key: str) -> dict[str, Any] | None:
    """Returns the value of `key` in a nested configuration, the outermost level first; None if no
    level has the key."""
    if key in config:
        return config[key]
    inner = (_find_setting(value, key) for value in config.values() if isinstance(value, dict))
    return next((found for found in inner if found is not None), None)


def hbm_bytes(program: Program) -> int:
    """Counts the bytes of device memory that one step reads and writes on one device, with every
    loop iteration.

    Each kernel reads its operands once and writes its result once. If a fusion only slices an
    operand, only the slice counts; if it updates an operand in place, only the update counts.
    Workspaces of libraries, and the effects of caches and register spills, are not included. Host
    memory is not counted.
    """
    return HbmTraffic(program).total.of_program()


class HbmTraffic:
    """Counts the bytes of device memory that a program's instructions read and write."""

    def __init__(self, program: Program):
        self._program = program

    @functools.cached_property
    def total(self) -> ScheduleSum:
        return ScheduleSum(self._program, self.of_kernel)

    def of_kernel(self, where: Computation, instruction: Instruction) -> int:
        """Returns the bytes of device memory that one kernel launch reads and writes; for
        instructions that are not control flow.

        Reads of an asynchronous operation count at its start and writes at its done; an
        asynchronous fusion counts both at its start.
        """
        opcode = instruction.opcode
        if opcode in _FREE or instruction.is_allocation:
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
        """Returns the bytes that the done instruction of an asynchronous operation writes; 0 if the
        start wraps a computation, which counts its own writes."""
        start = done.operands[0]
        # Any number of updates may stand between a start and its done.
        while start in where and where[start].opcode.endswith("-update"):
            start = where[start].operands[0]
        wraps = start in where and where[start].callees.get("calls")
        return 0 if wraps else _bytes(done.arrays)

    def _of_fusion(self, where: Computation, fusion: Instruction) -> int:
        body = self._program.computations[fusion.callees["calls"][0]]
        in_place = _updated_in_place(body)
        needed = _elements_needed(body, in_place)
        read = sum(
            # A parameter of no elements has 0 bytes, and the division must not fail.
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
    """Returns the arrays of an instruction's result without the scratch memory that cuBLAS and
    cuDNN add to it."""
    arrays = instruction.arrays
    target = instruction.attributes.get("custom_call_target", "") if len(arrays) > 1 else ""
    is_library = target.startswith(('"__cublas', '"__cudnn'))
    return arrays[:-1] if is_library and arrays[-1].dtype in _SCRATCH_DTYPES else arrays


def _written(body: Computation, result: Instruction) -> int:
    """Returns the bytes that a fusion writes to device memory for `result`, which is not an update
    in place; scratch memory of cuBLAS and cuDNN counts as 0."""
    if result.opcode == "get-tuple-element":
        source = body[result.operands[0]]
        # In a fusion around a library call the workspace is the last element of the call's tuple.
        if int(result.attributes["index"]) >= len(_without_workspace(source)):
            return 0
    return _bytes(_without_workspace(result))


def _of_slice(where: Computation, instruction: Instruction) -> int:
    """Returns the bytes that a slice, gather, update or scatter reads and writes if it is a kernel
    of its own."""
    if instruction.opcode in _UPDATES:
        # An update in place reads only the operands after its target, and writes the update.
        return _update_bytes(where, instruction) + _operand_bytes(where, instruction)
    return 2 * instruction.bytes + _operand_bytes(where, instruction)


def _operand_bytes(where: Computation, instruction: Instruction) -> int:
    """Returns the bytes in device memory of all operands of an instruction except the first:
    indices and updates."""
    return sum(_bytes(operand.arrays) for operand in where.operands_of(instruction)[1:])


def _update_bytes(where: Computation, update: Instruction) -> int:
    """Returns the bytes that an update or scatter writes into its first operand; twice for a
    scatter, which also reads them."""
    is_scatter = update.opcode == "scatter"
    return (2 if is_scatter else 1) * _bytes(_update_operand(where, update).arrays)


def _update_operand(where: Computation, update: Instruction) -> Instruction:
    index = -1 if update.opcode == "scatter" else 1
    return where[update.operands[index]]


def _results(body: Computation) -> list[Instruction]:
    """Returns the instructions that compute a fusion's results, one per array, with bitcasts
    skipped."""
    roots = body.operands_of(body.root) if body.root.opcode == "tuple" else [body.root]
    return [_renamed(body, root) for root in roots]


def _renamed(body: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in _RENAMES:
        instruction = body[instruction.operands[0]]
    return instruction


def _updated_in_place(body: Computation) -> set[str]:
    """Returns the names of those results of a fusion that write an update into the memory of one of
    the fusion's parameters."""
    return {
        result.name
        for result in _results(body)
        if result.opcode in _UPDATES
        and _renamed(body, body[result.operands[0]]).opcode == "parameter"
    }


def _elements_needed(body: Computation, in_place: set[str]) -> dict[str, int]:
    """Computes how many elements of each value a fusion needs for its results.

    Returns:
      {name of the value: number of elements}.
    """
    needed = {result.name: _size(result) for result in _results(body)}
    pieces: dict[str, int] = {}
    # Operands stand before their users, so backwards every user is known before its operands.
    for user in reversed(body.instructions):
        of_user = needed.get(user.name)
        if not of_user:
            continue
        for index, operand in enumerate(body.operands_of(user)):
            is_target = index == 0 and user.name in in_place
            # The target of an update in place is neither read nor copied.
            part = 0 if is_target else _part_needed(user, index, operand, of_user)
            if user.opcode in _SLICES or user.opcode in _RENAMES:
                # The pieces of a split differ, so they add up; `x * exp(x)` needs the same x twice.
                part = pieces[operand.name] = pieces.get(operand.name, 0) + part
            needed[operand.name] = min(_size(operand), max(part, needed.get(operand.name, 0)))
    return needed


def _part_needed(user: Instruction, index: int, operand: Instruction, of_user: int) -> int:
    """Returns how many elements of its operand the instruction `user` needs to produce `of_user`
    elements of its result."""
    size = _size(operand)
    if (user.opcode in _SLICES or user.opcode in _UPDATES) and index > 0:
        # Positions, and the values of an update, are read whole.
        return size
    if user.opcode in _COMBINE and len(user.arrays) > 1:
        # A call with several results may need any element for each of them.
        return size
    if user.opcode in _COMBINE:
        return -(-size * of_user // max(1, _size(user)))
    return min(size, of_user)


def _size(instruction: Instruction) -> int:
    return sum(array.size for array in instruction.arrays)
