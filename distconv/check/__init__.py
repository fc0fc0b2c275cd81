"""Predicts in one process which operators of a model or a script would run on many ranks, and what they would send."""
