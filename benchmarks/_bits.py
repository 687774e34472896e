"""What a run has left on disk, to be compared with another's bit by bit."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from safetensors import deserialize


def content(out: Path) -> dict[str, str]:
    """All that must be the same, bit for bit: tensors one by one, counters, lists, losses."""
    steps = (out / "checkpoints").iterdir()
    newest = max(steps, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])
    manifest = json.loads((newest / "manifest.json").read_text())
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    files = [*newest.glob("*.safetensors"), *(out / "history" / one["name"] for one in manifest["history"])]
    tensors = {
        f"{file.stem}/{name}": digest(str(tensor["dtype"]), str(tensor["shape"]), bytes(tensor["data"]))
        for file in files
        for name, tensor in deserialize(file.read_bytes())
    }
    return {
        **tensors,
        "encoder": digest((out / "backbone.safetensors").read_bytes()),
        "counters": json.dumps(manifest["info"]),
        "losses": json.dumps([[line.get(key) for key in ("step", "epoch", "loss")] for line in metrics]),
    }


def digest(*parts: str | bytes) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.encode() if isinstance(part, str) else part)
    return sha.hexdigest()


def difference(found: dict[str, str], expected: dict[str, str]) -> str:
    other = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
    return f"{', '.join(other[:5])}" + (f" and {len(other) - 5} more" if len(other) > 5 else "")


def names(out: Path) -> set[str]:
    """Names below the folder, with their numbers and hashes left open, to see which do not belong there."""
    paths = (str(path.relative_to(out)) for path in out.rglob("*"))
    return {re.sub(r"(?<=-)[0-9a-f]{16}|\d+(\.\d+)*", "#", path) for path in paths}
