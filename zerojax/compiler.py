"""Compiling a program for GPUs that are not here. Knows the compiler; never models or plans."""
