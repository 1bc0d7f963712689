"""Which snapshots a dataset keeps, and what is left of a listing whose caller went away."""

import asyncio
import contextlib
import errno
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from cachefs import snapshot as snapshots
from cachefs.errors import CachefsError, ConfigError, OriginAccessDenied
from cachefs.messages import BlockRef, DatasetAddRequest, Empty, ListingProgress, OriginOptions, WarmupRequest
from cachefs.rpc import DATASET_ADD, DATASET_LIST, WARMUP
from cachefs_daemon.datasets import records as registry
from cachefs_daemon.datasets.catalog import KEPT_GENERATIONS, Catalog, Dataset
from cachefs_daemon.datasets.open_snapshots import OpenSnapshots
from cachefs_daemon.datasets.origin_upkeep import MAX_PREPARED
from cachefs_daemon.origin.base import ObjectRange, OriginSettings
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.runtime import descriptors
from cachefs_daemon.runtime.boot_clock import now
from cachefs_daemon.runtime.threads import Threads
from tests.daemon import Daemon, block_ref
from tests.servers.scripted import silent_server
from tests.waiting import until


def with_datasets(state: Path, scene: Callable[[Catalog], Awaitable[None]]) -> None:
    with_held_snapshots(state, lambda datasets, _: scene(datasets))


def with_held_snapshots(state: Path, scene: Callable[[Catalog, OpenSnapshots], Awaitable[None]]) -> None:
    async def play() -> None:
        threads = Threads()
        held = OpenSnapshots(state / "snapshots", 1 << 20)
        datasets = Catalog(state, held, OriginSettings(), threads)
        try:
            await scene(datasets, held)
        finally:
            await datasets.close()
            threads.close()

    asyncio.run(play())


def files(state: Path) -> set[str]:
    return {path.stem for path in (state / "snapshots").iterdir()}


def test_old_snapshots_stay_while_a_mount_may_use_them(tmp_path: Path) -> None:
    origin, state = tmp_path / "origin", tmp_path / "state"
    origin.mkdir()
    (origin / "0").touch()

    async def grow(datasets: Catalog) -> None:
        await _drain(datasets.add(DatasetAddRequest(name="d", url=f"file://{origin}")))
        for number in range(1, 4):
            (origin / str(number)).touch()
            await _drain(datasets.refresh("d"))
        newest_first = [known.id for known in datasets.get("d").record.snapshots]
        assert len(newest_first) == 4
        third = newest_first[2]
        await datasets.forget_unused(
            lambda snapshot: snapshot.id == third and 0 <= now().seconds - snapshot.replaced < 60
        )
        assert [known.id for known in datasets.get("d").record.snapshots] == newest_first[:3]
        assert files(state) == set(newest_first[:3])

    async def restart(datasets: Catalog) -> None:
        newest_first = [known.id for known in datasets.get("d").record.snapshots]
        assert len(datasets.generations(datasets.get("d"))) == 3
        await datasets.forget_unused(lambda snapshot: False)
        assert files(state) == set(newest_first[:KEPT_GENERATIONS])
        assert datasets.snapshot("d").id == newest_first[0]

    with_datasets(state, grow)
    with_datasets(state, restart)


def test_two_datasets_share_a_snapshot_until_both_are_gone(tmp_path: Path) -> None:
    origin, state = tmp_path / "origin", tmp_path / "state"
    origin.mkdir()
    (origin / "file").touch()

    async def scene(datasets: Catalog) -> None:
        for name in ("a", "b"):
            await _drain(datasets.add(DatasetAddRequest(name=name, url=f"file://{origin}")))
        shared = datasets.snapshot("a").id
        await datasets.remove("a")
        assert files(state) == {shared}
        assert datasets.snapshot("b").files == 1
        await datasets.remove("b")
        assert files(state) == set()

    with_datasets(state, scene)


def test_a_dataset_that_cannot_be_used_any_more_concerns_no_other_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, state = tmp_path / "origin", tmp_path / "state"
    origin.mkdir()
    (origin / "file").write_bytes(b"x")
    with_datasets(state, lambda datasets: _drain(datasets.add(DatasetAddRequest(name="good", url=f"file://{origin}"))))
    (good,) = registry.load(state).datasets
    lost = msgspec.structs.replace(good, name="lost", snapshots=[registry.SnapshotRecord("0" * 32)])
    wrong = msgspec.structs.replace(good, name="wrong", url="ftp://nowhere")
    registry.save(state, registry.Registry([lost, wrong, good]))

    async def scene(datasets: Catalog) -> None:
        assert [dataset.record.name for dataset in datasets if dataset.current] == ["wrong", "good"]
        with pytest.raises(ConfigError, match="ftp://nowhere cannot be used"):
            await datasets.get("wrong").origin.read(ObjectRange(b"file", b"", 1, 0, 1), Deadline.after(10))

    with_datasets(state, scene)
    assert [message.partition(":")[0] for message in caplog.messages if "dataset" in message[:7]] == [
        "dataset lost", "dataset wrong",
    ]  # fmt: skip
    monkeypatch.setattr(snapshots, "verify", _no_descriptors)

    async def without_descriptors(datasets: Catalog) -> None:
        assert len(datasets) == 3
        assert not datasets.mountable()

    with_datasets(state, without_descriptors)
    assert "Too many open files" in caplog.text


def _no_descriptors(path: Path) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))


def test_not_all_descriptors_are_for_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "open_file_limit", lambda: 2)

    async def scene(datasets: Catalog) -> None:
        for name in ("a", "b"):
            (tmp_path / name / name).mkdir(parents=True)
            await _drain(datasets.add(DatasetAddRequest(name=name, url=f"file://{tmp_path}/{name}")))
        (tmp_path / "c" / "c").mkdir(parents=True)
        with pytest.raises(CachefsError, match="2 are open with a limit of 2 open files; raise"):
            await _drain(datasets.add(DatasetAddRequest(name="c", url=f"file://{tmp_path}/c")))
        assert len(datasets) == 2

    with_datasets(tmp_path / "state", scene)


def test_the_origin_of_a_removed_dataset_serves_no_other_one(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "file").write_bytes(b"x")

    async def scene(datasets: Catalog, held: OpenSnapshots) -> None:
        for name in ("a", "b"):
            await _drain(datasets.add(DatasetAddRequest(name=name, url=f"file://{origin}")))
        snapshot = datasets.snapshot("b")
        file = snapshot.find_path(b"file")
        assert file is not None
        async with contextlib.aclosing(datasets.add(DatasetAddRequest(name="c", url=f"file://{tmp_path}"))) as listing:
            await anext(listing)
            await datasets.remove("a")
            source = held.block_source(BlockRef(snapshot=snapshot.id, entry=file.number, number=0))
            assert source.origin is datasets.get("b").origin

    with_held_snapshots(tmp_path / "state", scene)


def test_changes_at_once_are_all_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "file").touch()
    state = tmp_path / "state"
    save, calls = registry.save, itertools.count()

    def first_is_slow(*args: Any) -> None:
        if next(calls) == 0:
            time.sleep(0.2)
        save(*args)

    async def scene(datasets: Catalog) -> None:
        for name in ("a", "b"):
            await _drain(datasets.add(DatasetAddRequest(name=name, url=f"file://{tmp_path}/origin")))
        monkeypatch.setattr(registry, "save", first_is_slow)
        await asyncio.gather(datasets.set_pins("a", [b"file"]), datasets.set_pins("b", [b"file"]))

    with_datasets(state, scene)
    assert [record.pins for record in registry.load(state).datasets] == [[b"file"], [b"file"]]


async def _drain(steps: AsyncIterator[ListingProgress]) -> None:
    async for _ in steps:
        pass


def test_the_daemon_shows_nothing_beyond_its_roots_and_no_link_out_of_a_dataset(tmp_path: Path) -> None:
    allowed, elsewhere = tmp_path / "allowed", tmp_path / "elsewhere"
    for directory in (allowed, elsewhere):
        directory.mkdir()
        (directory / "file").write_bytes(b"x")
    (allowed / "link").symlink_to(elsewhere / "file")
    with Daemon(tmp_path / "node", {"security": {"file_roots": [str(allowed)]}}) as daemon:
        view = daemon.add_dataset("allowed", f"file://{allowed}")
        assert (view.files, view.problems) == (1, 1)
        assert daemon.read(view, "file") == b"x"
        with pytest.raises(OriginAccessDenied, match=f"{elsewhere} is in none of security.file_roots"):
            daemon.add_dataset("elsewhere", f"file://{elsewhere}")


def test_a_file_is_never_a_mixture_of_two_with_one_size_and_mtime(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    path, fresh = origin / "file", tmp_path / "fresh"
    for one, byte in ((path, b"A"), (fresh, b"B")):
        one.write_bytes(byte * 300_000)
        os.utime(one, (1e9, 1e9))
    with Daemon(tmp_path / "node", {"daemon": {"block_size": "128KiB"}}) as daemon:
        view = daemon.add_dataset("d", f"file://{origin}")
        assert daemon.fetch(block_ref(view, "file"))[0].errno == 0
        fresh.rename(path)
        with pytest.raises(OSError, match="has changed") as raised:
            daemon.read(view, "file")
        assert raised.value.errno == errno.ESTALE
        refreshed = daemon.refresh_dataset("d")
        assert refreshed.diff is not None
        assert refreshed.dataset is not None
        assert refreshed.diff.changed == 1
        assert daemon.read(refreshed.dataset, "file") == b"B" * 300_000


def test_a_listing_ends_with_its_caller(tmp_path: Path) -> None:
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "file").touch()
    with Daemon(tmp_path / "node") as daemon, silent_server() as url:
        assert daemon.process is not None
        cachefsd = psutil.Process(daemon.process.pid)
        before = cachefsd.children()
        listing = daemon.client.stream_responses(DATASET_ADD, DatasetAddRequest(name="d", url=url), timeout=60)
        next(listing)
        listing.close()
        until(lambda: cachefsd.children() == before and not list((daemon.home / "state" / "snapshots").iterdir()))
        assert daemon.client.call(DATASET_LIST, Empty()).datasets == []
        assert daemon.add_dataset("d", f"file://{tmp_path}/origin").files == 1
        assert "Traceback" not in daemon.log.read_text()


def test_a_warmup_ends_with_its_caller(tmp_path: Path) -> None:
    for number in range(3000):
        path = tmp_path / "origin" / str(number % 10) / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 2000)
    with Daemon(tmp_path / "node", {"origin": {"max_connections": 1}}) as daemon:
        daemon.add_dataset("d", f"file://{tmp_path}/origin")
        warmup = daemon.client.stream_responses(WARMUP, WarmupRequest(dataset="d"), timeout=60)
        next(warmup)
        warmup.close()
        until(lambda: not daemon.status().warmups)
        assert "warmup 1 of d cancelled" in daemon.log.read_text()
        assert daemon.status().index_blocks < 3000
        assert "Traceback" not in daemon.log.read_text()


def test_of_what_is_mounted_origins_are_prepared_but_few_and_whatever_they_say(tmp_path: Path) -> None:
    class Reluctant:
        """The origin of a dataset, which cannot be opened."""

        prepared = 0

        async def preconnect(self) -> None:
            self.prepared += 1
            raise OSError("no route to host")

        async def close(self) -> None:
            pass

    async def scene(datasets: Catalog) -> None:
        origin: Any = Reluctant()
        for number in range(20):
            record = registry.DatasetRecord(f"d{number}", "s3://bucket", OriginOptions(), [])
            datasets._datasets[f"d{number}"] = Dataset(record, origin, None)
        datasets.prepare_origins(lambda name: name in ("d1", "d2", "other"))
        await asyncio.gather(*datasets._upkeep._preparing)
        assert origin.prepared == 2
        datasets.prepare_origins(lambda name: True)
        await asyncio.gather(*datasets._upkeep._preparing)
        assert origin.prepared == 2 + MAX_PREPARED

    with_datasets(tmp_path, scene)


@pytest.mark.parametrize(
    "url",
    [
        "https://user:hunter2@127.0.0.1:1/x", "https://127.0.0.1:1/x?sig=hunter2", "htps://user:hunter2@host/",
        "az:///?sig=hunter2", "s3:///hunter2/", "gs:///hunter2'\n", "hf://hunter2@/",
    ],
)  # fmt: skip
def test_a_refused_url_is_not_in_the_log(refusing: Daemon, url: str) -> None:
    with pytest.raises(CachefsError):
        list(refusing.client.stream_responses(DATASET_ADD, DatasetAddRequest(name="secretive", url=url)))
    log = refusing.log.read_text()
    assert "dataset secretive is not added: " in log
    assert "hunter2" not in log


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("refusing"), {}, {}) as daemon:
        yield daemon
