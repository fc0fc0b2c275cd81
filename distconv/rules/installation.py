"""Registers distconv's rules with torch."""

from __future__ import annotations

from distconv.rules.beneath import refuse_nested_tensors, refuse_operators_of_functions
from distconv.rules.registrations import registrations
from distconv.rules.registry import discover, install_guard, install_methods
from distconv.rules.stock import install_decompositions
from distconv.tensors.replacements import until_put_back, when_put_back
from distconv.transfer import compilers


@until_put_back
def install_rules() -> None:
    """Makes torch run operators on distconv's meshes by their rules, and refuse what has none; once in a process."""
    discover()
    registrations.put_in_place()
    when_put_back(registrations.take_back)
    install_methods()
    install_guard()
    install_decompositions()
    compilers.watch_compilers()
    refuse_operators_of_functions()
    refuse_nested_tensors()
