"""Chains: layers in a row that compute from one wide halo, in place of an exchange before each of them.

A rank whose activation has rows of its neighbours beside its own can compute the next layers of these rows, too. So
it goes on without a message until what it has no longer suffices. Then everything but its own rows is dropped, and a
halo is fetched again. What each rank has is known to all, as numbers, and every operator decides by it. So no result
depends on the plan, which says how wide a halo is fetched: it is made from the links of an earlier call, the functions
of a model that computed with activations.
"""
