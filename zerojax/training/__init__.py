"""Training around the step: proofs, runs and reports."""
