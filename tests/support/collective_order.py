"""Finds collectives of a compiled CPU program that may start before an earlier loop ends."""

from zerojax.forecasting.hlo import read_program

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def unordered(text):
    """Returns the pairs (loop with collectives, later collective that does not wait for it).

    A collective waits for what it reads, and for the collectives before it in the schedule; a loop
    is also a collective that does not wait, unless it reads a result of the first loop.
    """
    program = read_program(text)
    assert program.is_scheduled
    sends: dict[str, bool] = {}

    def has_collectives(instruction):
        called = [name for names in instruction.callees.values() for name in names]
        return instruction.opcode.startswith(COLLECTIVES) or any(map(computation_sends, called))

    def computation_sends(name):
        if name not in sends:
            sends[name] = any(map(has_collectives, program.computations[name].instructions))
        return sends[name]

    found = []
    for computation in program.computations.values():
        instructions = computation.instructions
        events = [one for one in instructions if has_collectives(one)]
        for loop in events:
            if loop.opcode.startswith(COLLECTIVES):
                continue
            after, waited = {loop.name}, False
            for one in instructions[instructions.index(loop) + 1 :]:
                is_event = one in events
                if after & set(one.operands) or (waited and is_event):
                    after.add(one.name)
                    waited |= is_event and one.opcode.startswith(COLLECTIVES)
                elif is_event:
                    found.append((loop.name, one.name))
    return found
