"""What the documents claim about the tests is so."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_test_that_vouches_for_a_fault_exists_and_the_scores_add_up() -> None:
    text = (TESTS.parent / "docs" / "reliability.md").read_text()
    rows = re.findall(r"^\| ([0-9]+) \|.*\| ([012]) \|$", text, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 31))
    assert f"The sum is {sum(int(score) for _, score in rows)} of 60" in text
    file = TESTS
    for name, test in re.findall(r"`((?:\w+/)+\w+\.py)?::(\w+)(?:\[\w+\])?`", text):
        file = TESTS / name if name else file
        assert f"def {test}(" in file.read_text(), (file, test)
