"""Measurements of zerojax beside the plain way of doing the same, both in one run; see README.md.

Imports zerojax; nothing of zerojax imports it, and it is not part of the installed package.
"""
