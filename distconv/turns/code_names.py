"""The names that the code of a function uses: global variables, attributes of objects, and modules that it imports."""

from __future__ import annotations

import dis
import functools
import types
from typing import NamedTuple


class CodeNames(NamedTuple):
    """The names in the code of a function and of the functions within it, each once.

    Attributes:
        read, written: global variables. Where the code asks for ``globals()``, every text in it may be such a name.
        attributes: of any objects, such as a module's variables.
        assigned: those of them that the code sets or deletes.
        imported: modules that it imports.
    """

    read: tuple[str, ...]
    written: tuple[str, ...]
    attributes: tuple[str, ...]
    assigned: tuple[str, ...]
    imported: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> CodeNames:
    """The names that code uses."""
    found: list[dict[str, None]] = [{}, {}, {}, {}, {}]
    for each in dis.get_instructions(code):
        for kind in _KINDS.get(each.opname, ()):
            found[kind][each.argval] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            for names, into in zip(names_of(inner), found, strict=True):
                into.update(dict.fromkeys(names))
    if "globals" in found[_READ]:
        found[_WRITTEN].update((text, None) for text in code.co_consts if isinstance(text, str))
    return CodeNames(*map(tuple, found))


_READ, _WRITTEN, _ATTRIBUTES, _ASSIGNED, _IMPORTED = range(5)

_KINDS = {
    "LOAD_GLOBAL": (_READ,),
    "LOAD_NAME": (_READ,),
    "STORE_GLOBAL": (_WRITTEN,),
    "DELETE_GLOBAL": (_WRITTEN,),
    "LOAD_ATTR": (_ATTRIBUTES,),
    "LOAD_METHOD": (_ATTRIBUTES,),
    "STORE_ATTR": (_ATTRIBUTES, _ASSIGNED),
    "DELETE_ATTR": (_ATTRIBUTES, _ASSIGNED),
    "IMPORT_NAME": (_IMPORTED,),
    "IMPORT_FROM": (_ATTRIBUTES,),
}
"""By instruction, the kinds of the name that it has."""
