"""The modules of a model, found at each call, after any change of the model in between."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from distconv.model.model_modules import modules_of

CHANGES = st.lists(
    st.tuples(st.sampled_from(("add", "remove", "move", "share", "none")), st.integers(0, 9)), max_size=8
)


def change(model: nn.Module, kind: str, number: int) -> None:
    """Changes the children of one of the modules; ``number`` says which."""
    every = list(model.modules())
    owner, other = every[number % len(every)], every[(7 * number + 1) % len(every)]
    names = list(owner._modules)
    if kind == "add":
        owner.add_module(f"n{number}", nn.Sequential(nn.Identity()))
    elif kind == "none":
        owner.register_module(f"n{number}", None)
    elif kind == "share" and owner not in other.modules():
        owner.add_module(f"s{number}", other)
    elif names:
        child = owner._modules.pop(names[number % len(names)])
        if kind == "move" and child is not None and other not in child.modules():
            other.add_module(f"m{number}", child)


@settings(max_examples=200, deadline=None)
@given(CHANGES)
def test_they_are_those_of_torch_after_each_change(changes: list[tuple[str, int]]) -> None:
    model = nn.Sequential(nn.Sequential(nn.Identity(), nn.ReLU()), nn.Sequential())
    for kind, number in changes:
        assert modules_of(model) == list(model.modules())
        change(model, kind, number)
    assert modules_of(model) == list(model.modules())
