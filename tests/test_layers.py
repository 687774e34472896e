"""The house has floors: a module imports only its own room and what lies below it."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import adasim

PACKAGE = Path(adasim.__file__).parent

FLOORS: list[set[str]] = [
    {"util"},
    {"__init__"},
    {"options"},
    {"registry"},
    {"config"},
    {"dist"},
    {"neighbors", "data", "models"},
    {"methods"},
    {"recipes"},
    {"runs"},
    {"train", "eval"},
    {"api"},
    {"tools"},
    {"explore"},
    {"cli"},
    {"__main__"},
]
"""From the ground up. A room knows what lies below it, and rooms of one floor do not know each other."""


def imports(path: Path) -> Iterator[str]:
    """The modules of this package that a file names in any import, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        yield from (module for module in modules if module.startswith("adasim."))


def floor(name: str) -> int:
    """Of a room; whatever else is imported from `adasim` comes from its `__init__`."""
    return next((number for number, rooms in enumerate(FLOORS) if name in rooms), 1)


def test_every_room_has_its_floor_and_knows_only_what_lies_below() -> None:
    paths = {path: path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert set(paths.values()) == set().union(*FLOORS)
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path, own in paths.items()
        for module in imports(path)
        if (other := module.split(".")[1]) != own and floor(other) >= floor(own)
    ]
    assert wrong == []


def test_the_tour_lists_the_rooms_from_the_ground_up() -> None:
    table = (PACKAGE.parent / "docs" / "tour.md").read_text().partition("| room |")[2]
    listed = [
        re.findall(r"\w+", row.partition("](")[0]) for row in re.findall(r"^\| (\W*\w.*?) \|", table, re.M)
    ]
    order = [floor(room) for row in listed for room in row]
    assert order == sorted(order)
    assert {room for row in listed for room in row} == set().union(*FLOORS) - {"__init__", "__main__"}


def test_the_heart_needs_torch_alone() -> None:
    """People take `adasim.neighbors` into loops of their own: nothing else may come with it."""
    for path in sorted((PACKAGE / "neighbors").glob("*.py")):
        rooms = {module.split(".")[1] for module in imports(path)}
        assert rooms <= {"neighbors", "util", "registry", "dist", "options"}, path.name
    for name in ("options", "registry"):
        assert "tyro" not in (PACKAGE / f"{name}.py").read_text()


def test_within_the_room_of_data_nobody_imports_in_a_circle() -> None:
    """Only the door (`__init__`) knows all of its files; the others name each other, and never the door."""
    files = {path.stem: path for path in (PACKAGE / "data").glob("*.py") if path.stem != "__init__"}
    known = {
        name: {m.split(".")[2] for m in imports(path) if m.startswith("adasim.data.")}
        for name, path in files.items()
    }
    assert {name: others - files.keys() for name, others in known.items() if others - files.keys()} == {}
    list(graphlib.TopologicalSorter(known).static_order())  # raises CycleError
