"""`cachefs-bench listing`: measures listing a very large bucket: time and memory of a daemon, next to rclone's.

Both list the same server in turns. `cachectl dataset add` also writes the snapshot, and rclone only prints the keys.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import psutil

from cachefs.errors import CachefsError
from cachefs.messages import DatasetAddRequest, DatasetName, Empty, ListingPhase, OriginOptions
from cachefs.rpc import DATASET_ADD, DATASET_REMOVE, STATUS
from cachefs_bench import listing_server
from cachefs_bench.lab.scratch_node import (
    SCRATCH_CREDENTIALS,
    NodeSettings,
    S3Credentials,
    ScratchNode,
    TierSettings,
    memory_directory,
    run_daemon,
)
from cachefs_bench.listing_server import BUCKET, Layout
from cachefs_bench.origin_server import environment_credentials
from cachefs_tools.child_programs import KILL_WITH_PARENT, wait_or_kill

DEFAULT_URL: Final = f"s3://{BUCKET}"
_DATASET: Final = "bench"
_TIER: Final = TierSettings(64 << 20)
_POLL_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class ListingLoad:
    """The bucket to list."""

    layout: Layout
    keys: int
    # Seconds that the server takes for each response.
    delay: float
    turns: int


def measure(
    work: Path, load: ListingLoad, url: str, endpoint: str | None, account: S3Credentials | None
) -> dict[str, Any]:
    """Measure listings of *url* at a running server *endpoint*; None: of a server started as *load* says."""
    turns = []
    with (
        _server(load, endpoint) as server,
        memory_directory("cachefs-bench-") as memory,
        run_daemon(work, memory, NodeSettings(_TIER, TierSettings(0)), account or SCRATCH_CREDENTIALS) as node,
    ):
        for number in range(load.turns):
            click.echo(f"turn {number + 1} of {load.turns}: a daemon lists {url} ...", err=True)
            turn = {"cachefs": _list_with_daemon(node, url, server)}
            if _rclone() is not None:
                click.echo(f"turn {number + 1} of {load.turns}: rclone lists it ...", err=True)
                turn["rclone"] = _list_with_rclone(work, url, server, account or SCRATCH_CREDENTIALS)
            turns.append(turn)
    return {
        "server": endpoint or "our own, which only lists",
        "url": url,
        **({} if endpoint else {"layout": load.layout, "keys": load.keys, "delay_ms": load.delay * 1e3}),
        "turns": turns,
    }


@contextmanager
def _server(load: ListingLoad, endpoint: str | None) -> Iterator[str]:
    if endpoint is not None:
        yield endpoint
        return
    command = [sys.executable, "-c", f"from {listing_server.__name__} import main; main()"]
    command += [load.layout, str(load.keys), str(load.delay)]
    process = subprocess.Popen([*KILL_WITH_PARENT, *command], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
    finally:
        process.terminate()
        wait_or_kill(process)


def _list_with_daemon(node: ScratchNode, url: str, server: str) -> dict[str, Any]:
    options = OriginOptions(endpoint_url=server, region="us-east-1", addressing_style="path")
    process = psutil.Process(node.client.call(STATUS, Empty()).pid)
    listed = 0.0
    began = time.monotonic()
    with _watch_memory(process) as peaks:
        for update in node.client.stream_responses(
            DATASET_ADD, DatasetAddRequest(name=_DATASET, url=url, options=options)
        ):
            if update.phase == ListingPhase.BUILDING and not listed:
                listed = time.monotonic() - began
            objects = update.objects
    seconds = time.monotonic() - began
    node.client.call(DATASET_REMOVE, DatasetName(name=_DATASET))
    return {
        "objects": objects, "seconds": round(seconds, 2), "listed_after_seconds": round(listed, 2),
        "child_peak_mb": peaks.child >> 20, "daemon_mb": peaks.parent >> 20,
    }  # fmt: skip


def _list_with_rclone(work: Path, url: str, server: str, account: S3Credentials) -> dict[str, Any]:
    """List like a user would. Keys are counted by lines; directories end with a slash."""
    settings = f"provider=Other,env_auth=true,list_version=2,force_path_style=true,endpoint='{server}'"
    command = [
        str(_rclone()), "lsf", "-R", "--files-only", "--fast-list", "--config", "/dev/null",
        f":s3,{settings}:{url.removeprefix('s3://')}",
    ]  # fmt: skip
    own = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": account.access_key,
        "AWS_SECRET_ACCESS_KEY": account.secret_key,
        "AWS_REGION": "us-east-1",
    }
    output = work / "lsf"
    began = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen([*KILL_WITH_PARENT, *command], stdout=file, env=own, start_new_session=True)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            process.kill()
            process.wait()
            raise
    seconds = time.monotonic() - began
    if status:
        raise CachefsError(f"rclone cannot list {url} at {server}")
    with output.open("rb") as file:
        objects = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    return {"objects": objects, "seconds": round(seconds, 2), "peak_mb": usage.ru_maxrss >> 10}


def _rclone() -> Path | None:
    program = Path(sysconfig.get_path("scripts"), "rclone")
    return program if program.exists() else None


@dataclass(slots=True)
class _MemoryPeaks:
    parent: int = 0
    child: int = 0


@contextmanager
def _watch_memory(process: psutil.Process) -> Iterator[_MemoryPeaks]:
    peaks = _MemoryPeaks()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_SECONDS):
            with suppress(psutil.Error, OSError):
                peaks.parent = max(peaks.parent, process.memory_info().rss)
                for child in process.children():
                    peaks.child = max(peaks.child, _peak_memory(child.pid))

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield peaks
    finally:
        ended.set()
        watching.join()


def _peak_memory(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    # Empty if the process has just ended.
    return int((status.partition("VmHWM:")[2].split() or ["0"])[0]) << 10


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
        click.echo(json.dumps(measure(Path(work), load, url, endpoint, account), indent=2))
