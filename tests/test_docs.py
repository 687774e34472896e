"""What the documents claim about the tests is so."""

import re
from pathlib import Path

from adasim.recipes import RECIPES

TESTS = Path(__file__).parent


def test_readmes_table_has_every_recipe() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (TESTS.parent / "README.md").read_text(), re.M)
    assert set(re.findall(r"`(.*?)`", " ".join(rows))) >= {"photos", *RECIPES}


def test_every_fault_has_a_test_that_exists() -> None:
    text = (TESTS.parent / "docs" / "reliability.md").read_text()
    proofs = dict(re.findall(r"^\| ([0-9]+) \|.*\| (`.*::\w+.*) \|$", text, re.M))
    assert [int(number) for number in proofs] == list(range(1, len(proofs) + 1))
    assert len(proofs) >= 30
    file = TESTS
    for name, test in re.findall(r"`((?:\w+/)*\w+\.py)?::(\w+)(?:\[\w+\])?`", text):
        file = TESTS / name if name else file
        assert f"def {test}(" in file.read_text(), (file, test)
