"""Pooling: maximum and average windows, and adaptive ones, with samples and space sharded.

``window``, ``adaptive`` and ``fractional`` have the rules, and ``operator`` what they read from an operator, and the
meaning of the indices of a maximum.
"""
