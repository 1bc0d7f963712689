"""`cachefs-bench block`: measures the daemon's processor time per fetched block, by stage.

A published job reads as fast as it can meanwhile.

The daemon runs as it does for users, with a mount that pushes. py-spy samples its stacks from outside without stopping
it (`--nonblocking`), so the measurement needs no code in the daemon.

A sample tells where a thread is, not whether it runs: a thread that waits for the GIL looks like a running one. So the
kernel gives each thread's total, and samples only divide it among stages.
"""

import contextlib
import json
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import click
from rich import box
from rich.console import Console
from rich.table import Table

from cachefs.errors import CachefsError
from cachefs.messages import Empty, OriginOptions, Status
from cachefs.rpc import STATUS, DaemonClient
from cachefs_bench.job_process import run_job_process
from cachefs_bench.lab.scratch_node import (
    DATASET,
    NodeSettings,
    TierSettings,
    list_dataset,
    memory_directory,
    run_daemon,
)
from cachefs_bench.origin_server import BUCKET, OriginServer, run_filled_server
from cachefs_bench.scenario import DatasetShape, JobLoader, Publishing, Scenario, TrainingJob
from cachefs_bench.training_node import SEGMENT_SIZE, budget_for
from cachefs_tools.child_programs import mount_dataset, run_program, wait_or_kill

# Samples of the daemon's stacks per second.
SAMPLING_RATE: Final = 200
# Bytes of a memory tier that is not meant to keep anything.
SMALL_TIER: Final = 32 << 20
SPARE: Final = 64 << 20
# The share of the dataset that fits into the SSD tier in the case with evictions.
SSD_SHARE: Final = 0.5
_POLL_SECONDS: Final = 0.1
_START_SECONDS: Final = 60.0
_EPOCHS: Final = 1000
# With fewer blocks or seconds, a stage has too few samples for a figure per block.
_MIN_BLOCKS: Final = 1000
_MIN_SECONDS: Final = 2.0


class BlockStage(StrEnum):
    """A stage of a block's way from the origin to its reader."""

    GET = "GET"
    CHECKSUM = "checksum"
    TIER_WRITE = "tier write"
    INDEX = "index"
    POLICY = "policy"
    EVICTION = "eviction and demotion"
    PLAN = "plan and look-ahead"
    FETCH = "fetch and slot"
    PUSH = "push orders"
    ACCOUNTING = "accounting"
    REPLIES = "replies"
    FETCH_PROCESS = "fetch process"
    LOOP = "event loop and threads"
    GRPC = "gRPC's own threads"
    OTHER = "other"


# py-spy writes a frame as "function (file:line)". A stack with a frame of this function in this file belongs to the
# stage.
_WHOLE_STACK: Final = (
    ("evict_blocks", "store/transfers.py", BlockStage.EVICTION),
    ("shrink", "store/maintenance.py", BlockStage.EVICTION),
    ("promote", "store/block_store.py", BlockStage.EVICTION),
)
# Otherwise the innermost frame with one of these parts decides.
_INNERMOST: Final = (
    ("piece_checksums (", BlockStage.CHECKSUM),
    ("cachefs_daemon/origin/", BlockStage.GET),
    ("botocore/", BlockStage.GET),
    ("aiohttp/", BlockStage.GET),
    ("store/index_writer.py", BlockStage.INDEX),
    ("store/segment_writer.py", BlockStage.TIER_WRITE),
    ("store/batch_io.py", BlockStage.TIER_WRITE),
    ("store/tier.py", BlockStage.TIER_WRITE),
    ("store/tier_directory.py", BlockStage.TIER_WRITE),
    ("planning/eviction/", BlockStage.POLICY),
    ("planning/pagecache/", BlockStage.PUSH),
    ("cachefs_daemon/mounts/", BlockStage.PUSH),
    ("cachefs_daemon/jobs/attribution.py", BlockStage.ACCOUNTING),
    ("cachefs_daemon/jobs/", BlockStage.PLAN),
    ("planning/sequences/follower.py", BlockStage.ACCOUNTING),
    ("planning/", BlockStage.PLAN),
    ("fetch/prefetcher.py", BlockStage.PLAN),
    ("cachefs_daemon/report_dispatcher.py", BlockStage.ACCOUNTING),
    ("cachefs_daemon/fetch/", BlockStage.FETCH),
    ("cachefs_daemon/datasets/", BlockStage.FETCH),
    ("cachefs_daemon/store/", BlockStage.TIER_WRITE),
    ("cachefs_daemon/api/", BlockStage.REPLIES),
    ("grpc/", BlockStage.REPLIES),
    ("cachefs_daemon/runtime/", BlockStage.LOOP),
    ("asyncio/", BlockStage.LOOP),
    ("concurrent/futures/", BlockStage.LOOP),
)


# A thread waits if its innermost frame is one of these functions.
_WAITING_FUNCTIONS: Final = frozenset(
    (
        "Condition.wait",
        "Event.wait",
        "Locked.__enter__",
        "EpollSelector.select",
        "_worker",
        "_poll_wrapper",
        "Thread.run",
    )
)


def stack_stage(frames: Sequence[str]) -> BlockStage:
    """Return the stage of a stack. frames: outermost first."""
    for function, file, stage in _WHOLE_STACK:
        if any(_function(frame) == function and file in frame for frame in frames):
            return stage
    for frame in reversed(frames):
        for part, stage in _INNERMOST:
            if part in frame:
                return stage
    return BlockStage.OTHER


def seconds_by_stage(stacks: Iterable[str], seconds: Mapping[int, float]) -> dict[BlockStage, float]:
    """Return the processor seconds of each stage.

    stacks: lines as `py-spy record --threads --format raw` writes them: a thread, its stack, and a sample count;
    seconds: processor time by thread id. Raises ValueError for any other line.
    """
    seen: defaultdict[int, Counter[BlockStage]] = defaultdict(Counter)
    for line in stacks:
        stack, _, count = line.strip().rpartition(" ")
        thread, *frames = stack.split(";")
        number = int(thread.partition("(")[2].partition(")")[0])
        if frames and frames[-1].partition(" (")[0] not in _WAITING_FUNCTIONS:
            seen[number][stack_stage(frames)] += int(count)
    found = dict.fromkeys(BlockStage, 0.0)
    for number, used in seconds.items():
        samples = seen[number]
        if not samples:
            found[BlockStage.GRPC] += used  # never seen in Python code
        for stage, times in samples.items():
            found[stage] += used * times / samples.total()
    return found


def _function(frame: str) -> str:
    """Return the name of a frame's function, without its class."""
    return frame.partition(" (")[0].rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class BlockCase:
    """A destination of the blocks, and how many are measured."""

    name: str
    # Settings of the daemon.
    settings: NodeSettings
    # Blocks that are fetched before the measurement.
    blocks_before: int
    # Most blocks that are measured.
    blocks: int


@dataclass(frozen=True, slots=True)
class FetchingNode:
    """The node under measurement."""

    client: DaemonClient
    socket: Path
    mountpoint: Path


def cases(shape: DatasetShape) -> list[BlockCase]:
    """Return the cases: into memory, with room for all blocks; and onto the SSD, where each block evicts another."""
    record = shape.size + (8 << 10)
    cached = round(SSD_SHARE * shape.files)
    everything = NodeSettings(TierSettings(budget_for(2 * shape.files * record) + SPARE), TierSettings(0))
    evicting = NodeSettings(TierSettings(SMALL_TIER), TierSettings(budget_for(cached * record), SEGMENT_SIZE))
    return [
        BlockCase("memory", everything, 0, shape.files),
        # The first blocks are fetched anyway; evictions begin when the tier is full.
        BlockCase("ssd, evicting", evicting, cached + cached // 4, _EPOCHS * shape.files),
    ]


def measure_case(
    work: Path, server: OriginServer, shape: DatasetShape, case: BlockCase, seconds: float
) -> dict[str, Any]:
    """Measure one case for at most *seconds*; *work* is an empty directory.

    The first half runs without py-spy and gives the total and the rate. In the second half py-spy, which takes most of
    a core and slows the daemon down, tells how the total divides among the stages.
    """
    with (
        run_fetching_node(work, server, case) as node,
        run_job_process(_busy_scenario(shape), TrainingJob(), node, work / "job"),
    ):
        _wait_for(node, case.blocks_before)
        alone = _measure_use(node, seconds / 2, case.blocks_before + case.blocks // 2)
        with _sample_stacks(_status(node).pid, work / "stacks") as stacks:
            seen = _measure_use(node, seconds / 2, case.blocks_before + case.blocks)
    if not alone.blocks or not seen.total:
        raise CachefsError(f"{case.name}: nothing was fetched in {seconds:.0f} s")
    stages = seconds_by_stage(stacks.read_text().splitlines(), seen.threads) | {BlockStage.FETCH_PROCESS: seen.outside}
    cost = 1e3 * alone.total / alone.blocks
    return {
        "case": case.name,
        "blocks": alone.blocks,
        "seconds": round(alone.seconds, 2),
        "blocks_per_s": round(alone.blocks / alone.seconds, 1),
        "cpu_ms_per_block": round(cost, 3),
        "by_stage_ms": {stage.value: round(cost * stages[stage] / seen.total, 3) for stage in BlockStage},
    }


@dataclass(frozen=True, slots=True)
class _ProcessorUse:
    """Blocks and processor time of a period."""

    blocks: int
    seconds: float
    # Processor seconds by thread id of the daemon.
    threads: dict[int, float]
    # Processor seconds of the fetch processes.
    outside: float

    @property
    def total(self) -> float:
        """Processor seconds of daemon and fetch processes."""
        return sum(self.threads.values()) + self.outside


def _measure_use(node: FetchingNode, seconds: float, until: int) -> _ProcessorUse:
    """Wait for *seconds*, or until *until* blocks have been fetched since the start."""
    status = _status(node)
    pid, before, began = status.pid, status.fetched_blocks, time.monotonic()
    threads, processes = _thread_seconds(pid), _process_seconds(node)
    while time.monotonic() - began < seconds and _status(node).fetched_blocks < until:
        time.sleep(_POLL_SECONDS)
    return _ProcessorUse(
        _status(node).fetched_blocks - before,
        time.monotonic() - began,
        {number: after - threads.get(number, 0.0) for number, after in _thread_seconds(pid).items()},
        sum(after - processes.get(number, 0.0) for number, after in _process_seconds(node).items()),
    )


def sample_warning(case: str, blocks: int, seconds: float) -> str:
    """Return a warning if the figures rest on too few blocks or seconds; else ""."""
    if blocks >= _MIN_BLOCKS and seconds >= _MIN_SECONDS:
        return ""
    return (
        f"warning: {case}: only {blocks:,} blocks in {seconds:.0f} s; figures take {_MIN_BLOCKS:,} blocks and "
        f"{_MIN_SECONDS:.0f} s at least: use more --seconds or --files"
    )


@contextmanager
def run_fetching_node(work: Path, server: OriginServer, case: BlockCase) -> Iterator[FetchingNode]:
    """Run a new, empty node with the dataset listed and mounted."""
    mountpoint = work / "mnt"
    with (
        memory_directory("cachefs-bench-") as memory,
        run_daemon(work, memory, case.settings, server.credentials) as node,
    ):
        options = OriginOptions(endpoint_url=server.endpoint, region="us-east-1", addressing_style="path")
        list_dataset(node.client, f"s3://{BUCKET}", options)
        with mount_dataset(DATASET, mountpoint, node.socket, work / "mount.log"):
            yield FetchingNode(node.client, node.socket, mountpoint)


def _busy_scenario(shape: DatasetShape) -> Scenario:
    """Return a published job that reads without a pause."""
    return Scenario("block", JobLoader.PLAIN, Publishing.SPEC, shape=replace(shape, epochs=_EPOCHS), keep_pages=True)


@contextmanager
def _sample_stacks(pid: int, stacks: Path) -> Iterator[Path]:
    """Sample a process meanwhile; its stacks are written to *stacks* at the end, in py-spy's raw format."""
    command = [
        "py-spy", "record", "--pid", str(pid), "--rate", str(SAMPLING_RATE), "--format", "raw", "--nonblocking",
        "--threads", "--duration", "unlimited", "--output", str(stacks), "--full-filenames",
    ]  # fmt: skip
    with run_program(command, stacks.with_suffix(".log")) as process:
        yield stacks
        process.send_signal(signal.SIGINT)
        wait_or_kill(process)
    if not stacks.exists():
        log = stacks.with_suffix(".log").read_text(errors="replace").strip()[-500:]
        why = f": {log}" if log else ", and says nothing; a longer --seconds may help"
        raise CachefsError(f"py-spy has written no stacks of the daemon{why}")


def _wait_for(node: FetchingNode, blocks: int) -> None:
    """Wait until *blocks* blocks have been fetched. Raises CachefsError if none arrive for a while."""
    seen, deadline = -1, time.monotonic() + _START_SECONDS
    while (now := _status(node).fetched_blocks) < blocks:
        if now != seen:
            seen, deadline = now, time.monotonic() + _START_SECONDS
        if time.monotonic() > deadline:
            raise CachefsError(f"only {now} of {blocks} blocks were fetched; see the daemon's log")
        time.sleep(_POLL_SECONDS)


def _status(node: FetchingNode) -> Status:
    return node.client.call(STATUS, Empty())


def _process_seconds(node: FetchingNode) -> dict[int, float]:
    """Return the processor seconds of each fetch process by pid. A process started meanwhile counts from 0."""
    found = {}
    for process in _status(node).fetch_processes:
        with contextlib.suppress(OSError):  # it has ended
            found[process.pid] = sum(_thread_seconds(process.pid).values())
    return found


def _thread_seconds(pid: int) -> dict[int, float]:
    """Return the processor seconds of each thread of a process by thread id."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


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
            for number, case in enumerate(cases(shape)):
                case_directory = work / f"case{number}"
                case_directory.mkdir()
                click.echo(f"{case.name} ...", err=True)
                documents.append(found := measure_case(case_directory, server, shape, case, seconds))
                if warning := sample_warning(case.name, found["blocks"], found["seconds"]):
                    click.echo(warning, err=True)
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
