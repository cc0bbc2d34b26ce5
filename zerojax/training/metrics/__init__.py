"""Writes a run's metrics to the terminal, metrics.jsonl, TensorBoard and an HTML report.

This package does not need JAX.
"""

from zerojax.training.metrics.metric_files import read_metrics
from zerojax.training.metrics.report import write_report
from zerojax.training.metrics.runlog import RunLog

__all__ = ["RunLog", "read_metrics", "write_report"]
