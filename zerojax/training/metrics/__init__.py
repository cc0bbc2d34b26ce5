"""Metrics of a run: terminal, metrics.jsonl, TensorBoard and HTML report.

The package needs no JAX.
"""

from zerojax.training.metrics.metric_files import read_metrics
from zerojax.training.metrics.report import write_report
from zerojax.training.metrics.runlog import RunLog

__all__ = ["RunLog", "read_metrics", "write_report"]
