"""The identical small GPT trained by zerojax and by what others use, on one machine in one run.

`python -m benchmarks.compare`; README.md tells how to give it the Pythons of the others.
"""
