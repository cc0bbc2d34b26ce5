"""Curriculum of the row length: early steps train on the first tokens of each row."""
