"""The house has floors: a module imports only its own room and what lies below it."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import adasim

PACKAGE = Path(adasim.__file__).parent

FLOORS: list[set[str]] = [
    {"util"},
    {"settings", "options"},
    {"registry"},
    {"config"},
    {"schedules"},
    {"dist"},
    {"neighbors", "data", "models"},
    {"methods"},
    {"recipes"},
    {"runs"},
    {"train", "eval"},
    {"api", "run"},
    {"tools"},
    {"explore"},
    {"cli"},
    {"__main__"},
]
"""From the ground up. A room knows what lies below it, and rooms of one floor do not know each other."""


def imports(path: Path) -> Iterator[str]:
    """The rooms of this package that a file names in any import, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules = [node.module or ""]
            if node.module == "adasim":
                modules = [f"adasim.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            if module.startswith("adasim."):
                yield module.split(".")[1]


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if name in rooms)


def test_every_room_has_its_floor() -> None:
    rooms = {room(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    assert rooms == set().union(*FLOORS)


def test_nobody_imports_from_above_or_from_next_door() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = room(path)
        if own == "__init__":
            continue
        for other in imports(path):
            if other == own or other == "__version__":
                continue
            if floor(other) >= floor(own):
                wrong.append(f"{path.relative_to(PACKAGE)} imports adasim.{other}")
    assert wrong == []


def test_the_heart_needs_torch_alone() -> None:
    """People take `adasim.neighbors` into loops of their own: nothing else may come with it."""
    allowed = {"util", "registry", "dist", "settings"}
    for path in sorted((PACKAGE / "neighbors").glob("*.py")):
        assert set(imports(path)) <= {"neighbors", *allowed}, path.name


def test_within_the_room_of_data_nobody_imports_in_a_circle() -> None:
    """Only the door (`__init__`) knows all of its files; the others name each other, and never the door."""
    known: dict[str, set[str]] = {}
    for path in (PACKAGE / "data").rglob("*.py"):
        if path.name == "__init__.py":
            continue
        own = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        known[own] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("adasim.data."):
                assert node.module != "adasim.data", f"{path}: by the door"
                known[own].add(node.module or "")
    list(graphlib.TopologicalSorter(known).static_order())  # raises CycleError
