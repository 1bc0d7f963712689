"""cachefs-demo: what cachefs does for a training job, shown on this machine in about a minute.

It generates a dataset, puts it behind an S3 server, and reads it through a mount in shuffled order, as a training job
reads two epochs. Then it prints how this compares with the same files on the local disk.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cachefs.extras import needs_extra
from cachefs.messages import DatasetAdd, Empty, OriginOptions, Status
from cachefs.rpc import DATASET_ADD, STATUS, DaemonClient

with needs_extra("demo", "cachefs-demo"):
    import psutil

    from cachefs_tools import image_folder
    from cachefs_tools.cachectl.command_session import CommandSession
    from cachefs_tools.cachectl.display import size
    from cachefs_tools.cachectl.progress import follow_listing
    from cachefs_tools.kernel_pages import forget_pages, load_pages_alike
    from cachefs_tools.orderly_exit import orderly_exit
    from cachefs_tools.reading import Pass, find_files, read_shuffled
    from cachefs_tools.scratch_config import NodeSettings, TierSettings
    from cachefs_tools.scratch_node import daemon, memory_directory, mounted, require_fuse, s3_server

BUCKET: Final = "demo-bucket"
DATASET: Final = "demo"
# Share of the dataset. The rest goes to the SSD tier, so both tiers have work to do.
MEMORY_SHARE: Final = 0.75
# Longer than a mount takes to report: it reports its counters every second while they change.
REPORT_SECONDS: Final = 2.5
# A pass over cached files takes a tenth of a second. The best of several passes says more than one pass.
TURNS: Final = 3
BLOCK_SIZE: Final = 1 << 20
# Of the table where it goes to a file; a terminal of this width shows it whole.
WIDTH: Final = 80


@dataclass(frozen=True, slots=True)
class Usage:
    """Counters of the mount and the daemon at one moment, or their growth over one pass."""

    requests: int  # FUSE requests
    memory: int  # bytes of reads that the memory tier served
    ssd: int  # bytes of reads that the SSD tier served
    origin: int  # bytes of reads that waited for the origin
    origin_requests: int  # requests that were sent to the origin

    def __sub__(self, before: "Usage") -> "Usage":
        return Usage(*(now - then for now, then in zip(asdict(self).values(), asdict(before).values(), strict=True)))


@dataclass(frozen=True, slots=True)
class Run:
    """A row of the table."""

    title: str
    reading: Pass
    usage: Usage | None  # None: the files were read from the local disk

    def shares(self) -> dict[str, float]:
        """The share of the bytes that each place served. What did not reach the mount came from the page cache."""
        if self.usage is None:
            return {}
        usage, total = self.usage, self.reading.bytes
        served = {"memory": usage.memory, "ssd": usage.ssd, "origin": usage.origin}
        page_cache = max(0, total - sum(served.values()))
        return {"page_cache": page_cache / total, **{name: count / total for name, count in served.items()}}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--files", default=3000, show_default=True, type=click.IntRange(min=2), help="Number of files to generate."
)
@click.option(
    "--file-size", default=110_000, show_default=True, type=click.IntRange(1000, 500_000), help="Mean bytes of a file."
)
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as one JSON document.")
def main(files: int, file_size: int, as_json: bool) -> None:
    """Read a generated dataset through cachefs and from the local disk, and compare."""
    with orderly_exit("cachefs-demo"):
        runs = demonstrate(files, file_size)
    if as_json:
        click.echo(json.dumps({"files": files, "runs": [document(run, runs[-1]) for run in runs]}, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False).print(table(runs))


def demonstrate(files: int, file_size: int) -> list[Run]:
    """The rows of the table; the last one is of the local disk. Raises CachefsError where a part does not work."""
    require_fuse()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cachefs-demo-")))
        source = work / "buckets" / BUCKET
        say(f"generating {files:,} files in {source}")
        total = image_folder.generate(source, files, file_size)
        memory = stack.enter_context(tier_directory(total, work))
        say(f"starting an S3 server, and cachefsd with {size(MEMORY_SHARE * total)} of memory in {memory}")
        endpoint = stack.enter_context(s3_server(source.parent, work / "s3.log"))
        node = stack.enter_context(daemon(work, memory, node_settings(total)))
        say(f"listing s3://{BUCKET} and mounting it")
        add_dataset(node.socket, endpoint)
        mountpoint = work / "mnt"
        stack.enter_context(mounted(DATASET, mountpoint, node.socket, work / "mount.log"))
        return measure(node.client, mountpoint, source)


@contextmanager
def tier_directory(total: int, work: Path) -> Iterator[Path]:
    """A directory for the memory tier: in /dev/shm, or in *work* where that is too small (64 MB in containers)."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or shutil.disk_usage(shared).free < 2 * total + (64 << 20):
        say("/dev/shm is too small for the memory tier: using the disk (in a container: --shm-size 2g)")
        yield work / "memory"
        return
    with memory_directory("cachefs-demo-") as directory:
        yield directory


def node_settings(total: int) -> NodeSettings:
    """Settings for *total* bytes of files. Each tier has room for some blocks more, since the daemon asks for it.

    Nothing is guessed: after some files, the rest of a set would come by itself, and no cold epoch could be shown.
    """
    memory, ssd = TierSettings(int(MEMORY_SHARE * total) + (16 << 20)), TierSettings(total + (64 << 20))
    return NodeSettings(memory, ssd, BLOCK_SIZE, guess=False)


def add_dataset(socket: Path, endpoint: str) -> None:
    """List the bucket as the dataset, with the progress that `cachectl dataset add` shows."""
    options = OriginOptions(endpoint_url=endpoint, region="us-east-1", addressing_style="path")
    session = CommandSession(socket, as_json=False)
    try:
        follow_listing(
            session, session.stream(DATASET_ADD, DatasetAdd(name=DATASET, url=f"s3://{BUCKET}", options=options))
        )
    finally:
        session.client.close()


def measure(client: DaemonClient, mountpoint: Path, source: Path) -> list[Run]:
    """Read both trees in all ways."""
    paths, local = find_files(str(mountpoint)), find_files(str(source))
    with bars() as shown:
        say("reading two epochs in shuffled order, the second one in turns with the local disk")
        cold = observed(client, shown, "epoch 1: cold", paths, 1)
        waiting = shown.add_task("loading the pages of both alike", total=None)
        load_pages_alike((mountpoint, source), [os.path.relpath(path, source) for path in local])
        shown.update(waiting, total=1, completed=1)
        warm, native = [], []
        for turn in range(1, TURNS + 1):
            warm.append(observed(client, shown, "epoch 2: warm", paths, 2, turn))
            title = f"local {file_system_of(source)}"
            native.append(Run(title, read_shown(shown, title, local, 2, turn), None))
        say("dropping the kernel's pages and reading from the tiers")
        forget_pages(paths)
        tiers = observed(client, shown, "from the tiers", paths, 3)
    return [cold, fastest(warm), tiers, fastest(native)]


def bars() -> Progress:
    """Shows how far each pass is, on terminals only."""
    screen = Console(stderr=True, highlight=False)
    return Progress(
        TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(),
        console=screen, disable=not screen.is_terminal,
    )  # fmt: skip


def fastest(runs: list[Run]) -> Run:
    """The run with the most files per second."""
    return max(runs, key=lambda run: run.reading.files_per_second)


def observed(client: DaemonClient, shown: Progress, title: str, paths: list[str], seed: int, turn: int = 0) -> Run:
    """Read the files of the mount, and see what the node did for it."""
    before = usage(client)
    reading = read_shown(shown, title, paths, seed, turn)
    return Run(title, reading, usage(client) - before)


def read_shown(shown: Progress, title: str, paths: list[str], seed: int, turn: int = 0) -> Pass:
    """Read the files, with a bar of its own for this pass. *turn*: the number of the pass, where there are several."""
    bar = shown.add_task(f"{title}, pass {turn} of {TURNS}" if turn else title, total=len(paths))
    return read_shuffled(paths, seed, lambda done: shown.update(bar, completed=done))


def usage(client: DaemonClient) -> Usage:
    """The counters, with all that the mount has done by now."""
    asked = time.monotonic()
    before: Usage | None = None
    while True:
        status = client.call(STATUS, Empty())
        now = time.monotonic()
        if now - status.mounts[0].seconds_since_report > asked or now > asked + REPORT_SECONDS:
            found = counted(status)
            # The workers of a mount report one by one.
            if found == before or now > asked + REPORT_SECONDS:
                return found
            before = found
        time.sleep(0.2)


def counted(status: Status) -> Usage:
    """The counters in a status of the daemon."""
    counters = status.mounts[0].counters
    return Usage(
        requests=counters["requests"], memory=counters["hit_bytes_memory"], ssd=counters["hit_bytes_ssd"],
        origin=counters["miss_bytes"], origin_requests=status.origin_requests,
    )  # fmt: skip


def file_system_of(path: Path) -> str:
    """The type of the file system that holds *path*, such as `ext4`."""
    above = [one for one in psutil.disk_partitions(all=True) if path.is_relative_to(one.mountpoint)]
    return str(max(above, key=lambda one: len(one.mountpoint)).fstype)


def document(run: Run, native: Run) -> dict[str, object]:
    """A run for the JSON document, compared with the run of the local disk."""
    reading = run.reading
    return {
        "run": run.title,
        "files": reading.files,
        "bytes": reading.bytes,
        "seconds": reading.seconds,
        "files_per_second": reading.files_per_second,
        "p50_us": reading.p50,
        "p99_us": reading.p99,
        "ratio_to_native": reading.files_per_second / native.reading.files_per_second,
        "shares": run.shares(),
        "fuse_requests": run.usage.requests if run.usage else 0,
        "origin_requests": run.usage.origin_requests if run.usage else 0,
    }


def table(runs: list[Run]) -> Table:
    """All runs for people to read."""
    native = runs[-1].reading
    result = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        title=f"{native.files:,} files, {size(native.bytes)}, one reader",
        caption="page cache, memory, ssd and origin served these shares of the bytes\n"
        "FUSE and S3 are requests to the mount and to the origin\n"
        "epoch 2 and local are page-cached, with pages that were loaded alike;\n"
        f"each is the best of {TURNS} passes, which take turns",
    )
    result.add_column("", no_wrap=True)
    for heading in ("files/s", "p50 us", "of\nlocal", "page\ncache", "memory", "ssd", "origin", "FUSE", "S3"):
        result.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        result.add_row(run.title, *cells(run, native))
    return result


def cells(run: Run, native: Pass) -> list[str]:
    """The cells of a row behind its title."""
    reading, shares = run.reading, run.shares()
    speed = [
        f"{reading.files_per_second:,.0f}",
        f"{reading.p50:,.0f}",
        f"{100 * reading.files_per_second / native.files_per_second:.0f} %",
    ]
    if run.usage is None:
        return speed
    served = [f"{100 * shares[name]:.0f} %" for name in ("page_cache", "memory", "ssd", "origin")]
    return [*speed, *served, f"{run.usage.requests:,}", f"{run.usage.origin_requests:,}"]


def say(step: str) -> None:
    click.echo(f"cachefs-demo: {step}", err=True)
