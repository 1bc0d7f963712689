"""`cachefs-bench miss`: cold reads without a published sequence, compared with other mounts of the same server."""

import json
import tempfile
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from cachefs_bench import misses
from cachefs_bench.misses import MissLoad

_WIDTH = 80


@click.command("miss")
@click.option(
    "--files", default=300, show_default=True, type=click.IntRange(min=1),
    help="Files of each pattern and turn, in whole hundreds.",
)  # fmt: skip
@click.option("--size", default=110_000, show_default=True, type=click.IntRange(8, 4 << 20), help="Bytes of each file.")
@click.option("--turns", default=3, show_default=True, type=click.IntRange(min=1), help="How often each reads.")
@click.option(
    "--endpoint",
    help="URL of a running S3 server, in which a bucket `cachefs-bench` is made and removed. Its credentials are in "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.  [default: a server of rclone is started]",
)
@click.option("--bucket", help="An empty bucket there, which is used in place of one that is made and removed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document in place of a table.")
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work.  [default: a temporary directory]",
)  # fmt: skip
def miss_command(as_json: bool, directory: Path | None, endpoint: str | None, bucket: str | None, **shape: int) -> None:
    """Measure cold reads through a mount, shuffled and as cp -r reads.

    Nothing is cached, and nothing is published. A client that only receives shows what the server can do. `rclone mount
    --vfs-cache-mode full` and `s3fs` read the same files where they are installed.
    """
    if bucket is not None and endpoint is None:
        raise click.UsageError("--bucket is one of a running server: give its --endpoint, too")
    load = MissLoad(misses.round_up(shape["files"]), shape["size"], shape["turns"])
    if load.files != shape["files"]:
        click.echo(f"{load.files:,} files of each pattern and turn are read: whole hundreds", err=True)
    with tempfile.TemporaryDirectory(prefix="cachefs-bench-", dir=directory) as work:
        document = misses.measure(Path(work), load, endpoint, bucket)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        Console(width=_WIDTH, highlight=False).print(table(document))


def table(document: dict[str, Any]) -> Table:
    """Return a table of at most 80 columns."""
    found = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    found.add_column("cold reads")
    found.add_column("by")
    for title in ("files/s", "p50 ms", "p99 ms", "cachefs is"):
        found.add_column(title, justify="right")
    for pattern, ways in document["patterns"].items():
        ratios = document["ratios"][pattern]
        for number, (name, figures) in enumerate(ways.items()):
            cells = (_cell(figures.get(key)) for key in ("files_per_second", "p50_ms", "p99_ms"))
            ratio = f"{ratios[name]:.2f} x" if name in ratios else ""
            found.add_row(pattern if not number else "", name, *cells, ratio)
    return found


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
