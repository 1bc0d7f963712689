"""`cachefs-bench refetch`: fetched bytes, without and with `cachefs run`."""

import json
import tempfile
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from cachefs_bench import refetch
from cachefs_bench.refetch import RefetchLoad

_WIDTH = 132


@click.command("refetch")
@click.option("--files", default=1000, show_default=True, type=click.IntRange(min=100), help="Files, of 256 KiB each.")
@click.option("--epochs", default=4, show_default=True, type=click.IntRange(min=2), help="Epochs of each job.")
@click.option("--rate", default=200.0, show_default=True, help="Samples a second of each job.")
@click.option("--every", is_flag=True, help="Run every combination: hours.  [default: 32 of them]")
@click.option("--only", default="", metavar="TEXT", help="Run those whose titles have this text.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document in place of a table.")
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work, with room for twice the files.  [default: a temporary directory]",
)  # fmt: skip
def refetch_command(every: bool, only: str, as_json: bool, directory: Path | None, **load: Any) -> None:
    """Count what jobs fetch from the origin, without and with `cachefs run`.

    For combinations of tiers, page cache, mount options and jobs: datasets fetched by the mount alone and under
    `cachefs run`, beside the least possible, and reads that waited for the origin. Needs torch, and root for its
    control groups.
    """
    cells = [cell for cell in (refetch.all_cells() if every else refetch.selected_cells()) if only in cell.title]
    with tempfile.TemporaryDirectory(prefix="cachefs-bench-", dir=directory) as work:
        document = refetch.measure(Path(work), RefetchLoad(**load), cells, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        Console(width=_WIDTH, highlight=False).print(table(document))


def table(document: dict[str, Any]) -> Table:
    """Return a table of the counts, a row per cell."""
    found = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    found.add_column("datasets fetched")
    for title in ("least", "mount", "run", "of least", "of mount", "waited: mount", "run", "after epoch 1"):
        found.add_column(title, justify="right")
    for row in document["cells"]:
        mount, run = row["mount"], row["run"]
        found.add_row(
            row["title"], f"{row['least']:.2f}", "" if mount is None else f"{mount['fetched']:.2f}",
            f"{run['fetched']:.2f}", f"{row['over_least']:.3f}",
            "" if mount is None else f"{row['over_mount']:.3f}", "" if mount is None else f"{mount['waited']:,}",
            f"{run['waited']:,}", f"{run['waited_later']:,}",
        )  # fmt: skip
    return found
