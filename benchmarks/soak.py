"""Faults at random times while real photos are trained on, a resume after each, and in the end all bits compared.

    python benchmarks/soak.py --data PHOTOS --kills 200             # half an hour on two cores, for Linux
    python benchmarks/soak.py --data PHOTOS --kills 40 --ranks 2    # under torchrun's launcher, over gloo

Short runs on a part of the photos are disturbed again and again until they end, and each is then compared with one
that nothing happened to: every tensor of the newest checkpoint, its counters, the neighbour lists, the encoder's
file, and the losses in metrics.jsonl. Then it looks for leftovers: temporary files, processes, shared memory.

- killed (SIGKILL): the process (with ranks: the launcher), the whole group, a loader process, a rank; some of them
  while a checkpoint is being written
- the disk fills, and has room again after a moment or only when the run has ended. Root gets a small disk in memory,
  mounted for this process alone; for others the size of files is limited
- a photo changes before a resume, which must be refused by name; with the photo restored it goes on

Importing torch takes seconds of processor time, so this process imports it once, and most attempts are forked from it
and run the real command line; every tenth is a fresh `python -m adasim` (or torchrun). --seed decides all but when
exactly a process is hit. It ends when --kills are done or --hours are over, and leaves nothing but its table:
benchmarks/results/soak.{json,md}, or soak_ranks with several. The exit code is 1 if anything was not as it should be.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun has it; on small tensors threads only wait

from _bits import content, difference, names
from _processes import (
    adopt_orphans,
    children,
    is_running,
    kill,
    limit_files,
    orphans,
    private_disk,
    start,
    tree,
    until,
    wait,
)
from _report import report
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import adasim.__main__
import adasim.api
import adasim.cli.pretrain

RECIPES = {
    "desk-resnet": [],
    "desk-vit": ["--model.patch-size", "8"],
    "desk-resnet with nnclr": ["--method", "nnclr"],
}
SETTINGS = shlex.split(
    "--views.size 32 --epochs 6 --batch-size 32 --no-curves --no-compare --save.log-every 1"
)
SAVES = shlex.split("--save.every-epochs 1 --save.every-minutes 0.005")  # in mid-epoch, too
FRESH = 10  # one attempt in this many imports everything anew
ENOUGH_S = 300.0  # for an attempt: longer means that it hangs
GONE_S = 60.0  # until what a kill orphaned is gone; an idle loader process looks every few seconds

KILLS = ("process", "group", "loader", "save", "rank")
LAUNCHER_LEFTOVER = re.compile(r"torchelastic_.*|pytorch-errorfile-.*")  # of torch's launcher


@dataclass
class Table:
    """What happened, by kind of fault."""

    times: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    exact: Counter[str] = field(default_factory=Counter)
    tracebacks: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    attempts: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    launchers: int = 0
    """What torch's launchers left."""

    @property
    def kills(self) -> int:
        return sum(count for kind, count in self.times.items() if kind.startswith(KILLS))

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "fault": kind,
                "times": count,
                "resumed": self.resumed[kind],
                "exact": self.exact[kind],
                "told by a traceback": self.tracebacks[kind],
            }
            for kind, count in sorted(self.times.items())
        ]


class Soak:
    """Runs, and what is done to them."""

    def __init__(self, args: argparse.Namespace, work: Path, own_disk: bool) -> None:
        self.args, self.work, self.own_disk = args, work, own_disk
        self.random = random.Random(args.seed)
        self.table = Table()
        self.end = time.monotonic() + args.hours * 3600
        self.photos = sorted(copy_photos(args.data, work / "photos", args.photos, self.random))
        self.deck: list[str] = []
        self.expected: dict[str, dict[str, str]] = {}
        self.names: set[str] = set()
        self.shared = set(os.listdir("/dev/shm"))

    # ---- attempts ----

    def begin(self, recipe: str, out: Path, fresh: bool, workers: int) -> int:
        """Start or resume the run, whichever it is time for; the process's id."""
        name, *_ = recipe.split()
        first = ["pretrain", name, *RECIPES[recipe], *SETTINGS, "--out", str(out), "--data", "photos"]
        again = ["pretrain", "--resume", str(out), "--no-curves", "--no-compare"]
        arguments = again if (out / "config.json").exists() else first
        arguments = [*arguments, *SAVES, "--data.workers", str(workers)]
        ranks = self.args.ranks
        work: Callable[[], object]
        if fresh:
            module = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "adasim"]
            command = [sys.executable, "-m", *(module if ranks > 1 else ["adasim"]), *arguments]
            work = lambda: os.execv(sys.executable, command)  # noqa: E731
        elif ranks > 1:
            work = lambda: launch(ranks, arguments)  # noqa: E731
        else:
            work = lambda: run_command(*arguments)  # noqa: E731
        self.table.attempts["fresh" if fresh else "forked"] += 1
        return start(work, self.log)

    @property
    def log(self) -> Path:
        return self.work / "log"

    def undisturbed(self, recipe: str, fresh: bool) -> Path:
        """A run that nothing happens to."""
        out = self.work / "disk" / "run"
        self.log.unlink(missing_ok=True)
        if wait(self.begin(recipe, out, fresh, workers=2), ENOUGH_S) != 0:
            raise SystemExit(f"A run that nothing happened to failed:\n{self.log.read_text()}")
        return out

    def prepare(self, recipe: str) -> None:
        """Know what the run's end looks like: from a fresh process, and the same from a forked one."""
        for fresh in (True, False):
            out = self.undisturbed(recipe, fresh)
            found, self.names = content(out), self.names | names(out)
            if found != self.expected.setdefault(recipe, found):
                raise SystemExit(
                    f"{recipe}: a forked run differs in {difference(found, self.expected[recipe])}."
                )
            shutil.rmtree(out)

    def disturb(self, recipe: str) -> None:
        """One run from start to end, with faults as long as any are to be had."""
        out = self.work / "disk" / "run"
        faults: list[str] = []
        pending: list[str] = []  # those that no attempt has gone on from
        complete = False
        while not complete:
            self.log.unlink(missing_ok=True)
            calm = self.table.kills >= self.args.kills or time.monotonic() > self.end
            kind = "" if calm else self.draw(out)
            fresh = sum(self.table.attempts.values()) % FRESH == FRESH - 1
            if kind == "photo changed":
                hit, code = self.change_photo(recipe, out, fresh)
            else:
                workers = self.random.choice((1, 2, 3))
                pid = self.begin(recipe, out, fresh, workers)
                hit = bool(kind) and self.wait_for_a_moment(pid, out, fresh) and self.strike(kind, pid, out)
                code = wait(pid, ENOUGH_S)
                if kind.startswith("disk"):
                    self.free_disk([])
            if code is None:
                kill(*tree(os.getpid()))
            left = orphans(GONE_S)
            said = self.log.read_text(errors="replace") if self.log.exists() else ""
            problems = [f"left over: {one}" for one in left]
            problems += [] if code is not None else ["it hung"]
            self.table.tracebacks[kind] += self.has_traceback(said)
            if hit and code not in self.expected_codes(kind):
                problems.append(f"exit code {code}")
            if not hit and (code != 0 or self.has_traceback(said)):
                problems.append(f"exit code {code}, though nothing was done to it")
            for problem in problems:
                self.complain(recipe, f"{kind or 'undisturbed'}: {problem}", out, said)
            if hit or code == 0:
                self.table.resumed.update(pending)
                pending = []
            if hit:
                self.table.times[kind] += 1
                faults.append(kind)
                pending.append(kind)
            elif kind:
                self.deck.append(kind)  # the run was quicker
            complete = code == 0
            if code is None or (code != 0 and not hit):
                break
        self.table.resumed.update(pending if complete else [])
        self.compare(recipe, out, faults, complete)

    def draw(self, out: Path) -> str:
        """The next kind of fault: a shuffled deck, so that each comes as often as it should."""
        if not self.deck:
            many = self.args.ranks > 1
            kinds = ["process", "group", "loader", "save: process", "save: group"]
            kinds += ["rank", "rank", "save: rank"] if many else ["process", "group"]
            self.deck = [*kinds, *kinds, "disk full for a while", "disk full to the end", "photo changed"]
            self.random.shuffle(self.deck)
        if self.deck[-1] == "photo changed" and not (out / "config.json").exists():
            self.deck.insert(0, self.deck.pop())
        return self.deck.pop()

    def expected_codes(self, kind: str) -> tuple[int | None, ...]:
        """How an attempt that was hit may end; a launcher that loses a rank has codes of its own."""
        others = {"loader": (0, 1), "photo changed": (2,)}
        if self.args.ranks > 1 and kind == "photo changed":
            return 1, 2
        if self.args.ranks > 1 and "process" not in kind and "group" not in kind:
            return tuple(range(-15, 3))
        return (0, 2) if kind.startswith("disk") else others.get(kind, (-signal.SIGKILL,))

    def has_traceback(self, said: str) -> bool:
        """Whether there is one of ours: torchrun tells of every rank that ended by its own."""
        ours = self.args.ranks == 1 or re.search(r'File ".*/adasim/\w', said)
        return "Traceback" in said and bool(ours)

    # ---- faults ----

    def wait_for_a_moment(self, pid: int, out: Path, fresh: bool) -> bool:
        """Some time after the start, or after a few steps; False if the process ended before."""
        metrics = out / "metrics.jsonl"
        steps = self.random.randrange(6)
        for _ in range(steps):
            before = metrics.stat().st_size if metrics.exists() else 0
            if not until(lambda size=before: metrics.exists() and metrics.stat().st_size != size, pid):  # type: ignore[misc]
                return False
        time.sleep(self.random.uniform(0, 0.2 if steps else 8 if fresh else 3))
        return is_running(pid)

    def strike(self, kind: str, pid: int, out: Path) -> bool:
        """Do it to the process that runs; False if it ended before."""
        if kind.startswith("disk"):
            return self.fill_disk(kind, pid)
        if kind.startswith("save"):
            saving = lambda: any(out.glob("checkpoints/*tmp")) or any(out.glob("*tmp"))  # noqa: E731
            if not until(saving, pid):
                return False
            time.sleep(self.random.uniform(0, 0.06))
        victims: list[int] = []

        def choose() -> bool:
            ranks = children(pid) if self.args.ranks > 1 else [pid]
            chosen = {
                "process": [pid],
                "group": [pid, *tree(pid)],
                "rank": ranks,
                "loader": [child for rank in ranks for child in children(rank)],
            }[kind.removeprefix("save: ")]
            victims[:] = chosen if kind.endswith("group") or not chosen else [self.random.choice(chosen)]
            return bool(victims)

        if not until(choose, pid) or not is_running(pid):
            return False
        kill(*victims)
        return True

    def fill_disk(self, kind: str, pid: int) -> bool:
        limits = [pid, *tree(pid)]
        if self.own_disk:
            with suppress(OSError), open(self.work / "disk" / "ballast", "wb", buffering=0) as file:
                for size in (1 << 16, 1):
                    with suppress(OSError):
                        while True:
                            file.write(bytes(size))
        else:
            limit_files(limits, 100_000)
        if kind == "disk full for a while":
            time.sleep(self.random.uniform(0.1, 2))
            self.free_disk(limits)
        return True

    def free_disk(self, limits: list[int]) -> None:
        (self.work / "disk" / "ballast").unlink(missing_ok=True)
        if not self.own_disk:
            limit_files(limits, resource.RLIM_INFINITY)

    def change_photo(self, recipe: str, out: Path, fresh: bool) -> tuple[bool, int | None]:
        """A resume with another photo under the same name must be refused; then it is restored."""
        photo, other = self.random.sample(self.photos, 2)
        before, stat = photo.read_bytes(), photo.stat()
        photo.write_bytes(other.read_bytes())
        code = wait(self.begin(recipe, out, fresh, workers=2), ENOUGH_S)
        photo.write_bytes(before)
        os.utime(photo, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        said = self.log.read_text()
        if code not in self.expected_codes("photo changed") or photo.name not in said:
            self.complain(recipe, f"a changed photo was not refused by name (exit code {code})", out, said)
        return True, 2 if code == 0 else code

    # ---- the end of a run ----

    def compare(self, recipe: str, out: Path, faults: list[str], complete: bool) -> None:
        self.table.runs += 1
        found = content(out) if complete else {}
        if found == self.expected[recipe]:
            self.table.exact.update(faults)
        elif complete:
            problem = f"differs in {difference(found, self.expected[recipe])} after {', '.join(faults)}"
            self.complain(recipe, problem, out, "")
        self.look_for_leftovers(recipe, out)
        shutil.rmtree(out, ignore_errors=True)
        print(f"{recipe}: {len(faults)} faults, {self.table.kills} kills in all, {now()}", flush=True)

    def look_for_leftovers(self, recipe: str, out: Path) -> None:
        strange = sorted(names(out) - self.names)
        temporary = sorted(os.listdir(tempfile.gettempdir()))
        self.table.launchers += len([name for name in temporary if LAUNCHER_LEFTOVER.fullmatch(name)])
        strange += [name for name in temporary if not LAUNCHER_LEFTOVER.fullmatch(name)]
        strange += [f"/dev/shm/{name}" for name in sorted(set(os.listdir("/dev/shm")) - self.shared)]
        for name in temporary:
            path = Path(tempfile.gettempdir()) / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if strange:
            self.complain(recipe, f"left over: {', '.join(strange)}", out, "")

    def complain(self, recipe: str, problem: str, out: Path, said: str) -> None:
        self.table.problems.append(f"{recipe}: {problem}")
        print(f"PROBLEM {recipe}: {problem}\n{said[-3000:]}", flush=True)
        if self.args.keep and out.exists():
            shutil.copytree(out, self.args.keep / f"problem-{len(self.table.problems)}")


def run_command(*arguments: str) -> None:
    """What `python -m adasim ARGUMENTS` does, having imported everything."""
    sys.argv = ["adasim", *arguments]
    adasim.__main__.main()


def launch(ranks: int, arguments: list[str]) -> None:
    """What torchrun does, but with forked ranks."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="soak",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, run_command)(*arguments)


def now() -> str:
    return time.strftime("%H:%M:%S")


def copy_photos(data: Path, folder: Path, count: int, draw: random.Random) -> Iterator[Path]:
    """Some of the images below `data`, in their folders."""
    kinds = (".jpg", ".jpeg", ".png", ".webp")
    found = sorted(path for path in data.rglob("*") if path.suffix.lower() in kinds)
    if len(found) < count:
        raise SystemExit(f"{data} has {len(found)} images; --photos asks for {count}.")
    for path in draw.sample(found, count):
        copy = folder / path.relative_to(data)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
        yield copy


# ---- the whole ----


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder for everything, where we are, and which is gone afterwards; temporary files of all go into it."""
    folder, before = Path(tempfile.mkdtemp(prefix="soak-")), os.getcwd()
    for name in ("disk", "tmp", "photos"):
        (folder / name).mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    os.chdir(folder)
    try:
        yield folder
    finally:
        orphans(0)
        os.chdir(before)
        subprocess.run(["umount", "-l", str(folder / "disk")], capture_output=True)
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a folder of images; it is only read")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--photos", type=int, default=96, help="how many of the images to train on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="copy runs that are not as they should be into this folder")
    args = parser.parse_args()
    args.data = args.data.resolve()
    if args.keep:
        args.keep = args.keep.resolve()
        args.keep.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    adopt_orphans()
    began = time.monotonic()
    with workplace() as work:
        own_disk = private_disk(work / "disk", "96m")
        soak = Soak(args, work, own_disk)
        recipes = list(RECIPES)[: 2 if args.ranks > 1 else None]
        for recipe in recipes:
            soak.prepare(recipe)
        while soak.table.kills < args.kills and time.monotonic() < soak.end:
            soak.disturb(recipes[soak.table.runs % len(recipes)])
    table = soak.table
    settings = {
        "images": f"{args.photos} of {args.data.name}",
        "ranks": args.ranks,
        "seed": args.seed,
        "runs": f"{table.runs} of {', '.join(recipes)}",
        "kills": table.kills,
        "attempts": f"{table.attempts['forked']} forked and {table.attempts['fresh']} fresh",
        "full disk": "a disk of 96 MB" if own_disk else "a limit of file sizes",
        "compared": f"{min(map(len, soak.expected.values()))} tensors and files or more",
        "problems": len(table.problems),
        "minutes": round((time.monotonic() - began) / 60),
    }
    if args.ranks > 1:
        settings["what launchers of torch left in the temporary folder"] = table.launchers
    report("soak_ranks" if args.ranks > 1 else "soak", settings, table.rows(), "soak")
    print("\n".join(table.problems))
    sys.exit(bool(table.problems or table.tracebacks.total()))


if __name__ == "__main__":
    main()
