"""Checks and measurements for a machine with one GPU; `bash benchmarks/gpu/run.sh` runs them all.

Each module is one part, run in a process of its own, and works on a CPU with `--smoke`.
"""
