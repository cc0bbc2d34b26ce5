"""Sums of per-instruction costs over the loops, calls and branches of a step."""

from __future__ import annotations

from collections.abc import Callable

from zerojax.forecasting.hlo.program import Computation, Instruction, Program

# A start whose computation is a list of instructions of its own. A `fusion-start` is one kernel,
# like the fusion it starts.
_CALLS = ("call", "call-start", "async-start")


class Total:
    """Adds up what each executed instruction costs.

    A loop counts as often as it runs (once where that is not known, see `Program.unknown_loops`); a
    conditional as its dearest branch.

    Args:
      program: what is executed.
      cost: `cost(computation, instruction)` of one instruction that is not control flow, one time.
        A fusion is one instruction.
    """

    def __init__(self, program: Program, cost: Callable[[Computation, Instruction], int]):
        self._program = program
        self._cost = cost
        self._computations: dict[str, int] = {}
        self._instructions: dict[Instruction, int] = {}

    def of_program(self) -> int:
        return self.of_computation(self._program.entry.name)

    def of_computation(self, name: str) -> int:
        """One run of the computation."""
        if name not in self._computations:
            computation = self._program.computations[name]
            self._computations[name] = sum(
                self.of_instruction(computation, instruction)
                for instruction in computation.instructions
            )
        return self._computations[name]

    def of_instruction(self, computation: Computation, instruction: Instruction) -> int:
        """One execution of the instruction, with all that it runs."""
        if instruction.opcode == "conditional":
            return max(map(self.of_computation, instruction.branches))
        if instruction.opcode == "while" or (instruction.opcode in _CALLS and instruction.callees):
            return sum(times * self.of_computation(name) for name, times in instruction.runs())
        if instruction not in self._instructions:
            self._instructions[instruction] = self._cost(computation, instruction)
        return self._instructions[instruction]
