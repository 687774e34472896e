"""The README's first example, line by line: from a folder of photos to an encoder in use."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from helpers import hub_cache, in_one_line, of_known_speed
from PIL import Image

from adasim.api import load_run
from adasim.cli.main import main
from adasim.tools import plan

pytestmark = pytest.mark.slow


def test_from_a_folder_of_photos_to_an_encoder_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "time_steps", of_known_speed)
    hub_cache(monkeypatch, tmp_path / "hub", "nobody/nothing")
    Path("photos").mkdir()
    random = np.random.default_rng(0)
    for i in range(32):
        small = Image.fromarray(random.integers(0, 256, (6, 8, 3), np.uint8))
        small.resize((80 + i, 60), Image.Resampling.BICUBIC).save(f"photos/IMG_{i:04}.jpg")

    def adasim(line: str) -> str:
        main(line.split())
        return in_one_line(capsys.readouterr().out)

    said = adasim("pretrain photos --data photos --out runs/photos --hours 0.001 --yes --no-curves")
    assert "32 images without labels" in said
    assert "images/s" in said
    more = 1 + load_run("runs/photos").config.epochs
    said = adasim(f"pretrain --resume runs/photos --epochs {more}")
    assert f"now has {more}" in said
    assert "curves runs/photos/curves.png" in said
    assert "explore adasim explore runs/photos" in said  # what comes next
    assert Path("runs/photos/curves.png").stat().st_size > 10_000
    assert "curves.svg" in adasim("plot runs/photos")
    assert "explore.html" in adasim("explore runs/photos")
    assert "gallery-intriguing.png" in adasim("gallery runs/photos --pick intriguing")
    assert "RankMe" in adasim("eval views runs/photos")
    adasim("embed runs/photos --data photos --out features.npz")
    with np.load("features.npz") as found:
        assert found["features"].shape == (32, 128)
        assert [Path(name).name for name in found["files"]] == [f"IMG_{i:04}.jpg" for i in range(32)]
    similar = adasim("similar runs/photos photos/IMG_0003.jpg --in photos -k 5")
    assert similar.count("IMG_") >= 5
    assert list(Path().glob("*similar*.png"))
    library = "onnx" if find_spec("onnxruntime") is not None else "timm"
    adasim(f"export runs/photos --to {library}")
    assert (Path(f"runs/photos-{library}") / "README.md").is_file()
