"""M3: a node is killed in epoch 2 and returns two epochs later, without its memory tier."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError
from cachefs_bench.cluster.run import (
    ClusterLoad,
    ClusterRun,
    check_at_least,
    check_at_most,
    document,
    problem_document,
    read_document,
    run_cluster,
)
from cachefs_bench.cluster.steady import ReportLine, epoch_timeout, job_settings
from cachefs_bench.lab.cluster import ClusterCounters, node_counters, ssd_blocks
from cachefs_bench.lab.host import wait_for
from cachefs_bench.lab.job import start_job

_MIN_EPOCHS = 4


def m3(load: ClusterLoad, work: Path, report: ReportLine) -> dict[str, Any]:
    """Run M3. The remaining nodes have room for the whole dataset."""
    if load.nodes < 2 or load.epochs < _MIN_EPOCHS:
        raise CachefsError(f"m3 needs 2 nodes and {_MIN_EPOCHS} epochs at least")
    if load.capacity == 1.0:
        load = replace(load, capacity=load.nodes / (load.nodes - 1))
    with run_cluster(load, work) as run, start_job(job_settings(load), run.nodes) as job:
        seconds = epoch_timeout(job.settings, load.nodes)
        *others, lost = job.ranks
        job.run_epoch(0, seconds)
        before = run.read_counters()
        job.begin_epoch()
        half = load.files // load.nodes // 2
        wait_for(
            lambda: lost.progress.epoch == 1 and lost.progress.position >= half, seconds, "half of epoch 2 is read"
        )
        report(f"killing {lost.node.name} in epoch 2")
        killed = run.read_counters()
        lost.node.reboot()
        lost.stop(kill=True)
        job.wait_for_epoch(1, seconds, others)
        job.run_epoch(2, seconds, others)
        away = run.read_counters()
        report(f"{lost.node.name} comes back")
        _restart_node(run, lost.node.name)
        found_on_ssd = ssd_blocks(lost.node)
        back = job.replace_rank(lost, 3)
        moments = [run.read_counters()]
        for number in range(3, load.epochs):
            job.run_epoch(number, seconds)
            moments.append(run.read_counters())
        used = node_counters(back.node)
        other_results = [result for rank in others for result in rank.progress.results]
        troubles = [trouble for rank in others for trouble in rank.progress.troubles]
    last = moments[-1] - moments[-2]
    # With two copies of each block, another node has a copy of each block that is lost.
    share = 1 / load.nodes + 0.02 if load.replicas < 2 else 0.0
    read_again = (moments[-1].origin_bytes - before.origin_bytes) / load.bytes
    checks = [
        check_at_most("reads of other nodes that failed or were wrong", _bad_reads(other_results), 0),
        check_at_most("longest read of other nodes, seconds", max(result.longest for result in other_results), 5.0),
        check_at_most("bytes read again of the origin / dataset", read_again, share),
        check_at_least("blocks found in its SSD tier as it came back", found_on_ssd, 1),
        check_at_least("blocks of its SSD tier that were read or given since", used.hits_ssd + used.given_blocks, 1),
        check_at_most("origin requests of the last epoch", last.origin_requests, 0),
    ]
    return document(
        "m3", load, checks, others=read_document(other_results), troubles=problem_document(troubles, killed.when),
        origin_bytes_of_dataset={
            "epoch 1": before.origin_bytes / load.bytes, "until the kill": _origin_share(killed, before, load),
            "while it was away": _origin_share(away, killed, load),
            "since it is back": _origin_share(moments[-1], away, load),
        },
    )  # fmt: skip


def _restart_node(run: ClusterRun, name: str) -> None:
    """Restart the node with the contents of its disk."""
    node = next(one for one in run.nodes if one.name == name)
    node.start(run.cluster.node_settings(node))
    run.mount_dataset(node)


def _origin_share(now: ClusterCounters, then: ClusterCounters, load: ClusterLoad) -> float:
    return (now.origin_bytes - then.origin_bytes) / load.bytes


def _bad_reads(results: Any) -> int:
    return sum(result.errors + result.wrong for result in results)
