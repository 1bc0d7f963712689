"""What people read fits a terminal of 80 columns: help texts; tables of jobs are in test_job_page.py."""

from collections.abc import Iterator

import click
import pytest

from cachefs.cli import main as cachefs
from cachefs.mount.cli import main as mount_cachefs
from cachefs_tools.cachectl import main as cachectl


def helps(name: str, command: click.Command) -> Iterator[tuple[str, str]]:
    """(command, its help) of it and of all its parts."""
    context = click.Context(command, info_name=name, terminal_width=80)
    yield name, command.get_help(context)
    if isinstance(command, click.Group):
        for part in command.commands.values():
            yield from helps(f"{name} {part.name}", part)


@pytest.mark.parametrize("command", [cachectl, cachefs, mount_cachefs], ids=["cachectl", "cachefs", "mount.cachefs"])
def test_help(command: click.Command) -> None:
    for name, text in helps("x", command):
        assert [line for line in text.splitlines() if len(line) > 80] == [], name
        assert [line for line in text.splitlines() if line.endswith("...") and "Usage" not in line] == [], name
