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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build leaves files behind."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "adasim", copy / "adasim", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = [
        *("wheel", "--no-deps", "--no-build-isolation", "--no-index"),
        "--wheel-dir",
        str(out),
        str(copy),
    ]
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *build], check=True)
    return next(out.iterdir())


@pytest.mark.slow
def test_a_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"adasim-{adasim.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(about).decode()
    pages = (ROOT / "adasim" / "explore" / "page").iterdir()
    sources = {*(ROOT / "adasim").rglob("*.py"), ROOT / "adasim" / "py.typed", *pages}
    assert held == {str(path.relative_to(ROOT)) for path in sources}
    assert f"\nVersion: {adasim.__version__}\n" in metadata
    assert "\nProject-URL: Paper, https://arxiv.org/abs/2303.13606\n" in metadata


@pytest.mark.slow
def test_the_wheel_runs_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """An empty one, which finds torch and the like where these tests do, and knows nothing of the checkout."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    install = ["--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *install], check=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "elsewhere").mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1"
    }

    def run(program: str, *arguments: str) -> str:
        command = [str(python.with_name(program)), *arguments]
        done = subprocess.run(command, cwd=tmp_path / "elsewhere", env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("python", "-c", "import adasim; print(adasim.__file__)").startswith(str(packages))
    assert run("adasim", "--version") == f"adasim {adasim.__version__}\n"
    assert "after pretraining" in run("adasim", "demo", "--epochs", "2", "--out", "demo")
    assert (tmp_path / "elsewhere" / "demo" / "neighbours.png").exists()
    assert (tmp_path / "elsewhere" / "demo" / "curves.png").exists()
    assert b"adasim explore" in (tmp_path / "elsewhere" / "demo" / "explore.html").read_bytes()[:400]
