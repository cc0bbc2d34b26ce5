"""Reader of optimized HLO text: communication, overlap and memory."""

from zerojax.forecasting.hlo.collectives import Collective, find_collectives, find_in_branches
from zerojax.forecasting.hlo.host_copies import HostCopy, find_host_copies, link_bytes
from zerojax.forecasting.hlo.matmuls import matmul_flops, opaque_calls
from zerojax.forecasting.hlo.overlap import Overlap, find_overlap
from zerojax.forecasting.hlo.program import Computation, Instruction, Program, read_program
from zerojax.forecasting.hlo.traffic import hbm_bytes
from zerojax.forecasting.hlo.types import Array

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
