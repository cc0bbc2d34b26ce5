"""Progressive layer drop: steps that leave out layers at random."""
