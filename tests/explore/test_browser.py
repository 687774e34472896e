"""The page in a real Chromium, opened from the disk with the network cut."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from explore.explored import HOSTILE, Explored, explored, make_folder

from adasim.explore.page import write_page
from adasim.util.csv import to_csv
from adasim.util.terminal import printable

pytestmark = pytest.mark.slow  # it starts a browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def missing() -> str:
    """What the tests of this file lack, if anything."""
    if CHROMIUM is None:
        return "Chromium is not installed (Debian: apt-get install chromium)"
    for package in ("playwright", "axe_playwright_python"):
        if importlib.util.find_spec(package) is None:
            return f"the Python package {package} is not installed"
    return ""


if missing() and not os.environ.get("ADASIM_REQUIRE_BROWSER"):
    pytest.skip(f"{missing()}, so the page is not tested", allow_module_level=True)


class Tab:
    """A page with everything that it asked for and complained about."""

    def __init__(self, page: Any, explored: Explored) -> None:
        self.page, self.explored = page, explored
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.route("**/*", self._answer)

    def _answer(self, route: Any) -> None:
        self.requests.append(route.request.url)
        if route.request.url.startswith("file:"):
            route.continue_()
        else:
            route.abort()

    def open(self, view: str = "") -> None:
        self.page.goto("about:blank")
        self.page.goto(self.explored.page.as_uri() + view)
        self.page.wait_for_selector("main h2")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def hash(self) -> str:
        return str(self.page.evaluate("location.hash"))

    def export(self, name: str) -> str:
        """The text of a file that the export dialog gives."""
        self.page.click("#export")
        with self.page.expect_download() as download:
            self.page.locator("#export-choices").get_by_role("button", name=name).click()
        self.press("Escape")
        return Path(download.value.path()).read_bytes().decode()

    def rows(self) -> list[dict[str, str]]:
        """Of verdicts.csv."""
        return list(csv.DictReader(io.StringIO(self.export("verdicts.csv"), newline="")))

    def verdicts(self) -> dict[int, str]:
        return {int(row["id"]): row["verdict"] for row in self.rows()}

    def forget(self) -> None:
        self.page.evaluate("localStorage.clear()")

    def reload(self) -> None:
        self.page.reload()
        self.page.wait_for_selector("article")

    def wait_until_stored(self, word: str) -> None:
        self.page.wait_for_function(
            "word => Object.values(localStorage).some((text) => text.includes(word))", arg=word
        )


@contextmanager
def window(browser: Any, explored: Explored, width: int = 1280, scheme: str = "light") -> Iterator[Tab]:
    """A window that stores nothing of other windows; at its end nothing may have been complained about."""
    viewport = {"width": width, "height": 900}
    context = browser.new_context(viewport=viewport, color_scheme=scheme, accept_downloads=True)
    tab = Tab(context.new_page(), explored)
    yield tab
    assert tab.complaints == []
    context.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    assert not missing(), missing()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def shared(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with window(browser, explored(tmp_path_factory.mktemp("explored"))) as tab:
        yield tab


@pytest.fixture
def alone(browser: Any, shared: Tab) -> Iterator[Tab]:
    with window(browser, shared.explored) as tab:
        yield tab


@pytest.fixture
def tab(shared: Tab) -> Iterator[Tab]:
    """The page, fresh; at the end nothing may have left the disk, and nothing may have been complained about."""
    shared.open()
    shared.forget()
    shared.requests.clear()
    shared.complaints.clear()
    yield shared
    assert [url for url in shared.requests if not url.startswith("file:")] == []
    assert shared.complaints == []
    assert shared.page.evaluate("window.pwned") is None


@pytest.fixture
def other(tab: Tab) -> Iterator[Tab]:
    """Another tab of the same page."""
    other = Tab(tab.page.context.new_page(), tab.explored)
    yield other
    other.page.close()


AXE = """axe.run(document, {
    resultTypes: ['violations'], runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'best-practice']
})"""


def violations(tab: Tab) -> list[tuple[str, str, list[str]]]:
    """What axe finds, of whatever weight."""
    tab.page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text("utf-8"))
    return [
        (tab.hash(), rule["id"], [node["html"][:200] for node in rule["nodes"][:2]])
        for rule in tab.page.evaluate(AXE)["violations"]
    ]


VIEWS = (
    "overview",
    "map",
    "neighbours",
    "neighbours?image=3",
    "duplicates",
    "wrong-labels",
    "surprising",
    "lonely",
)
HOSTILE_NAMES = {f"train/blue/{printable(name)}" for name in HOSTILE}


@pytest.mark.parametrize(
    ("scheme", "width", "views"),
    [("light", 1280, VIEWS), ("dark", 390, ("overview", "map", "neighbours?image=3", "wrong-labels"))],
)
def test_every_view_opens_from_the_disk_without_a_request_and_nothing_stands_in_a_screen_readers_way(
    browser: Any, shared: Tab, scheme: str, width: int, views: tuple[str, ...]
) -> None:
    address = shared.explored.page.as_uri()
    with window(browser, shared.explored, width, scheme) as tab:
        for view in views:
            tab.open(f"#/{view}")
            assert tab.page.locator("nav a[aria-current=page]").count() == 1
            assert violations(tab) == []
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        assert set(tab.requests) <= {address, *(f"{address}#/{view}" for view in views)}
        shown = tab.page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
        assert all(name.startswith(("blob:", "data:")) for name in shown)


def test_ten_items_are_reviewed_by_keyboard_alone_and_survive_a_reload(tab: Tab) -> None:
    table = tab.explored.found.tables["surprising"]
    ids = [row[0] for row in table.rows[:10]]
    assert len(ids) == 10
    tab.press(*"]]]]]")
    assert tab.hash() == "#/surprising"
    keys = ["1", "2", "3", "4", "2", "1", "2", "4", "1", "3"]
    tab.press(*keys)
    assert "10 of" in tab.page.inner_text("#progress")
    tab.press("u", "2")  # the last one was a mistake
    keys[-1] = "2"
    tab.reload()
    meaning = {"1": "keep", "2": "reject", "3": "relabel", "4": "unsure"}
    assert tab.verdicts() == {int(i): meaning[key] for i, key in zip(ids, keys, strict=True)}
    assert {row["view"] for row in tab.rows()} == {"surprising"}
    tab.press("k", "k", "u")  # the page was loaded anew: there is nothing to undo, and nothing breaks
    assert len(tab.rows()) == 10


def test_a_group_of_duplicates_keeps_the_image_that_was_chosen(tab: Tab) -> None:
    group = tab.explored.found.findings.groups[0]
    assert group.straddles
    tab.open("#/duplicates")
    tab.press("ArrowRight", "ArrowRight", "m", "2")  # the second image instead of the first
    verdicts = tab.verdicts()
    assert verdicts == {i: "keep" if i == group.members[1] else "reject" for i in group.members}
    tab.press("k", "Enter")
    tab.page.wait_for_selector(".around")
    tab.press("Backspace")  # back from the neighbours: the choice is remembered
    tab.page.wait_for_selector("article.current")
    assert "keep" in tab.page.inner_text("article.current .tile >> nth=1")
    tab.press("2")
    assert tab.verdicts() == verdicts
    tab.press("k", "ArrowRight", "m")  # the first one after all: the verdict follows
    assert tab.verdicts() == {i: "keep" if i == group.members[0] else "reject" for i in group.members}
    assert "Leave out copies" in tab.page.inner_text("article.current button[aria-pressed=true]")
    tab.press("u")
    assert tab.verdicts() == verdicts
    tab.press("u", "u")
    assert tab.rows() == []
    tab.press("k", "ArrowRight", "m", "Enter")  # without a verdict it is remembered, too
    tab.page.wait_for_selector(".around")
    tab.press("Backspace")
    tab.page.wait_for_selector("article.current")
    assert "keep" not in tab.page.inner_text("article.current .tile >> nth=0")
    assert "keep" in tab.page.inner_text("article.current .tile >> nth=1")


def test_a_chosen_duplicate_is_kept_also_in_a_group_that_is_judged_in_part(tab: Tab) -> None:
    first, second, *_ = tab.explored.found.findings.groups[0].members
    tab.open(f"#/duplicates?only={first}")
    tab.press("2")  # keeps the first
    tab.open(f"#/neighbours?image={second}")
    tab.press("1")  # keeps the second, too: its verdict among the duplicates is taken back
    tab.open(f"#/duplicates?only={first}")
    tab.press("ArrowRight", "ArrowRight", "m", "2")
    assert {first: "reject", second: "keep"}.items() <= tab.verdicts().items()


def test_a_verdict_in_one_list_neither_replaces_nor_answers_that_of_another(tab: Tab) -> None:
    surprising = {int(row[0]) for row in tab.explored.found.tables["surprising"].rows}
    first, second = next(  # of one group, of which the second is surprising, too
        (members[0], i)
        for members in (group.members for group in tab.explored.found.findings.groups)
        for i in members[1:]
        if i in surprising
    )

    def verdicts() -> dict[int, tuple[str, str]]:
        """The first of each image, which weighs most."""
        return {int(row["id"]): (row["verdict"], row["view"]) for row in reversed(tab.rows())}

    tab.open(f"#/neighbours?image={first}")
    tab.press("2")
    tab.open(f"#/surprising?only={second}")
    tab.press("3")
    tab.open(f"#/duplicates?only={first}")
    assert tab.page.inner_text("#progress").startswith("0 of")
    assert "left out" in tab.page.inner_text(".tile >> nth=0")
    assert "keep" in tab.page.inner_text(".tile >> nth=1")  # the first that is not left out
    tab.press("1")  # keep all: they are no copies
    assert tab.page.inner_text("#progress").startswith("1 of")
    expected = {first: ("reject", "neighbours"), second: ("relabel", "surprising")}
    assert expected.items() <= verdicts().items()
    tab.open(f"#/surprising?only={second}")
    assert "Wrong label" in tab.page.inner_text("button[aria-pressed=true]")
    tab.open(f"#/neighbours?image={second}")
    tab.press("1")  # on the image as a whole, which takes the surprising one back
    assert verdicts()[second][0] == "keep"
    tab.press("u")
    assert verdicts()[second] == ("relabel", "surprising")


def test_two_tabs_of_one_page_keep_and_show_the_verdicts_of_both(tab: Tab, other: Tab) -> None:
    image = int(tab.explored.found.tables["surprising"].rows[0][0])
    tab.open("#/surprising")
    other.open(f"#/neighbours?image={image}")
    other.press("2")
    tab.page.wait_for_selector("text=Left out in neighbours")
    assert tab.page.inner_text("#progress").startswith("1 of")
    other.page.close()
    # A tab that has not been told yet loses nothing either; of what it writes itself, a page is not told.
    write = """([before, after]) => {
        const [key] = Object.keys(localStorage);
        const all = JSON.parse(localStorage[key]);
        for (const entry of Object.values(all).flat()) {
            if (entry.verdict === before) Object.assign(entry, { verdict: after, at: entry.at + 1 });
        }
        localStorage[key] = JSON.stringify(all);
    }"""
    tab.page.evaluate(write, ["reject", "unsure"])
    tab.press("j", "1")
    assert sorted(row["verdict"] for row in tab.rows()) == ["keep", "unsure"]
    tab.page.evaluate(write, ["unsure", "relabel"])
    tab.press("u")
    assert [row["verdict"] for row in tab.rows()] == ["relabel"]


def test_a_tab_puts_back_what_another_one_overwrote_before_it_knew_of_it(tab: Tab, other: Tab) -> None:
    surprising = {int(row[0]) for row in tab.explored.found.tables["surprising"].rows}
    image = min(set(range(60)) - surprising)
    tab.open("#/surprising")
    other.open(f"#/neighbours?image={image}")
    tab.press("2")
    other.page.evaluate("localStorage[Object.keys(localStorage)[0]] = '{}'")
    other.wait_until_stored("reject")
    other.press("4")
    tab.wait_until_stored("unsure")
    assert sorted(tab.verdicts().values()) == sorted(other.verdicts().values()) == ["reject", "unsure"]


def test_a_tab_that_could_not_store_for_a_while_loses_nothing_of_its_own_or_of_others(
    tab: Tab, other: Tab
) -> None:
    surprising = {int(row[0]) for row in tab.explored.found.tables["surprising"].rows}
    image = min(set(range(60)) - surprising)
    tab.open("#/surprising")
    other.open(f"#/neighbours?image={image}")
    tab.page.evaluate(
        """() => {
            window.allowed = Storage.prototype.setItem;
            Storage.prototype.setItem = () => { throw new DOMException("", "QuotaExceededError"); };
        }"""
    )
    tab.press("2")
    assert tab.page.is_visible("#notice")
    other.press("4")
    tab.wait_until_stored("unsure")
    tab.page.evaluate("() => { Storage.prototype.setItem = window.allowed; }")
    tab.press("1")
    assert not tab.page.is_visible("#notice")
    tab.reload()
    assert sorted(row["verdict"] for row in tab.rows()) == ["keep", "reject", "unsure"]


FILL = """() => {
    let text = "x".repeat(1 << 20);
    for (let n = 0; text; n++) {
        try { localStorage.setItem(`filler${n}`, text); } catch { text = text.slice(text.length >> 1 || 1); }
    }
}"""
FORBID = """Object.defineProperty(window, "localStorage", {
    get() { throw new DOMException("Access is denied for this document.", "SecurityError"); }
})"""


def test_where_the_browser_cannot_store_no_verdict_is_lost_without_a_question(alone: Tab) -> None:
    tab = alone
    asked: list[str] = []

    def stay(dialog: Any) -> None:
        asked.append(dialog.type)
        dialog.dismiss()

    tab.page.on("dialog", stay)
    tab.open("#/surprising")
    assert not tab.page.is_visible("#notice")
    tab.page.evaluate(FILL)
    tab.press("2", "4", "j")
    assert "in this tab alone" in tab.page.inner_text("#notice")
    tab.page.evaluate("setTimeout(() => location.reload())")
    tab.page.wait_for_timeout(500)
    assert asked == ["beforeunload"]
    assert [row["verdict"] for row in tab.rows()] == ["reject", "unsure"]
    tab.press("1")  # a new one, which the file above does not have
    assert "in this tab alone" in tab.page.inner_text("#notice")
    with tab.page.expect_download() as download:
        tab.page.click("#notice-save")
    assert "in this tab alone" not in tab.page.inner_text("#notice")
    assert tab.page.is_visible("#notice")
    tab.reload()
    assert asked == ["beforeunload"]  # nothing was asked: the file has everything
    assert tab.rows() == []
    tab.page.click("#export")
    with tab.page.expect_file_chooser() as chooser:
        tab.page.click("#load")
    chooser.value.set_files(download.value.path())
    tab.page.wait_for_selector("text=3 verdicts loaded.")
    tab.press("Escape")
    assert "3 of" in tab.page.inner_text("#progress")
    assert "in this tab alone" not in tab.page.inner_text("#notice")
    assert sorted(row["verdict"] for row in tab.rows()) == ["keep", "reject", "unsure"]
    tab.page.evaluate(
        "Object.keys(localStorage).filter((key) => key.startsWith('filler'))"
        ".forEach((key) => localStorage.removeItem(key))"
    )
    tab.press("2")
    assert not tab.page.is_visible("#notice")
    tab.reload()
    assert len(tab.rows()) == 4
    assert asked == ["beforeunload"]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_a_browser_that_forbids_storage_is_told_of_at_once_and_legibly(
    browser: Any, shared: Tab, scheme: str, width: int
) -> None:
    with window(browser, shared.explored, width, scheme) as tab:
        tab.page.add_init_script(FORBID)
        tab.open("#/wrong-labels")
        assert "This browser cannot keep verdicts" in tab.page.inner_text("#notice")
        for _ in range(2):
            assert violations(tab) == []
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
            tab.press("2", "2", "2")  # the item in turn is not hidden behind the notice
            ends = "[document.querySelector('article.current'), document.querySelector('#notice')]"
            item, notice = tab.page.evaluate(ends + ".map((one) => one.getBoundingClientRect())")
            assert item["bottom"] <= notice["top"]
        assert "in this tab alone" in tab.page.inner_text("#notice")


def test_verdicts_that_were_saved_are_loaded_as_they_were(tab: Tab, tmp_path: Path) -> None:
    names = tab.explored.found.collection.names
    for name in HOSTILE_NAMES:
        tab.open(f"#/neighbours?image={names.index(name)}")
        shown = tab.page.evaluate("[...document.querySelectorAll('main bdi')].map(e => e.textContent)")
        assert name in shown
        tab.press("2")
    assert {row["file"] for row in tab.rows()} == HOSTILE_NAMES
    for view in ("duplicates", "wrong-labels", "surprising", "lonely"):  # several lists have the same image
        tab.open(f"#/{view}")
        tab.press("3", "3", "4", "1", "1", "1", "2")
    rows = tab.rows()
    assert len(rows) > len({row["id"] for row in rows})
    saved = {kind: tab.export(f"verdicts.{kind}") for kind in ("csv", "json")}
    changed = io.StringIO()  # as a spreadsheet saves it
    csv.writer(changed, delimiter=";").writerows(csv.reader(io.StringIO(saved["csv"], newline="")))
    contents = {
        "v.csv": saved["csv"],
        "v.json": saved["json"],
        "semicolons.csv": "\ufeff" + changed.getvalue(),
        "others.csv": saved["csv"].replace("train/", "elsewhere/").replace("test/", "elsewhere/"),
        "photo.csv": '"\x00',
        "null.json": "null",
    }
    for name, content in contents.items():
        tab.forget()
        tab.open("#/lonely")
        (tmp_path / name).write_text(content, "utf-8", newline="")
        tab.page.set_input_files("#file", tmp_path / name)
        tab.page.wait_for_function("() => document.getElementById('loaded').textContent")
        told = tab.page.inner_text("#loaded")
        tab.press("Escape")
        if "verdicts loaded" in told:
            assert tab.export("verdicts.csv") == saved["csv"]
            tab.press("u")  # all at once
        else:
            assert f"{name} holds no verdicts on these images." in told
            assert name in ("others.csv", "photo.csv", "null.json")
        assert tab.rows() == []


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["1280-light", "390-dark"])
def sized(tab: Tab, request: pytest.FixtureRequest) -> Iterator[Tab]:
    width, scheme = request.param
    tab.page.set_viewport_size({"width": width, "height": 900})
    tab.page.emulate_media(color_scheme=scheme)
    yield tab
    tab.page.set_viewport_size({"width": 1280, "height": 900})
    tab.page.emulate_media(color_scheme="light")


def score_of(tab: Tab, name: str) -> list[float]:
    table = tab.explored.found.tables[name]
    return [float(row[table.columns.index("score")]) for row in table.rows]


def listed(tab: Tab) -> int:
    return int(tab.page.locator("article >> nth=0").get_attribute("aria-setsize"))


def test_the_handle_cuts_the_list_by_score_and_the_address_keeps_it(sized: Tab) -> None:
    tab = sized
    scores = score_of(tab, "surprising")
    tab.open("#/surprising")
    assert listed(tab) == len(scores)
    tab.page.focus("#least")
    tab.press(*["PageUp"] * 4)
    least = float(tab.page.input_value("#least"))
    above = sum(score >= least for score in scores)
    assert 0 < above < len(scores)
    assert listed(tab) == above
    assert f"{above} of {len(scores)}" in tab.page.inner_text("#above")
    assert f"min={least:g}" in tab.hash()
    tab.reload()
    assert listed(tab) == above
    box = tab.page.locator("#least").bounding_box()
    tab.page.mouse.click(box["x"] + 1, box["y"] + box["height"] / 2)  # and all of them again
    assert listed(tab) == len(scores)


def test_one_verdict_for_all_that_is_listed_and_one_undo(sized: Tab) -> None:
    tab = sized
    scores = score_of(tab, "surprising")
    least = sorted(scores)[len(scores) // 2]
    ids = {
        int(row[0])
        for row, score in zip(tab.explored.found.tables["surprising"].rows, scores, strict=True)
        if score >= least
    }
    tab.open(f"#/surprising?min={least}")
    tab.press("1")  # one has a verdict already, which stays
    (first,) = tab.verdicts()
    tab.press("a")
    assert violations(tab) == []
    assert "not seen" in tab.page.inner_text("#bulk")
    tab.page.click("#bulk >> text=Leave out")
    assert tab.verdicts() == {i: "keep" if i == first else "reject" for i in ids}
    assert f"{len(ids)} of {len(ids)} reviewed" in tab.page.inner_text("#progress")
    tab.page.click("#toast button")
    assert tab.verdicts() == {first: "keep"}
    tab.press("a")
    tab.page.check("#again")
    tab.page.click("#bulk >> text=Unsure")
    assert tab.verdicts() == dict.fromkeys(ids, "unsure")
    tab.press("u")
    assert tab.verdicts() == {first: "keep"}


def test_lists_and_images_are_narrowed_down_by_class_and_split(sized: Tab) -> None:
    tab = sized
    collection = tab.explored.found.collection
    rows = tab.explored.found.tables["surprising"].rows
    tab.open("#/surprising")
    tab.page.select_option("#filter-from", label="blue")
    assert listed(tab) == sum(row[3] == "blue" for row in rows)
    tab.page.select_option("#filter-split", "test")
    assert listed(tab) == sum(row[1:4:2] == ("test", "blue") for row in rows)
    tab.open("#/neighbours")
    tab.page.select_option("#filter-label", label="<")
    tab.page.select_option("#filter-split", "train")
    fits = [i for i, name in enumerate(collection.names) if name.startswith("train/</")]
    assert tab.page.locator(".grid li").count() == len(fits)
    for place in (0, 1):
        tab.page.check(f".grid input >> nth={place}")
    tab.press("Escape")
    tab.page.click("#many")
    tab.page.select_option("#new-label", "blue")
    tab.page.click("#bulk >> text=Wrong label")
    assert [(int(row["id"]), row["new_label"]) for row in tab.rows()] == [(i, "blue") for i in fits[:2]]


@pytest.fixture
def burst(browser: Any, tmp_path: Path) -> Iterator[Tab]:
    """A page with a group of 40 equal images."""
    data = make_folder(tmp_path / "data")
    first = (data / "train" / "blue" / "00.png").read_bytes()
    for n in range(40):
        (data / "train" / "blue" / f"burst-{n:02d}.png").write_bytes(first)
    with window(browser, explored(tmp_path, data=data)) as tab:
        yield tab


def test_no_group_is_judged_before_all_of_it_was_in_sight(burst: Tab) -> None:
    tab = burst
    size = len(tab.explored.found.findings.groups[0].members)
    assert size > 40
    tab.page.set_viewport_size({"width": 1000, "height": 520})
    tab.open("#/duplicates")
    tab.press("2")
    assert f"of these {size} images" in tab.page.inner_text("#look .question")
    assert tab.page.locator("#look .every .tile").count() == size
    pressed = 0
    while tab.page.locator("#look .question").inner_text() and pressed < 20:
        assert (
            tab.page.evaluate("Object.keys(JSON.parse(Object.values(localStorage)[0] || '{}')).length") == 0
        )
        tab.press("2")
        pressed += 1
    assert pressed > 1  # it went on by pages first
    tab.press("Escape")
    assert sorted(tab.verdicts().values()) == ["keep"] + ["reject"] * (size - 1)


def test_space_or_a_click_shows_image_and_neighbour_from_their_files(sized: Tab) -> None:
    tab = sized
    found = tab.explored.found
    names, rows = found.collection.names, found.tables["surprising"].rows
    neighbours = found.support.neighbours.tolist()
    at = next(  # its file, and those of its neighbours, can be linked to
        n for n, row in enumerate(rows) if not any("\\" in names[j] for j in neighbours[int(row[0])])
    )
    tab.open(f"#/surprising?at={at}")
    tab.press(" ")
    tab.page.wait_for_selector("#look img >> nth=1")
    sources = tab.page.eval_on_selector_all("#look img", "all => all.map((one) => one.src)")
    assert sources[0] == (tab.explored.data / names[int(rows[at][0])]).as_uri()
    tab.press("ArrowRight", "ArrowRight", "ArrowRight")  # another neighbour
    tab.page.wait_for_function(
        "before => (document.querySelectorAll('#look img')[1] || { src: before }).src !== before",
        arg=sources[1],
    )
    assert violations(tab) == []
    tab.press("2", "k", " ")  # a verdict without leaving
    assert not tab.page.is_visible("#look")
    assert list(tab.verdicts().values()) == ["reject"]
    tab.page.click("article.current .strip .tile >> nth=1")
    assert tab.page.is_visible("#look")


def test_the_map_is_selected_from_by_mouse_and_leads_to_a_list_and_a_verdict_for_all(sized: Tab) -> None:
    tab = sized
    tab.open("#/map")
    stage = tab.page.locator("#map").bounding_box()
    left, top, width, height = (stage[key] for key in ("x", "y", "width", "height"))
    mouse = tab.page.mouse

    def drag(*places: tuple[float, float]) -> None:
        mouse.move(left + places[0][0] * width, top + places[0][1] * height)
        mouse.down()
        for x, y in places[1:]:
            mouse.move(left + x * width, top + y * height, steps=5)
        mouse.up()

    count = len(tab.explored.found.collection)
    tab.page.keyboard.down("Shift")
    drag((0.01, 0.01), (0.99, 0.99))
    tab.page.keyboard.up("Shift")
    assert f"{count} images selected" in tab.page.inner_text("#selection")
    tab.page.click("text=Lasso")
    drag((0.01, 0.01), (0.5, 0.01), (0.5, 0.99), (0.01, 0.99))
    chosen = int(tab.page.inner_text("#selection b").split()[0])
    assert 0 < chosen < count
    tab.page.click("#judge-selected")
    tab.page.click("#bulk >> text=Leave out")
    assert list(tab.verdicts().values()) == ["reject"] * chosen
    tab.page.click("#as-list")
    assert tab.page.locator(".grid li.reject").count() == chosen == tab.page.locator(".grid li").count()
    tab.press("u")
    assert tab.rows() == []
    tab.page.go_back()
    tab.page.wait_for_selector("#map")
    assert f"{chosen} images selected" in tab.page.inner_text("#selection")


def test_the_map_gives_a_keyboard_the_same_selections(sized: Tab) -> None:
    tab = sized
    tab.open("#/map")
    count = len(tab.explored.found.collection)
    sizes = [int(text.split()[0]) for text in tab.page.locator("#regions a").all_inner_texts()]
    assert sum(sizes) == count
    assert len(sizes) > 4
    tab.page.focus("#map")
    tab.press("+", "ArrowLeft", "Enter")
    chosen = int(tab.page.inner_text("#selection b").split()[0])
    assert 0 < chosen < count
    tab.page.wait_for_function("() => location.hash.includes('view=')")
    tab.press("Escape", "0")
    assert "Nothing is selected" in tab.page.inner_text("#selection")
    tab.page.wait_for_function("() => !location.hash.includes('view=')")
    tab.page.focus("#regions a >> nth=0")
    tab.press("Enter")
    tab.page.wait_for_selector(".grid")
    assert tab.page.locator(".grid li").count() == sizes[0]
    tab.open("#/map?by=finding")
    tab.page.click(".legend button >> nth=0")
    assert "pick=" in tab.hash()


def test_a_wrong_label_takes_the_suggestion(tab: Tab) -> None:
    table = tab.explored.found.tables["wrong-labels"]
    tab.open("#/wrong-labels")
    tab.press("3")
    (verdict,) = json.loads(tab.export("verdicts.json"))
    expected = dict(zip(table.columns, table.rows[0], strict=True))
    assert (verdict["id"], verdict["new_label"]) == (expected["id"], expected["suggested"])


@pytest.mark.parametrize("name", ["duplicates", "wrong-labels", "surprising", "lonely"])
def test_an_exported_list_is_pythons_list_to_the_byte(tab: Tab, name: str) -> None:
    table = tab.explored.found.tables[name]
    tab.open(f"#/{name}")
    assert tab.export(f"{name}.csv") == to_csv(table.columns, table.rows)
    as_objects = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert json.loads(tab.export(f"{name}.json")) == as_objects


def test_hostile_file_names_stay_text(tab: Tab) -> None:
    names = tab.explored.found.collection.names
    assert {"train/blue/\\u202egnp.exe.png", "train/blue/bytes-\\xff.png"} <= set(names)  # spelled out
    for name in HOSTILE_NAMES:
        tab.open(f"#/wrong-labels?q={names.index(name)}")
    assert tab.page.locator("img, iframe, object").count() == 0
    tab.open("#/duplicates")
    assert "</script>alert(1)" in tab.page.inner_text("article >> nth=0")


def test_back_and_forward_walk_through_the_views_that_were_seen(tab: Tab) -> None:
    tab.open("#/wrong-labels")
    tab.press("j", "j")
    at = tab.hash()
    assert at == "#/wrong-labels?at=2"
    tab.press("ArrowRight", "ArrowRight", "Enter")  # the first neighbour of the third suspect
    first = tab.hash()
    assert first.startswith("#/neighbours?image=")
    tab.page.click(".around .grid a >> nth=1")
    second = tab.hash()
    assert second != first
    tab.page.go_back()
    tab.page.wait_for_function("wanted => location.hash === wanted", arg=first)
    tab.press("Backspace")
    tab.page.wait_for_function("wanted => location.hash === wanted", arg=at)
    assert tab.page.locator("article.current").get_attribute("aria-posinset") == "3"
    tab.page.go_forward()
    tab.page.wait_for_function("wanted => location.hash === wanted", arg=first)
    image = int(first.rpartition("=")[2])
    shown = tab.page.inner_text(".details")
    assert tab.explored.found.collection.names[image] in shown


def test_a_cell_of_the_confusion_filters_and_the_search_finds(tab: Tab) -> None:
    tab.page.click(".matrix a >> nth=0")
    assert "from=0&to=1" in tab.hash()
    tab.open("#/neighbours")
    tab.press("/")
    tab.page.keyboard.type("leak")
    tab.press("Enter")
    assert tab.page.locator(".grid a").count() == 1
    tab.page.click(".grid a")
    assert "test/blue/leak.png" in tab.page.inner_text(".details")
    link = tab.page.get_by_role("link", name="Open the file").get_attribute("href")
    assert (tab.explored.page.parent / str(link)).resolve().read_bytes()[:4] == b"\x89PNG"


def test_also_in_leads_to_this_image_alone_and_the_filter_can_be_removed(tab: Tab) -> None:
    rows = tab.explored.found.tables["wrong-labels"].rows
    image = min(int(row[0]) for row in rows)  # a small number, which stands in many names
    tab.open(f"#/neighbours?image={image}")
    tab.page.get_by_role("link", name="Wrong labels").last.click()
    assert tab.hash() == f"#/wrong-labels?only={image}"
    assert tab.page.locator("article").get_attribute("aria-setsize") == "1"
    assert f"image {image} ·" in tab.page.inner_text("article")
    tab.page.click(".chip")
    tab.page.wait_for_selector(f"article[aria-setsize='{len(rows)}']")
    assert tab.hash() == "#/wrong-labels"


def test_every_button_is_in_sight_on_a_telephone(browser: Any, shared: Tab) -> None:
    cut_off = """() => [...document.querySelectorAll("article")].filter((item) => {
        const bottom = item.getBoundingClientRect().bottom;
        return [...item.querySelectorAll(".verdicts button, .words p")].some(
            (part) => part.getBoundingClientRect().bottom > bottom - 8);
    }).length"""
    lengthen = (
        "document.querySelectorAll('.words p').forEach((p) => { p.textContent = 'words '.repeat(60); })"
    )
    with window(browser, shared.explored, 390) as tab:
        for view in ("wrong-labels", "duplicates", "surprising"):
            tab.open(f"#/{view}")
            assert tab.page.locator("article .words p").count() > 0
            tab.page.evaluate(lengthen)
            assert (view, tab.page.evaluate(cut_off)) == (view, 0)


def test_a_long_list_keeps_few_items_in_the_page(tab: Tab) -> None:
    tab.open("#/surprising")
    tab.press("End")
    count = len(tab.explored.found.tables["surprising"].rows)
    assert tab.page.locator("article.current").get_attribute("aria-posinset") == str(count)
    assert tab.page.locator("article").count() < 16


def test_an_image_that_others_list_beyond_the_shown_ranks_is_not_called_lonely(
    alone: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = alone.explored.found
    monkeypatch.setattr("adasim.explore.page.PAGE_SUPPORT", 1)
    monkeypatch.setattr(found, "windowed", True)
    write_page(tmp_path / "page.html", found)
    best, own = found.support.neighbours[:, 0].tolist(), found.support.self_match().tolist()
    listed = found.findings.popularity.tolist()
    image = next(
        i for i in range(len(best)) if listed[i] > 1 and own[i] > 0.01 and best[i] != i and i not in best
    )
    alone.explored = replace(alone.explored, page=tmp_path / "page.html")
    alone.open(f"#/neighbours?image={image}")
    shown = alone.page.inner_text("main")
    assert f"A neighbour of {listed[image]} images, but not among their 1 best." in shown
    assert f"{listed[image]} images" in alone.page.inner_text(".details")
    assert f"{100 * own[image]:.0f}%" in alone.page.inner_text(".details")
    assert "lonely" not in alone.page.inner_text(".around > div >> nth=1")


def open_with_classes(tab: Tab, count: int, folder: Path) -> None:
    """The page, as if there were so many more classes, each confused with the next one."""
    before, start, rest = tab.explored.page.read_text("utf-8").partition(
        '<script type="application/json" id="data">'
    )
    found, end, after = rest.partition("</script>")
    data = json.loads(found)
    data["classes"] += [f"class {c}" for c in range(count)]
    data["confusion"] = [[c, c + 1, 0.5] for c in range(count)]
    many = json.dumps(data).replace("<", "\\u003c")
    (folder / "page.html").write_text(before + start + many + end + after, "utf-8")
    tab.explored = replace(tab.explored, page=folder / "page.html")
    tab.open()


def test_a_hundred_thousand_classes_and_cells_are_not_too_many(alone: Tab, tmp_path: Path) -> None:
    open_with_classes(alone, 130_000, tmp_path)  # more than the arguments that a call may have
    assert alone.page.locator(".panel .ranks a").count() == 48


def test_a_wide_table_of_classes_scrolls_and_covers_nothing(alone: Tab, tmp_path: Path) -> None:
    open_with_classes(alone, 16, tmp_path)
    table = alone.page.locator(".scroll[aria-label='Class confusion']")
    assert table.evaluate("box => box.scrollWidth > box.clientWidth")
    columns = alone.page.locator(".panels > div")
    left, right = (columns.nth(n).bounding_box() for n in (0, 1))
    panels = columns.nth(0).locator(".panel")
    ends = [box["x"] + box["width"] for box in (panels.nth(n).bounding_box() for n in range(panels.count()))]
    assert max(ends) <= left["x"] + left["width"] + 1 <= right["x"]


def test_without_labels_the_label_view_says_why_it_is_empty(alone: Tab, tmp_path: Path) -> None:
    """And thumbnails that the page has no room for are found beside it."""
    alone.explored = explored(tmp_path, labels=False, inline_bytes=1000)
    alone.open("#/wrong-labels")
    assert "no labels" in alone.page.inner_text("main")
    alone.open("#/duplicates")
    loaded = alone.page.evaluate(
        """async () => {
            const image = new Image();
            image.src = document.querySelector('.picture').style.backgroundImage.slice(5, -2);
            await image.decode();
            return image.naturalWidth;
        }"""
    )
    assert loaded == alone.explored.found.looks.columns * 32
