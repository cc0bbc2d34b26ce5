"""Metrics of a run: terminal, metrics.jsonl, TensorBoard and HTML report.

The package needs no JAX.
"""

from zerojax.metrics.jsonl import read_metrics
from zerojax.metrics.report import write_report
from zerojax.metrics.runlog import RunLog

__all__ = ["RunLog", "read_metrics", "write_report"]
