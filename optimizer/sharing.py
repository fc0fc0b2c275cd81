"""Workspace division (WD): finds the fastest divisions of many convolutions whose workspaces together fit a total.

This is a multiple-choice knapsack: one item of every group within a total of bytes, in the least time.
"""

from __future__ import annotations

from collections.abc import Sequence

from mucudnn.optimizer.assign import assign
from mucudnn.optimizer.reuse import Item, desirable_set


def share(kernels: Sequence[Sequence[Item]], total: float) -> list[Item]:
    """A choice of one division for each kernel whose workspaces add up to `total` at most, and which is as fast as any,
    as exactly as `assign` has it.

    Minimises the sum of T_kc x_kc over the kernels k and their divisions c, subject to one c per k and the sum of
    M_kc x_kc within the total (WD, mu-cuDNN, Oyama et al. 2018, section III-C).

    Args:
        kernels: for each, divisions to choose from; those that another dominates are never chosen.
        total: bytes that all workspaces may take together; `math.inf` for no limit.

    Returns:
        The divisions in the order of the kernels.

    Raises:
        ValueError: for a kernel without divisions, and for a total that no choice fits.
    """
    menus = dict(enumerate(map(desirable_set, kernels)))
    if not menus:
        return []
    seconds = {kernel: [division.seconds for division in menu] for kernel, menu in menus.items()}
    sizes = {kernel: [division.workspace for division in menu] for kernel, menu in menus.items()}
    found = assign(seconds, {}, sizes, total)
    return [menu[found.chosen[kernel]] for kernel, menu in menus.items()]
