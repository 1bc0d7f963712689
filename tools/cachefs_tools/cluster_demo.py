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
from cachefs.extras import needs_extra
from cachefs.messages import DatasetAdd, Empty, OriginOptions
from cachefs.rpc import DATASET_ADD, DATASET_LIST

with needs_extra("demo", "cachefs-demo-cluster"):
    from cachefs_tools.cachectl.command_session import CommandSession
    from cachefs_tools.cachectl.display import size
    from cachefs_tools.cachectl.progress import follow_listing
    from cachefs_tools.lab.cluster import Cluster, ClusterSettings, made_cluster
    from cachefs_tools.lab.counters import Moment, take
    from cachefs_tools.lab.host import LOOPBACK, until
    from cachefs_tools.lab.job import Job, JobSettings, Rank, started_job
    from cachefs_tools.lab.reader import EpochResult
    from cachefs_tools.lab.scratch import scratch_directory
    from cachefs_tools.lab.slow_link import Limits
    from cachefs_tools.lab.throttle import Throttle, throttled
    from cachefs_tools.orderly_exit import orderly_exit
    from cachefs_tools.sample_data import write_samples
    from cachefs_tools.scratch_config import NodeSettings, TierSettings
    from cachefs_tools.scratch_node import require_fuse, s3_server

BUCKET: Final = "demo-bucket"
DATASET: Final = "demo"
NODES: Final = 4
EPOCHS: Final = 3
# Share of the dataset that each node holds: any three nodes hold all of it.
SHARE: Final = 0.4
BLOCK_SIZE: Final = 1 << 20
SECONDS: Final = 60.0
# Time limit of an epoch, as a multiple of its time at the configured rate.
PATIENCE: Final = 20.0
WIDTH: Final = 80


@dataclass(frozen=True, slots=True)
class Row:
    """One epoch of both jobs."""

    title: str
    grown: Moment  # growth of the cluster's counters meanwhile
    results: Sequence[EpochResult]

    @property
    def reads(self) -> int:
        return sum(result.reads for result in self.results)

    @property
    def bad(self) -> int:
        """Number of reads that failed, or had wrong bytes."""
        return sum(result.errors + result.wrong for result in self.results)

    def shares(self) -> tuple[float, float, float]:
        """Return the shares of reads whose block was on the node, on another one, and only at the origin. A block that
        one node has fetched from the origin for another counts once, as the origin's."""
        total, origin = self.grown.total, self.grown.origin_requests / self.reads
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
        rows = demonstrate(files, file_size, rate)
    if as_json:
        click.echo(json.dumps({"files": files, "epochs": [row_document(row) for row in rows]}, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False).print(table(rows, files, file_size))


def demonstrate(files: int, file_size: int, rate: float) -> list[Row]:
    """Return the rows of the table. Raises CachefsError if a part fails."""
    require_fuse()
    with ExitStack() as stack:
        work = stack.enter_context(scratch_directory("cachefs-demo-"))
        source = work / "buckets" / BUCKET
        say(f"generating {files:,} files of {size(file_size)} in {source}")
        write_samples(source, files, file_size)
        upstream = stack.enter_context(s3_server(source.parent, work / "s3.log"))
        throttle = stack.enter_context(throttled(upstream, Limits(), work / "throttle.log"))
        room = int(SHARE * files * file_size)
        say(f"starting {NODES} nodes, each with room for {size(room)}: {SHARE:.0%} of the dataset")
        settings = ClusterSettings(
            NodeSettings(TierSettings(room // 2 + (16 << 20)), TierSettings(room // 2 + (16 << 20)), BLOCK_SIZE),
            keys={"grace": 5},
        )
        cluster = stack.enter_context(made_cluster(work, settings, [LOOPBACK] * NODES))
        cluster.start()
        say(f"adding the dataset on {cluster.nodes[0].name}, and mounting it on all")
        add_dataset(cluster, throttle.endpoint)
        say("starting two jobs, with a reader on each node")
        jobs = [
            stack.enter_context(
                started_job(JobSettings(f"job{number}", DATASET, files, EPOCHS, seed, rate, threads=2), cluster.nodes)
            )
            for number, seed in ((1, 1), (2, 100_001))
        ]
        return measure(cluster, throttle, jobs)


def add_dataset(cluster: Cluster, endpoint: str) -> None:
    """List the bucket on the first node, and mount the dataset on each node as soon as it is known there."""
    options = OriginOptions(endpoint_url=endpoint, region="us-east-1", addressing_style="path")
    first = cluster.nodes[0]
    session = CommandSession(first.socket, as_json=False)
    try:
        request = DatasetAdd(name=DATASET, url=f"s3://{BUCKET}", options=options)
        follow_listing(session, session.stream(DATASET_ADD, request))
    finally:
        session.client.close()
    for node in cluster.nodes:
        client = node.client
        until(
            lambda client=client: any(one.name == DATASET for one in client.call(DATASET_LIST, Empty()).datasets),  # type: ignore[misc]
            SECONDS, f"{node.name} knows the dataset that was added on {first.name}",
        )  # fmt: skip
        node.mount(DATASET)


def measure(cluster: Cluster, throttle: Throttle, jobs: Sequence[Job]) -> list[Row]:
    """Let both jobs read their epochs; kill the last node in the second one."""
    lost = cluster.nodes[-1]
    settings = jobs[0].settings
    seconds = SECONDS + PATIENCE * settings.files / NODES / settings.rate
    titles = ("1: cold", f"2: {lost.name} killed", f"3: without {lost.name}")
    rows = []
    before = Moment(0.0, {}, 0, 0)
    with bars() as shown:
        for epoch, title in enumerate(titles):
            ranks = [rank for job in jobs for rank in job.ranks if rank.node.runs]
            bar = shown.add_task(f"epoch {title}", total=len(ranks) * settings.files // NODES)
            for rank in ranks:
                rank.go()
            if epoch == 1:
                follow(shown, bar, ranks, epoch, seconds, until_share=0.5)
                before = without(before, lost.name)
                lost.reboot()
                dead = [rank for rank in ranks if rank.node is lost]
                for rank in dead:
                    rank.stop(kill=True)
                say(f"killed {lost.name}; its two readers are gone with it")
                ranks = [rank for rank in ranks if rank not in dead]
                shown.update(bar, total=len(ranks) * settings.files // NODES)
            follow(shown, bar, ranks, epoch, seconds)
            now = take([node for node in cluster.nodes if node.runs], throttle)
            results = [one for rank in ranks for one in rank.progress.results if one.epoch == epoch]
            rows.append(Row(title, now - before, results))
            before = now
    return rows


def without(moment: Moment, name: str) -> Moment:
    """Return the moment without the counters of a node."""
    nodes = {one: counters for one, counters in moment.nodes.items() if one != name}
    return Moment(moment.when, nodes, moment.origin_bytes, moment.origin_requests)


def follow(
    shown: Progress, bar: Any, ranks: Sequence[Rank], epoch: int, seconds: float, until_share: float = 1.0
) -> None:
    """Show the progress of these ranks in the epoch, until each has read that share of it. Raises CachefsError."""
    deadline = time.monotonic() + seconds
    total = shown.tasks[bar].total or 0
    while True:
        done = [rank.done(epoch) for rank in ranks]
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
def bars() -> Iterator[Progress]:
    """Show the progress of each epoch, on terminals only."""
    screen = Console(stderr=True, highlight=False)
    with Progress(
        TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(),
        console=screen, disable=not screen.is_terminal,
    ) as shown:  # fmt: skip
        yield shown


def row_document(row: Row) -> dict[str, object]:
    """Return a row of the JSON document."""
    local, peers, origin = row.shares()
    return {
        "epoch": row.title, "reads": row.reads, "bad": row.bad, "local": local, "peers": peers, "origin": origin,
        "origin_bytes": row.grown.origin_bytes,
        "longest_ms": 1e3 * max((one.longest for one in row.results), default=0.0),
    }  # fmt: skip


def table(rows: Sequence[Row], files: int, file_size: int) -> Table:
    """Return the table of all epochs."""
    total = files * file_size
    fetched = sum(row.grown.origin_bytes for row in rows) / total
    result = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"{files:,} files, {size(total)}, two jobs on {NODES} nodes with room for {SHARE:.0%} each",
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
            row.title, f"{row.reads:,}", str(row.bad), f"{p50:.1f}", f"{longest:,.0f}",
            *(f"{100 * share:.0f} %" for share in row.shares()), size(row.grown.origin_bytes),
        )  # fmt: skip
    return result


def say(step: str) -> None:
    click.echo(f"cachefs-demo-cluster: {step}", err=True)


if __name__ == "__main__":
    main()
