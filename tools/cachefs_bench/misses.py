"""`cachefs-bench miss`: measures reads of files that are neither on the node nor published: what a newcomer sees first.

Each reader gets the same files from the same server, in turns, and reads each file once, so that it is cold.

Where they are installed, `rclone mount` and `s3fs` read the same bucket.
"""

import asyncio
import json
import random
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from rich import box
from rich.console import Console
from rich.table import Table

from cachefs.errors import CachefsError
from cachefs.messages import OriginOptions
from cachefs.mount import kernel
from cachefs_bench.lab.scratch_node import (
    DATASET,
    NodeSettings,
    TierSettings,
    list_dataset,
    memory_directory,
    run_daemon,
)
from cachefs_bench.origin_server import OriginServer, run_filled_server
from cachefs_bench.raw_client import RawClient
from cachefs_bench.sample_data import PER_CLASS, is_sample, sample_name
from cachefs_bench.scenario import DatasetShape
from cachefs_bench.training_node import budget_for
from cachefs_tools.child_programs import mount_dataset, run_program, wait_until

RCLONE: Final = "rclone"
S3FS: Final = "s3fs"
_SPARE: Final = 64 << 20
READERS: Final = {"shuffled, 1 reader": 1, "shuffled, 4 readers": 4}
COPY: Final = "cp -r"
PATTERNS: Final = (*READERS, COPY)
RAW_CLIENT: Final = "raw client"
CACHEFS: Final = "cachefs"
_WIDTH = 80


def installed_programs() -> dict[str, str]:
    """Return the installed programs, by name."""
    paths = {RCLONE: f"{sysconfig.get_path('scripts')}:/usr/local/bin:/usr/bin", S3FS: "/usr/local/bin:/usr/bin"}
    found = {name: shutil.which(name, path=path) for name, path in paths.items()}
    return {name: program for name, program in found.items() if program}


@contextmanager
def mount_bucket(name: str, program: str, server: OriginServer, work: Path) -> Iterator[Path]:
    """Mount the server's bucket with a program in the new directory *work*, with its cache there."""
    directory, log = work / "mnt", work / f"{name}.log"
    directory.mkdir(parents=True)
    command = {RCLONE: _rclone, S3FS: _s3fs}[name](program, server, work, directory)
    try:
        with run_program(command, log) as process:
            wait_until(directory.is_mount, process, log)
            yield directory
    finally:
        if directory.is_mount():
            kernel.unmount(directory, lazy=True)


def _rclone(program: str, server: OriginServer, work: Path, directory: Path) -> list[str]:
    account = server.credentials
    remote = (
        f":s3,provider=Other,force_path_style=true,region=us-east-1,endpoint='{server.endpoint}',"
        f"access_key_id='{account.access_key}',secret_access_key='{account.secret_key}':{server.bucket}"
    )
    return [program, "mount", remote, str(directory), "--config", "/dev/null", "--read-only",
            "--vfs-cache-mode", "full", "--cache-dir", str(work / "cache"), "--dir-cache-time", "1h"]  # fmt: skip


def _s3fs(program: str, server: OriginServer, work: Path, directory: Path) -> list[str]:
    secret = work / "passwd"
    secret.touch(0o600)
    secret.write_text(f"{server.credentials.access_key}:{server.credentials.secret_key}\n")
    options = f"url={server.endpoint},use_path_request_style,passwd_file={secret},endpoint=us-east-1,sigv4,ro"
    return [program, server.bucket, str(directory), "-f", "-o", options]


@dataclass(frozen=True, slots=True)
class MissLoad:
    """The files to read."""

    # Files of each pattern in each turn; a multiple of PER_CLASS.
    files: int
    # Bytes of each file.
    size: int
    turns: int

    def numbers(self, pattern: str, turn: int) -> Sequence[int]:
        """Return the files of a pattern in one turn, in read order: whole directories for copies, random files behind
        them for the others. Neighbouring files would not be shuffled: readahead would fetch them."""
        copied = self.files * self.turns
        if pattern == COPY:
            return range(turn * self.files, (turn + 1) * self.files)
        others = range(copied, copied * len(PATTERNS))
        part = turn * len(READERS) + list(READERS).index(pattern)
        return random.Random(0).sample(others, len(others))[part * self.files : (part + 1) * self.files]


@dataclass(frozen=True, slots=True)
class ReadPass:
    """The result of reading some files."""

    seconds: float
    # Seconds of each read; empty if reads were not measured one by one.
    read_seconds: list[float]


def measure(work: Path, load: MissLoad, endpoint: str | None = None, bucket: str | None = None) -> dict[str, Any]:
    """Measure all ways to read. *endpoint*: a running server, or None for one of rclone; *bucket*: see
    `run_filled_server`."""
    shape = DatasetShape(files=load.files * len(PATTERNS) * load.turns, size=load.size)
    with ExitStack() as stack:
        server = stack.enter_context(run_filled_server(work, shape, endpoint, bucket))
        mounts = {CACHEFS: stack.enter_context(_mount_cachefs(work / "node", server, shape))}
        for name, program in installed_programs().items():
            mounts[name] = stack.enter_context(mount_bucket(name, program, server, work / name))
        for mount in mounts.values():
            _stat_all(mount)
        passes: dict[str, dict[str, list[ReadPass]]] = {pattern: {} for pattern in PATTERNS}
        for turn in range(load.turns):
            for pattern in PATTERNS:
                click.echo(f"turn {turn + 1} of {load.turns}: {pattern}, {load.files:,} files ...", err=True)
                numbers = load.numbers(pattern, turn)
                for name, mount in mounts.items():
                    passes[pattern].setdefault(name, []).append(_read_pattern(pattern, mount, numbers, work))
                if pattern in READERS:
                    raw = asyncio.run(_read_raw(server, numbers, load.size, READERS[pattern]))
                    passes[pattern].setdefault(RAW_CLIENT, []).append(raw)
    return {
        "server": endpoint or "rclone",
        "files": load.files,
        "size": load.size,
        "turns": load.turns,
        "patterns": {
            pattern: {name: _figures(found, load.files) for name, found in methods.items()}
            for pattern, methods in passes.items()
        },
        "ratios": {pattern: _ratio(methods) for pattern, methods in passes.items()},
    }


@contextmanager
def _mount_cachefs(work: Path, server: OriginServer, shape: DatasetShape) -> Iterator[Path]:
    work.mkdir()
    tier = TierSettings(budget_for(2 * shape.files * (shape.size + (8 << 10))) + _SPARE)
    with (
        memory_directory("cachefs-bench-") as memory,
        run_daemon(work, memory, NodeSettings(tier, TierSettings(0)), server.credentials) as node,
    ):
        options = OriginOptions(endpoint_url=server.endpoint, region="us-east-1", addressing_style="path")
        list_dataset(node.client, f"s3://{server.bucket}", options)
        with mount_dataset(DATASET, work / "mnt", node.socket, work / "mount.log"):
            yield work / "mnt"


def _stat_all(mount: Path) -> None:
    """Learn names and sizes before the reads, like a job that has listed its files."""
    for path in mount.rglob("*"):
        path.stat()


def _read_pattern(pattern: str, mount: Path, numbers: Sequence[int], work: Path) -> ReadPass:
    if pattern == COPY:
        return _copy(mount, numbers, work)
    began = time.perf_counter()
    with ThreadPoolExecutor(READERS[pattern]) as pool:
        waits = list(pool.map(lambda number: _read(mount / sample_name(number), number), numbers))
    return ReadPass(time.perf_counter() - began, waits)


def _read(path: Path, number: int) -> float:
    began = time.perf_counter()
    data = path.read_bytes()
    took = time.perf_counter() - began
    if not is_sample(data, number):
        raise CachefsError(f"{path} has not the bytes that were put there")
    return took


def _copy(mount: Path, numbers: Sequence[int], work: Path) -> ReadPass:
    classes = sorted({sample_name(number).partition("/")[0] for number in numbers})
    copies = work / "copies"
    copies.mkdir()
    began = time.perf_counter()
    subprocess.run(["cp", "-r", *(str(mount / name) for name in classes), str(copies)], check=True)
    seconds = time.perf_counter() - began
    if sum(path.is_file() for path in copies.rglob("*")) != len(numbers):
        raise CachefsError(f"cp did not find {len(numbers)} files in {mount}")
    subprocess.run(["rm", "-r", str(copies)], check=True)
    return ReadPass(seconds, [])


async def _read_raw(server: OriginServer, numbers: Sequence[int], size: int, readers: int) -> ReadPass:
    """Read with a client that neither signs nor checks: the limit."""
    config = AioConfig(signature_version="s3v4", s3={"addressing_style": "path"})
    account = server.credentials
    async with get_session().create_client(
        "s3", endpoint_url=server.endpoint, region_name="us-east-1", aws_access_key_id=account.access_key,
        aws_secret_access_key=account.secret_key, config=config,
    ) as signer:  # fmt: skip
        keys = [{"Bucket": server.bucket, "Key": sample_name(number)} for number in numbers]
        urls = [await signer.generate_presigned_url("get_object", Params=key) for key in keys]
    client, waits, remaining = RawClient(), [], iter(urls)

    async def reader() -> None:
        for url in remaining:
            began = time.perf_counter()
            await client.get_url(url, size)
            waits.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(reader() for _ in range(readers)))
    return ReadPass(time.perf_counter() - began, waits)


def _figures(passes: list[ReadPass], files: int) -> dict[str, float]:
    found = {"files_per_second": round(statistics.median(files / one.seconds for one in passes), 1)}
    waits = sorted(wait for one in passes for wait in one.read_seconds)
    if waits:
        found["p50_ms"] = round(1e3 * waits[len(waits) // 2], 2)
        found["p99_ms"] = round(1e3 * waits[len(waits) * 99 // 100], 2)
    return found


def _ratio(methods: dict[str, list[ReadPass]]) -> dict[str, float]:
    """Return the ratio of our files per second to the others', per turn."""
    ours = methods[CACHEFS]
    ratio: Callable[[ReadPass, ReadPass], float] = lambda mine, theirs: theirs.seconds / mine.seconds  # noqa: E731
    return {
        name: round(statistics.median(map(ratio, ours, theirs)), 2)
        for name, theirs in methods.items()
        if name != CACHEFS
    }


def round_up(files: int) -> int:
    """Round up to whole directories."""
    return -(-files // PER_CLASS) * PER_CLASS


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
    load = MissLoad(round_up(shape["files"]), shape["size"], shape["turns"])
    if load.files != shape["files"]:
        click.echo(f"{load.files:,} files of each pattern and turn are read: whole hundreds", err=True)
    with tempfile.TemporaryDirectory(prefix="cachefs-bench-", dir=directory) as work:
        document = measure(Path(work), load, endpoint, bucket)
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
    for pattern, methods in document["patterns"].items():
        ratios = document["ratios"][pattern]
        for number, (name, figures) in enumerate(methods.items()):
            cells = (_cell(figures.get(key)) for key in ("files_per_second", "p50_ms", "p99_ms"))
            ratio = f"{ratios[name]:.2f} x" if name in ratios else ""
            found.add_row(pattern if not number else "", name, *cells, ratio)
    return found


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
