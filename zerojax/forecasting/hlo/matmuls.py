"""Matrix products of a program and their FLOPs."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

from zerojax.forecasting.hlo.program import Computation, Instruction, Program
from zerojax.forecasting.hlo.schedule import Total
from zerojax.forecasting.hlo.types import Array

_DOTS = ("dot", "ragged-dot", "scaled-dot")
# Gradients of fused attention compute the scores again and then four products.
_ATTENTION_PRODUCTS = {"forward": 2, "backward": 5}


class Matmuls:
    """Finds the matrix products of a program's instructions.

    Convolutions count as products, and fused attention of cuDNN as one product with the FLOPs of
    all it holds, masked scores included.
    """

    def __init__(self, program: Program):
        self._program = program
        self._fused: dict[str, list[int]] = {}

    def flops(self, computation: Computation, instruction: Instruction) -> list[int]:
        """FLOPs (2 m n k) of each product in one execution of the instruction on one device.

        Looks into fusions; not into loops, calls and branches, which `Total` follows.
        """
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in _DOTS:
            return [_dot_flops(computation, instruction)]
        if opcode == "convolution":
            return [_convolution_flops(computation, instruction)]
        if opcode == "custom-call":
            return _library_flops(computation, instruction)
        if opcode == "fusion":
            return [n for name in instruction.callees["calls"] for n in self._of_fusion(name)]
        return []

    def _of_fusion(self, name: str) -> list[int]:
        if name not in self._fused:
            computation = self._program.computations[name]
            self._fused[name] = [
                n for i in computation.instructions for n in self.flops(computation, i)
            ]
        return self._fused[name]

    @functools.cached_property
    def total_flops(self) -> Total:
        return Total(self._program, lambda where, one: sum(self.flops(where, one)))

    @functools.cached_property
    def total_count(self) -> Total:
        return Total(self._program, lambda where, one: len(self.flops(where, one)))


def matmul_flops(program: Program) -> int:
    """FLOPs of all matrix products of one step on one device, loops counted.

    Products inside kernels that the text does not show are missing: see `opaque_calls`.
    """
    return Matmuls(program).total_flops.of_program()


def opaque_calls(program: Program) -> dict[str, int]:
    """Custom calls whose work the text does not tell: target -> calls per step.

    Hand-written kernels, sorts, solvers. What they compute is in no sum of FLOPs; their operands
    and results are in `hbm_bytes`.
    """
    found: dict[str, int] = {}
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode.removesuffix("-start") != "custom-call":
                continue
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
    """Each output element meets every kernel element of its own feature, padding included."""
    labels = re.fullmatch(r"\w+_(\w+)->\w+", convolution.attributes["dim_labels"])
    if labels is None:
        raise ValueError(f"dim_labels of {convolution!r} are not like b01f_01io->b01f")
    return 2 * output.size * kernel.size // kernel.shape[labels[1].index("o")]


def _target(call: Instruction) -> str:
    return call.attributes.get("custom_call_target", "").strip('"')


def _library_flops(computation: Computation, call: Instruction) -> list[int]:
    """One entry for a product of cuBLAS or cuDNN; [] for any other custom call."""
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
    kernel, output = {
        "__cudnn$convBackwardInput": (second, first),
        "__cudnn$convBackwardFilter": (call.arrays[0], second),
    }.get(target, (second, call.arrays[0]))
    return _products_of_kernel(call, kernel, output)


def _attention_flops(computation: Computation, call: Instruction, target: str) -> list[int]:
    scores = _find_setting(call.backend_config, "intermediate_tensor_shape")
    if scores is None:
        return []
    size = math.prod(int(dim) for dim in scores["dimensions"])
    head_dim = computation[call.operands[0]].arrays[0].shape[-1]
    products = _ATTENTION_PRODUCTS["backward" if "Backward" in target else "forward"]
    return [2 * size * head_dim * products]


def _find_setting(config: dict[str, Any], key: str) -> dict[str, Any] | None:
    """The setting `key`, at any depth."""
    if key in config:
        return config[key]
    inner = (_find_setting(value, key) for value in config.values() if isinstance(value, dict))
    return next((found for found in inner if found is not None), None)
