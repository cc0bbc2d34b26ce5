"""Reads the text of optimized HLO programs: collectives, their overlap with other work, and
memory."""

from zerojax.forecasting.hlo.communication import Collective, find_collectives, find_in_branches
from zerojax.forecasting.hlo.costs import hbm_bytes, matmul_flops, opaque_calls
from zerojax.forecasting.hlo.host_copies import (
    HostCopy,
    bytes_within_host,
    find_host_copies,
    link_bytes,
)
from zerojax.forecasting.hlo.overlap import Overlap, find_overlap
from zerojax.forecasting.hlo.program import Array, Computation, Instruction, Program, read_program

__all__ = [
    "Array",
    "Collective",
    "Computation",
    "HostCopy",
    "Instruction",
    "Overlap",
    "Program",
    "bytes_within_host",
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
