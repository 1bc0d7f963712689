"""M3: a node is killed in epoch 2 and returns two epochs later, without its memory tier."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError
from cachefs_tools.bench.cluster.figures import at_least, at_most, document, read_document, trouble_document
from cachefs_tools.bench.cluster.run import Load, Run, running
from cachefs_tools.bench.cluster.steady import Say, job_of, patience
from cachefs_tools.lab.counters import Moment, counters_of, held_in_ssd
from cachefs_tools.lab.host import until
from cachefs_tools.lab.job import started_job

_LEAST_EPOCHS = 4


def m3(load: Load, work: Path, say: Say) -> dict[str, Any]:
    """Run M3. The remaining nodes have room for the whole dataset."""
    if load.nodes < 2 or load.epochs < _LEAST_EPOCHS:
        raise CachefsError(f"m3 needs 2 nodes and {_LEAST_EPOCHS} epochs at least")
    if load.capacity == 1.0:
        load = replace(load, capacity=load.nodes / (load.nodes - 1))
    with running(load, work) as run, started_job(job_of(load), run.nodes) as job:
        seconds = patience(job.settings, load.nodes)
        *others, lost = job.ranks
        job.epoch(0, seconds)
        before = run.take()
        job.begin()
        half = load.files // load.nodes // 2
        until(lambda: lost.progress.epoch == 1 and lost.progress.position >= half, seconds, "half of epoch 2 is read")
        say(f"killing {lost.node.name} in epoch 2")
        killed = run.take()
        lost.node.reboot()
        lost.stop(kill=True)
        job.join(1, seconds, others)
        job.epoch(2, seconds, others)
        away = run.take()
        say(f"{lost.node.name} comes back")
        _come_back(run, lost.node.name)
        found_on_ssd = held_in_ssd(lost.node)
        back = job.replace(lost, 3)
        moments = [run.take()]
        for number in range(3, load.epochs):
            job.epoch(number, seconds)
            moments.append(run.take())
        used = counters_of(back.node)
        other_results = [one for rank in others for one in rank.progress.results]
        troubles = [one for rank in others for one in rank.progress.troubles]
    last = moments[-1] - moments[-2]
    # With two copies of each block, another node has a copy of each block that is lost.
    share = 1 / load.nodes + 0.02 if load.replicas < 2 else 0.0
    read_again = (moments[-1].origin_bytes - before.origin_bytes) / load.bytes
    checks = [
        at_most("reads of other nodes that failed or were wrong", _bad(other_results), 0),
        at_most("longest read of other nodes, seconds", max(one.longest for one in other_results), 5.0),
        at_most("bytes read again of the origin / dataset", read_again, share),
        at_least("blocks found in its SSD tier as it came back", found_on_ssd, 1),
        at_least("blocks of its SSD tier that were read or given since", used.hits_ssd + used.given_blocks, 1),
        at_most("origin requests of the last epoch", last.origin_requests, 0),
    ]
    return document(
        "m3", load, checks, others=read_document(other_results), troubles=trouble_document(troubles, killed.when),
        origin_bytes_of_dataset={
            "epoch 1": before.origin_bytes / load.bytes, "until the kill": _part(killed, before, load),
            "while it was away": _part(away, killed, load), "since it is back": _part(moments[-1], away, load),
        },
    )  # fmt: skip


def _come_back(run: Run, name: str) -> None:
    """Restart the node with the contents of its disk."""
    node = next(one for one in run.nodes if one.name == name)
    node.start(run.cluster.settings_of(node))
    run.mount(node)


def _part(now: Moment, then: Moment, load: Load) -> float:
    return (now.origin_bytes - then.origin_bytes) / load.bytes


def _bad(results: Any) -> int:
    return sum(one.errors + one.wrong for one in results)
