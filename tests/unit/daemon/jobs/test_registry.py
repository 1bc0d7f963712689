"""What jobs say, and how they end: with real snapshots, plan and threads, and without a daemon around them."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cachefs.block import block_key
from cachefs.errors import Busy, ConfigError, OriginUnavailable, StoreFull
from cachefs.job_messages import JobEpoch, JobProgress, JobPublication, SampleMap
from cachefs.messages import Trouble
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.snapshot import Snapshot
from cachefs.snapshot_builder import ListedObject, build_snapshot_file
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.datasets.stamps import ChangeStamp
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.jobs import consumer as consumer_module
from cachefs_daemon.jobs import epochs as epochs_module
from cachefs_daemon.jobs import liveness
from cachefs_daemon.jobs import registry as registry_module
from cachefs_daemon.jobs.attribution import Attribution
from cachefs_daemon.jobs.epoch_loader import EpochLoader, LoaderParts
from cachefs_daemon.jobs.job_files import ConsumerRecord, JobPriority, JobRecord
from cachefs_daemon.jobs.persistence import record_of
from cachefs_daemon.jobs.plan_memory import BYTES_PER_BLOCK, BYTES_PER_PATH, BYTES_PER_READ, PlanMemory, PlanPurpose
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.runtime import boot_clock
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time
from tests.blockstore import BLOCK_SIZE, OpenStore, memory_directory, opened, store_config
from tests.waiting import until_async

FILES = 40
DATASETS = ("train", "val")


class Troubles:
    """No troubles; a function learns of each look for those of a job."""

    def __init__(self, asked: Callable[[str, float], None]) -> None:
        self._asked = asked

    def troubles_of(self, job: str, snapshots: Sequence[str], began: float, *, fresh: bool = False) -> list[Trouble]:
        self._asked(job, began)
        return []


class Jobs(JobRegistry):
    """The jobs of a node with two datasets."""

    def __init__(self, directory: Path, store: OpenStore, threads: Threads, room: int) -> None:
        self.snapshots = {name: snapshot_of(directory, name) for name in DATASETS}
        self.loader = EpochLoader(
            LoaderParts(
                store.plan, store.storage.presence_watch, store.blocks, cast(Fetcher, None), threads, PlanMemory(room)
            )
        )
        self.store = store
        catalog: Any = SimpleNamespace(snapshot=self.snapshots.__getitem__)
        presence = store.storage.planning.presence
        super().__init__(cast(Catalog, catalog), store.plan, presence, self.loader, lambda: store.storage.capacity)

    def say(self, job: str = "j", dataset: str = "train", consumer: str = "0", **fields: Any) -> JobPublication:
        spec = SamplerSpec(kind="torch-distributed", size=FILES, epochs=900_000)
        request = JobPublication(**{"job": job, "dataset": dataset, "consumer": consumer, "spec": spec, **fields})
        self.publish(request)
        return request

    def state(self, job: str = "j", consumer: str = "0") -> tuple[str, str]:
        """State and problem of a consumer."""
        [view] = [view for view in self.job_view(self.get(job)).consumers if view.consumer == consumer]
        return view.state, view.problem


def snapshot_of(directory: Path, name: str) -> Snapshot:
    objects = [ListedObject(b"%05d" % number, 1000, 7, b"v") for number in range(FILES)]
    prefix = name.encode()
    return Snapshot(
        build_snapshot_file(objects, f"s3://{name}", BLOCK_SIZE, lambda key: b"s3:" + prefix + key, directory)
    )


def play(
    directory: Path,
    scene: Callable[[Jobs], Awaitable[None]],
    room: int = 1 << 30,
    run: Callable[[Coroutine[Any, Any, None]], None] = virtual_time.run,
) -> None:
    """Play the scene. run: `asyncio.run` where a thread hangs, which only a real one can."""

    async def play() -> None:
        threads = Threads()
        with memory_directory() as root, opened(store_config(root)) as store:
            jobs = Jobs(directory, store, threads, room)
            try:
                async with asyncio.timeout(30):
                    await scene(jobs)
            finally:
                await jobs.close()
                threads.close()

    run(play())


async def planned(jobs: Jobs, count: int = 1) -> None:
    await until_async(lambda: len(jobs.push_readers(0.0)) == count)


def test_a_job_that_begins_while_others_are_cleaned_up_is_planned_for(tmp_path: Path) -> None:
    async def scene(jobs: Jobs) -> None:
        for dataset in DATASETS:
            jobs.say("one", dataset, dataset)
        await planned(jobs, 2)
        watch, go_on, began = jobs.store.storage.presence_watch, threading.Event(), threading.Event()
        unwatch = watch.unwatch

        def slow(snapshot: str) -> None:
            began.set()
            go_on.wait(60)
            unwatch(snapshot)

        watch.unwatch = slow  # type: ignore[method-assign]
        jobs.cancel("one")
        cleaning = asyncio.create_task(jobs.end_gone())
        await until_async(began.is_set)
        for dataset in DATASETS:
            jobs.say("two", dataset, dataset)
        go_on.set()
        await cleaning
        await planned(jobs, 2)
        ids = {snapshot.id for snapshot in jobs.snapshots.values()}
        assert set(jobs.store.plan.spaces) == set(watch.watched) == ids
        assert [jobs.state("two", dataset)[0] for dataset in DATASETS] == ["waiting", "waiting"]

    play(tmp_path, scene, run=asyncio.run)


def test_a_failure_that_passes_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_module, "RETRY_SECONDS", (0.01,))

    async def scene(jobs: Jobs) -> None:
        samples, failures = (
            jobs.loader.load_samples,
            iter([OriginUnavailable("the origin is away"), OSError("no files")]),
        )

        async def unsteady(*given: Any) -> Any:
            for failure in failures:
                raise failure
            return await samples(*given)

        monkeypatch.setattr(jobs.loader, "load_samples", unsteady)
        jobs.say()
        await until_async(lambda: jobs.state()[1] != "")
        state, problem = jobs.state()
        assert (state, problem.partition(";")[2]) == ("preparing", " trying again")
        await planned(jobs)
        assert jobs.state() == ("waiting", "")

    play(tmp_path, scene)


def test_a_consumer_that_was_given_up_begins_anew_when_it_is_published_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(jobs: Jobs) -> None:
        samples = jobs.loader.load_samples

        async def wrong(*given: Any) -> Any:
            raise ConfigError("this makes no sense")

        monkeypatch.setattr(jobs.loader, "load_samples", wrong)
        spec = SamplerSpec(kind="explicit", size=FILES)
        request = jobs.say(spec=spec)
        order = np.arange(5, dtype="<u4").tobytes()
        jobs.add_order(JobEpoch(job="j", consumer="0", epoch=3, order=order))
        await until_async(lambda: jobs.state() == ("not followed", "this makes no sense"))
        monkeypatch.setattr(jobs.loader, "load_samples", samples)
        jobs.publish(request)
        await planned(jobs)
        assert jobs.state() == ("waiting", "")
        assert [view.known_epochs for view in jobs.job_view(jobs.get("j")).consumers] == [[3]]

    play(tmp_path, scene)


def test_a_consumer_that_fails_does_not_take_others_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(jobs: Jobs) -> None:
        spec = SamplerSpec(kind="sequential", size=FILES)
        requests = [jobs.say(consumer=name, spec=spec) for name in ("good", "bad")]
        await planned(jobs, 2)
        attribution = Attribution(jobs.store.plan, jobs)
        [bad] = [consumer for consumer in jobs.consumers if consumer.name == "bad"]
        assert bad.follower is not None

        def fail(*given: Any) -> Any:
            raise KeyError("it is not in the plan")

        monkeypatch.setattr(bad.follower, "claim_reads", fail)
        keys = [block_key(jobs.snapshots["train"].size_and_content(number)[1], 0) for number in range(1, 11)]
        attribution.note_reads(keys[:5], [], 1.0)
        assert jobs.state(consumer="bad")[0] == "not followed"
        assert "internal error (KeyError" in jobs.state(consumer="bad")[1]
        assert attribution.note_reads(keys[:5], [], 1.0).own_reads.keys() == {
            consumer.key for consumer in jobs.consumers if consumer.name == "good"
        }
        jobs.margins()
        jobs.publish(requests[1])
        await planned(jobs, 2)
        assert jobs.state(consumer="bad") == ("waiting", "")

    play(tmp_path, scene)


def test_a_job_that_resumes_at_a_late_epoch_is_followed(tmp_path: Path) -> None:
    async def scene(jobs: Jobs) -> None:
        jobs.say()
        await planned(jobs)
        jobs.note_progress(JobProgress(job="j", consumer="0", epoch=899_999, position=3))
        await until_async(lambda: jobs.state()[0] == "following")
        [view] = jobs.job_view(jobs.get("j")).consumers
        assert (view.epoch, view.position, view.problem) == (899_999, 3, "")

    play(tmp_path, scene)


def test_samplers_of_far_more_samples_than_there_are_are_refused_at_once(tmp_path: Path) -> None:
    async def scene(jobs: Jobs) -> None:
        typo = SamplerSpec(kind="numpy", size=100_000_000)
        paths = SampleMap(kind="files", paths=[b"00001", b"00002"])
        for sample_map, there in ((None, FILES), (paths, 2)):
            with pytest.raises(ConfigError, match=rf"the sampler has 100,000,000 samples, the dataset {there};"):
                jobs.say(spec=typo, map=sample_map)
        assert list(jobs) == []
        # Only the files say how many records there are.
        jobs.say(spec=typo, map=SampleMap(kind="records", indexer="fixed:100", paths=[b"00001"]))
        await until_async(lambda: jobs.state()[0] == "not followed")
        assert "the sampler has 100,000,000 samples, the dataset 10;" in jobs.state()[1]

    play(tmp_path, scene)


def test_jobs_and_their_consumers_are_limited_in_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_JOBS", 2)
    monkeypatch.setattr(registry_module, "MAX_CONSUMERS", 4)

    async def scene(jobs: Jobs) -> None:
        jobs.say("a")
        jobs.say("b")
        with pytest.raises(Busy, match="2 jobs run on this node"):
            jobs.say("c")
        jobs.say("b")  # it is there
        for name in "12":
            jobs.say("b", consumer=name)
        with pytest.raises(Busy, match="have 4 consumers"):
            jobs.say("b", consumer="3")
        jobs.cancel("b")
        jobs.say("c")
        with pytest.raises(ConfigError, match="at most 256 characters"):
            jobs.say(consumer="x" * 257)
        with pytest.raises(ConfigError, match="expected printable names"):
            jobs.say(consumer="0\n2026-11-22 ERROR forged")
        with pytest.raises(ConfigError, match="epochs count from 0 to 999,999"):
            jobs.note_progress(JobProgress(job="c", consumer="0", epoch=10**6, position=0))

    play(tmp_path, scene)


def running(jobs: Jobs) -> list[str]:
    return sorted(f"{one.request.job} {one.name}" for one in jobs.consumers)


def test_no_user_takes_the_room_of_others_in_control_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_JOBS", 16)

    async def scene(jobs: Jobs) -> None:
        for number in range(4):
            jobs.say(f"{number}~control", sent_by=1000)
        with pytest.raises(Busy, match="4 jobs of control files"):
            jobs.say("more~control", sent_by=1000)
        for number in (0, 1, 3):
            await asyncio.sleep(1)
            jobs.note_progress(JobProgress(job=f"{number}~control", consumer="0", epoch=0, position=1))
        jobs.say("theirs~control", sent_by=2000)
        assert jobs.get("2~control").reason.startswith("another user of control files")
        jobs.say("unknown~control")
        with pytest.raises(Busy, match="4 jobs of control files"):
            jobs.say("more~control", sent_by=1000)
        with pytest.raises(Busy, match="4 jobs of control files"):
            jobs.say("back~control")  # all whose user is not known have the part of one
        assert running(jobs) == ["1~control 0", "3~control 0", "theirs~control 0", "unknown~control 0"]

    play(tmp_path, scene)


def test_no_job_makes_room_for_one_whose_map_memory_does_not_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "MAX_JOBS", 8)
    large = SampleMap(kind="files", entries=bytes(4 * FILES))

    async def scene(jobs: Jobs) -> None:
        jobs.say("a~control", sent_by=1000)
        jobs.say("b~control", sent_by=1000)
        with pytest.raises(StoreFull):
            jobs.say("c~control", spec=SamplerSpec(kind="explicit", size=0), map=large, sent_by=2000)
        assert running(jobs) == ["a~control 0", "b~control 0"]
        jobs.say("c~control", sent_by=2000)
        assert len(running(jobs)) == 2
        assert "c~control 0" in running(jobs)

    play(tmp_path, scene, room=4 * FILES)


def test_no_user_takes_the_room_of_others_with_the_consumers_of_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "MAX_CONSUMERS", 16)

    async def scene(jobs: Jobs) -> None:
        for name in "0123":
            jobs.say("large~control", consumer=name, sent_by=1000)
        jobs.say("theirs~control", sent_by=2000)
        jobs.say("large~control", consumer="9", sent_by=2000)
        with pytest.raises(Busy, match="with 4 consumers"):
            jobs.say("theirs~control", consumer="1", sent_by=2000)
        assert running(jobs) == ["large~control 2", "large~control 3", "large~control 9", "theirs~control 0"]

    play(tmp_path, scene)


def test_a_job_whose_last_consumer_makes_room_for_another_of_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "MAX_CONSUMERS", 8)

    async def scene(jobs: Jobs) -> None:
        jobs.say("a~control", sent_by=1000)
        jobs.say("b~control", sent_by=1000)
        jobs.say("a~control", consumer="1", sent_by=2000)
        assert running(jobs) == ["a~control 1", "b~control 0"]
        assert jobs.get("a~control").state == "running"

    play(tmp_path, scene)


def test_no_user_keeps_the_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_JOBS", 8)
    monkeypatch.setattr(registry_module, "MAX_CONSUMERS", 16)

    async def scene(jobs: Jobs) -> None:
        for name in "ab":
            jobs.say(f"{name}~65534")
        with pytest.raises(Busy, match="2 jobs of user 65534 with 2 consumers"):
            jobs.say("c~65534")
        for number in "12":
            jobs.say("a~65534", consumer=number)
        with pytest.raises(Busy, match="2 jobs of user 65534 with 4 consumers"):
            jobs.say("a~65534", consumer="3")
        jobs.say("a~1000")
        for name in "abcd":
            jobs.say(name)

    play(tmp_path, scene)


def test_another_users_process_keeps_no_job(tmp_path: Path) -> None:
    async def scene(jobs: Jobs) -> None:
        for name in ("mine", f"theirs~{os.getuid() + 1}"):
            jobs.say(name, pid=os.getpid())
        assert [one.liveness.process_start is None for one in jobs.consumers] == [False, True]

    play(tmp_path, scene)


def test_an_end_that_was_wanted_needs_no_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(jobs: Jobs) -> None:
        jobs.say("through")
        jobs.note_progress(JobProgress(job="through", consumer="0", epoch=0, position=FILES, ended=True))
        jobs.say("stopped")
        jobs.cancel("stopped")
        jobs.say("silent", lease=5)
        await asyncio.sleep(6)
        await jobs.end_gone()
        views = {job.name: jobs.job_view(job) for job in jobs}
        states = {name: (view.state, view.reason) for name, view in views.items()}
        assert states["through"] == ("ended", "")
        assert states["stopped"] == ("cancelled", "")
        assert states["silent"] == ("ended", "no heartbeat for 5 s")
        assert {consumer.rate for view in views.values() for consumer in view.consumers} == {0}

    with caplog.at_level("INFO"):
        play(tmp_path, scene)
    said = [record.message for record in caplog.records]
    assert {"job through has ended", "job stopped has been cancelled"} <= set(said)
    assert "job silent has ended: no heartbeat for 5 s" in said


def test_what_is_shown_of_ended_consumers_does_not_grow(tmp_path: Path) -> None:
    async def scene(jobs: Jobs) -> None:
        jobs.say(consumer="stays")
        for number in range(registry_module.MAX_ENDED_CONSUMERS + 5):
            jobs.say(consumer=str(number))
            jobs.note_progress(JobProgress(job="j", consumer=str(number), epoch=0, position=0, ended=True))
        views = jobs.job_view(jobs.get("j")).consumers
        assert len(views) == registry_module.MAX_ENDED_CONSUMERS + 1
        assert [view.consumer for view in views[-2:]] == ["68", "stays"]
        for epoch in range(900_000, 900_050):
            jobs.note_progress(JobProgress(job="j", consumer="stays", epoch=epoch, position=0))
        assert jobs.state(consumer="stays")[1] == "it reads epoch 900049, and has published 900000"

    play(tmp_path, scene)


def test_a_map_that_many_ranks_publish_is_kept_once(tmp_path: Path) -> None:
    async def scene(jobs: Jobs) -> None:
        for rank in range(3):
            paths = [b"%05d" % number for number in range(FILES)]
            request = JobPublication(
                job="j", dataset="train", consumer=str(rank), map=SampleMap(kind="files", paths=paths)
            )
            assert [view.consumer for view in jobs.publish(request).consumers] == [str(rank)]
        assert len({id(consumer.request.map) for consumer in jobs.consumers}) == 1
        [record] = [record_of(job) for job in jobs]
        assert len(record.maps) == 1

    play(tmp_path, scene)


def test_an_epoch_that_is_too_far_ahead_is_refused_and_one_that_has_to_go_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs_module, "MAX_WAITING_ORDERS", 3)

    async def scene(jobs: Jobs) -> None:
        jobs.say(spec=SamplerSpec(kind="explicit", size=FILES))
        order = np.arange(5, dtype="<u4").tobytes()

        def publish(epoch: int) -> None:
            jobs.add_order(JobEpoch(job="j", consumer="0", epoch=epoch, order=order))

        for epoch in (5, 6, 9):
            publish(epoch)
        with pytest.raises(Busy, match="epoch 10 of consumer 0 of job j is too far ahead"):
            publish(10)
        assert jobs.state()[1] == ""
        publish(4)
        problem = "orders of 1 epochs from 9 on were published too far ahead to be kept; "
        assert jobs.state()[1] == problem + "publish them again when the job is nearer"
        [record] = [record_of(job) for job in jobs]
        assert [one.forgotten for one in record.consumers] == [[9]]

    play(tmp_path, scene)


def test_a_plan_that_memory_does_not_allow_is_not_made_until_others_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "RETRY_SECONDS", (0.01,))

    async def scene(jobs: Jobs) -> None:
        jobs.say("one")
        await planned(jobs)
        jobs.say("two")
        await until_async(lambda: "no memory for its plan" in jobs.state("two")[1])
        jobs.cancel("one")
        await until_async(lambda: jobs.state("two") == ("waiting", ""))

    play(tmp_path, scene, room=60 * FILES)


def test_room_that_is_given_back_can_be_taken() -> None:
    room = PlanMemory(3000)
    room.reserve("a", PlanPurpose.PLAN, 1440)
    room.reserve("a", PlanPurpose.PLAN, 1440)
    room.reserve("b", PlanPurpose.ORDERS, 1440)
    with pytest.raises(StoreFull, match=r"it would take 1\.406 KiB, and what jobs .* take 2\.812 KiB of 2\.93 KiB"):
        room.reserve("c", PlanPurpose.PLAN, 1440)
    room.release_consumer("a", PlanPurpose.ORDERS)
    room.release_consumer("nobody")
    with pytest.raises(StoreFull):
        room.reserve("c", PlanPurpose.PLAN, 1440)
    room.release_consumer("a", PlanPurpose.PLAN)
    room.reserve("c", PlanPurpose.PLAN, 1440)
    room.reserve("c", PlanPurpose.PLAN, 10)
    room.reserve("d", PlanPurpose.PLAN, 1550)


def test_one_user_leaves_room_for_others_but_for_the_one_that_the_daemon_runs_as() -> None:
    room, sample_map = PlanMemory(1000), SampleMap(kind="records", entries=bytes(200))
    room.hold_map(sample_map, "a~7")
    room.reserve("a~7/0#1", PlanPurpose.PLAN, 200)
    room.reserve("b~7/x/y#2", PlanPurpose.ORDERS, 100)
    with pytest.raises(StoreFull, match=r"jobs of user 7 have published .* take 500 B of 500 B"):
        room.reserve("c~7/0#3", PlanPurpose.PLAN, 1)
    with pytest.raises(StoreFull, match="jobs of user 7"):
        room.reserve("a~7/0#1", PlanPurpose.PLAN, 201)
    with pytest.raises(StoreFull, match="jobs of user 7"):
        room.hold_map(SampleMap(kind="records", entries=bytes(1)), "c~7")
    room.reserve("c~8/0#4", PlanPurpose.PLAN, 100)
    room.release_map(sample_map)
    room.reserve("c~7/0#3", PlanPurpose.PLAN, 200)
    room.release_consumer("c~7/0#3")
    room.release_consumer("a~7/0#1")
    room.release_consumer("b~7/x/y#2")
    room.reserve("own/0#5", PlanPurpose.PLAN, 900)
    with pytest.raises(StoreFull, match="what jobs have published"):
        room.reserve("c~7/0#6", PlanPurpose.PLAN, 1)
    room.release_consumer("own/0#5")
    room.release_consumer("c~8/0#4")
    assert (room.used, room._by_owner) == (0, {})


def test_a_map_takes_room_once_and_as_long_as_somebody_holds_it() -> None:
    room, one = PlanMemory(1000), SampleMap(kind="records", entries=bytes(300), offsets=bytes(600))
    room.hold_map(one, "job")
    room.hold_map(one, "job")
    room.release_map(one)
    paths = SampleMap(kind="files", paths=[b"x" * 50] * 2)
    with pytest.raises(StoreFull):
        room.hold_map(paths, "job")
    room.release_map(one)
    room.hold_map(paths, "job")
    assert room.used == 2 * (50 + BYTES_PER_PATH)


def test_maps_that_memory_does_not_allow_are_refused_until_others_end(tmp_path: Path) -> None:
    """Whoever ends, and how: nothing of the room is lost, and nothing is held that takes none."""
    explicit = SamplerSpec(kind="explicit", size=0)

    async def scene(jobs: Jobs) -> None:
        def say(job: str, consumer: str = "0", fill: int = 0) -> None:
            entries = fill.to_bytes(4, "little") * 250
            jobs.say(job, consumer=consumer, spec=explicit, map=SampleMap(kind="files", entries=entries))

        say("one")
        say("one", "1")  # another copy of the same map
        assert jobs.loader.plan_memory.used == 1000
        say("one", "2", fill=1)
        with pytest.raises(StoreFull, match="no memory for its plan"):
            say("two", fill=2)
        assert [job.name for job in jobs] == ["one"]
        jobs.note_progress(JobProgress(job="one", consumer="0", epoch=0, position=0, ended=True))
        with pytest.raises(StoreFull):  # consumer 1 has that map too
            say("two", fill=2)
        say("one", "1", fill=1)
        assert jobs.loader.plan_memory.used == 1000
        jobs.cancel("one")
        assert jobs.loader.plan_memory.used == 0
        say("two", fill=2)
        say("two", fill=3)
        assert jobs.loader.plan_memory.used == 1000

    play(tmp_path, scene, room=2500 - 24 * 20)


def test_orders_that_memory_does_not_allow_are_refused_until_others_are_read(tmp_path: Path) -> None:
    async def scene(jobs: Jobs) -> None:
        jobs.say(spec=SamplerSpec(kind="explicit", size=FILES), map=SampleMap(kind="files"))
        order = bytes(4 * 1000)
        for epoch in (7, 8):
            jobs.add_order(JobEpoch(job="j", consumer="0", epoch=epoch, order=order))
        refused = r"epoch 9 of consumer 0 of job j: no memory for its plan: it would take 11\.72"
        with pytest.raises(StoreFull, match=refused):
            jobs.add_order(JobEpoch(job="j", consumer="0", epoch=9, order=order))
        assert jobs.state()[1].startswith("no memory for the orders of 1 epochs from 9 on; publish them again when")
        [record] = [record_of(job) for job in jobs]
        assert [(one.forgotten, one.refused) for one in record.consumers] == [([], [9])]
        with pytest.raises(StoreFull, match="epoch 8"):
            jobs.add_order(JobEpoch(job="j", consumer="0", epoch=8, order=3 * order))
        assert jobs.loader.plan_memory.used == 4000  # that of epoch 8 was to be replaced
        jobs.add_order(JobEpoch(job="j", consumer="0", epoch=9, order=order))
        assert "the orders of 1 epochs from 8 on" in jobs.state()[1]
        jobs.cancel("j")
        assert jobs.loader.plan_memory.used == 0

    play(tmp_path, scene, room=10_000)


def test_orders_that_were_read_take_no_room(tmp_path: Path) -> None:
    async def scene(jobs: Jobs) -> None:
        jobs.say(spec=SamplerSpec(kind="explicit", size=FILES))
        order = np.arange(FILES, dtype="<u4").tobytes()
        for epoch in range(10):
            jobs.add_order(JobEpoch(job="j", consumer="0", epoch=epoch, order=order))
        await planned(jobs)
        orders = jobs.loader.plan_memory.used - BYTES_PER_BLOCK * FILES - BYTES_PER_READ * FILES
        assert orders == 10 * len(order)
        jobs.note_progress(JobProgress(job="j", consumer="0", epoch=7, position=0))
        await until_async(
            lambda: jobs.loader.plan_memory.used == BYTES_PER_BLOCK * FILES + BYTES_PER_READ * FILES + 3 * len(order)
        )

    play(tmp_path, scene)


def test_a_weight_outlives_a_restart_and_ends_with_its_job(tmp_path: Path) -> None:
    async def scene(jobs: Jobs) -> None:
        request = JobPublication(
            job="j", dataset="train", consumer="0", spec=SamplerSpec(kind="numpy", size=FILES), pid=os.getpid()
        )
        known = ConsumerRecord(request, -1, "", os.getpid(), None, {}, [], [])
        jobs.restore(JobRecord("j", "", 0.0, [known], [], {}, JobPriority(2.0, ChangeStamp(1))), {})
        assert jobs.weights == {"j": 2.0}
        jobs.set_priority("j", JobPriority(0.5, ChangeStamp(2)))
        assert (jobs.weights, [record_of(job).priority.weight for job in jobs]) == ({"j": 0.5}, [0.5])
        jobs.cancel("j")
        assert jobs.weights == {}
        with pytest.raises(ConfigError, match="only a running job has a weight"):
            jobs.set_priority("j", JobPriority(2.0))
        jobs.publish(request)
        assert [job.priority.weight for job in jobs] == [1.0]

    play(tmp_path, scene)


def test_a_job_of_before_a_restart_asks_for_the_order_that_finds_no_room_any_more(tmp_path: Path) -> None:
    """Also where what publishes has not noticed that the daemon was restarted."""
    orders = {epoch: bytes(4 * 1000) for epoch in range(4)}

    async def scene(jobs: Jobs) -> None:
        request = JobPublication(
            job="j", dataset="train", consumer="0", spec=SamplerSpec(kind="explicit", size=FILES), pid=os.getpid()
        )
        jobs.loader.plan_memory.reserve("another", PlanPurpose.ORDERS, 4000)
        known = ConsumerRecord(request, -1, "", os.getpid(), None, orders, [], [])
        jobs.restore(JobRecord("j", "", 0.0, [known], [], {}), {"0": (1, 7)})
        assert jobs.state()[1].startswith("no memory for the orders of 2 epochs from 2 on")

        def wanted(epoch: int) -> list[int]:
            return jobs.note_progress(JobProgress(job="j", consumer="0", epoch=epoch, position=7))

        assert wanted(1) == [2]  # epoch 0 is over, and takes no room from epoch 1
        assert wanted(2) == [2, 3]
        [record] = [record_of(job) for job in jobs]
        assert [one.refused for one in record.consumers] == [[2, 3]]
        jobs.loader.plan_memory.release_consumer("another")
        jobs.add_order(JobEpoch(job="j", consumer="0", epoch=2, order=orders[2]))
        assert wanted(2) == [3]
        end = JobProgress(job="j", consumer="0", epoch=2, position=7, ended=True)
        assert jobs.note_progress(end) == []

    play(tmp_path, scene, room=10_000)


def test_an_order_that_is_longer_than_memory_allows_waits_until_others_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "RETRY_SECONDS", (0.01,))

    async def scene(jobs: Jobs) -> None:
        jobs.say("one", spec=SamplerSpec(kind="sequential", size=FILES))
        await planned(jobs)
        jobs.say("two", spec=SamplerSpec(kind="explicit", size=FILES))
        order = (np.arange(1000, dtype="<u4") % FILES).tobytes()
        jobs.add_order(JobEpoch(job="two", consumer="0", epoch=0, order=order))
        await until_async(lambda: "no memory for its plan" in jobs.state("two")[1])
        assert len(jobs.push_readers(0.0)) == 1
        jobs.cancel("one")
        await until_async(lambda: jobs.state("two") == ("waiting", ""))
        assert len(jobs.push_readers(0.0)) == 1

    play(tmp_path, scene, room=12 * FILES + 24 * 1000 + 4 * 1000 + 100)


def test_nothing_of_a_plan_that_is_given_up_stays(tmp_path: Path) -> None:
    async def scene(jobs: Jobs) -> None:
        jobs.say(spec=SamplerSpec(kind="sequential", size=FILES))
        await planned(jobs)
        [consumer] = jobs.consumers
        consumer.fail(ValueError("x"))
        assert (jobs.loader.plan_memory.used, consumer.follower, list(jobs.store.plan.consumers())) == (0, None, [])
        assert jobs.state()[0] == "not followed"

    play(tmp_path, scene)


def test_an_indexer_ends_when_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, ended = threading.Event(), threading.Event()

    def endless(sample_map: Any, snapshot: Any, space: Any, read: Callable[[int, int, int], bytes]) -> None:
        started.set()
        try:
            while True:
                read(1, 0, 0)
        finally:
            ended.set()

    monkeypatch.setattr("cachefs_daemon.jobs.sample_maps.resolve", endless)

    async def scene(jobs: Jobs) -> None:
        jobs.say(map=SampleMap(kind="records", indexer="tar", paths=[b"00001"]), spec=None)
        await until_async(started.is_set)
        jobs.cancel("j")
        await until_async(ended.is_set)

    play(tmp_path, scene, run=asyncio.run)


def test_what_a_consumer_was_to_read_counts_until_it_is_known_what_its_new_sampler_reads(tmp_path: Path) -> None:
    async def scene(jobs: Jobs) -> None:
        plan, room = jobs.store.plan, jobs.loader.plan_memory
        jobs.say()
        await planned(jobs)
        [before] = plan.consumers()
        jobs.say(spec=None)
        assert plan.consumers() == [before], "else no block would be read again, and all of them could go"
        jobs.say(spec=None, workers=1)
        assert plan.consumers() == [before]
        jobs.add_order(JobEpoch("j", "0", 1, np.arange(FILES, dtype="<u4").tobytes()))
        await planned(jobs)
        [key] = plan.consumers()
        assert key != before
        jobs.cancel("j")
        assert plan.is_empty
        assert room.used == 0

    play(tmp_path, scene)


def test_what_a_consumer_was_to_read_gives_way_where_there_is_no_memory_for_both(tmp_path: Path) -> None:
    async def scene(jobs: Jobs) -> None:
        jobs.say()
        await planned(jobs)
        [before] = jobs.store.plan.consumers()
        jobs.say(workers=1)
        await until_async(lambda: bool(jobs.push_readers(0.0)))
        assert before not in jobs.store.plan.consumers()
        assert jobs.state()[1] == ""

    # One plan, and not two.
    play(tmp_path, scene, room=int(1.5 * FILES * (BYTES_PER_BLOCK + BYTES_PER_READ)))


def test_parts_of_an_epoch_are_shown_as_what_they_are(tmp_path: Path) -> None:
    """A loader whose order is known only as it is drawn publishes each part as an epoch of its own."""

    async def scene(jobs: Jobs) -> None:
        jobs.say(spec=SamplerSpec(kind="explicit", size=FILES))
        for part in range(8):
            order = np.arange(10 * (part % 4), 10 * (part % 4) + 10, dtype="<u4").tobytes()
            jobs.add_order(JobEpoch(job="j", consumer="0", epoch=part, order=order))
        await planned(jobs)
        place = JobProgress(job="j", consumer="0", epoch=6, position=3, part_of=1, part_begins=20)
        jobs.note_progress(place)
        await until_async(lambda: view(jobs) == (1, 23, 30))
        with pytest.raises(ConfigError, match="epochs count from 0"):
            jobs.note_progress(JobProgress(job="j", consumer="0", epoch=6, position=3, part_of=1, part_begins=-1))

    def view(jobs: Jobs) -> tuple[int, int, int]:
        [one] = jobs.job_view(jobs.get("j")).consumers
        return one.epoch, one.position, one.epoch_length

    play(tmp_path, scene)


def test_failures_are_a_jobs_own_from_the_birth_of_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(liveness, "birth_of", lambda pid: boot_clock.now() if pid else None)

    async def scene(jobs: Jobs) -> None:
        jobs.report_troubles_of(Troubles(lambda job, began: asked.append(began)), list, lambda job: [])
        jobs.say("young", pid=os.getpid())
        jobs.say("unknown")
        jobs.troubles_of(jobs.get("young"))
        jobs.troubles_of(jobs.get("unknown"))
        assert asked[0] == pytest.approx(jobs.get("young").started, abs=1)
        assert asked[1] == jobs.get("unknown").started - registry_module.LATE_PUBLICATION_SECONDS

    play(tmp_path, scene)


def test_consumers_are_there_while_the_failed_reads_of_an_ended_job_are_looked_for(tmp_path: Path) -> None:
    """Else a read that failed in the last seconds of a job would be that of no job."""
    found: list[tuple[str, list[str]]] = []

    async def scene(jobs: Jobs) -> None:
        jobs.report_troubles_of(
            Troubles(lambda job, began: found.append((job, [*jobs.consumer_keys]))), list, lambda job: []
        )
        for job in ("said", "cancelled"):
            jobs.say(job)
            [key] = jobs.consumer_keys
            if job == "said":
                jobs.note_progress(JobProgress(job=job, consumer="0", epoch=0, position=0, ended=True))
            else:
                jobs.cancel(job)
            assert found[-1] == (job, [key])
            assert not jobs.consumer_keys

    play(tmp_path, scene)
