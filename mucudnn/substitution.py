"""Puts other attributes in the place of a module's or class's own for a while, or other environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_INHERITED = object()


@contextmanager
def substituted(owner: Any, /, **attributes: object) -> Iterator[None]:
    """A context in which a module or class has other attributes. At its end it has its own again."""
    own = {name: vars(owner).get(name, _INHERITED) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in own.items():
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """A context in which environment variables have other values. At its end they are as they were before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
