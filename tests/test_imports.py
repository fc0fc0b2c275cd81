"""Imports run one way only: distconv -> mucudnn -> optimizer, and within mucudnn from floor to floor."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from docs import rooms

ROOT = Path(__file__).resolve().parent.parent
OURS = ("optimizer", "mucudnn", "distconv", "benchmarks", "tests")
ALLOWED = {
    "optimizer": ("mucudnn.optimizer",),
    "mucudnn": ("mucudnn",),
    "distconv": ("distconv", "mucudnn"),
}
"""By folder: what its files may import of ours."""


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("folder", ALLOWED)
def test_packages_import_only_what_lies_beneath(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        ours = {name for name in imported(path) if name.partition(".")[0] in OURS}
        beneath = {name for name in ours if any(f"{name}.".startswith(f"{allowed}.") for allowed in ALLOWED[folder])}
        assert ours == beneath, path


FLOORS = (
    ("process",),
    (
        "optimizer",
        "convolution",
        "devices",
        "sizes",
        "program",
        "version",
        "lazily",
        "private_names",
        "spelling",
        "architectures",
    ),
    ("providers", "budgets", "reporting", "settings"),
    ("timing",),
    ("planning",),
    ("runtime", "networks"),
    ("patching",),
    ("mucudnn",),
    ("commands",),
    ("__main__",),
)
"""The rooms of mucudnn from the ground up: each imports from the floors beneath it only."""

MOST_ARROWS = 75
"""Between rooms of mucudnn: less than half of what there were when its modules all lay in one folder."""


def test_no_module_and_no_room_imports_itself_in_a_circle() -> None:
    modules = rooms.imports()
    assert rooms.circle(modules) == []
    assert rooms.circle(rooms.rooms(modules)) == []


MOST_ROOMS_OF_DISTCONV, MOST_FLOORS_OF_DISTCONV, MOST_ARROWS_OF_DISTCONV = 20, 9, 90
"""The most rooms of distconv, the most floors on which they stand, and the most imports from one of them to another."""


def test_distconv_has_few_rooms_on_few_floors_and_few_arrows_between_them() -> None:
    every = rooms.rooms(rooms.imports())
    of_distconv = {room for room in every if rooms.package_of(room) == "distconv"}
    between = {room: every[room] & of_distconv for room in of_distconv}
    assert len(between) <= MOST_ROOMS_OF_DISTCONV, (
        "a reader keeps no more rooms in mind: put the module into one of them"
    )
    assert max(rooms.floors(between).values()) < MOST_FLOORS_OF_DISTCONV, "a call passes few rooms from top to bottom"
    assert sum(map(len, between.values())) <= MOST_ARROWS_OF_DISTCONV, (
        "each new import from room to room is one more reason to change both: pass what is needed, or move the module"
    )


def test_families_of_rules_do_not_import_each_other_in_a_circle() -> None:
    modules = rooms.imports()
    families: dict[str, set[str]] = {}
    for module, targets in modules.items():
        if module.startswith(RULES):
            its = {family_of(target) for target in targets if target.startswith(RULES)}
            families.setdefault(family_of(module), set()).update(its - {family_of(module)})
    assert len(families) > 12
    assert rooms.circle(families) == []


RULES = "distconv.rules."


def family_of(module: str) -> str:
    """The folder of a rule, or the module itself where it lies beside the folders."""
    return module.removeprefix(RULES).partition(".")[0]


def test_mucudnns_rooms_import_from_the_floors_beneath() -> None:
    floors = {room: floor for floor, row in enumerate(FLOORS) for room in row}
    between = {
        room.removeprefix("mucudnn."): {target.removeprefix("mucudnn.") for target in targets}
        for room, targets in rooms.rooms(rooms.imports()).items()
        if room.startswith("mucudnn")
    }
    assert between.keys() == floors.keys()
    upward = [(room, target) for room in between for target in between[room] if floors[target] >= floors[room]]
    assert upward == []
    assert sum(map(len, between.values())) <= MOST_ARROWS, (
        "pass what is needed to a room, or move the module, before it imports one more"
    )


def test_a_circle_is_found() -> None:
    assert rooms.circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]
    assert rooms.circle({"a": {"b"}, "b": set()}) == []


def test_optimizer_needs_no_torch() -> None:
    """Imported beneath an empty package of that name, as the real one imports torch for reasons of its own."""
    program = (
        "import sys, types\n"
        "package = types.ModuleType('mucudnn')\n"
        f"package.__path__ = [{str(ROOT / 'mucudnn')!r}]\n"
        "sys.modules['mucudnn'] = package\n"
        "import mucudnn.optimizer\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=240)


def test_no_command_of_distconv_needs_torch_before_it_runs() -> None:
    """Its import takes seconds, for which neither a help text nor the start of ranks is to wait."""
    program = "import sys; import distconv.__main__ as m; m._parser(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=240)
