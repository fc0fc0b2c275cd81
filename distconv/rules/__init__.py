"""Rules: what an operator does when its tensors are DTensors with sharded samples, channels or space.

Every module of this package is imported with distconv and registers its rules, so that a new one is a new file; the
files that others share are `registry` (who is called), `stock` (what torch does by itself) and `channel_split` (what
layers with sharded channels move). CONTRIBUTING.md shows how to write a rule, with an example.
"""
