"""A list that is too long for memory is printed as it comes, in the form of one that is not."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cachefs.messages import DirectoryEntry
from cachefs_tools.cachectl.command_session import CommandSession, to_json_types
from cachefs_tools.cachectl.content import entry_row

COLUMNS = "NAME >SIZE"


def entries(count: int, start: int = 0) -> list[DirectoryEntry]:
    return [DirectoryEntry(name=b"%d \xff" % n, directory=n % 3 == 0, size=n) for n in range(start, start + count)]


@pytest.mark.parametrize("pages", [[], [[]], [entries(1)], [[], entries(2), [], entries(3, 2)]])
def test_as_json_it_is_one_document(pages: list[list[DirectoryEntry]], capsys: pytest.CaptureFixture[str]) -> None:
    CommandSession(Path("s"), as_json=True).print_pages("entries", iter(pages), COLUMNS, entry_row)
    whole = {"entries": to_json_types(list(itertools.chain(*pages)))}
    assert capsys.readouterr().out == json.dumps(whole, indent=2) + "\n"


def test_as_text_it_has_one_heading(capsys: pytest.CaptureFixture[str]) -> None:
    session = CommandSession(Path("s"), as_json=False)
    session.print_pages("entries", iter([entries(2), entries(2, 2)]), COLUMNS, entry_row)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "0", "1", "2", "3"]
    session.print_pages("entries", iter([]), COLUMNS, entry_row)
    assert capsys.readouterr().out.split() == ["NAME", "SIZE"]


@pytest.mark.parametrize("as_json", [True, False])
def test_a_page_is_printed_before_the_next_one_is_asked_for(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def pages() -> Iterator[list[DirectoryEntry]]:
        yield entries(2)
        assert "1 " in capsys.readouterr().out
        yield entries(2, 2)
        raise click.Abort

    with pytest.raises(click.Abort):
        CommandSession(Path("s"), as_json).print_pages("entries", pages(), COLUMNS, entry_row)
