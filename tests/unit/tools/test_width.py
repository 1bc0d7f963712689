"""What people read fits a terminal of 80 columns: help texts, and the tables of jobs."""

import io
from collections.abc import Iterator

import click
import pytest
from cachefs_tools.cachectl import main as cachectl
from cachefs_tools.cachectl.job import describe
from rich.console import Console

from cachefs.cli import main as cachefs
from cachefs.job_messages import ConsumerView, JobView
from cachefs.mount.cli import main as mount_cachefs


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


def test_headings_of_a_job_are_not_broken() -> None:
    consumer = ConsumerView(
        "0", 12, 1_281_167, 1_281_167, [12], 12e3, 1_281_167, 3, "standing still", ahead_bytes=10**9, pushed_bytes=10**8
    )
    view = JobView("train", "images", "3f9c", "published", 0.0, "running", [consumer])
    screen = io.StringIO()
    Console(file=screen, width=80).print(*describe(view))
    assert "NAME STATE EPOCH SAMPLE OF RATE STRANGE AHEAD PUSHED" in " ".join(screen.getvalue().split())
