"""The demo's figures: what is derived from them, what must be true of them, and how they look in 80 columns."""

import io
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from cachefs.errors import CachefsError
from cachefs_bench.demo.display import draw_chart
from cachefs_bench.demo.results import (
    DemoEpoch,
    DemoResult,
    DemoRun,
    KillEffect,
    LoopPosition,
    TrainedEpoch,
    longest_wait,
    require_equal_bytes,
    result_document,
    sample_rates,
)  # fmt: skip
from cachefs_bench.demo.settings import DemoSettings
from cachefs_bench.demo.svg import draw_svg

FILES = 100_000
BYTES = 11_000_000_000
SETTINGS = DemoSettings(FILES, 110_000, 1.0, 64)
# It waits for 3 s, then takes 2 s for each quarter, and stands still for 4 s before the last one.
POSITIONS = [
    LoopPosition(0, 25_000, 5.0, 3.0), LoopPosition(0, 50_000, 7.0, 3.0), LoopPosition(0, 75_000, 9.0, 3.0),
    LoopPosition(0, 100_000, 15.0, 7.0),
]  # fmt: skip


def run(name: str, seconds: float = 1234.5, waited: float = 1000.0) -> DemoRun:
    epochs = [
        DemoEpoch(TrainedEpoch(number, FILES, BYTES, seconds, waited, 1.0, str(number) * 64), POSITIONS, 100_000, BYTES)
        for number in range(2)
    ]
    return DemoRun(name, f"fed by {name}", "with <a> & a few words", epochs, 1)


KILL = KillEffect(POSITIONS[1], 12.3, 98_765, 98_765, 12_345, 10.0)
STORY = DemoResult(FILES, BYTES, [run("s3"), run("mount"), run("run"), run("local", 700.0, 0.0)], run("killed"), KILL)


def screen_of(encoding: str = "utf-8", **options: bool) -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    return Console(file=io.TextIOWrapper(raw, encoding=encoding, write_through=True), width=80, **options), raw


def test_every_line_of_the_chart_fits_80_columns() -> None:
    screen, raw = screen_of()
    lines = draw_chart(STORY, SETTINGS, screen)
    screen.print(lines)
    text = raw.getvalue().decode()
    assert len(text.splitlines()) == len(lines.renderables), "a line went on in the next one"
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("epoch 1 ") == 5
    for expected in (
        "1234.5 s",
        "81 %",
        "100,000",
        "the daemon is killed here",
        "98,765",
        "12,345",
        "00000000, 11111111",
    ):
        assert expected in text
    assert "\x1b" not in text


def test_bars_show_what_was_measured_also_without_unicode() -> None:
    screen, raw = screen_of("ascii")
    screen.print(draw_chart(STORY, SETTINGS, screen))
    lines = raw.getvalue().decode("ascii").splitlines()
    bars = [re.search(r"(#+)(\.*)\s", line[11:]) for line in lines if line.startswith("  epoch ")]
    lengths = [(len(bar[1]), len(bar[2])) for bar in bars if bar is not None]
    assert len(lengths) == 10
    assert sum(lengths[0]) == 42
    assert lengths[0][1] == round(42 * 1000 / 1234.5)
    assert lengths[6] == (round(42 * 700 / 1234.5), 0)


def test_the_picture_is_xml_with_each_figure_once() -> None:
    root = ElementTree.fromstring(draw_svg(STORY, SETTINGS))
    texts = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("1234.5 s") == 8
    assert texts.count("700.0 s") == 2
    assert "fed by s3with <a> & a few words" in texts
    width = float(root.attrib["width"])
    for bar in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(bar.get("x", 0)) + float(bar.attrib["width"]) <= width


def test_rates_are_those_of_the_intervals_between_batches() -> None:
    assert sample_rates(POSITIONS, 3) == pytest.approx([5000, (25_000 + 25_000 + 25_000 / 6) / 5, 25_000 / 6])
    assert sum(sample_rates(POSITIONS, 7)) * 15 / 7 == pytest.approx(100_000)


def test_slowest_wait_begins_where_the_loop_was() -> None:
    assert longest_wait(POSITIONS, POSITIONS[0]) == 4
    assert longest_wait(POSITIONS, POSITIONS[3]) == 0


def test_document_has_epochs_as_people_count_them() -> None:
    assert [epoch["epoch"] for epoch in result_document(STORY)["runs"][0]["epochs"]] == [1, 2]
    assert result_document(STORY)["killed"]["killed_at_sample"] == 50_000


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"digest": "f" * 64}, "fed by mount: epoch 1 gave other bytes"), ({"samples": 99_999}, "has 99,999 samples"),
     ({"bytes": 1}, "with 1 bytes")],
)  # fmt: skip
def test_a_run_with_other_bytes_is_an_error(changed: dict[str, object], said: str) -> None:
    require_equal_bytes(STORY)
    mount = STORY.runs[1]
    wrong = replace(mount.epochs[0], trained=replace(mount.epochs[0].trained, **changed))  # type: ignore[arg-type]
    runs = [STORY.runs[0], replace(mount, epochs=[wrong, mount.epochs[1]]), *STORY.runs[2:]]
    with pytest.raises(CachefsError, match=said):
        require_equal_bytes(replace(STORY, runs=runs))
