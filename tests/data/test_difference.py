"""How two listings differ, in words."""

from collections.abc import Callable

import pytest

from adasim.data.identity import difference

LISTING = [f"cats/{i:03d}.png {1000 + i}" for i in range(50)]


def rename(lines: list[str]) -> list[str]:
    return sorted([*lines[1:], "zebra.png 1000"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: [*x, "dogs/new.png 7"], "1 added (dogs/new.png)"),
        (lambda x: x[1:], "1 removed (cats/000.png)"),
        (rename, "1 renamed (cats/000.png -> zebra.png)"),
        (lambda x: [*x[:-1], "cats/049.png 5"], "1 changed (cats/049.png)"),
        (lambda x: x[5:], "5 removed (cats/000.png, cats/001.png, cats/002.png and 2 more)"),
        (lambda x: [*x[2:], "b a 7"], "2 removed (cats/000.png, cats/001.png), 1 added (b a)"),
        (lambda x: x[::-1], "the order of the images differs"),
    ],
)
def test_the_difference_of_two_listings_in_words(
    change: Callable[[list[str]], list[str]], words: str
) -> None:
    assert words in difference(LISTING, change(LISTING))


def test_entirely_other_data_is_compared_in_linear_time() -> None:
    many = [f"new/{i} {i % 3}" for i in range(200_000)]
    words = difference([f"old/{i} {i % 5}" for i in range(200_000)], many)
    assert "renamed" in words
    assert "80000 removed" in words
    assert "80000 added" in words
