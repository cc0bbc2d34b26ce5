"""Training around the step: what proves, runs and reports a user's training.

Holds `equality`, behind `zerojax.check`.
"""
