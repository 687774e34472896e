"""`adasim gallery`: which images it picks, what it draws of them, what its tables say, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import command, in_one_line, names, photos_of_patterns, refusal, snapshot
from PIL import Image
from pretrainings import Small

import adasim
from adasim.data import open_images
from adasim.data.images import ArrayImages
from adasim.explore.collection import Collection, collect
from adasim.explore.gallery import draw, named, pick, render, rows_of, supports_of_memory
from adasim.explore.lists import COLUMNS, as_csv, as_latex
from adasim.explore.open import Opened, open_features, open_run
from adasim.explore.support import Support
from adasim.neighbors import NeighborMemory
from adasim.options import ExploreOptions
from adasim.runs.folder import check_replaceable
from adasim.tools.sheet import plain_look
from adasim.util.csv import escape_latex, read_csv
from adasim.util.errors import UserError

HOSTILE = [
    "a_b&c%d#e$f${g}~h^i\\j",
    "=1+1",
    "$\\frac$",
    "<b>|",
    "naïve Łódź",
    "猫",
    "[1]",
    "-- ``x'' ?`",
    "x" * 90,
]
"""Names that others may have chosen."""


# ---- five images with a window of two epochs, by hand ----

LISTS = {  # image: its lists of two epochs, {neighbour: similarity}
    0: ({0: 0.75, 1: 0.5}, {0: 0.5, 2: 0.25}),
    1: ({1: 0.5, 0: 0.25}, {0: 0.75, 4: 0.5}),
    2: ({2: 0.5, 3: 0.25}, {3: 0.75, 2: 0.25}),
    3: ({3: 0.5, 0: 0.5}, {0: 0.25, 3: 0.25}),  # a tie, which the smaller id wins
    4: ({}, {}),  # never seen
}
LABELS = [0, 0, 1, 1, 0]


def by_hand(i: int, k: int, tau: float) -> list[tuple[int, float]]:
    """p_win from its equation: mean similarity over the window, absent counts as 0, softmax over the K best."""
    total: dict[int, float] = {}
    for found in LISTS[i]:
        for j, similarity in found.items():
            total[j] = total.get(j, 0.0) + similarity
    best = sorted(total, key=lambda j: (-total[j], j))[:k]
    weights = [math.exp(total[j] / 2 / tau) for j in best]
    return [(j, weight / sum(weights)) for j, weight in zip(best, weights, strict=True)]


@pytest.fixture
def five() -> Opened:
    memory = NeighborMemory(5, 2, window=2, k=2)
    for i, lists in LISTS.items():
        for slot, found in enumerate(lists):
            for place, (j, similarity) in enumerate(found.items()):
                memory.history_ids[i, slot, place] = j
                memory.history_similarities[i, slot, place] = similarity
    memory.epochs = 2
    pixels = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 8, 8) * 50
    images = ArrayImages("five", pixels, torch.tensor(LABELS), ["cat", "dog"])
    return supports_of_memory(memory, collect([images]), 0.2, "mine")


def test_picks_and_rows_are_those_of_p_win_computed_by_hand(five: Opened) -> None:
    best = {i: by_hand(i, 2, 0.2)[0][0] for i in range(4)}
    assert best == {0: 0, 1: 0, 2: 3, 3: 0}
    picked = {kind: set(pick(five, kind, 9, 0).ids) for kind in ("random", "intriguing", "other-class")}
    assert picked["random"] == {0, 1, 2, 3}
    assert picked["intriguing"] == {1, 2, 3} == {i for i in best if best[i] != i}
    assert picked["other-class"] == {3} == {i for i in best if LABELS[best[i]] != LABELS[i]}
    for row in rows_of(five, [2, 0, 3, 1]):
        expected = by_hand(row.query, 2, 0.2)
        assert row.ids == [j for j, _ in expected]
        assert row.p == pytest.approx([p for _, p in expected])
    with pytest.raises(UserError, match="Nothing is known of image 4"):
        pick(five, "3,4", 6, 0)


def test_a_greater_count_keeps_the_images_and_another_seed_chooses_others() -> None:
    collection = collect([ArrayImages("many", torch.zeros(500, 1, 2, 2, dtype=torch.uint8))])
    support = Support(torch.arange(500)[:, None], torch.ones(500, 1))
    supports = Opened(collection, support, torch.empty(0), "")
    six = pick(supports, "random", 6, 0).ids
    assert len(set(six)) == 6
    assert pick(supports, "random", 20, 0).ids[:6] == six
    assert pick(supports, "random", 6, 1).ids != six
    assert len(pick(supports, "random", 999, 0).ids) == 500


def test_images_are_named_by_id_by_file_and_by_the_end_of_a_path() -> None:
    files = ["cat/1.png", "cat/2.png", "dog/1.png", "a, b.png", "7"]
    collection = Collection([], [], files, [0] * 5, None, [])
    assert named(collection, "2,0, 2") == [2, 0]
    assert named(collection, "cat/1.png,2.png") == [0, 1]
    assert named(collection, "/photos/dog/1.png") == [2]
    assert named(collection, "a, b.png") == [3]
    for asked, expected in {
        "1.png": "2 images fit 1.png, such as cat/1.png and dog/1.png",
        "5": "ids run from 0 to 4",
        "-1": "ids run from 0 to 4",
        "cow.png": "No image is called cow.png",
        " , ": "names no image",
    }.items():
        with pytest.raises(UserError, match=re.escape(expected)):
            named(collection, asked)


# ---- the picture ----


def bars_of(axes: Any) -> tuple[list[Any], list[Any]]:
    """Tracks, and the bars on them; those of the legend come last."""
    low = [patch for patch in axes.patches if patch.get_height() < 0.2]
    return low[::2], low[1::2]


def test_bars_frames_and_marks_say_what_the_numbers_say(five: Opened) -> None:
    picked = pick(five, "3,0,2", 6, 0)
    rows = rows_of(five, picked.ids)
    axes = draw(five, rows, picked).axes[0]
    said = [text.get_text() for text in axes.texts]
    shares = [share for row in rows for share in row.p]
    assert [w for w in said if re.fullmatch(r"\d\.\d\d", w)] == [f"{share:.2f}" for share in shares]
    # 3: best match 0, of another class, then itself; 0: itself, then 1 of its class; 2: 3, then itself.
    assert [w for w in said if w in ("≠ cat", "≠ dog", "cat", "dog", "the query")] == [
        *("dog", "≠ cat", "the query"),
        *("cat", "the query", "cat"),
        *("dog", "dog", "the query"),
    ]
    assert [w.split()[1] for w in said if w.startswith("matches")] == ["another", "itself", "another"]
    frames = {patch.get_xy() for patch in axes.patches if not patch.get_fill()}
    squares = [p.get_xy() for p in axes.patches if p.get_fill() and p.get_width() == p.get_height()]
    framed = [place in frames for place in squares]  # query, then its support
    assert framed == [True, False, True, True, True, False, True, False, True]
    tracks, bars = bars_of(axes)
    full, lengths = tracks[0].get_width(), [bar.get_width() for bar in bars[: len(shares)]]
    top = math.ceil(max(shares) * 20) / 20
    assert f"bars: p_win, full at {top:.2f}" in said
    assert lengths == pytest.approx([full * share / top for share in shares])


def test_a_neighbour_without_a_label_is_not_drawn_as_one_of_the_querys_class(five: Opened) -> None:
    assert five.collection.labels is not None
    five.collection.labels[1] = -1
    picked = pick(five, "0", 6, 0)
    axes = draw(five, rows_of(five, picked.ids), picked).axes[0]
    own, unlabelled, *legend = [bar.get_facecolor() for bar in bars_of(axes)[1]]
    assert own == legend[0]
    assert unlabelled not in legend  # the query itself, its class, another one


def test_images_of_any_shape_keep_their_proportions_and_a_torn_one_is_said(tmp_path: Path) -> None:
    sizes = [(300, 100), (40, 160), (32, 32), (3, 64)]
    for n, size in enumerate(sizes):
        Image.new("L" if n % 2 else "RGB", size, 90).save(tmp_path / f"{n}.png")
    (tmp_path / "4.png").write_bytes((tmp_path / "0.png").read_bytes()[:50])
    np.save(tmp_path / "mine.npy", np.eye(5, dtype=np.float32))
    opened = open_features(tmp_path / "mine.npy", str(tmp_path), ExploreOptions(), lambda sentence: None)
    supports = replace(opened, support=opened.support.best(1))
    picked = pick(supports, "0,1,2,3,4", 6, 0)
    axes = draw(supports, rows_of(supports, picked.ids), picked).axes[0]
    assert len(axes.images) == 2 * len(sizes)  # each as a query, and as its own best match
    side = max(patch.get_width() for patch in axes.patches)
    for (width, height), image in zip(sizes, axes.images[::2], strict=True):
        left, right, bottom, top = image.get_extent()
        assert max(right - left, bottom - top) == pytest.approx(side)
        assert (right - left) / (bottom - top) == pytest.approx(width / height, rel=0.05)
    assert [text.get_text() for text in axes.texts].count("cannot be read") == 2


def test_a_long_support_wraps_and_the_tables_hold_all_of_it() -> None:
    images = ArrayImages("many", torch.zeros(30, 1, 4, 4, dtype=torch.uint8))
    ids, p = torch.arange(30).expand(30, 30), torch.full((30, 30), 1 / 30)
    supports = Opened(collect([images]), Support(ids, p), torch.empty(0), "")
    picked = pick(supports, "0,1", 6, 0)
    rows = rows_of(supports, picked.ids)
    axes = draw(supports, rows, picked, show=25).axes[0]
    places = {(round(left, 3), round(top, 3)) for left, _, _, top in (i.get_extent() for i in axes.images)}
    assert len(places) == len(axes.images) == 2 * (1 + 25)
    assert len({x for x, _ in places}) == 1 + 10
    assert "the 25 best are shown" in [text.get_text() for text in axes.texts]
    assert as_csv(supports, rows).count(b"\r\n") == 1 + 2 * 30
    with pytest.raises(UserError, match="Lower --count or --show"):
        draw(supports, rows * 99, picked, show=30)


@pytest.fixture
def hostile() -> Opened:
    """As many images, each with two neighbours, their files and classes called what nobody should call them."""
    count = len(HOSTILE)
    pixels = torch.zeros(count, 1, 4, 4, dtype=torch.uint8)
    collection = collect([ArrayImages("x", pixels, torch.arange(count), list(HOSTILE))])
    collection.names = [f"{name}.png" for name in HOSTILE]
    ids = torch.stack([torch.arange(count), (torch.arange(count) + 1) % count], 1)
    p = torch.tensor([0.75, 0.25]).expand(count, 2)
    return Opened(collection, Support(ids, p), torch.empty(0), "features of _%\\$")


def test_a_pdf_has_text_as_text_and_is_the_same_every_time(hostile: Opened) -> None:
    picked = pick(hostile, "2,5", 4, 0)
    made = [render(hostile, rows_of(hostile, picked.ids), picked, show=10, format="pdf") for _ in range(2)]
    assert made[0] == made[1]
    assert made[0].startswith(b"%PDF")
    assert b"/FontFile2" in made[0]  # TrueType, not outlines
    assert b"/Type3" not in made[0]


# ---- the tables ----


def test_letters_of_other_scripts_come_from_fonts_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import rcParams
    from matplotlib.font_manager import fontManager

    monkeypatch.setattr(fontManager, "get_font_names", lambda: ["DejaVu Sans", "Comic Sans MS", "MS Gothic"])
    with plain_look():
        assert rcParams["font.family"] == ["DejaVu Sans", "MS Gothic"]


def test_hostile_names_survive_the_csv_and_no_spreadsheet_runs_them(hostile: Opened, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(as_csv(hostile, rows_of(hostile, list(range(len(HOSTILE))))))
    assert b",'=1+1.png," in path.read_bytes()
    columns, lines = read_csv(path)
    assert tuple(columns) == COLUMNS
    for place, line in enumerate(lines):
        query, rank = divmod(place, 2)
        j = (query + rank) % len(HOSTILE)
        assert line == {
            **{"query": str(query), "query_file": f"{HOSTILE[query]}.png", "query_class": HOSTILE[query]},
            **{"rank": str(rank + 1), "id": str(j), "file": f"{HOSTILE[j]}.png", "class": HOSTILE[j]},
            "p_win": "0.750000" if rank == 0 else "0.250000",
        }


def test_no_name_can_break_the_latex_table(hostile: Opened) -> None:
    text = as_latex(hostile, rows_of(hostile, list(range(len(HOSTILE)))), "a caption of _ & %").decode()
    body = text.partition("\\endhead\n")[2]
    bare = re.sub(r"\\[a-zA-Z]+|\\.", "", body.replace("\\\\", ""))  # without commands and escaped characters
    assert not re.search(r"[%#$_^~\\]", bare)
    for line in body.splitlines():
        plain = re.sub(r"\\.", "", line)
        assert plain.count("{") == plain.count("}")
        if line.endswith("\\\\"):
            assert plain.count("&") == 4
    assert escape_latex("ﬁ \u2013 é ő ç ų") == "U+FB01 U+2013 é ő ç U+0173"
    assert escape_latex("--''?`-x'y") == "-{}-{}'{}'?{}`{}-x'y"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")
def test_latex_sets_the_table(hostile: Opened, tmp_path: Path) -> None:
    table = as_latex(hostile, rows_of(hostile, [0, 3, 5, 8]), "p_win of 100%_{x}")
    (tmp_path / "table.tex").write_bytes(table)
    page = r"\documentclass{article}\usepackage{longtable}\begin{document}\input{table}\end{document}"
    (tmp_path / "page.tex").write_text(page)
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "-draftmode", "page"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:]


# ---- the command ----


def test_a_gallery_of_a_run_shows_what_it_draws_its_partners_from(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = set(names(run))
    command(f"gallery {run} --pick intriguing --count 99 --show 1")
    assert "such images among 48 images" in in_one_line(capsys.readouterr().out)
    assert set(names(run)) - before == {f"gallery-intriguing.{kind}" for kind in ("png", "csv", "tex")}
    memory, tau = adasim.load_run(run).memory, adasim.load_run(run).config.neighbors.tau
    assert memory is not None
    _, lines = read_csv(run / "gallery-intriguing.csv")
    neighbours, p = memory.distribution(torch.arange(48), tau)
    shut = [i for i in range(48) if neighbours[i, 0] != i]
    assert 0 < len(shut) < 48
    assert {int(line["query"]) for line in lines} == set(shut)
    for line in lines:
        i, rank = int(line["query"]), int(line["rank"]) - 1
        assert int(line["id"]) == neighbours[i, rank]
        assert float(line["p_win"]) == pytest.approx(float(p[i, rank]), abs=1e-6)
    check_replaceable(run)  # what a gallery leaves in a run does not stand in the way of --overwrite

    command(f"gallery {run} --pick 3 --tau 0.05 --out {tmp_path / 'sharp.pdf'} --format png")
    assert names(tmp_path) == ["run", "sharp.csv", "sharp.pdf", "sharp.png", "sharp.tex"]
    sharp = [float(line["p_win"]) for line in read_csv(tmp_path / "sharp.csv")[1]]
    assert sharp == pytest.approx(memory.distribution([3], 0.05)[1][0].tolist(), abs=1e-6)
    assert "tau = 0.05" in open_run(run, ExploreOptions(tau=0.05, workers=0), lambda sentence: None).origin


def test_nothing_is_replaced_unasked_and_a_refusal_writes_nothing(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gallery-random.tex").write_text("mine")
    before = snapshot(tmp_path)
    asked = f"gallery {finished} --out {tmp_path}"
    for line, expected in {
        asked: "gallery-random.tex is there already",
        f"{asked} --pick 48": "ids run from 0 to 47",
        f"{asked} --pick intriguin": "No image is called intriguin",
        f"{asked} --count 0 --pick 3": "--count=0 must be at least 1",
        f"{asked} --tau 0": "--tau=0.0 must be at least 1e-06",
        f"{asked} --k 3": "--k is for --backbone and --features",
        f"{asked}/x/y": "no folder",
        "gallery": "Name a run folder",
        "gallery --backbone resnet50": "--backbone needs --data",
    }.items():
        assert expected in refusal(line, capsys)
    assert snapshot(tmp_path) == before


def test_a_run_without_a_full_window_says_what_to_do(
    finished: Path, small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    standard = adasim.pretrain(small(pairs="standard", epochs=1), tmp_path / "standard")
    sentence = refusal(f"gallery {standard}", capsys)
    assert "its pairs are standard" in sentence
    assert f"adasim gallery --backbone {standard} --data synthetic:48" in sentence

    early = tmp_path / "early"
    shutil.copytree(finished, early)
    config = json.loads((early / "config.json").read_text())
    config["neighbors"]["window"] = 5  # of which three are finished
    (early / "config.json").write_text(json.dumps(config))
    assert "has saved 3 of the 5 epochs" in refusal(f"gallery {early}", capsys)
    shutil.rmtree(early / "checkpoints")
    assert "has no checkpoint" in refusal(f"gallery {early}", capsys)


def test_images_that_moved_are_found_again_and_others_are_refused(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos_of_patterns(tmp_path / "old", "{i:02d}.png")  # without classes
    run = adasim.pretrain(small(epochs=2, data__source=str(tmp_path / "old")), tmp_path / "run")
    new = (tmp_path / "old").rename(tmp_path / "new")
    for verb in ("gallery", "explore"):
        assert "Say where they are now with --data" in refusal(f"{verb} {run}", capsys)
    command(f"explore {run} --data {new} --workers 0 --csv {tmp_path / 'lists'}")
    assert (tmp_path / "lists" / "lonely.csv").exists()
    command(f"gallery {run} --data {new} --pick 07.png")
    _, lines = read_csv(run / "gallery-picked.csv")
    assert {(line["query_file"], line["class"]) for line in lines} == {("07.png", "")}
    assert "needs labels" in refusal(f"gallery {run} --data {new} --pick other-class", capsys)
    (new / "03.png").unlink()
    for verb in ("gallery", "explore"):
        message = refusal(f"{verb} {run} --data {new}", capsys)
        assert "are not those that" in message
        assert f"adasim {verb} --backbone {run} --data {new}" in message


def test_any_encoder_and_any_features_have_galleries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    encoder = "--backbone vit_mini --random-weights --size 16 --no-cache --workers 0"
    command(f"gallery {encoder} --data synthetic:24 --passes 2 --k 4 --count 3")
    assert names(tmp_path) == ["gallery-random.csv", "gallery-random.png", "gallery-random.tex"]
    _, lines = read_csv(tmp_path / "gallery-random.csv")
    shares: dict[str, list[float]] = {}
    for line in lines:
        shares.setdefault(line["query"], []).append(float(line["p_win"]))
    assert [len(p) for p in shares.values()] == [4, 4, 4]
    assert [sum(p) for p in shares.values()] == pytest.approx([1, 1, 1], abs=1e-5)
    command(f"gallery {encoder} --data synthetic:64 --passes 1 --k 50 --show 50 --count 1 --out wide.png")
    assert len(read_csv(tmp_path / "wide.csv")[1]) == 50
    count = sum(len(open_images("synthetic:24", size=16, split=split)) for split in ("train", "test"))
    np.save("mine.npy", np.random.default_rng(0).normal(size=(count, 8)).astype(np.float32))
    asked = "gallery --features mine.npy --data synthetic:24 --pick intriguing"
    assert "An image always matches its own view best" in refusal(asked, capsys)
