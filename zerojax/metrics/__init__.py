"""What a run reports, in which units, and where: terminal, metrics.jsonl, TensorBoard, HTML page.

Knows numbers, steps and files; never arrays, devices or the training step. Needs no JAX.
"""

from zerojax.metrics.jsonl import read_metrics
from zerojax.metrics.report import write_report
from zerojax.metrics.runlog import RunLog

__all__ = ["RunLog", "read_metrics", "write_report"]
