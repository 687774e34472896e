"""What people install is what stands here: one version, and a wheel that works without the checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import adasim

ROOT = Path(__file__).parent.parent


def test_the_citation_is_of_this_version() -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited is not None
    assert cited[1] == adasim.__version__


def checkout(folder: Path) -> Path:
    """A copy of what is packaged, since a build leaves files behind."""
    for name in ("adasim", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


class Environment:
    """An empty one, which finds torch and the like where these tests do, and knows nothing of the checkout."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder)
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        # After what is installed here, which may be another copy of this package.
        (self.packages / "outer.pth").write_text(
            f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})"
        )

    def install(self, *words: str) -> None:
        install = ["--python", str(self.python), "install", "--no-deps", "--no-index", *words]
        subprocess.run([sys.executable, "-m", "pip", "--quiet", *install], check=True)

    def run(self, folder: Path, program: str, *arguments: str) -> str:
        command = [str(self.python.with_name(program)), *arguments]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env["OMP_NUM_THREADS"] = "1"
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.mark.slow
def test_a_wheel_holds_the_whole_package_and_runs_in_an_environment_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    copy = checkout(tmp_path / "copy")
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
    wheel = tmp_path / f"adasim-{adasim.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {path for path in (ROOT / "adasim").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert held == {str(path.relative_to(ROOT)) for path in sources}
    own, here = Environment(tmp_path / "venv"), tmp_path / "elsewhere"
    own.install(str(wheel))
    here.mkdir()
    said = own.run(here, "adasim", "demo", "--epochs", "2", "--out", "demo")
    assert "after pretraining" in said
    assert {"neighbours.png", "curves.png", "explore.html"} <= {
        path.name for path in (here / "demo").iterdir()
    }
    assert own.run(here, "python", "-c", "import adasim; print(adasim.__file__)").startswith(
        str(own.packages)
    )


@pytest.mark.slow
def test_an_editable_install_works_in_the_folder_that_the_checkout_lies_in(tmp_path: Path) -> None:
    """There, the folder `adasim` of the checkout is no package, and must not be taken for one."""
    clone = tmp_path / "adasim"
    clone.mkdir()
    own = Environment(tmp_path / "venv")
    own.install("--no-build-isolation", "--editable", str(checkout(clone)))
    code = "import adasim; print(adasim.__file__, 'load_backbone' in dir(adasim))"
    for folder in (tmp_path, clone):
        assert own.run(folder, "python", "-c", code).split() == [
            str(clone / "adasim" / "__init__.py"),
            "True",
        ]
        assert own.run(folder, "python", "-m", "adasim", "--version") == f"adasim {adasim.__version__}\n"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_make_with_an_older_python_says_how_to_name_another(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    pretend = "import sys; sys.version_info = (3, 9); exec(sys.argv[1])"
    (tmp_path / "old").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{pretend}' \"$2\"\n")
    (tmp_path / "old").chmod(0o755)
    make = ["make", "demo", f"PYTHON={tmp_path / 'old'}"]
    done = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode
    assert "Python 3.11 or newer. Name one that you have, as in: make demo PYTHON=python3.11" in done.stderr
    assert not (tmp_path / ".venv").exists()
