"""Closed formulas of the papers: bubbles where no stage waits in step, and memory.

Below, p is the number of stages, m of microbatches and v of chunks.
"""

from zerojax.schedules.simulation import Costs


def asynchronous_bubble_formula(
    name: str, *, stages: int, microbatches: int, chunks: int = 1, costs: Costs | None = None
) -> float:
    """Share of the time in which a stage idles that waits for nothing but its inputs.

    Holds for m of at least p. zb_h1: arXiv:2401.10241, section 2, (p-1)(F+B-W). zb_v:
    arXiv:2405.15362 with F = B = W, a stage never idles between its first and its last operation;
    what is left is the way of the first microbatch to the last stage, (p-1) forwards of a chunk.
    """
    costs = costs or Costs()
    p, m = stages, microbatches
    if name == "zb_h1":
        lost = (p - 1) * (costs.forward + costs.backward - costs.weight)
    elif name == "zb_v":
        lost = (p - 1) * costs.forward / 2
    else:
        return (p - 1) / (chunks * m + p - 1)
    return lost / (m * (costs.forward + costs.backward + costs.weight) + lost)


def in_flight_formula(
    name: str, *, stages: int, microbatches: int, chunks: int = 1
) -> tuple[int, ...]:
    """Activations that each stage holds at a time, see `count_in_flight`."""
    p, m, v = stages, microbatches, chunks
    most = {
        "gpipe": lambda s: m,
        "1f1b": lambda s: 2 * (p - 1 - s) + 1,
        "1f1b_classic": lambda s: p - s,
        "interleaved": lambda s: 2 * (p - 1 - s) + (v - 1) * p + 1,
        "zb_h1": lambda s: 2 * p - 1 - s,
        "zb_v": lambda s: 3 * p - 1,
    }[name]
    return tuple(min(most(stage), v * m) for stage in range(p))
