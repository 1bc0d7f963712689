"""`cachefs-bench listing`: time and memory of listing a very large bucket."""

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from cachefs_bench import listing_speed
from cachefs_bench.listing_server import Layout
from cachefs_bench.listing_speed import DEFAULT_URL, ListingLoad
from cachefs_bench.origin_server import environment_credentials


@click.command("listing")
@click.option("--keys", default=1_000_000, show_default=True, type=click.IntRange(min=1), help="Number of keys.")
@click.option(
    "--layout",
    default=Layout.TREE.value,
    show_default=True,
    type=click.Choice([layout.value for layout in Layout]),
    help="How the keys look.",
)
@click.option("--delay", default=75.0, show_default=True, type=click.FloatRange(min=0), help="Milliseconds per answer.")
@click.option("--turns", default=1, show_default=True, type=click.IntRange(min=1), help="How often each lists.")
@click.option(
    "--endpoint",
    help="URL of a running S3 server. Its credentials are in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.  "
    "[default: a server of our own is started, which only lists]",
)
@click.option("--url", default=DEFAULT_URL, show_default=True, help="What is listed there.")
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work.  [default: a temporary directory]",
)  # fmt: skip
def listing_command(endpoint: str | None, url: str, directory: Path | None, **shape: Any) -> None:
    """Measure listing a bucket: time and memory of a daemon that adds it as a dataset.

    Beside it `rclone lsf -R --fast-list` lists the same, where rclone is installed.
    """
    load = ListingLoad(Layout(shape["layout"]), shape["keys"], shape["delay"] / 1e3, shape["turns"])
    account = None
    if endpoint is not None:
        account = environment_credentials()
    with tempfile.TemporaryDirectory(prefix="cachefs-bench-", dir=directory) as work:
        click.echo(json.dumps(listing_speed.measure(Path(work), load, url, endpoint, account), indent=2))
