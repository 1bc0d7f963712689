"""Tables of cachectl fit the terminal: columns go by importance, and words stay whole."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from cachefs_tools.cachectl.display import (
    ColumnKind,
    TableColumn,
    compact,
    fit_columns,
    labelled_lines,
    shorten_middle,
    table,
    wrap_text,
)

COLUMNS = "NAME MOUNTPOINT =STATE? >BLOCKS?? >ERRORS? ~MESSAGE"
ROWS = [
    (
        "clairvoyant-images",
        "/dev/shm/cachefs-demo/mount",
        "running",
        "1,234,567",
        3,
        "the disk of the SSD tier is full",
    ),
    ("b", "/data", "dead", "0", 12_345, ""),
]


def printed(what: RenderableType, width: int) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=width, highlight=False, markup=False).print(what)
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def test_a_heading_says_what_its_column_holds() -> None:
    assert TableColumn.parse_heading(">RATE??") == TableColumn("RATE", ColumnKind.NUMBER, 2)
    assert TableColumn.parse_heading("=STATE") == TableColumn("STATE", ColumnKind.WORD)
    assert TableColumn.parse_heading("~MESSAGE?") == TableColumn("MESSAGE", ColumnKind.PROSE, 1)
    assert TableColumn.parse_heading("TO/FROM") == TableColumn("TO/FROM", ColumnKind.NAME)


def test_with_room_all_columns_are_shown_and_a_row_is_a_line() -> None:
    lines = printed(table(COLUMNS, ROWS), 200)
    assert lines[0].split() == ["NAME", "MOUNTPOINT", "STATE", "BLOCKS", "ERRORS", "MESSAGE"]
    assert len(lines) == 3


def test_without_room_what_is_spare_goes_first() -> None:
    shown = {width: printed(table(COLUMNS, ROWS), width)[0].split() for width in (110, 90, 80, 20)}
    assert [("STATE" in heads, "BLOCKS" in heads, "ERRORS" in heads) for heads in shown.values()] == [
        (True, True, True), (True, False, True), (True, False, False), (False, False, False),
    ]  # fmt: skip
    assert all({"NAME", "MOUNTPOINT", "MESSAGE"} <= set(heads) for heads in list(shown.values())[:3])


@pytest.mark.parametrize("width", [40, 60, 80, 81, 100, 132])
def test_lines_are_no_wider_and_no_number_is_cut(width: int) -> None:
    lines = printed(table("NAME SPEC =STATE >RATE ~MESSAGE?", [(*row[:3], row[4], row[5]) for row in ROWS]), width)
    assert max(map(cell_len, lines)) <= width
    assert any("12345" in line for line in lines)


def test_names_go_on_behind_a_seam_and_text_at_a_blank() -> None:
    assert wrap_text("/dev/shm/cachefs-demo/mount", 12) == ["/dev/shm/", "cachefs-", "demo/mount"]
    assert wrap_text("clairvoyant", 8) == ["clairvoy", "ant"]  # there is no seam
    assert wrap_text("no space left on /var/lib/x, so", 16) == ["no space left on", "/var/lib/x, so"]
    assert wrap_text("the file /var/lib/cachefs/ssd is", 12) == ["the file", "/var/lib/", "cachefs/ssd", "is"]
    assert wrap_text("", 5) == [""]
    assert wrap_text("数据集数据集", 5) == ["数据", "集数", "据集"]  # two columns each


def test_in_one_line_the_middle_is_left_out() -> None:
    assert shorten_middle("train-20261126-large", 9) == "trai…arge"
    assert shorten_middle("short", 9) == "short"
    assert [shorten_middle("abc", width) for width in (0, 1, 2)] == ["", "…", "a…"]
    assert cell_len(shorten_middle("数据集" * 9, 10)) <= 10


def test_names_that_need_more_than_there_is_give_way_to_each_other() -> None:
    columns = [TableColumn.parse_heading(text) for text in ("NAME", "SPEC", ">RATE")]
    shown = fit_columns(columns, [100, 10, 6], 60)
    assert shown == {0: 42, 1: 10, 2: 6}
    assert fit_columns(columns, [5, 5, 6], 60) == {0: 5, 1: 5, 2: 6}
    assert fit_columns(columns, [100, 100, 6], 20) == {0: 10, 1: 10, 2: 6}  # as narrow as can be


def test_a_long_fact_goes_on_below_itself() -> None:
    lines = printed(
        labelled_lines([("memory", "in /dev/shm/cachefs"), ("", "only 3 GiB of its budget can be used now")]), 40
    )
    assert lines == [
        "memory     in /dev/shm/cachefs",
        "           only 3 GiB of its budget can",
        "           be used now",
    ]


def test_a_number_never_takes_more_room_than_it_has() -> None:
    assert [compact(number, 5) for number in (0, 99_999, 123_456, 1_234_567, 9.9e9)] == [
        "0", "99999", "123k", "1.2M", "9.9G",
    ]  # fmt: skip
    assert all(len(compact(10.0**power * digits, 4)) <= 4 for power in range(15) for digits in (1, 9.994, 9.996))
