"""Rules: what an operator does when its tensors are DTensors with sharded samples, channels or space.

Every module of this package is imported with distconv and registers its rules, so a new rule is a new file. The files
that others share are `registry` (which rule runs), `stock` (what torch does by itself) and `channel_split` (what layers
with sharded channels move). CONTRIBUTING.md shows how to write a rule, with an example.
"""
