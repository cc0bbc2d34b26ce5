"""One file per way to train: what its user writes beside the model and the batches.

Each has `prepare(make_model, batch, ...)`, which returns a step; their lines are counted.
"""
