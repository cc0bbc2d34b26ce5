"""The same small GPT trained by zerojax and by other libraries, on one machine in one run.

`python -m benchmarks.compare`; README.md explains how to pass the Python interpreters of the
others.
"""
