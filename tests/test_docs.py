"""What the documents claim is so: links lead somewhere, the tour names what there is, every fault has a test."""

import re
from pathlib import Path

import pytest

from adasim.recipes import RECIPES

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def test_readmes_table_has_every_recipe() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "README.md").read_text(), re.M)
    assert set(re.findall(r"`(.*?)`", " ".join(rows))) >= {"photos", *RECIPES}


def test_every_fault_has_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    proofs = dict(re.findall(r"^\| ([0-9]+) \|.*\| (`.*::\w+.*) \|$", text, re.M))
    assert [int(number) for number in proofs] == list(range(1, len(proofs) + 1))
    assert len(proofs) >= 30
    file = TESTS
    for name, test in re.findall(r"`((?:\w+/)*\w+\.py)?::(\w+)(?:\[\w+\])?`", text):
        file = TESTS / name if name else file
        assert f"def {test}(" in file.read_text(), (file, test)


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    broken = []
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_documents_that_the_code_names_exist() -> None:
    for file in (
        path for folder in ("adasim", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
    ):
        for name in re.findall(r"\b(?:docs|benchmarks/results)/[\w.]+\.md\b", file.read_text()):
            assert (ROOT / name).is_file(), (file, name)


def test_the_tour_names_functions_where_they_are() -> None:
    tour = ROOT / "docs" / "tour.md"
    found = re.findall(r"`([\w.]+)` in \[[^]]+\]\(([^)]+\.py)\)", tour.read_text())
    assert len(found) >= 6
    for name, link in found:
        source = (tour.parent / link).read_text()
        for part in name.split("."):
            assert re.search(rf"\b(?:def|class) {part}\b|^{part}\b.* = ", source, re.M), (name, link)
