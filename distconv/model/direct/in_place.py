"""Which functions change their first argument in place, by their names."""

IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__setitem__")


def is_in_place(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE
