"""Chains: layers in a row that compute from one wide halo, in place of an exchange before each of them.

A rank that has rows of its neighbours beside its own rows of an activation can compute the next layers for these rows,
too. So it goes on without a message until the rows no longer suffice. Then all rows but its own are dropped, and a halo
is fetched again. All ranks know which rows every rank has (the coverage), and every operator decides by that. How wide
a halo is fetched is chosen from the links of an earlier call: the functions of a model that computed with activations.
Results do not depend on the choice.
"""
