"""cachefs-demo: what cachefs does for a training job, shown on this machine in about a minute.

Generates a dataset, puts it behind an S3 server, and reads it through a mount in shuffled order, as two epochs of a
training job would; then prints how that compares with the same files on the local disk.
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
import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from cachefs.errors import CachefsError
from cachefs.messages import DatasetAdd, Empty, OriginOptions, Status
from cachefs.rpc import DATASET_ADD, STATUS, DaemonClient
from cachefs_tools import image_folder
from cachefs_tools.cachectl.display import size
from cachefs_tools.cachectl.progress import follow_listing
from cachefs_tools.cachectl.session import Session
from cachefs_tools.reading import Pass, drop_page_cache, find_files, read_shuffled
from cachefs_tools.scratch_node import daemon, end_in_order_when_interrupted, mounted, s3_server

BUCKET: Final = "demo-bucket"
DATASET: Final = "demo"
# Of the dataset; the rest goes to the SSD tier, so that both are seen at work.
MEMORY_SHARE: Final = 0.75
# A mount reports its counters every second while they change.
REPORT_SECONDS: Final = 2.5
# A pass over what is cached takes a tenth of a second, so the best of some says more than one.
TURNS: Final = 3
CONFIG: Final = """\
[daemon]
socket = "{socket}"
state_dir = "{work}/state"
block_size = "1MiB"

[memory]
dir = "{memory}"
budget = {memory_budget}

[ssd]
dir = "{work}/ssd"
budget = {ssd_budget}
min_free = 0
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """Counters of the mount and the daemon at one moment, or their growth over one pass.

    requests: FUSE requests; memory, ssd, origin: bytes of reads they served; origin_requests: sent to the origin.
    """

    requests: int
    memory: int
    ssd: int
    origin: int
    origin_requests: int

    def __sub__(self, before: "Usage") -> "Usage":
        return Usage(*(now - then for now, then in zip(asdict(self).values(), asdict(before).values(), strict=True)))


@dataclass(frozen=True, slots=True)
class Run:
    """A row of the table. usage is None where cachefs had no part in it."""

    title: str
    reading: Pass
    usage: Usage | None

    def shares(self) -> dict[str, float]:
        """Of the bytes read, who served them: what never reached the mount came from the kernel's page cache."""
        if self.usage is None:
            return {}
        usage, total = self.usage, self.reading.bytes
        served = {"memory": usage.memory, "ssd": usage.ssd, "origin": usage.origin}
        page_cache = max(0, total - sum(served.values()))
        return {"page_cache": page_cache / total, **{name: count / total for name, count in served.items()}}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--files", default=3000, show_default=True, type=click.IntRange(min=2), help="Files to generate.")
@click.option("--file-size", default=110_000, show_default=True, type=click.IntRange(1000, 500_000), help="Mean bytes.")
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as one JSON document.")
def main(files: int, file_size: int, as_json: bool) -> None:
    """Read a generated dataset through cachefs and from the local disk, and compare."""
    end_in_order_when_interrupted()
    try:
        runs = demonstrate(files, file_size)
    except (CachefsError, OSError) as error:
        click.echo(f"cachefs-demo: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("cachefs-demo: interrupted; nothing is left mounted or running", err=True)
        sys.exit(130)
    if as_json:
        click.echo(json.dumps({"files": files, "runs": [document(run, runs[-1]) for run in runs]}, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 100, highlight=False).print(table(runs))


def demonstrate(files: int, file_size: int) -> list[Run]:
    """The rows of the table, native last. Raises CachefsError."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise CachefsError("/dev/fuse cannot be used here; in a container, start it with --device /dev/fuse")
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cachefs-demo-")))
        source = work / "buckets" / BUCKET
        say(f"generating {files:,} files in {source}")
        total = image_folder.generate(source, files, file_size)
        memory = stack.enter_context(memory_directory(total, work))
        say(f"starting an S3 server, and cachefsd with {size(MEMORY_SHARE * total)} of memory in {memory}")
        endpoint = stack.enter_context(s3_server(source.parent, work / "s3.log"))
        socket = work / "cachefsd.sock"
        config = work / "cachefsd.toml"
        config.write_text(configuration(work, socket, memory, total))
        client = stack.enter_context(daemon(config, socket, work / "cachefsd.log"))
        say(f"listing s3://{BUCKET} and mounting it")
        add_dataset(socket, endpoint)
        mountpoint = work / "mnt"
        stack.enter_context(mounted(DATASET, mountpoint, socket, work / "mount.log"))
        return measure(client, mountpoint, source)


@contextmanager
def memory_directory(total: int, work: Path) -> Iterator[Path]:
    """A place in /dev/shm for the memory tier; where that is too small (64 MB in containers), one in *work*."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or shutil.disk_usage(shared).free < 2 * total + (64 << 20):
        say("/dev/shm is too small for the memory tier: using the disk (in a container: --shm-size 2g)")
        yield work / "memory"
        return
    with tempfile.TemporaryDirectory(prefix="cachefs-demo-", dir=shared) as directory:
        yield Path(directory)


def configuration(work: Path, socket: Path, memory: Path, total: int) -> str:
    """Budgets are never below what the daemon asks for, some blocks."""
    return CONFIG.format(
        work=work, socket=socket, memory=memory, memory_budget=int(MEMORY_SHARE * total) + (16 << 20),
        ssd_budget=total + (64 << 20),
    )  # fmt: skip


def add_dataset(socket: Path, endpoint: str) -> None:
    options = OriginOptions(endpoint_url=endpoint, region="us-east-1", addressing_style="path")
    session = Session(socket, as_json=False)
    try:
        follow_listing(
            session, session.stream(DATASET_ADD, DatasetAdd(name=DATASET, url=f"s3://{BUCKET}", options=options))
        )
    finally:
        session.client.close()


def measure(client: DaemonClient, mountpoint: Path, source: Path) -> list[Run]:
    paths, local = find_files(str(mountpoint)), find_files(str(source))
    say("reading two epochs in shuffled order, the second one in turns with the local disk")
    cold = observed(client, "epoch 1: cold", paths, 1)
    read_shuffled(local, 0)
    warm, native = [], []
    for _ in range(TURNS):
        warm.append(observed(client, "epoch 2: warm", paths, 2))
        native.append(Run(f"local {file_system_of(source)}", read_shuffled(local, 2), None))
    say("dropping the kernel's pages and reading from the tiers")
    drop_page_cache(paths)
    tiers = observed(client, "from the tiers", paths, 3)
    return [cold, fastest(warm), tiers, fastest(native)]


def fastest(runs: list[Run]) -> Run:
    return max(runs, key=lambda run: run.reading.files_per_second)


def observed(client: DaemonClient, title: str, paths: list[str], seed: int) -> Run:
    before = usage(client)
    reading = read_shuffled(paths, seed)
    return Run(title, reading, usage(client) - before)


def usage(client: DaemonClient) -> Usage:
    """Counters once the mount has reported what it did until now."""
    asked = time.monotonic()
    while True:
        status = client.call(STATUS, Empty())
        now = time.monotonic()
        if now - status.mounts[0].seconds_since_report > asked or now > asked + REPORT_SECONDS:
            return counted(status)
        time.sleep(0.1)


def counted(status: Status) -> Usage:
    counters = status.mounts[0].counters
    return Usage(
        requests=counters["requests"], memory=counters["hit_bytes_memory"], ssd=counters["hit_bytes_ssd"],
        origin=counters["miss_bytes"], origin_requests=status.origin_requests,
    )  # fmt: skip


def file_system_of(path: Path) -> str:
    """Type of the file system *path* is on, such as `ext4`."""
    above = [one for one in psutil.disk_partitions(all=True) if path.is_relative_to(one.mountpoint)]
    return str(max(above, key=lambda one: len(one.mountpoint)).fstype)


def document(run: Run, native: Run) -> dict[str, object]:
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
    native = runs[-1].reading
    result = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"{native.files:,} files, {size(native.bytes)}, one reader",
        caption="page cache to origin: shares of the bytes; FUSE, S3: requests to mount and origin\n"
        f"epoch 2 and local: everything page-cached, the best of {TURNS} passes in turn",
    )
    result.add_column("", no_wrap=True)
    for heading in ("files/s", "GB/s", "p50 us", "of\nlocal", "page\ncache", "memory", "ssd", "origin", "FUSE", "S3"):
        result.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        result.add_row(run.title, *cells(run, native))
    return result


def cells(run: Run, native: Pass) -> list[str]:
    reading, shares = run.reading, run.shares()
    speed = [
        f"{reading.files_per_second:,.0f}",
        f"{reading.bytes / reading.seconds / 1e9:.2f}",
        f"{reading.p50:,.0f}",
        f"{100 * reading.files_per_second / native.files_per_second:.0f} %",
    ]
    if run.usage is None:
        return speed
    served = [f"{100 * shares[name]:.0f} %" for name in ("page_cache", "memory", "ssd", "origin")]
    return [*speed, *served, f"{run.usage.requests:,}", f"{run.usage.origin_requests:,}"]


def say(step: str) -> None:
    click.echo(f"cachefs-demo: {step}", err=True)
