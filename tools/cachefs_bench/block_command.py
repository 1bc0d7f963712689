"""`cachefs-bench block`: the daemon's processor time per fetched block, by stage."""

import json
import tempfile
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from cachefs_bench import block_budget
from cachefs_bench.block_stages import BlockStage
from cachefs_bench.origin_server import run_filled_server
from cachefs_bench.scenario import DatasetShape


@click.command("block")
@click.option("--files", default=12000, show_default=True, type=click.IntRange(min=64), help="Number of files.")
@click.option(
    "--size", default=110_000, show_default=True, type=click.IntRange(8, 4 << 20), help="Bytes of each file: one block."
)
@click.option(
    "--seconds", default=20.0, show_default=True, type=click.FloatRange(min=0, min_open=True),
    help="How long each case is measured, at most.",
)  # fmt: skip
@click.option("--workers", default=4, show_default=True, type=click.IntRange(min=1), help="Workers of the loader.")
@click.option(
    "--endpoint",
    help="URL of a running S3 server. Its credentials are in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.  "
    "[default: a server of rclone is started]",
)
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work.  [default: a temporary directory]",
)  # fmt: skip
def block_command(
    files: int, size: int, seconds: float, workers: int, endpoint: str | None, directory: Path | None
) -> None:
    """Measure what a fetched block costs the daemon, by stage.

    A published job reads as fast as it can through a mount that pushes. Blocks go into memory, and then onto an SSD
    tier where another block is evicted for each. py-spy tells the stages apart; it takes root.
    """
    shape = DatasetShape(files=files, size=size, epochs=1, workers=workers, demand=1e6)
    with tempfile.TemporaryDirectory(prefix="cachefs-bench-", dir=directory) as name:
        work = Path(name)
        documents = []
        with run_filled_server(work, shape, endpoint) as server:
            for number, case in enumerate(block_budget.cases(shape)):
                place = work / f"case{number}"
                place.mkdir()
                click.echo(f"{case.name} ...", err=True)
                documents.append(found := block_budget.measure_case(place, server, shape, case, seconds))
                if said := block_budget.sample_warning(case.name, found["blocks"], found["seconds"]):
                    click.echo(said, err=True)
        _show(documents)
        click.echo(json.dumps(documents, indent=2))


def _show(documents: list[dict[str, object]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("ms of processor time per block")
    for document in documents:
        table.add_column(str(document["case"]), justify="right")
    for stage in BlockStage:
        table.add_row(stage.value, *(f"{one['by_stage_ms'][stage.value]:.3f}" for one in documents))  # type: ignore[index]
    table.add_row("all", *(f"{one['cpu_ms_per_block']:.3f}" for one in documents))
    table.add_row("blocks/s", *(f"{one['blocks_per_s']:.0f}" for one in documents))
    Console(stderr=True, highlight=False).print(table)
