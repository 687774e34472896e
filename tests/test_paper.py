"""The runner behind benchmarks/paper: its cells are complete, each leaves one line, partners are judged rightly."""

import importlib
import json
import runpy
import shlex
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from statistics import mean
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from helpers import json_lines, refusal
from PIL import Image

from adasim.cli.main import main as adasim_command
from adasim.train.report import MEANT
from adasim.util.collapse import CollapseWatch

ROOT = Path(__file__).parents[1]


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`paper("cell")` is the module benchmarks.paper.cell."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.paper.{name}")


def result(which: str, knn: float = 1.0, **kept: Any) -> dict[str, Any]:
    """A line of results: `result("dino/adasim/0", knn=12, loss=[2.0, 1.0])`."""
    method, arm, seed = which.split("/")
    return {"method": method, "arm": arm, "seed": int(seed), "knn": knn, "curves": kept, "collapse": []}


def write(file: Path, *lines: dict[str, Any]) -> Path:
    file.write_text("\n".join(map(json.dumps, lines)))
    return file.parent


def test_every_cell_of_every_table_has_a_configuration_and_a_name_of_its_own(paper: Any) -> None:
    tables, settings = paper("tables"), paper("settings")
    for cells in tables.TABLES.values():
        assert len(set(cells)) == len(cells)
        for cell in cells:
            assert tables.Cell.read(str(cell)) == cell
            if not cell.arm.startswith("confident"):  # which adasim has no more
                settings.build(*cell).check_values()
    assert settings.build("simsiam", "adasim:k=3,tau=0.1", 2).neighbors.k == 3


def test_arms_differ_from_the_baseline_in_their_pairs_alone(paper: Any) -> None:
    build = paper("settings").build
    names = {"pairs", "nearest", "neighbors"}
    for method in ("simsiam", "dino"):
        baseline = build(method, "standard", 1).to_dict()
        for arm in ("nearest", "adasim", "oracle:p=0"):
            other = build(method, arm, 1).to_dict()
            assert {k for k in baseline.keys() | other.keys() if baseline.get(k) != other.get(k)} <= names


def test_the_share_of_right_partners_is_counted_among_those_that_changed(paper: Any) -> None:
    found = paper("frontier").judged(torch.tensor([0, 0, 3, 1, 5, 4]), torch.tensor([0, 0, 1, 1, 2, 0]))
    assert found == pytest.approx({"bootstrapped": 5 / 6, "precision": 2 / 5})


def test_the_texts_show_what_the_results_say(paper: Any) -> None:
    report = paper("report")
    tables = report.blocks(paper("results").Results(paper("cell").RESULTS))
    for text in report.TEXTS:
        assert report.filled(text.read_text(), tables) == text.read_text(), (
            "python -m benchmarks.paper.report"
        )
    together = "".join(text.read_text() for text in report.TEXTS)
    assert [name for name in tables if f"<!-- {name} -->" not in together] == []


def test_a_gain_over_a_baseline_of_another_first_epoch_is_told(paper: Any, tmp_path: Path) -> None:
    losses = {"standard/0": 1.0, "adasim/0": 1.0, "standard/1": 2.0, "adasim/1": 2.1}
    lines = [
        result(f"dino/{name}", loss=[loss, 0.5], bootstrapped=[0, 0.25]) for name, loss in losses.items()
    ]
    results, blocks = paper("results").Results(write(tmp_path / "main.jsonl", *lines)), paper("blocks")
    assert list(map(str, results.unpaired())) == ["dino/adasim/1"]
    assert "`dino/adasim/1`" in blocks.pairing(results)


def test_a_run_that_failed_in_its_first_epoch_is_told(paper: Any, tmp_path: Path) -> None:
    line = result("dino/nearest/0") | {"failed": "The loss is nan."}
    del line["knn"]
    results, blocks = paper("results").Results(write(tmp_path / "main.jsonl", line)), paper("blocks")
    table = blocks.arm_table(results, [("dino", "nearest")], {})
    assert table.splitlines()[-1].split(" | ")[2] == "1, 1 failed"
    assert blocks.collapse_list(results) == "- `dino/nearest/0`: *The loss is nan.*"


def test_a_cell_that_has_a_result_or_is_not_known_is_told(
    paper: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = paper("__main__").main
    (tmp_path / "train").mkdir()
    write(tmp_path / "main.jsonl", result("dino/nearest/0"))

    def call(cell: str) -> None:
        asked = ["main", "--data", str(tmp_path), "--results", str(tmp_path), "--cell", cell]
        monkeypatch.setattr("sys.argv", ["paper", *asked])
        main()

    call("dino/nearest/0")
    assert "dino/nearest/0 has a result already; --again runs it" in capsys.readouterr().out
    for wrong, what in (
        ("dinosaur/nearest/0", "no method dinosaur"),
        ("dino/adasin:k=3/0", "no pairs adasin"),
        ("dino/adasim:share=0.3/0", "have no share"),
        ("dino/oracle:oracle_p=0/0", "have no oracle_p"),
    ):
        with pytest.raises(SystemExit, match=what):
            call(wrong)


def test_of_a_cell_that_two_tables_have_the_newest_line_counts(paper: Any, tmp_path: Path) -> None:
    for day, table in enumerate(("policies", "main"), 1):
        write(tmp_path / f"{table}.jsonl", result("simsiam/standard/0", day) | {"date": f"2026-01-0{day}"})
    (found,) = paper("results").Results(tmp_path).seeds("simsiam", "standard")
    assert found["knn"] == 2


def test_commands_at_the_papers_scale_are_understood(
    paper: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = paper("cluster")
    place = cluster.Cluster(tmp_path / "nowhere", tmp_path / "runs", tmp_path)
    own = paper("tables").Cell("dino-vit", "nearest:space=latent", 0)
    trained = {c for item in cluster.PAPER.values() for c in item.cells if c.method in cluster.TRAININGS}
    for cell in sorted({own, *trained}):
        (train,) = cluster.commands(cell, "", place)
        assert f"No such folder: {tmp_path}/nowhere" in refusal(train[train.index("adasim") + 1 :], capsys)
        assert "--overwrite" in cluster.commands(cell, "", place, anew=True)[0]
    for measure in cluster.commands(own, " ".join(cluster.MEASURES), place)[1:]:
        assert str(tmp_path) in refusal(measure[measure.index("eval") :], capsys)


def test_a_dry_run_is_a_script_of_every_command_that_fits_a_terminal(
    paper: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dry_run, cluster = paper("dry_run"), paper("cluster")
    for counted in ("_step", "_forward"):
        monkeypatch.setattr(dry_run, counted, lambda *_: 10**10)
    monkeypatch.chdir(tmp_path)
    asked = "all --recipes paper --dry-run --gpus 4 --gpu H100"
    monkeypatch.setattr("sys.argv", ["paper", *asked.split()])
    paper("__main__").main()
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    joined = text.replace(" \\\n   ", "")
    place = cluster.Cluster(Path("data"), Path("runs/paper/cluster"), Path(), "torchrun --nproc-per-node 4")
    for item in cluster.PAPER.values():
        assert item.title.split(".")[0] in text
        for cell in item.cells:
            for command in cluster.commands(cell, item.measures, place):
                assert joined.count(shlex.join(command) + "\n") == 1, command
    assert all(f"data/{name}" in joined for name in dry_run.DATA)


@pytest.mark.slow
def test_the_estimate_is_set_to_the_papers_own_step(paper: Any) -> None:
    dry_run, published = paper("dry_run"), paper("published")
    for batch, (seconds, _) in published.RUNTIME.items():
        hours = dry_run._hours(batch * dry_run._step("dino-vit-s16"), "fp16", "MI250X")
        assert 3600 * hours == pytest.approx(seconds, rel=0.1)


CHAINS = {
    "oracle": "dino-vit/oracle:p=0.5/0",
    "main": "simsiam/standard/0 dino/nearest/0 dino-vit/adasim/0 dino-vit-b/nearest:space=latent/0",
    "fewshot": "simsiam/standard/0 supervised/resnet50.tv_in1k/0",
    "ablation": "dino-vit/adasim:tau=0.4/0",
    "runtime": "",
    "segmentation": "dino-vit/adasim/0 dino-vit-coco/adasim:window=50,k=3/0",
    "hood": "dino-vit/adasim:window=50,k=10/0",
    "gallery": "dino-vit/adasim:window=50,k=10/0",
    "schedule": "dino-vit-b/standard/0",
}
SMALLER = {
    "pretrain": "--epochs 3 --batch-size 16 --views.size 16 --neighbors.window 1 --save.encoder-every 1 "
    "--precision fp32 --device cpu --data.workers 0 --no-curves --no-compare",
    "simsiam": "--model.name resnet_tiny --simsiam.proj-dim 16 --simsiam.pred-dim 8",
    "resnet50": "--model.name resnet_tiny --dino.out-dim 16 --dino.hidden-dim 16 --dino.bottleneck-dim 8",
    "vit": "--model.name vit_mini --dino.out-dim 16 --dino.hidden-dim 16 --dino.bottleneck-dim 8",
    "knn": "--k 5 --workers 0",
    "linear": "--quick --epochs 1 --workers 0",
    "fewshot": "--ways 2 --shots 2 --queries 2 --episodes 5 --workers 0",
    "segmentation": "--quick --epochs 1 --workers 0",
    "runtime": "--recipe desk-resnet --images 64 --batch 8 --steps 2 --device cpu",
}


@pytest.mark.slow
def test_every_table_and_figure_of_the_paper_comes_to_its_end(
    paper: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, cell_of = paper("cluster"), paper("tables").Cell.read
    folder = toy_data(paper, tmp_path / "data")
    place = cluster.Cluster(folder, tmp_path / "runs", tmp_path / "results", "torchrun --nproc-per-node 8")

    def smaller(command: list[str], log: Path) -> None:
        """The command in this process, with a small model and few epochs."""
        words = command[command.index("-m") + 1 :]
        if words[0] != "adasim":
            monkeypatch.setattr("sys.argv", [*words, *SMALLER["runtime"].split()])
            return paper("runtime").main()
        words = [
            word.replace("resnet50.tv_in1k", "resnet10t") if word == "resnet50.tv_in1k" else word
            for word in words
        ]
        kinds = [words[1]] if words[1] == "pretrain" else [words[2]]
        if words[1] == "pretrain":
            kinds += [next(kind for kind in ("simsiam", "resnet50", "vit") if kind in words[2])]
        untrained = ["--random-weights", "--size", "32"] if "resnet10t" in words else []
        with open(log, "a") as file, redirect_stdout(file):
            adasim_command(
                [*words[1:], *" ".join(SMALLER.get(kind, "") for kind in kinds).split(), *untrained]
            )

    for name, chosen in CHAINS.items():
        assert cluster.run(name, place, [*map(cell_of, chosen.split())], execute=smaller) == []
        if chosen:
            lines = json_lines(place.results / f"{name}.jsonl")
            assert [f"{line['method']}/{line['arm']}/{line['seed']}" for line in lines] == chosen.split()
    assert CHAINS.keys() == cluster.PAPER.keys()
    figures = {
        name: json_lines(place.results / f"{name}.jsonl")[-1]["figures"] for name in CHAINS if CHAINS[name]
    }
    assert {name.split()[0] for name in figures["main"]} == {"knn", "linear"}
    assert len(figures["fewshot"]) >= 8
    assert len(figures["segmentation"]) == 3
    assert len(json_lines(place.results / "schedule.jsonl")[0]["snapshots"]) == 3
    drawn = {path.stem for path in (place.results / "figures").glob("*.png")}
    assert drawn == {"hood", "schedule", "random", "intriguing", "other-class"}
    assert len(json_lines(place.results / "runtime.jsonl")) == 1


def toy_data(paper: Any, folder: Path) -> Path:
    """All data sets of the paper, with 64 images for pretraining."""
    torch.manual_seed(0)
    save, sets = paper("prepare").save, paper("dry_run").DATA

    def images(count: int) -> list[tuple[Image.Image, int]]:
        return [(Image.fromarray(x.numpy()), i % 2) for i, x in enumerate(shades(count))]

    save(images(64), ["a", "b"], folder / "imagenet" / "train")
    save(images(16), ["a", "b"], folder / "imagenet" / "val")
    save([(x, 0) for x, _ in images(32)], ["train2017"], folder / "coco")
    for name in sets:
        if name in paper("prepare").CLASSES:
            save(images(12), ["a", "b"], folder / name)
        elif name in paper("prepare").MASKS:
            for split in ("train", "val"):
                save([(x, 0) for x, _ in images(8)], ["images"], folder / name / split)
                masks = [(Image.fromarray((x[..., 0] // 128).numpy()), 0) for x in shades(8)]
                save(masks, ["masks"], folder / name / split)
    return folder


def test_what_a_command_prints_is_kept_and_searched_for_a_collapse(paper: Any, tmp_path: Path) -> None:
    watch = CollapseWatch()
    *_, said = (watch.update(torch.eye(20) + 10) for _ in range(5))
    assert said
    paper("cluster").shown_and_kept(["echo", "\n".join(["epoch 1", *said])], tmp_path / "log")
    assert paper("cell").collapse_of(tmp_path / "log") == said
    with pytest.raises(CalledProcessError):
        paper("cluster").shown_and_kept(["false"], tmp_path / "log")


@pytest.mark.slow
def test_a_cell_leaves_one_line_and_the_frontier_reads_its_run(
    paper: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell, frontier, cells = paper("cell"), paper("frontier"), paper("tables").Cell
    torch.manual_seed(0)
    for split, count in (("train", 30), ("test", 10)):
        images = [(Image.fromarray(x.numpy()), i % 3) for i, x in enumerate(shades(count))]
        paper("prepare").save(images, ["a", "b", "c"], tmp_path / "data" / split)
    build = cell.build

    def tiny(*which: Any) -> Any:
        config = build(*which)
        config.epochs, config.batch_size, config.optim.warmup_epochs, config.eval.every = 4, 8, 1, 2
        config.neighbors.window = 1
        return config

    monkeypatch.setattr(cell, "build", tiny)
    monkeypatch.setattr(cell, "images_per_class", lambda method: 9)
    one = cells("simsiam", "nearest", 0)
    cell.run_cell("policies", one, tmp_path / "data", tmp_path / "runs", tmp_path / "results")
    [line] = (tmp_path / "results" / "policies.jsonl").read_text().splitlines()
    kept = json.loads(line)
    assert kept["command"].endswith("policies --data DIR --cell simsiam/nearest/0 --again")
    assert 0 <= kept["knn"] <= 100
    assert 0 <= kept["linear"] <= 100
    assert kept["curves"]["bootstrapped"] == [0, *[pytest.approx(1, abs=0.2)] * 3]
    assert [value is None for value in kept["curves"]["knn"]] == [True, False, True, False]
    assert list(cell.done(tmp_path / "results" / "policies.jsonl")) == [one]

    again = cell.run_cell("policies", one, tmp_path / "data", tmp_path / "runs", tmp_path / "results")
    assert again["curves"] == kept["curves"]
    assert again["resumed"] is False

    run = str(tmp_path / "runs" / "simsiam_nearest_0")
    monkeypatch.setattr("sys.argv", ["frontier", run, "--passes", "3", "--pairs", "nearest"])
    capsys.readouterr()
    frontier.main()
    assert "running mean" in capsys.readouterr().out


def shades(count: int) -> torch.Tensor:
    """Images of 32 pixels, uint8 (count, 32, 32, 3)."""
    return torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8)


def test_the_comparison_with_the_released_code_refuses_a_folder_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "main_adasim.py").touch()
    monkeypatch.setattr("sys.argv", ["parity.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="it has no utils"):
        runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "parity.py"), run_name="__main__")


def test_what_a_run_says_of_our_benches_is_what_the_results_say(paper: Any) -> None:
    module = paper("results")
    results = module.Results(paper("cell").RESULTS)

    def gain(method: str, arm: str) -> float:
        ours, standard = (
            {line["seed"]: line["knn"] for line in results.seeds(method, which)}
            for which in (arm, "standard")
        )
        assert len(ours) == len(standard) == 3
        return mean(ours[seed] - standard[seed] for seed in ours)

    low, high = (
        mean(part[0] / sum(part) for part in map(module.shares, results.seeds(method, "adasim")))
        for method in ("simsiam", "late")
    )
    assert (
        f"cost {-gain('simsiam', 'adasim'):.1f} points of k-NN where {low:.0%} were of one class and gained "
        f"{gain('late', 'adasim'):.1f} where {high:.0%} were; any of the class instead gained "
        f"{gain('late', 'control:partner=right'):.1f}, and "
        f"{gain('late', 'control:partner=right,nearest=0,farthest=0.1'):.1f} if only from its nearest tenth"
        in MEANT
    )
