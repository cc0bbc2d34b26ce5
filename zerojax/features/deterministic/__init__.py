"""Steps whose result has the same bits on every mesh (`deterministic`)."""
