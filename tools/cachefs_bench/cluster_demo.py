"""cachefs-demo-cluster: four nodes act as one cache for two training jobs, and one of them dies.

All nodes run on this machine, each with its own daemon, tiers and mount, on ports of 127.0.0.1. Two jobs read one
dataset in different orders, with a rank on each node. In the middle of epoch 2 one node is killed.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cachefs.errors import CachefsError
from cachefs.messages import DatasetAddRequest, Empty, OriginOptions
from cachefs.rpc import DATASET_ADD, DATASET_LIST
from cachefs_bench.lab.cluster import ClusterCounters, ClusterSettings, LabCluster, create_cluster, read_counters
from cachefs_bench.lab.host import LOOPBACK, wait_for
from cachefs_bench.lab.job import JobSettings, LabJob, LabRank, start_job
from cachefs_bench.lab.reader import EpochResult
from cachefs_bench.lab.scratch import scratch_directory
from cachefs_bench.lab.scratch_node import NodeSettings, TierSettings, run_s3_server
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.throttle import Throttle, run_throttle
from cachefs_bench.orderly_exit import orderly_exit
from cachefs_bench.sample_data import write_samples
from cachefs_tools.cachectl.command_session import CommandSession
from cachefs_tools.cachectl.display import size
from cachefs_tools.cachectl.progress import show_listing
from cachefs_tools.child_programs import require_fuse

BUCKET: Final = "demo-bucket"
DATASET: Final = "demo"
NODES: Final = 4
EPOCHS: Final = 3
# Share of the dataset that each node holds: any three nodes hold all of it.
NODE_SHARE: Final = 0.4
BLOCK_SIZE: Final = 1 << 20
SECONDS: Final = 60.0
# Time limit of an epoch, as a multiple of its time at the configured rate.
TIMEOUT_FACTOR: Final = 20.0
WIDTH: Final = 80


@dataclass(frozen=True, slots=True)
class EpochRow:
    """One epoch of both jobs."""

    title: str
    growth: ClusterCounters  # growth of the cluster's counters meanwhile
    results: Sequence[EpochResult]

    @property
    def reads(self) -> int:
        return sum(result.reads for result in self.results)

    @property
    def bad_reads(self) -> int:
        """Number of reads that failed, or had wrong bytes."""
        return sum(result.errors + result.wrong for result in self.results)

    def source_shares(self) -> tuple[float, float, float]:
        """Return the shares of reads whose block was on the node, on another one, and only at the origin. A block that
        one node has fetched from the origin for another counts once, as the origin's."""
        total, origin = self.growth.total, self.growth.origin_requests / self.reads
        peers = max(0.0, (total.peer_blocks - total.given_fetched) / self.reads)
        return max(0.0, 1 - peers - origin), peers, origin


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--files", default=1600, show_default=True, type=click.IntRange(min=64), help="Files to generate.")
@click.option(
    "--file-size", default=110_000, show_default=True, type=click.IntRange(1000, 500_000), help="Bytes of each file."
)
@click.option(
    "--rate", default=50.0, show_default=True, type=click.FloatRange(min=1), help="Files/s that each reader reads."
)
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as one JSON document.")
def main(files: int, file_size: int, rate: float, as_json: bool) -> None:
    """Run two jobs on four nodes of this machine that are one cache, and kill one of the nodes.

    Every byte that is read is checked.
    """
    with orderly_exit("cachefs-demo-cluster"):
        rows = run_demo(files, file_size, rate)
    if as_json:
        click.echo(json.dumps({"files": files, "epochs": [row_document(row) for row in rows]}, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False).print(table(rows, files, file_size))


def run_demo(files: int, file_size: int, rate: float) -> list[EpochRow]:
    """Return the rows of the table. Raises CachefsError if a part fails."""
    require_fuse()
    with ExitStack() as stack:
        work = stack.enter_context(scratch_directory("cachefs-demo-"))
        source = work / "buckets" / BUCKET
        print_step(f"generating {files:,} files of {size(file_size)} in {source}")
        write_samples(source, files, file_size)
        upstream = stack.enter_context(run_s3_server(source.parent, work / "s3.log"))
        throttle = stack.enter_context(run_throttle(upstream, LinkLimits(), work / "throttle.log"))
        room = int(NODE_SHARE * files * file_size)
        print_step(f"starting {NODES} nodes, each with room for {size(room)}: {NODE_SHARE:.0%} of the dataset")
        settings = ClusterSettings(
            NodeSettings(TierSettings(room // 2 + (16 << 20)), TierSettings(room // 2 + (16 << 20)), BLOCK_SIZE),
            keys={"grace": 5},
        )
        cluster = stack.enter_context(create_cluster(work, settings, [LOOPBACK] * NODES))
        cluster.start_nodes()
        print_step(f"adding the dataset on {cluster.nodes[0].name}, and mounting it on all")
        add_dataset(cluster, throttle.endpoint)
        print_step("starting two jobs, with a reader on each node")
        jobs = [
            stack.enter_context(
                start_job(JobSettings(f"job{number}", DATASET, files, EPOCHS, seed, rate, threads=2), cluster.nodes)
            )
            for number, seed in ((1, 1), (2, 100_001))
        ]
        return measure(cluster, throttle, jobs)


def add_dataset(cluster: LabCluster, endpoint: str) -> None:
    """List the bucket on the first node, and mount the dataset on each node as soon as it is known there."""
    options = OriginOptions(endpoint_url=endpoint, region="us-east-1", addressing_style="path")
    first = cluster.nodes[0]
    session = CommandSession(first.socket, as_json=False)
    try:
        request = DatasetAddRequest(name=DATASET, url=f"s3://{BUCKET}", options=options)
        show_listing(session, session.stream(DATASET_ADD, request))
    finally:
        session.client.close()
    for node in cluster.nodes:
        client = node.client
        wait_for(
            lambda client=client: any(one.name == DATASET for one in client.call(DATASET_LIST, Empty()).datasets),  # type: ignore[misc]
            SECONDS, f"{node.name} knows the dataset that was added on {first.name}",
        )  # fmt: skip
        node.mount(DATASET)


def measure(cluster: LabCluster, throttle: Throttle, jobs: Sequence[LabJob]) -> list[EpochRow]:
    """Let both jobs read their epochs; kill the last node in the second one."""
    lost = cluster.nodes[-1]
    settings = jobs[0].settings
    seconds = SECONDS + TIMEOUT_FACTOR * settings.files / NODES / settings.rate
    titles = ("1: cold", f"2: {lost.name} killed", f"3: without {lost.name}")
    rows = []
    before = ClusterCounters(0.0, {}, 0, 0)
    with progress_bars() as shown:
        for epoch, title in enumerate(titles):
            ranks = [rank for job in jobs for rank in job.ranks if rank.node.is_running]
            bar = shown.add_task(f"epoch {title}", total=len(ranks) * settings.files // NODES)
            for rank in ranks:
                rank.start_epoch()
            if epoch == 1:
                follow(shown, bar, ranks, epoch, seconds, until_share=0.5)
                before = without_node(before, lost.name)
                lost.reboot()
                dead = [rank for rank in ranks if rank.node is lost]
                for rank in dead:
                    rank.stop(kill=True)
                print_step(f"killed {lost.name}; its two readers are gone with it")
                ranks = [rank for rank in ranks if rank not in dead]
                shown.update(bar, total=len(ranks) * settings.files // NODES)
            follow(shown, bar, ranks, epoch, seconds)
            now = read_counters([node for node in cluster.nodes if node.is_running], throttle)
            results = [one for rank in ranks for one in rank.progress.results if one.epoch == epoch]
            rows.append(EpochRow(title, now - before, results))
            before = now
    return rows


def without_node(moment: ClusterCounters, name: str) -> ClusterCounters:
    """Return the moment without the counters of a node."""
    nodes = {one: counters for one, counters in moment.nodes.items() if one != name}
    return ClusterCounters(moment.when, nodes, moment.origin_bytes, moment.origin_requests)


def follow(
    shown: Progress, bar: Any, ranks: Sequence[LabRank], epoch: int, seconds: float, until_share: float = 1.0
) -> None:
    """Show the progress of these ranks in the epoch, until each has read that share of it. Raises CachefsError."""
    deadline = time.monotonic() + seconds
    total = shown.tasks[bar].total or 0
    while True:
        done = [rank.has_read(epoch) for rank in ranks]
        positions = [
            total / len(ranks) if over else rank.progress.position * (rank.progress.epoch == epoch)
            for rank, over in zip(ranks, done, strict=True)
        ]
        shown.update(bar, completed=int(sum(positions)))
        if all(done) or (until_share < 1 and sum(positions) >= until_share * total):
            return
        if time.monotonic() > deadline:
            raise CachefsError(f"epoch {epoch + 1} takes longer than {seconds:.0f} s")
        time.sleep(0.1)


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Show the progress of each epoch, on terminals only."""
    screen = Console(stderr=True, highlight=False)
    with Progress(
        TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(),
        console=screen, disable=not screen.is_terminal,
    ) as shown:  # fmt: skip
        yield shown


def row_document(row: EpochRow) -> dict[str, object]:
    """Return a row of the JSON document."""
    local, peers, origin = row.source_shares()
    return {
        "epoch": row.title, "reads": row.reads, "bad": row.bad_reads, "local": local, "peers": peers, "origin": origin,
        "origin_bytes": row.growth.origin_bytes,
        "longest_ms": 1e3 * max((one.longest for one in row.results), default=0.0),
    }  # fmt: skip


def table(rows: Sequence[EpochRow], files: int, file_size: int) -> Table:
    """Return the table of all epochs."""
    total = files * file_size
    fetched = sum(row.growth.origin_bytes for row in rows) / total
    result = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"{files:,} files, {size(total)}, two jobs on {NODES} nodes with room for {NODE_SHARE:.0%} each",
        caption="of the reads, these parts found their block on their own node, came from\n"
        "another node, and had to come from the origin; all bytes were checked\n"
        "(what the origin gave to one node ahead, and that node to another, is in both)\n"
        f"in all, {fetched:.2f} times the dataset left the origin",
    )
    result.add_column("epoch", no_wrap=True)
    for heading in ("reads", "bad", "p50\nms", "longest\nms", "own\nnode", "other\nnode", "origin", "from\norigin"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        p50, longest = (
            1e3 * max((getattr(one, name) for one in row.results), default=0.0) for name in ("p50", "longest")
        )
        result.add_row(
            row.title, f"{row.reads:,}", str(row.bad_reads), f"{p50:.1f}", f"{longest:,.0f}",
            *(f"{100 * share:.0f} %" for share in row.source_shares()), size(row.growth.origin_bytes),
        )  # fmt: skip
    return result


def print_step(step: str) -> None:
    click.echo(f"cachefs-demo-cluster: {step}", err=True)


if __name__ == "__main__":
    main()
