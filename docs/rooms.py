"""Draws docs/rooms.svg: the folders and top-level modules of the packages ("rooms"), and which imports which.

python docs/rooms.py           # the same code gives the same file

A room is a folder of a package, with all that is in it, or a module beside the folders. It is on a floor above
every room that it imports. `tests/test_imports.py` reads the same imports.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = Path(__file__).with_name("rooms.svg")
FOLDERS = {"mucudnn.optimizer": "optimizer", "mucudnn": "mucudnn", "distconv": "distconv"}
"""The packages by the names that they are imported under, with their folders in the repository."""

COLOURS = {"mucudnn.optimizer": "#009e73", "mucudnn": "#0072b2", "distconv": "#d55e00"}
"""Distinct to the colour-blind (Okabe and Ito)."""

WIDTH, ROW, HEIGHT, GAP = 1400, 92, 34, 18

Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module of the packages, by the name that it is imported under."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder != "optimizer" and parts[0] == "optimizer":
                continue  # what links to the folder of that name
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


@functools.cache
def imports() -> Graph:
    """The modules of the packages that each module imports, anywhere in it: also in functions and for type checkers."""
    known = modules()
    graph = {}
    for name, path in known.items():
        targets: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                # Each name is a module of the package, or something that the package itself has.
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= {target if target in known else node.module for target in inner}
        graph[name] = (targets & known.keys()) - {name}
    return graph


def room_of(module: str) -> str:
    """The room that a module is in: "mucudnn.timing", "distconv.settings", or "mucudnn" for what a package shows."""
    if module.startswith("mucudnn.optimizer"):
        return "mucudnn.optimizer"
    return ".".join(module.split(".")[:2])


def rooms(graph: Graph) -> Graph:
    """Which rooms the modules of each room import from."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, targets in graph.items():
        found[room_of(module)] |= {room_of(target) for target in targets} - {room_of(module)}
    return dict(found)


def circle(graph: Graph) -> list[str]:
    """Names of which each imports the next and the last the first; empty where there is no such circle."""
    done: set[str] = set()

    def below(path: list[str]) -> list[str]:
        for target in sorted(graph[path[-1]]):
            if target in path:
                return path[path.index(target) :]
            if target not in done and (found := below([*path, target])):
                return found
        done.add(path[-1])
        return []

    return next((found for name in graph if name not in done and (found := below([name]))), [])


def floors(graph: Graph) -> dict[str, int]:
    """The floor of every room: 0 for one that imports nothing, else one above the highest that it imports."""
    found: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in found:
            found[room] = 1 + max(map(floor, graph[room]), default=-1)
        return found[room]

    for room in graph:
        floor(room)
    return found


def package_of(room: str) -> str:
    """The package that a room belongs to."""
    return max((name for name in FOLDERS if f"{room}.".startswith(f"{name}.")), key=len)


def label_of(room: str) -> str:
    """A room's name in the picture, which tells packages by colours."""
    return room if room in FOLDERS else room.removeprefix(f"{package_of(room)}.")


def width_of(room: str) -> float:
    """Room for its label."""
    return 7.6 * len(label_of(room)) + 14


def drawn(graph: Graph) -> str:
    """The picture of rooms on their floors, as SVG; an arrow that others imply is left out."""
    found = floors(graph)
    top = max(found.values())
    places: dict[str, tuple[float, float]] = {}
    for floor in range(top + 1):
        row = sorted(room for room, its in found.items() if its == floor)
        gap = (WIDTH - sum(map(width_of, row))) / len(row)
        left = gap / 2
        for room in row:
            places[room] = (left + width_of(room) / 2, GAP + ROW * (top - floor))
            left += width_of(room) + gap
    height = ROW * top + HEIGHT + 2 * GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        '<defs><marker id="arrow" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 6 3 0 6z" fill="#808080"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for room, targets in sorted(graph.items()):
        for target in sorted(targets - implied(graph, room)):
            (x, y), (end_x, end_y) = places[room], places[target]
            lines.append(
                f'<path d="M{x:.0f} {y + HEIGHT:.0f} C{x:.0f} {y + HEIGHT + 40:.0f} {end_x:.0f} {end_y - 40:.0f} '
                f'{end_x:.0f} {end_y:.0f}" fill="none" stroke="#a0a0a0" marker-end="url(#arrow)"/>'
            )
    for room, (x, y) in sorted(places.items()):
        package = package_of(room)
        width = width_of(room)
        lines.append(
            f'<rect x="{x - width / 2:.0f}" y="{y:.0f}" width="{width:.0f}" height="{HEIGHT}" rx="4" '
            f'fill="{COLOURS[package]}"/><text x="{x:.0f}" y="{y + 22:.0f}" text-anchor="middle" font-size="13" '
            f'fill="white">{label_of(room)}</text>'
        )
    return "\n".join((*lines, "</svg>", ""))


def implied(graph: Graph, room: str) -> set[str]:
    """The rooms that a room reaches through another one."""
    found: set[str] = set()
    for target in graph[room]:
        found |= graph[target] | implied(graph, target)
    return found


def main() -> None:
    graph = imports()
    between = rooms(graph)
    if found := circle(between):
        raise SystemExit(f"rooms.py: rooms import each other in a circle: {' -> '.join((*found, found[0]))}")
    PICTURE.write_text(drawn(between))
    arrows = sum(map(len, between.values()))
    print(f"{PICTURE.relative_to(ROOT)}: {len(between)} rooms on {max(floors(between).values()) + 1} floors, "
          f"{arrows} arrows; {len(graph)} modules, {sum(map(len, graph.values()))} arrows")  # fmt: skip


if __name__ == "__main__":
    main()
