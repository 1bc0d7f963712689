"""cachectl doctor: finds problems of this node and their remedies."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click
from rich.table import Table
from rich.text import Text

from cachefs_tools.cachectl import completion
from cachefs_tools.cachectl.command_session import CommandSession, ExitStatus, with_session
from cachefs_tools.doctor.finding import Finding, Level

_TITLES: Final = {
    Level.PROBLEM: "Problems",
    Level.WARNING: "Warnings",
    Level.NOTE: "Good to know",
    Level.OK: "In order",
}
_SIGNS: Final = {Level.PROBLEM: "x", Level.WARNING: "!", Level.NOTE: "-", Level.OK: "+"}
_STYLES: Final = {Level.PROBLEM: "bold red", Level.WARNING: "yellow", Level.NOTE: "", Level.OK: "green"}


@click.command()
@click.argument("datasets", metavar="[DATASET]...", nargs=-1, shell_complete=completion.datasets)
@click.option("--origin", is_flag=True, help="Ask the origins of all datasets too: some 20 GETs each.")
@click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="Configuration file of the daemon.")
@with_session
def doctor(session: CommandSession, datasets: Sequence[str], origin: bool, config: Path | None) -> None:
    """Find problems of this node, and print remedies.

    It looks at the kernel and FUSE, limits, disks, the clock, the daemon, mounts, /etc/fstab and credentials. Where
    datasets are named, it asks their origins too, with up to 20 GETs and 17 MiB for each. It works without a daemon,
    and every check has a deadline. With status 4 it has found a problem.
    """
    from cachefs_tools.doctor.examination import Examination, ExaminationRequest

    wanted = ExaminationRequest(session.socket, config, tuple(dict.fromkeys(datasets)), origin)
    with session.screen.status("looking at the node") if session.screen.is_terminal else _NoSpinner() as spinner:
        found = Examination(wanted, lambda what: spinner.update(f"looking at: {what}")).run()
    counts = {level.value: sum(each.level is level for each in found) for level in Level}
    session.print_result({"counts": counts, "findings": found}, *describe(found))
    if counts[Level.PROBLEM]:
        sys.exit(ExitStatus.INCOMPLETE)


class _NoSpinner:
    """A spinner that shows nothing, for output that is not a terminal."""

    def __enter__(self) -> "_NoSpinner":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, text: str) -> None:
        pass


def describe(found: Sequence[Finding]) -> Iterator[str | Text | Table]:
    """Yield the findings, worst first, and a summary."""
    for level in Level:
        group = [each for each in found if each.level is level]
        if group:
            yield Text(_TITLES[level], style="bold")
            yield _table(group)
            yield ""
    yield summary(found)


def _table(group: Sequence[Finding]) -> Table:
    """Make a table with signs in the first column, and texts that continue below themselves."""
    result = Table.grid(padding=(0, 1, 0, 0))
    result.add_column(no_wrap=True)
    result.add_column(overflow="fold")
    for each in group:
        result.add_row(Text(_SIGNS[each.level], style=_STYLES[each.level]), each.found)
        if each.consequence:
            result.add_row("", f"so: {each.consequence}")
        if each.way_out:
            result.add_row("", f"do: {each.way_out}")
    return result


def summary(found: Sequence[Finding]) -> str:
    """Return the last line."""
    counts = {level: sum(each.level is level for each in found) for level in Level}
    parts = [
        f"{counts[level]} {word}{'' if counts[level] == 1 else 's'}"
        for level, word in ((Level.PROBLEM, "problem"), (Level.WARNING, "warning"))
        if counts[level]
    ]
    good = counts[Level.OK]
    return f"{' and '.join(parts) or 'Nothing is wrong'}; {good} check{' is' if good == 1 else 's are'} in order."
