"""Each page of the documentation is in the navigation, and each link in it leads to a page and a heading there."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]
SITE = REPOSITORY / "docs" / "site"
sys.path.append(str(SITE))

import configuration_keys  # noqa: E402
from epochs import BENCHMARKS, READERS, WAYS, cold_factors, demo_epochs, picture  # noqa: E402
from generated import PARTS  # noqa: E402
from navigation import HOME, readers  # noqa: E402
from sizing import Training, kept, least_origin_bytes, lru_hits, origin_rate, requests_in_flight, table  # noqa: E402

OUTSIDE = ("http:", "https:", "mailto:")
FENCED = re.compile(r"^( {0,3})(```|~~~).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)
# After an empty line, as lines of a list are indented too.
INDENTED = re.compile(r"(?<=\n\n) {4,}\S.*(?:\n(?: {4,}.*|(?=\n {4,}\S)))*")
IN_BACKTICKS = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


class Link(NamedTuple):
    page: str
    target: str


def pages() -> list[str]:
    """All pages, relative to the repository."""
    found = [*REPOSITORY.glob("docs/**/*.md"), REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md"]
    return sorted(str(page.relative_to(REPOSITORY)) for page in found)


@cache
def without_code(page: str) -> str:
    return INDENTED.sub("", FENCED.sub("", (REPOSITORY / page).read_text()))


def links(page: str) -> Iterator[Link]:
    for target in LINK.findall(IN_BACKTICKS.sub("", without_code(page))):
        if not target.startswith(OUTSIDE):
            yield Link(page, target)


@cache
def anchors(page: str) -> frozenset[str]:
    """Of the headings, as code servers and the site make them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in HEADING.findall(without_code(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return frozenset(found)


def problem(link: Link) -> str | None:
    """Why the link leads nowhere."""
    path, _, anchor = link.target.partition("#")
    file = (REPOSITORY / link.page).parent / path if path else REPOSITORY / link.page
    if not file.is_file():
        return "no such file"
    page = str(file.resolve().relative_to(REPOSITORY))
    if path.endswith(".md") and page not in pages():
        return "no page of the documentation"
    if anchor and anchor not in anchors(page):
        return "no such heading"
    return None


@pytest.mark.parametrize("page", pages())
def test_every_link_leads_to_a_page_and_a_heading(page: str) -> None:
    assert [f"{link.target}: {why}" for link in links(page) if (why := problem(link))] == []


def test_every_page_is_in_the_navigation_once() -> None:
    listed = [page for reader in readers() for page in reader.pages]
    assert sorted([HOME, *listed]) == [page for page in pages() if page != "README.md"]


def test_the_home_page_has_all_pages_but_lists_of_many() -> None:
    """A reader who begins there finds each page, or the page that has a list of these."""
    linked = {
        str((REPOSITORY / "docs" / link.target.partition("#")[0]).relative_to(REPOSITORY)) for link in links(HOME)
    }
    wanted = {page for reader in readers() for page in reader.pages if not re.match(r"docs/decisions/\d", page)}
    assert sorted(wanted - linked - {"CHANGELOG.md"}) == []


def test_links_are_found_at_all() -> None:
    """Else the tests above would pass for pages they cannot read."""
    assert sum(len(list(links(page))) for page in pages()) > 300


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("installing.md", None),
        ("installing.md#pip", None),
        ("installing.md#pop", "no such heading"),
        ("instaling.md", "no such file"),
        ("site/conf.py", None),
        ("../CHANGELOG.md", None),
        ("#who-may-do-what", None),
    ],
)
def test_what_a_wrong_link_is(target: str, why: str | None) -> None:
    assert problem(Link("docs/operations.md", target)) == why


def test_links_in_code_are_none() -> None:
    text = "a [b](c.md)\n\n    [d](e.md)\n\n    [f](g.md)\n\n```\n[h](i.md)\n```\n- k\n    [l](m.md) `[n](o.md)`\n"
    rest = IN_BACKTICKS.sub("", INDENTED.sub("", FENCED.sub("", text)))
    assert LINK.findall(rest) == ["c.md", "m.md"]


def test_the_readme_can_be_read_in_a_minute() -> None:
    page = (REPOSITORY / "README.md").read_text()
    assert len(page.splitlines()) <= 120
    assert (
        page.index("## What you get") < page.index("## Where it is not the right tool") < page.index("## How it does")
    )
    # tests/packages/test_tutorial.py runs both blocks as they stand: installing, and six lines.
    _, lines = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(lines.splitlines()) == 6
    benefits = re.findall(r"^- \*\*.*$", page, re.MULTILINE)
    assert len(benefits) == 5
    assert all(len(line) <= 120 and line.endswith(".") for line in benefits)


def test_the_picture_of_the_readme_has_the_figures_of_the_benchmarks() -> None:
    page = BENCHMARKS.read_text()
    assert [len(epochs) for epochs in demo_epochs(page).values()] == [2] * len(WAYS)
    assert len(cold_factors(page)) == len(READERS)
    assert (REPOSITORY / "docs/images/epochs.svg").read_text() == picture(page), "run docs/site/plots.py docs/images"


@pytest.mark.parametrize("part", PARTS)
def test_generated_parts_are_what_the_code_makes(part: str) -> None:
    (page,) = [page for page in pages() if f"<!-- generated: {part} -->\n" in (REPOSITORY / page).read_text()]
    _, _, rest = (REPOSITORY / page).read_text().partition(f"<!-- generated: {part} -->\n")
    found = rest.partition("<!-- end -->")[0].splitlines()
    assert found == list(PARTS[part]()), "run .venv/bin/python docs/site/generated.py"


@pytest.mark.parametrize("example", configuration_keys.examples(), ids=lambda path: path.name)
def test_examples_of_configurations_are_what_the_code_makes(example: Path) -> None:
    text = configuration_keys.examples()[example]
    assert example.read_text() == text, "run .venv/bin/python docs/site/generated.py"


@pytest.mark.parametrize(
    "part", [part for part in PARTS if part not in ("live-settings", "origins", "metrics", "metric-labels")]
)
def test_every_row_of_a_generated_table_says_something(part: str) -> None:
    """Descriptions begin with a small letter and have no full stop at the end: examples of configurations add both."""
    for row in list(PARTS[part]())[2:]:
        key, _, meaning = re.split(r"(?<!\\)\|", row)[1:-1]
        assert re.fullmatch(r" (HOST:PORT|TCP|Kubernetes|[^A-Z\s]).*[^.\s] ", meaning), key


def test_the_table_of_sizes_is_what_the_formulas_say() -> None:
    assert table() in (REPOSITORY / "docs/sizing.md").read_text()


def test_the_formulas_of_sizing() -> None:
    half = Training(dataset=100e9, room=50e9, epochs=5, rate=1000, sample=100e3, latency=0.1)
    assert least_origin_bytes(half) == 100e9 + 4 * 50e9
    assert least_origin_bytes(replace(half, room=200e9)) == 100e9
    assert kept(replace(half, room=200e9)) == 1
    assert lru_hits(0.5) == pytest.approx(0.153, abs=1e-3)
    assert (lru_hits(0), lru_hits(1)) == (0, 1)
    assert origin_rate(half, kept(half)) == 50e6
    assert requests_in_flight(half, 0) == 100
