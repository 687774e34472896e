"""A result is kept whole or not at all, and a table compares only what may be compared."""

import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adasim.cli.main import main
from adasim.config import Config
from adasim.eval.results import (
    COMPARED,
    Result,
    append_result,
    compare,
    print_comparison,
    read_results,
    to_latex,
    to_markdown,
)
from adasim.eval.splits import data_name
from adasim.runs.folder import RunFolder
from adasim.util import terminal
from adasim.util.errors import UserError


def result(protocol: str = "knn", value: float = 50.0, name: str = "photos", **changes: Any) -> Result:
    setting = {"knn": "k=20", "linear": "dino, quick", "fewshot": "5-way 5-shot"}[protocol]
    made = Result(protocol, setting, value, {"top1": value}, {"name": name, "fingerprint": name}, {}, {})
    return replace(made, **changes)


def run_with(folder: Path, *results: Result) -> Path:
    folder.mkdir(parents=True)
    for one in results:
        append_result(folder / "results.jsonl", one, "cpu")
    return folder


def test_a_line_says_what_was_measured_when_and_with_which_versions(tmp_path: Path) -> None:
    append_result(tmp_path / "results.jsonl", result(value=61.5), "cpu")
    record = json.loads((tmp_path / "results.jsonl").read_text())
    assert record["date"][:2] == "20"
    assert record["versions"]["torch"]
    assert read_results(tmp_path) == [result(value=61.5)]


def test_a_line_cut_short_by_a_crash_is_passed_over_and_spoils_no_later_one(tmp_path: Path) -> None:
    file = run_with(tmp_path / "run", result(value=1.0), result(value=2.0)) / "results.jsonl"
    os.truncate(file, file.stat().st_size - 30)
    append_result(file, result(value=3.0), "cpu")
    assert [one.value for one in read_results(tmp_path / "run")] == [1.0, 3.0]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run_with(tmp_path / "run", result()) / "results.jsonl"
    before = file.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:20]))
    with pytest.raises(UserError, match="the disk is full"):
        append_result(file, result(), "cpu")
    assert file.read_bytes() == before


def test_results_that_come_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: append_result(file, result(value=float(i)), "cpu"), range(40)))
    assert sorted(one.value for one in read_results(tmp_path)) == list(range(40))


def test_a_table_says_which_line_of_its_results_is_left_out_and_prints_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tmp_path / "run", result(value=1.0), result(value=2.0))
    lines = (run / "results.jsonl").read_bytes().splitlines(keepends=True)
    (run / "results.jsonl").write_bytes(lines[0] + lines[1].replace(b"{", b"[", 1))
    main(["eval", "table", str(run), "--format", "markdown"])
    said = capsys.readouterr()
    assert said.err == f"{run / 'results.jsonl'}: line 2 is left out, as damaged.\n"
    assert said.out.splitlines()[-1].startswith("| run | 1.0 |")
    (run / "results.jsonl").write_bytes(b'[1]\n"text"\n{"protocol": "knn"}\nnot json\n' + lines[0])
    main(["eval", "table", str(run)])
    assert "lines 1, 2, 3 and 1 more are left out" in capsys.readouterr().err


def test_a_table_shows_the_newest_values_and_their_difference_to_the_first_run(tmp_path: Path) -> None:
    base = run_with(tmp_path / "dino", result(value=10.0), result(value=68.4), result("linear", 71.9))
    own = result(value=99.0, name="some photos", metrics={COMPARED: {"raw pixels": 9.0}})  # at a run's end
    snapshot = result(value=1.0, model={"epoch": 1})
    ours = run_with(tmp_path / "adasim", result(value=70.1), result("linear", 73.3), own, snapshot)
    table = compare([base, ours])
    assert table.headings == [("k-NN", "k=20", "photos"), ("linear", "dino, quick", "photos")]
    (name, first), (other, second) = table.rows
    assert (name, other) == ("dino", "adasim")
    assert first == [(68.4, None, None, None), (71.9, None, None, None)]
    assert second == [(70.1, None, pytest.approx(1.7), None), (73.3, None, pytest.approx(1.4), None)]


def test_runs_of_a_sweep_keep_their_whole_names(tmp_path: Path) -> None:
    runs = [run_with(tmp_path / name, result()) for name in ("t0", "t0.2", "t1.0", "a/t0.2")]
    runs.append(runs[1] / "results.jsonl")  # the same run under another path
    append_result(tmp_path / "loose.v2.jsonl", result(), "cpu")
    runs.append(tmp_path / "loose.v2.jsonl")
    here = tmp_path.name
    expected = ["t0", f"{here}/t0.2", "t1.0", "a/t0.2", f"{here}/t0.2", "loose.v2"]
    assert [name for name, _ in compare(runs).rows] == expected


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/data/photos/", "photos"),
        ("/data/photos-0.2", "photos-0.2"),
        ("photos.v1.npz", "photos.v1"),
        ("hf:user/cifar10", "cifar10"),
        ("synthetic:320", "synthetic:320"),
        ("/", "/"),
    ],
)
def test_data_sets_keep_their_whole_names(source: str, name: str) -> None:
    assert data_name(source) == name


def test_values_on_other_images_or_in_other_settings_are_not_compared(tmp_path: Path) -> None:
    base = run_with(tmp_path / "a", result(value=60.0), result("linear", 70.0))
    other = result(value=65.0)
    other.data["fingerprint"] = "other images of the same name"
    ours = run_with(tmp_path / "b", other, result("linear", 75.0, setting="simsiam, quick"))
    table = compare([base, ours])
    assert len(table.headings) == 4
    assert len({heading for heading in table.headings}) == 4
    assert all(cell is None or cell.gain is None for _, cells in table.rows for cell in cells)


def test_few_shot_results_get_an_average_for_runs_that_have_all_of_them(tmp_path: Path) -> None:
    base = run_with(tmp_path / "a", result("fewshot", 40.0, "cars"), result("fewshot", 60.0, "pets"))
    ours = run_with(tmp_path / "b", result("fewshot", 41.0, "cars"))
    table = compare([base, ours])
    assert [heading[2] for heading in table.headings] == ["cars", "pets", "average"]
    assert table.rows[0][1][2] == (50.0, None, None, None)
    assert table.rows[1][1] == [(41.0, None, 1.0, None), None, None]


def test_markdown_has_brackets_dashes_and_a_bold_best(tmp_path: Path) -> None:
    base = run_with(tmp_path / "a|b", result(value=57.1), result("linear", 68.0))
    ours = run_with(tmp_path / "ours", result(value=56.2))
    assert to_markdown(compare([base, ours])).splitlines() == [
        "| run | k-NN, k=20, photos | linear, dino, quick, photos |",
        "|---|---:|---:|",
        r"| a\|b | **57.1** | 68.0 |",
        "| ours | 56.2 (-0.9) | - |",
    ]


def test_latex_is_a_tabular_whose_names_are_escaped(tmp_path: Path) -> None:
    base = run_with(tmp_path / "vit_s", result(value=68.4, name="photos_50%"))
    ours = run_with(tmp_path / "vit_s_ada", result(value=70.1, name="photos_50%"))
    text = to_latex(compare([base, ours]))
    assert text.splitlines()[0] == r"\begin{tabular}{lr}"
    assert r" & photos\_50\% \\" in text
    assert r"vit\_s\_ada & \textbf{70.1} (+1.7) \\" in text


@pytest.fixture
def seeds(tmp_path: Path) -> Callable[..., list[Path]]:
    """seeds(pairs, {seed: k-NN accuracy}): run folders PAIRS-sSEED with one result each."""

    def make(pairs: str, values: dict[int, float]) -> list[Path]:
        runs = [tmp_path / f"{pairs}-s{seed}" for seed in values]
        for run, (seed, value) in zip(runs, values.items(), strict=True):
            RunFolder.create(run, Config(pairs=pairs, seed=seed), {"fingerprint": "same"}).close()
            append_result(run / "results.jsonl", result(value=value), "cpu")
        return runs

    return make


def test_runs_that_differ_by_seed_share_a_row_and_gains_are_paired_by_seed(
    seeds: Callable[..., list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = seeds("standard", {0: 10.0, 1: 50.0, 2: 30.0})
    ours = seeds("adasim", {2: 33.0, 1: 51.0, 7: 99.0})
    loose = tmp_path / "published.jsonl"
    append_result(loose, result(value=40.0), "cpu")
    table = compare([*base, *ours, loose])
    assert [name for name, _ in table.rows] == ["standard (3 seeds)", "adasim (3 seeds)", "published"]
    cells = [cell for _, (cell,) in table.rows if cell is not None]
    assert cells[0] == (30.0, 20.0, None, None)  # 10, 30 and 50
    # 33, 51 and 99: mean 61, squares of 28, 10 and 38 over 2; gains of 3 and 1: deviation 1.41, over the root of 2
    assert cells[1] == pytest.approx((61.0, (2328 / 2) ** 0.5, 2.0, 1.0))
    assert cells[2] == (40.0, None, 10.0, None)  # has no seed: compared with the mean
    assert "| adasim (3 seeds) | **61.0 ± 34.1** (+2.0 ± 1.0) |" in to_markdown(table)
    assert r"adasim (3 seeds) & \textbf{61.0 $\pm$ 34.1} (+2.0 $\pm$ 1.0) \\" in to_latex(table)
    main(["eval", "table", *map(str, [*base, *ours]), "--format", "markdown"])
    assert "mean ± standard deviation" in capsys.readouterr().err


def test_a_seed_that_is_missing_is_said_and_a_repeated_one_has_a_row_of_its_own(
    seeds: Callable[..., list[Path]], tmp_path: Path
) -> None:
    base, ours = seeds("standard", {0: 10.0, 1: 20.0}), seeds("adasim", {2: 30.0, 3: 40.0})
    append_result(base[0] / "results.jsonl", result("linear", 60.0), "cpu")
    said: list[str] = []
    table = compare([*base, *ours], said.append)
    assert table.rows[1][1] == [(35.0, pytest.approx(50**0.5), None, None), None]
    assert said == [
        "standard (2 seeds): linear, dino, quick, photos was measured for 1 of 2 seeds.",
        "adasim (2 seeds): k-NN, k=20, photos has no gain, since no seed is one of standard (2 seeds), too.",
    ]
    again = tmp_path / "again"
    shutil.copytree(base[0], again)
    assert [name for name, _ in compare([*base, again]).rows] == ["standard-s0", "standard-s1", "again"]


@pytest.mark.parametrize("width", [60, 80, 300])
def test_no_number_is_cut_however_narrow_the_terminal(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    protocols, data = ("knn", "linear", "fewshot"), ("clothing", "a long name of some other photos")
    runs = []
    for r, name in enumerate(("base", "ours", "desk-resnet-standard-seed-2", "w10", "w20")):
        found = [
            result(protocol, 10.1 + 10 * p + 3 * d + r, where)
            for p, protocol in enumerate(protocols)
            for d, where in enumerate(data)
        ]
        runs.append(run_with(tmp_path / name, *found))
    table = compare(runs)
    print_comparison(table, terminal.console())
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    numbers = sorted(re.findall(r"\d+\.\d(?: \([+-]\d+\.\d\))?", shown))
    values = [(cell.value, cell.gain) for _, cells in table.rows for cell in cells if cell]
    assert numbers == sorted(f"{v:.1f}" + ("" if gain is None else f" ({gain:+.1f})") for v, gain in values)
    assert ("run" in shown.split()) == (width == 300)  # a row for each where there is room


def test_a_folder_without_results_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="adasim eval knn"):
        compare([tmp_path])
