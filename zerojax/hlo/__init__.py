"""Reader of optimized HLO text: communication, overlap and memory."""

from zerojax.hlo.collectives import Collective, find_collectives, find_in_branches
from zerojax.hlo.host_copies import HostCopy, find_host_copies, link_bytes
from zerojax.hlo.matmuls import matmul_flops, opaque_calls
from zerojax.hlo.overlap import Overlap, find_overlap
from zerojax.hlo.program import Computation, Instruction, Program, read_program
from zerojax.hlo.traffic import hbm_bytes
from zerojax.hlo.types import Array

__all__ = [
    "Array",
    "Collective",
    "Computation",
    "HostCopy",
    "Instruction",
    "Overlap",
    "Program",
    "find_collectives",
    "find_host_copies",
    "find_in_branches",
    "find_overlap",
    "hbm_bytes",
    "link_bytes",
    "matmul_flops",
    "opaque_calls",
    "read_program",
]
