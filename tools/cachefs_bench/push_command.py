"""`cachefs-bench push`: measures the benefit of pushing pages ahead of a reader. Each preset is one experiment."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from cachefs_bench import push_large, push_paced, push_speed
from cachefs_bench.push_node import TIERS

FILES: Final = 20_000
SIZE: Final = 110_000
LARGE: Final = 4 << 30
SMALL_BUDGET: Final = "256MiB"
# Seconds between a job's publishing and its first read, in which it opens its dataset and builds its model.
HEAD_START: Final = 0.5

Options = dict[str, Any]
Runs = list[dict[str, Any]]


def _run_paced(work: Path, options: Options, watch_pages: bool = False) -> Runs:
    load = push_paced.PacedLoad(
        files=options["files"], size=options["size"], tier=options["tier"], epochs=options["epochs"],
        compute=options["compute"] / 1e3, head_start=options["head_start"], budget=options["budget"],
        watch_pages=watch_pages,
    )  # fmt: skip
    return push_paced.measure(work, load)


def _run_small_budget(work: Path, options: Options) -> Runs:
    return _run_paced(work, options, watch_pages=True)


def _run_full_speed(work: Path, options: Options) -> Runs:
    load = push_speed.FullSpeedLoad(
        files=options["files"], size=options["size"], tier=options["tier"], turns=options["turns"],
        head_start=options["head_start"], budget=options["budget"],
    )  # fmt: skip
    return push_speed.measure(work, load)


def _run_large(work: Path, options: Options) -> Runs:
    load = push_large.LargeFileLoad(size=options["size"], head_start=options["head_start"], budget=options["budget"])
    return push_large.measure(work, load)


# Preset -> its function, and defaults of its options.
PRESETS: Final[dict[str, tuple[Callable[[Path, Options], Runs], Options]]] = {
    "m1": (_run_paced, {"size": SIZE, "tier": "ssd", "budget": "", "head_start": HEAD_START}),
    "m2": (_run_full_speed, {"size": SIZE, "tier": "memory", "budget": "", "head_start": 0.0}),
    "m3": (_run_small_budget, {"size": SIZE, "tier": "ssd", "budget": SMALL_BUDGET, "head_start": HEAD_START}),
    "m5": (_run_large, {"size": LARGE, "budget": "", "head_start": 0.0}),
}


@click.command("push")
@click.option(
    "--preset", type=click.Choice(list(PRESETS)), required=True, help="The question (see docs/benchmarks.md)."
)
@click.option(
    "--files", default=FILES, show_default=True, type=click.IntRange(min=2), help="m1, m2, m3: number of files."
)
@click.option(
    "--size", type=click.IntRange(min=9), help=f"Bytes of a file. m5 has one file.  [default: {SIZE}; m5: {LARGE}]"
)
@click.option(
    "--tier", type=click.Choice(TIERS), help="The tier that holds the files.  [default: ssd; m2: memory; m5: both]"
)
@click.option("--epochs", default=1, show_default=True, type=click.IntRange(min=1), help="m1, m3: epochs.")
@click.option(
    "--turns",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="m2: how many mounts push, and how many do not.",
)
@click.option(
    "--compute",
    default=2.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="m1, m3: milliseconds of computing per sample.",
)
@click.option(
    "--budget", help=f"How much of the page cache may be used.  [default: the mount's own; m3: {SMALL_BUDGET}]"
)
@click.option(
    "--head-start",
    type=click.FloatRange(min=0),
    help=f"Seconds from publishing to the first read.  [default: {HEAD_START}; m2, m5: 0]",
)
@click.option(
    "--directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to work.  [default: a temporary directory]",
)  # fmt: skip
def push_command(preset: str, directory: Path | None, **options: Any) -> None:
    """Measure reads while pages are pushed ahead of the reader.

    The pages are pushed into the kernel's page cache. The same files are read from the local disk beside them.
    """
    measure, defaults = PRESETS[preset]
    options.update((name, value) for name, value in defaults.items() if options[name] is None)
    with tempfile.TemporaryDirectory(prefix="cachefs-bench-", dir=directory) as name:
        runs = measure(Path(name), options)
    click.echo(json.dumps({"preset": preset, **options, "runs": runs}, indent=2))
