"""cachefs-demo: shows the effect of cachefs on a training loop, on this machine in less than two minutes."""

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from cachefs.errors import CachefsError
from cachefs_tools.quiet_imports import quiet_imports

with quiet_imports():
    from cachefs_bench.demo.display import PROGRAM, draw_chart, open_display
    from cachefs_bench.demo.results import result_document
    from cachefs_bench.demo.runs import run_demo
    from cachefs_bench.demo.settings import DemoSettings
    from cachefs_bench.demo.stage import prepare_stage
    from cachefs_bench.demo.svg import draw_svg
    from cachefs_bench.orderly_exit import orderly_exit
    from cachefs_tools.child_programs import require_fuse

# Width of the chart in a file.
WIDTH = 80


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--files", default=1000, show_default=True, type=click.IntRange(64, 100_000), help="Number of files to generate."
)
@click.option(
    "--file-size", default=110_000, show_default=True, type=click.IntRange(1000, 500_000), help="Mean bytes of a file."
)
@click.option(
    "--compute",
    default=5,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="Milliseconds that the training loop computes for each sample.",
)
@click.option(
    "--workers", default=4, show_default=True, type=click.IntRange(1, 64), help="Threads of the loop's loader."
)
@click.option(
    "--svg",
    default=Path("cachefs-demo.svg"),
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for the chart as a picture.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as one JSON document.")  # fmt: skip
def main(files: int, file_size: int, compute: int, workers: int, svg: Path, as_json: bool) -> None:
    """Feed one training loop in four ways: from S3, through a cachefs mount, under `cachefs run`, and from the local
    disk. Then kill the daemon in the middle of an epoch, and compare every byte.

    Every figure is measured while you wait. Nothing is left but the picture.
    """
    with orderly_exit(PROGRAM):
        require_fuse()
        _require_writable(svg)
        settings = DemoSettings(files, file_size, compute / 1e3, workers)
        with open_display() as display, prepare_stage(settings, display) as stage:
            story = run_demo(stage, display)
        svg.write_text(draw_svg(story, settings), encoding="utf-8")
        if as_json:
            click.echo(json.dumps({**result_document(story), "svg": str(svg.resolve())}, indent=2))
        else:
            screen = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
            screen.print(draw_chart(story, settings, screen))
            click.echo(f"The same as a picture: {svg.resolve()}")


def _require_writable(path: Path) -> None:
    """Raise CachefsError if the picture could not be written at the end. Leaves no file."""
    fresh = not path.exists()
    try:
        with path.open("ab"):
            pass
        if fresh:
            path.unlink()
    except OSError as error:
        raise CachefsError(f"{path} cannot be written ({error.strerror}); name another file: --svg PATH") from None


if __name__ == "__main__":
    main()
