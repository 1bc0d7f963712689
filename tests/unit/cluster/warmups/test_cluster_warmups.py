"""Warm-ups of the cluster on several nodes in one process: who knows what, who ends them, and what they survive."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from cachefs.errors import Busy, ConfigError, NotFound
from cachefs.messages import WarmupProgress, WarmupRequest
from cachefs.planning.cluster.warmup import PartPlan
from cachefs.snapshot import Snapshot
from cachefs.snapshot_builder import ListedObject, build_snapshot_file
from cachefs_cluster.sharing.sections import CONSUMERS, WARMUP_PARTS, WARMUPS, ConsumerFacts
from cachefs_cluster.warmups.cluster_warmups import (
    FILE_NAME,
    MAX_JOB_SECONDS,
    MAX_OPEN,
    SILENT_SECONDS,
    ClusterWarmupParts,
    ClusterWarmups,
)
from cachefs_cluster.warmups.part import LocalPart, PartFetcher, PartTarget
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time
from tests.sharing import SharingNode, introduce, sharing_nodes
from tests.waiting import until_async

SIZE, FILES = 1000, 60
REQUEST = WarmupRequest(dataset="set", cluster=True, wait=False)


@pytest.fixture
def snapshot(tmp_path: Path) -> Iterator[Snapshot]:
    objects = [ListedObject(b"%03d" % at, SIZE, at, b"v") for at in range(FILES)]
    with closing(
        Snapshot(build_snapshot_file(objects, "s3://bucket/set", 1 << 20, lambda key: b"s3:" + key, tmp_path))
    ) as made:
        yield made


class Fetcher:
    """Fetches a third of the dataset in ten seconds, unless it is held up."""

    def __init__(self) -> None:
        self.began: list[tuple[str, ...]] = []  # ids of the members, for each plan
        self.held_up = asyncio.Event()
        self.held_up.set()

    async def fetch(self, number: int, request: WarmupRequest, target: PartTarget, part: LocalPart) -> None:
        self.began.append(target.ring.ids)
        part.state, part.key, part.selected = "running", target.key, (FILES * SIZE, FILES)
        whole = FILES // len(target.ring.ids)
        for done in range(0, whole + 1, whole // 10):
            part.note_planned(PartPlan(None, whole, whole * SIZE, done, done * SIZE, 0))  # type: ignore[arg-type]
            await asyncio.sleep(1.0)
            await self.held_up.wait()
        part.state = "done"

    def slowness_reason(self, dataset: str) -> str:
        return ""


class Node:
    """One node, which has the dataset."""

    def __init__(self, sharing: SharingNode, snapshot: Snapshot, directory: Path) -> None:
        self.sharing = sharing
        self.fetcher = Fetcher()
        self.dataset = SimpleNamespace(record=SimpleNamespace(share=1.0), current=snapshot)
        self.directory = directory / sharing.record.name
        self.directory.mkdir(exist_ok=True)
        self.jobs = SimpleNamespace(consumers=[])
        self.has_dataset = True
        self.warmups = self._make()
        self.task: asyncio.Task[None]

    def _make(self) -> ClusterWarmups:
        catalog = SimpleNamespace(
            find=lambda name: self.dataset if self.has_dataset else None,
            get=lambda name: self.dataset,
            snapshot=self._snapshot,
        )
        return ClusterWarmups(
            ClusterWarmupParts(
                self.sharing.shared, cast(Catalog, catalog), cast(JobRegistry, self.jobs), Threads(),
                cast(PartFetcher, self.fetcher), self.directory, 30.0,
            )
        )  # fmt: skip

    def _snapshot(self, name: str) -> Any:
        if name != "set":
            raise NotFound(f"no dataset named {name!r}")
        return self.dataset.current

    async def start(self) -> None:
        await self.warmups.restore()
        self.task = asyncio.create_task(self.warmups.run())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def restart(self) -> None:
        """Start again with what is on disk."""
        await asyncio.sleep(1.0)  # it is saved
        await self.stop()
        self.sharing.shared._listeners.clear()
        self.warmups = self._make()
        await self.start()

    def shown(self, number: int) -> WarmupProgress | None:
        return next((one for one in self.warmups.progress() if one.id == number), None)

    async def ended(self, number: int) -> WarmupProgress:
        await until_async(lambda: (one := self.shown(number)) is not None and one.state not in ("running", "waiting"))
        found = self.shown(number)
        assert found is not None
        return found


@contextlib.asynccontextmanager
async def cluster(count: int, snapshot: Snapshot, directory: Path) -> AsyncIterator[list[Node]]:
    async with sharing_nodes(count) as sharing:
        nodes = [Node(one, snapshot, directory) for one in sharing]
        for node in nodes:
            await node.start()
        try:
            yield nodes
        finally:
            for node in nodes:
                await node.stop()


def test_all_nodes_show_the_sum_and_the_same_end(snapshot: Snapshot, tmp_path: Path) -> None:
    async def scene() -> None:
        async with cluster(3, snapshot, tmp_path) as nodes:
            begun = await nodes[1].warmups.begin(REQUEST)
            assert (begun.state, begun.blocks_total, begun.bytes_total) == ("running", FILES, FILES * SIZE)
            await asyncio.sleep(5.5)
            shown = [node.shown(begun.id) for node in nodes]
            assert all(one is not None and FILES // 4 < one.blocks < FILES * 3 // 4 for one in shown)
            for node in nodes:
                last = await node.ended(begun.id)
                assert (last.state, last.blocks, last.bytes, last.message) == ("done", FILES, FILES * SIZE, "")
                assert node.fetcher.began == [tuple(one.sharing.record.id for one in nodes)]
            await asyncio.sleep(2.0)
            assert not any(node.sharing.shared.published_names(WARMUP_PARTS) for node in nodes)
            # Where it was requested, it is published for nodes that join.
            assert [len(node.sharing.shared.published_names(WARMUPS)) for node in nodes] == [0, 1, 0]

    virtual_time.run(scene())


def test_a_cancel_reaches_all_nodes_and_one_that_was_away_does_not_bring_it_back(
    snapshot: Snapshot, tmp_path: Path
) -> None:
    async def scene() -> None:
        async with cluster(3, snapshot, tmp_path) as (one, two, three):
            begun = await one.warmups.begin(replace(REQUEST, at=time.time() + 50_000))
            await until_async(lambda: three.shown(begun.id) is not None)
            three.sharing.meet()
            one.sharing.meet(two.sharing)
            two.sharing.meet(one.sharing)
            said = await two.warmups.cancel(begun.id)
            assert (said.state, said.message) == ("cancelled", "cancelled on node-2")
            assert (await one.ended(begun.id)).message == "cancelled on node-2"
            await three.restart()
            assert (three.shown(begun.id) or said).state == "waiting"
            introduce([one.sharing, two.sharing, three.sharing])
            assert (await three.ended(begun.id)).state == "cancelled"
            assert (await one.ended(begun.id)).state == "cancelled"
            assert not one.fetcher.began + three.fetcher.began

    virtual_time.run(scene())


def test_a_node_that_leaves_the_ring_loses_its_part_also_the_one_that_was_asked(
    snapshot: Snapshot, tmp_path: Path
) -> None:
    async def scene() -> None:
        async with cluster(3, snapshot, tmp_path) as (one, two, three):
            begun = await one.warmups.begin(REQUEST)
            await asyncio.sleep(5.0)
            two.sharing.meet(three.sharing)
            three.sharing.meet(two.sharing)
            await one.stop()
            for node in (two, three):
                assert (await node.ended(begun.id)).blocks == FILES
                assert [len(ids) for ids in node.fetcher.began] == [3, 2]
            await one.start()

    virtual_time.run(scene())


def test_a_part_that_was_done_is_lost_with_its_node(snapshot: Snapshot, tmp_path: Path) -> None:
    async def scene() -> None:
        async with cluster(3, snapshot, tmp_path) as (one, two, three):
            one.fetcher.held_up.clear()
            begun = await one.warmups.begin(REQUEST)
            await asyncio.sleep(20.0)
            gone = dataclasses.replace(three.sharing.record, state="away")
            for node, other in ((one, two), (two, one)):
                node.sharing.membership.tell(node.sharing.record, [other.sharing.record, gone])
            one.fetcher.held_up.set()
            await asyncio.sleep(20.0)
            for node in (one, two):
                shown = node.shown(begun.id)
                assert shown is not None
                assert shown.state == "running"
                assert shown.reason == ("node-3 does not answer; after 30 s of that, others take its part over")
            one.sharing.meet(two.sharing)
            two.sharing.meet(one.sharing)
            for node in (one, two):
                assert (await node.ended(begun.id)).blocks == FILES
                assert [len(ids) for ids in node.fetcher.began] == [3, 2]

    virtual_time.run(scene())


def test_a_node_that_joins_gets_a_part(snapshot: Snapshot, tmp_path: Path) -> None:
    async def scene() -> None:
        async with cluster(3, snapshot, tmp_path) as (one, two, three):
            one.sharing.meet(two.sharing)
            two.sharing.meet(one.sharing)
            three.sharing.meet()
            begun = await one.warmups.begin(REQUEST)
            await asyncio.sleep(5.0)
            introduce([one.sharing, two.sharing, three.sharing])
            for node in (one, two, three):
                assert (await node.ended(begun.id)).state == "done"
            assert [len(ids) for ids in three.fetcher.began] == [3]

    virtual_time.run(scene())


def test_a_node_of_an_older_release_does_not_hold_up_the_end(snapshot: Snapshot, tmp_path: Path) -> None:
    async def scene() -> None:
        async with sharing_nodes(3) as sharing:
            nodes = [Node(one, snapshot, tmp_path) for one in sharing[:2]]
            for node in nodes:
                await node.start()
            begun = await nodes[0].warmups.begin(REQUEST)
            await asyncio.sleep(15.0)
            assert (nodes[1].shown(begun.id) or begun).reason == "not known yet of node-3: what is missing there"
            await asyncio.sleep(SILENT_SECONDS)
            for node in nodes:
                last = await node.ended(begun.id)
                assert (last.state, last.message) == ("failed", "nothing is known of the part of node-3")
                await node.stop()

    virtual_time.run(scene())


def test_a_node_without_the_dataset_gives_up_and_is_named(snapshot: Snapshot, tmp_path: Path) -> None:
    async def scene() -> None:
        async with cluster(2, snapshot, tmp_path) as (one, two):
            one.has_dataset = False  # the one that would note the end
            begun = await two.warmups.begin(REQUEST)
            await asyncio.sleep(15.0)
            assert (two.shown(begun.id) or begun).reason == "node-1 waits: the dataset is not on this node"
            last = await two.ended(begun.id)
            assert (last.state, last.message) == ("failed", "node-1: the dataset is not on this node")

    virtual_time.run(scene())


def test_it_begins_with_a_job_of_any_node_and_ends_after_a_week_without(snapshot: Snapshot, tmp_path: Path) -> None:
    async def scene() -> None:
        async with cluster(2, snapshot, tmp_path) as (one, two):
            never = await one.warmups.begin(replace(REQUEST, before="nobody"))
            begun = await one.warmups.begin(replace(REQUEST, before="train"))
            await asyncio.sleep(30.0)
            assert (two.shown(begun.id) or never).state == "waiting"
            facts = ConsumerFacts("train~1000", "0", "set", snapshot.id)
            two.sharing.shared.publish(CONSUMERS, "train~1000/0", facts)
            two.jobs.consumers.append(SimpleNamespace(request=SimpleNamespace(job="train~1000")))
            assert (await one.ended(begun.id)).blocks == FILES
            record = one.warmups._records[never.id]
            for node in (one, two):
                record = node.warmups._records[never.id]
                record.facts = replace(record.facts, begun=record.facts.begun - MAX_JOB_SECONDS)
            last = await two.ended(never.id)
            assert (last.state, last.message) == ("failed", "job nobody has not been seen for 7 days")

    virtual_time.run(scene())


def test_it_goes_on_after_a_restart_of_all_nodes(snapshot: Snapshot, tmp_path: Path) -> None:
    async def scene() -> None:
        async with cluster(2, snapshot, tmp_path) as nodes:
            begun = await nodes[0].warmups.begin(REQUEST)
            await asyncio.sleep(3.0)
            for node in nodes:
                await node.restart()
            for node in nodes:
                assert (await node.ended(begun.id)).blocks == FILES
            for node in nodes:
                (node.directory / FILE_NAME).write_bytes(b"damaged")
            await asyncio.sleep(1.0)

    virtual_time.run(scene())


def test_what_cannot_be_is_refused(snapshot: Snapshot, tmp_path: Path) -> None:
    async def scene() -> None:
        async with cluster(1, snapshot, tmp_path) as (node,):
            now = time.time()
            for fields, text in (
                ({"at": now - 3600}, "is past by 1 h 0 min; without --at the warmup begins now"),
                ({"at": now + 400 * 86_400}, "more than the 366 days"),
                ({"at": now + 60, "before": "train"}, "not both"),
                ({"before": "a\nb"}, "invalid job name"),
                ({"paths": [b"x" * 40_000]}, "have more than 32,768 bytes"),
                ({"fraction": 2.0}, "expected more than 0"),
            ):
                with pytest.raises(ConfigError, match=text):
                    await node.warmups.begin(replace(REQUEST, **fields))
            with pytest.raises(NotFound):
                await node.warmups.begin(replace(REQUEST, dataset="other"))
            with pytest.raises(NotFound, match="no 'nothing' in snapshot"):
                await node.warmups.begin(replace(REQUEST, paths=[b"nothing"]))
            with pytest.raises(NotFound, match="there is no warmup 7"):
                await node.warmups.cancel(7)
            assert not node.warmups.progress()
            for _ in range(MAX_OPEN):
                await node.warmups.begin(replace(REQUEST, at=now + 86_400))
            with pytest.raises(Busy, match="32 warmups of the cluster run or wait"):
                await node.warmups.begin(REQUEST)

    virtual_time.run(scene())
