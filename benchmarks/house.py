"""Lines, files and the way of an image through them: python benchmarks/house.py [CHECKOUT]

The way is the files of which some function runs while a folder of photos is pretrained on and explored.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from types import FrameType

WAY = (
    "pretrain desk-resnet --data photos --out run --no-curves --no-compare --device cpu --epochs 2 --batch-size 16 "
    "--neighbors.window 1 --neighbors.k 2 --views.size 16 --data.workers 0",
    "explore run --out page.html --workers 0 --device cpu",
)


def imported(path: Path, modules: Collection[str]) -> set[str]:
    """The modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & set(modules)


def walk(package: Path) -> int:
    """In how many files some function runs, from a folder of images to the page."""
    import numpy as np
    from PIL import Image

    from adasim.cli.main import main  # of the checkout

    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_flags & 1:  # a function, not the body of a module or a class
            files.add(frame.f_code.co_filename)

    Path("photos").mkdir()
    for i in range(48):
        noise = np.random.default_rng(i).integers(0, 256, (80, 80, 3), np.uint8)
        Image.fromarray(noise).save(f"photos/{i}.png")
    threading.setprofile(note)
    sys.setprofile(note)
    for line in WAY:
        main(line.split())
    return sum(Path(file).is_relative_to(package) for file in list(files))  # which grows meanwhile


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    package = root / "adasim"
    files = list(package.rglob("*.py"))
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in files}
    modules = {path: name.removesuffix(".__init__") for path, name in names.items()}
    importers = Counter(name for path in files for name in imported(path, modules.values()) - {modules[path]})
    once = sorted(name for name, count in importers.items() if count == 1)
    stems = Counter(path.stem for path in files if path.parent.name != "cli" and path.stem[0] != "_")
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        walk = [sys.executable, __file__, "--walk", str(package)]
        way = subprocess.run(walk, cwd=folder, env=env, check=True, capture_output=True, text=True)
    rows = {
        "lines of the package": sum(len(path.read_text().splitlines()) for path in files),
        "files of the package": len(files),
        "lines of tests": sum(len(path.read_text().splitlines()) for path in (root / "tests").rglob("*.py")),
        "files from disk to page": way.stdout.split()[-1],
        "modules with a single importer": f"{len(once)}: {', '.join(once)}",
        "names that occur twice, outside of cli": [name for name, count in stems.items() if count > 1],
        "try": sum(isinstance(node, ast.Try) for node in nodes),
    }
    for name, value in rows.items():
        print(f"{name:40} {value}")


if __name__ == "__main__":
    print(walk(Path(sys.argv[2]))) if "--walk" in sys.argv else main()
