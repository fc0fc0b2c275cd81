"""Rules: what an operator does when its tensors are DTensors with sharded samples, channels or space.

A folder is a family of operators. Every module is imported with distconv and registers its rules, so a new rule is a
new file in its family. What families share is in `registry` (which rule runs), `stock` (what torch does by itself),
`operands` (the layout in which an operator computes) and `whole` (operators that run on gathered tensors). No two
families import each other. CONTRIBUTING.md shows how to write a rule, with an example.
"""
