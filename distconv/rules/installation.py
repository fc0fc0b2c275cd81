"""Registers distconv's rules with torch."""

from __future__ import annotations

import functools

from distconv.rules import decompositions
from distconv.rules.registrations import registrations
from distconv.rules.registry import discover, install_guard
from distconv.transfer import compilers


@functools.cache
def install_rules() -> None:
    """Makes torch run operators on distconv's meshes by their rules, and refuse what has none; once in a process."""
    discover()
    registrations.put_in_place()
    install_guard()
    decompositions.install()
    compilers.watch()
