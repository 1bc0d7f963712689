"""Fetch processes that fail, stand still and die: each block comes all the same, is right, and no room is lost."""

import asyncio
import logging
import os
import signal
import sys
import zlib
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from typing import Any

import pytest

from cachefs.block import MEMORY, SSD, BlockLocation
from cachefs.errors import ObjectChanged
from cachefs.messages import BlockRef, DatasetView, OriginOptions, WarmupRequest
from cachefs.planning.eviction.quotas import Quota
from cachefs.rpc import WARMUP
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch import fetch_processes
from cachefs_daemon.fetch.block_fetch import BlockFetchOutcome
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.fetch.fetch_parts import FetchCounts, FetchParts, SourceLookups
from cachefs_daemon.fetch.fetch_processes import FetchProcesses
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.origin.base import ObjectRange, OriginSettings
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.kinds import open_origin
from cachefs_daemon.origin.s3 import get as s3_get
from cachefs_daemon.origin.s3.origin import S3Origin
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.segment_writer import PAGE, span
from tests.blockstore import OpenStore, data_of, disk_usage, key_of, opened, store_config
from tests.daemon import Daemon
from tests.servers import faulty
from tests.servers.faulty import Fault, FaultyProxy
from tests.servers.s3 import S3Server
from tests.servers.scripted import scripted
from tests.waiting import until, until_async

COUNT = 40
CERTIFICATE = Path(faulty.__file__).parent / "localhost.pem"
SIZE = 100_000
# Serves to learn how the bucket is asked for.
FIRST = 0


@pytest.fixture(scope="module")
def bucket(rclone: S3Server) -> str:
    rclone.create_bucket("carried")
    rclone.put("carried", {f"{number:03}": data_of(number, SIZE) for number in range(COUNT + 1)})
    return "carried"


@pytest.fixture
def proxy(rclone: S3Server) -> Iterator[FaultyProxy]:
    with faulty.running(rclone.endpoint) as running:
        yield running


@pytest.fixture(autouse=True)
def _account(rclone: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rclone.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3_get, "_PREPARED_SECONDS", 1e6)
    monkeypatch.setattr(fetch_processes, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(fetch_processes, "_MIN_RESTART_PAUSE", 0.0)
    # On a busy machine a process may get no processor for seconds. Tests of a silent one set shorter times.
    monkeypatch.setattr(fetch_processes, "_SILENT_SECONDS", 60.0)
    monkeypatch.setattr(fetch_processes, "_STORE_SECONDS", 60.0)


class Bench:
    """A fetcher with a fetch process, over a real store and a real server."""

    def __init__(self, store: OpenStore, origin: S3Origin, threads: Threads, count: int) -> None:
        self.store = store
        self.origin = origin
        self.errors = ErrorLog()
        self.listed: dict[int, ObjectRange] = {}
        counts, limiter = FetchCounts(), ConcurrencyLimiter(32, 1 << 30)
        self.carrying = FetchProcesses(store.storage.reservations, threads, self.errors, counts, count, 20)
        self.fetcher = Fetcher(
            FetchParts(
                store.blocks,
                SourceLookups(self.source),
                threads,
                limiter,
                self.errors,
                20,
                fetch_in_process=self.carrying.try_fetch,
                counts=counts,
            )
        )

    async def prepare(self, *, ready: bool = True) -> None:
        """List the bucket, learn the way to it, and wait until a process is *ready*."""
        async for batch in self.origin.list(lambda key, reason: None):
            for one in batch:
                self.listed[int(one.key)] = ObjectRange(one.key, one.version, one.size, 0, one.size)
        await self.fetcher.fetch_ahead([ref(FIRST)])
        await until_async(lambda: self.origin.prepare_get(self.listed[FIRST]) is not None)
        self.carrying._start_missing_processes()
        if ready:
            await until_async(lambda: self.carrying._least_busy_process() is not None)

    def source(self, ref: BlockRef) -> BlockSource:
        return BlockSource(key_of(ref.entry), self.origin, self.listed[ref.entry], ref.snapshot)

    @property
    def pid(self) -> int:
        return self.carrying.status()[0].pid

    @property
    def carried(self) -> int:
        return sum(one.blocks for one in self.carrying.status())

    async def settled(self) -> None:
        """Wait until no process has anything to do, and all that it had is entered or given back."""
        await until_async(lambda: not any(one.in_flight for one in self.carrying.status()) and not self.carrying._tasks)

    async def check(self, numbers: Sequence[int], outcomes: list[BlockFetchOutcome]) -> None:
        """All blocks are there and right, and there is no room that belongs to none."""
        for number, outcome in zip(numbers, outcomes, strict=True):
            assert isinstance(outcome, BlockLocation), (number, outcome)
            assert self.store.read(key_of(number), outcome) == data_of(number, SIZE)
        await self.settled()
        assert_nothing_lost(self.store)
        assert all(not state.writers for state in self.store.storage._tiers[MEMORY]._segments.values())


def assert_nothing_lost(store: OpenStore) -> None:
    """No room belongs to no block."""
    live = len(store.storage._tiers[MEMORY].live_segments())
    assert store.usage()[MEMORY].used == len(store.keys()) * span(SIZE) + PAGE * live


def ref(number: int) -> BlockRef:
    return BlockRef("snapshot", number, 0)


def refs(numbers: range) -> list[BlockRef]:
    return [ref(number) for number in numbers]


Scene = Callable[[Bench], Awaitable[None]]


async def with_process(store: OpenStore, options: OriginOptions, scene: Scene, count: int = 1) -> None:
    origin = open_origin("s3://carried", options, OriginSettings())
    assert isinstance(origin, S3Origin)
    threads = Threads()
    bench = Bench(store, origin, threads, count)
    pids: list[int] = []
    try:
        await asyncio.wait_for(scene(bench), 120)
    finally:
        pids.extend(one.process.pid for one in bench.carrying._processes)
        await bench.fetcher.close()
        await bench.carrying.close()
        await origin.close()
        threads.close()
    assert not any(map(is_there, pids))


def play(root: Path, endpoint: str, scene: Scene, **sizes: Any) -> None:
    options = OriginOptions(endpoint_url=endpoint, addressing_style="path")
    with opened(store_config(root, **{"memory": 16 << 20, "ssd": 0, **sizes})) as store:
        asyncio.run(with_process(store, options, scene))


ALL = range(1, COUNT + 1)


def test_blocks_that_nobody_waits_for_come_through_a_process(root: Path, proxy: FaultyProxy, bucket: str) -> None:
    async def scene(bench: Bench) -> None:
        await bench.prepare()
        asked = bench.origin.requests
        outcomes = await bench.fetcher.fetch_ahead(refs(ALL))
        await bench.check(ALL, outcomes)
        assert (bench.carried, bench.fetcher.fetched_blocks) == (COUNT, COUNT + 1)
        assert (bench.origin.requests - asked, bench.origin.errors) == (COUNT, 0)
        assert bench.fetcher.in_flight == (0, 0)
        assert len([path for method, path in proxy.requests if method == "GET" and "list" not in path]) == COUNT + 1

    play(root, proxy.endpoint, scene)


def test_a_client_that_only_processes_use_is_not_closed(root: Path, proxy: FaultyProxy, bucket: str) -> None:
    async def scene(bench: Bench) -> None:
        await bench.prepare()
        connection = bench.origin._connection
        client = connection.current
        assert client is not None
        client.used -= 1e6
        await bench.fetcher.fetch_ahead(refs(ALL))
        assert bench.carried == COUNT
        connection._close_if_idle(client)
        assert connection.current is client

    play(root, proxy.endpoint, scene)


def test_a_read_on_demand_is_the_daemons_own(root: Path, proxy: FaultyProxy, bucket: str) -> None:
    async def scene(bench: Bench) -> None:
        await bench.prepare()
        await bench.fetcher.fetch_on_demand([ref(1)], 20)
        assert bench.carried == 0

    play(root, proxy.endpoint, scene)


# Of one answer each; the next one is right.
FAULTS = {
    "another ETag": Fault(headers={"ETag": '"another"'}),
    "no ETag": Fault(headers={"ETag": ""}),
    "a wrong byte": Fault(headers={"x-amz-checksum-crc32": b64encode(zlib.crc32(b"?").to_bytes(4, "big")).decode()}),
    "cut short": Fault(truncate=500),
    "dropped": Fault(drop=True),
    "reset": Fault(drop=True, reset=True),
    "too long": Fault(extra=b"!"),
    "too short": Fault(replace=b"hello"),
    "refused": Fault(status=403),
    "failed": Fault(status=500),
    "in chunks": Fault(chunked=True),
    "nonsense before": Fault(before=b"HTTP/1.1 100 Continue\r\n folded\r\n\r\n"),
}


def test_what_a_process_cannot_bring_comes_all_the_same(root: Path, proxy: FaultyProxy, bucket: str) -> None:
    async def scene(bench: Bench) -> None:
        await bench.prepare()
        proxy.add(*(replace(fault, path=f"/{number:03}") for number, fault in enumerate(FAULTS.values(), start=1)))
        outcomes = await bench.fetcher.fetch_ahead(refs(ALL))
        await bench.check(ALL, outcomes)
        assert all(fault.times == 0 for fault in proxy._faults)
        # One block more was seen once, beside twelve test processes.
        assert COUNT - len(FAULTS) <= bench.carried < COUNT
        assert bench.origin.errors >= len(FAULTS)

    play(root, proxy.endpoint, scene)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_refuses_since_there_are_too_many_is_heard(
    status: int, root: Path, proxy: FaultyProxy, bucket: str
) -> None:
    async def scene(bench: Bench) -> None:
        await bench.prepare()
        proxy.add(*(Fault(path=f"/{number:03}", status=status) for number in range(1, 6)))
        outcomes = await bench.fetcher.fetch_ahead(refs(ALL))
        await bench.check(ALL, outcomes)
        assert bench.origin.endpoint.throttled == 5
        # While requests must wait for their turn, they are the daemon's own.
        assert bench.origin.prepare_get(bench.listed[FIRST]) is None

    play(root, proxy.endpoint, scene)


def test_an_object_that_has_changed_is_said_so(root: Path, proxy: FaultyProxy, bucket: str) -> None:
    async def scene(bench: Bench) -> None:
        await bench.prepare()
        proxy.add(Fault(path="/003", headers={"ETag": '"another"'}, times=None))
        outcomes = await bench.fetcher.fetch_ahead(refs(ALL))
        assert isinstance(outcomes.pop(2), ObjectChanged)
        unchanged = [number for number in ALL if number != 3]
        await bench.check(unchanged, outcomes)
        # Where the process is late, as on a busy machine, the daemon fetches blocks itself.
        assert 0 < bench.carried < COUNT
        assert len(bench.store.keys()) == COUNT

    play(root, proxy.endpoint, scene)


def test_a_process_that_is_killed_loses_nothing_and_is_replaced(
    root: Path, proxy: FaultyProxy, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(bench: Bench) -> None:
        await bench.prepare()
        for number in (1, 2):  # one that does not end by itself, and the one after it
            numbers = range(1, 11) if number == 1 else range(11, 21)
            proxy.add(*(Fault(path=f"/{n:03}", delay=60) for n in numbers))
            killed, asked = bench.pid, len(proxy.requests)
            ahead = asyncio.ensure_future(bench.fetcher.fetch_ahead(refs(numbers)))
            await until_async(lambda asked=asked: len(proxy.requests) >= asked + 10)  # type: ignore[misc]
            os.kill(killed, signal.SIGKILL)
            outcomes = await ahead
            await until_async(lambda: not bench.carrying._processes)
            await bench.check(numbers, outcomes)
            bench.carrying._start_missing_processes()
            await until_async(lambda: bench.carrying._least_busy_process() is not None)
        outcomes = await bench.fetcher.fetch_ahead(refs(range(21, 31)))
        await bench.check(range(21, 31), outcomes)
        assert bench.carried == 10

    with caplog.at_level(logging.WARNING):
        play(root, proxy.endpoint, scene)
    assert len([one for one in caplog.records if "a fetch process failed" in one.message]) == 1


@pytest.mark.parametrize("kept", [False, True], ids=["it goes on", "it does not"])
def test_a_process_that_stands_still_delays_no_reader(
    kept: bool, root: Path, proxy: FaultyProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_processes, "_SILENT_SECONDS", 1e6)
    monkeypatch.setattr(fetch_processes, "_DEAD_SECONDS", 1e6)
    monkeypatch.setattr(Endpoint, "late_after", lambda endpoint, size: 0.0)

    async def scene(bench: Bench) -> None:
        await bench.prepare()
        os.kill(bench.pid, signal.SIGSTOP)
        ahead = asyncio.ensure_future(bench.fetcher.fetch_ahead(refs(ALL)))
        await until_async(lambda: bench.carrying.status()[0].in_flight == bench.fetcher.ahead_permits)
        outcomes = await bench.fetcher.fetch_on_demand(refs(ALL), 20)
        assert all(isinstance(one, BlockLocation) for one in outcomes)
        assert await ahead == outcomes
        if kept:
            return  # it is killed in the end, stopped as it is
        os.kill(bench.pid, signal.SIGCONT)
        await bench.check(ALL, [one for one in outcomes if isinstance(one, BlockLocation)])
        assert bench.fetcher.fetched_blocks == COUNT + 1

    play(root, proxy.endpoint, scene)


def test_what_a_process_that_stands_still_was_to_bring_comes_though_nobody_waits(
    root: Path, proxy: FaultyProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(bench: Bench) -> None:
        await bench.prepare()
        monkeypatch.setattr(fetch_processes, "_SILENT_SECONDS", 0.05)
        monkeypatch.setattr(fetch_processes, "_DEAD_SECONDS", 0.5)
        stopped = bench.pid
        os.kill(stopped, signal.SIGSTOP)
        outcomes = await bench.fetcher.fetch_ahead(refs(ALL))
        # It is killed, and another one may have been started since.
        await until_async(lambda: stopped not in [one.process.pid for one in bench.carrying._processes])
        await bench.check(ALL, outcomes)

    play(root, proxy.endpoint, scene)


@pytest.mark.parametrize("program", ["/nonexistent/python", "/bin/false"])
def test_without_processes_everything_works_and_the_log_says_so_once(
    program: str, root: Path, proxy: FaultyProxy, bucket: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "executable", program)

    async def scene(bench: Bench) -> None:
        await bench.prepare(ready=False)
        for half in (range(1, 21), range(21, COUNT + 1)):
            outcomes = await bench.fetcher.fetch_ahead(refs(half))
            await until_async(lambda: not bench.carrying._is_starting and not bench.carrying._processes)
            await bench.check(half, outcomes)

    with caplog.at_level(logging.DEBUG):
        play(root, proxy.endpoint, scene)
    said = [one.levelno for one in caplog.records if "a fetch process failed" in one.message]
    assert said.count(logging.WARNING) == 1
    assert len(said) > 1


def test_a_process_with_nothing_to_do_ends_and_the_log_says_nothing(
    root: Path, proxy: FaultyProxy, bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(bench: Bench) -> None:
        await bench.prepare()
        monkeypatch.setattr(fetch_processes, "_IDLE_SECONDS", 0.0)
        await until_async(lambda: not bench.carrying._processes)

    with caplog.at_level(logging.INFO):
        play(root, proxy.endpoint, scene)
    assert not [one for one in caplog.records if "fetch process" in one.message]


def test_blocks_that_no_tier_takes_are_refused_as_ever(root: Path, proxy: FaultyProxy, bucket: str) -> None:
    async def scene(bench: Bench) -> None:
        await bench.prepare()
        outcomes = await bench.fetcher.fetch_ahead(refs(ALL))
        assert outcomes.count(None) > 5
        await bench.settled()
        assert_nothing_lost(bench.store)

    play(root, proxy.endpoint, scene, memory=3 << 20)


def test_others_are_evicted_for_what_a_process_brings(root: Path, proxy: FaultyProxy, bucket: str) -> None:
    async def scene(bench: Bench) -> None:
        await bench.prepare()
        for first in range(1, COUNT, 8):
            outcomes = await bench.fetcher.fetch_ahead(refs(range(first, first + 8)))
            assert all(isinstance(one, BlockLocation) for one in outcomes)
        await bench.settled()
        tiers = bench.store.usage()
        assert bench.carried == COUNT
        assert sum(tier.blocks for tier in tiers) == len(bench.store.keys()) < COUNT
        assert all(tier.used <= tier.limit for tier in tiers)
        assert tiers[SSD].blocks
        for number in ALL:
            place = bench.store.get(key_of(number))
            assert place is None or bench.store.read(key_of(number), place) == data_of(number, SIZE)

    play(root, proxy.endpoint, scene, memory=2 << 20, ssd=3 << 19, policy="lru", segment=1 << 19)


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_dataset_may_take_is_kept(killed: bool, root: Path, proxy: FaultyProxy, bucket: str) -> None:
    async def scene(bench: Bench) -> None:
        bench.store.set_limit(Quota("d", frozenset({"snapshot"}), share=0.5))
        await bench.prepare()
        if killed:
            proxy.add(*(Fault(path=f"/{number:03}", delay=60) for number in range(1, 11)))
        asked = len(proxy.requests)
        ahead = asyncio.ensure_future(bench.fetcher.fetch_ahead(refs(range(1, 11))))
        if killed:
            await until_async(lambda: len(proxy.requests) >= asked + 10)
            os.kill(bench.pid, signal.SIGKILL)
        await bench.check(range(1, 11), await ahead)
        limited = bench.store.tiering.unlocked.quotas._limited["d"]
        assert not limited.being_written
        assert limited.used[MEMORY] == sum(size for _, size in limited.kept.values())
        assert len(limited.last_read) == len(limited.kept)

    play(root, proxy.endpoint, scene)


def test_other_credentials_are_used_at_once(root: Path, proxy: FaultyProxy, bucket: str) -> None:
    async def scene(bench: Bench) -> None:
        await bench.prepare()
        client = bench.origin._connection.current
        assert client is not None
        good = client.own_client._credentials.frozen
        client.own_client._credentials.frozen = good._replace(secret_key="wrong")
        client.own_client._accesses.clear()
        await client.own_client._find_access("carried")
        await bench.fetcher.fetch_ahead(refs(range(1, 6)))
        assert bench.carried == 0
        client.own_client._credentials.frozen = good
        client.own_client._accesses.clear()
        await bench.fetcher.fetch_on_demand([ref(6)], 20)  # learns the way again, if need be with another client
        outcomes = await bench.fetcher.fetch_ahead(refs(range(11, 21)))
        assert bench.carried == 10
        await bench.check(range(11, 21), outcomes)

    play(root, proxy.endpoint, scene)


def test_what_was_written_when_the_daemon_was_killed_is_found_at_the_next_start(
    root: Path, proxy: FaultyProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that is killed has entered nothing of what its processes have written."""
    forgotten = BlockLocation(MEMORY, 0, 0, 0, b"")

    async def scene(bench: Bench) -> None:
        await bench.prepare()
        reservations = bench.store.storage.reservations
        monkeypatch.setattr(reservations, "publish_blocks", lambda written: [forgotten] * len(written))
        proxy.add(*(Fault(path=f"/{number:03}", delay=60, times=None) for number in range(31, COUNT + 1)))
        ahead = asyncio.ensure_future(bench.fetcher.fetch_ahead(refs(ALL)))
        await until_async(lambda: bench.carried >= 22)
        ahead.cancel()

    play(root, proxy.endpoint, scene)
    with opened(store_config(root, memory=16 << 20, ssd=0)) as store:
        found = {number for number in ALL if store.get(key_of(number)) is not None}
        assert len(found) >= 22
        for number in found:
            place = store.get(key_of(number))
            assert place is not None
            assert store.read(key_of(number), place) == data_of(number, SIZE)
        assert_nothing_lost(store)
        assert disk_usage(root / "memory") <= store.usage()[MEMORY].used + PAGE


def test_servers_with_tls_and_without_credentials(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = data_of(1, SIZE)
    context = SSLContext(PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(CERTIFICATE))

    def script(request: str) -> Iterable[bytes]:
        assert "authorization" not in request.lower()
        return [b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\nETag: "e"\r\n\r\n' % SIZE + body]

    async def scene(bench: Bench) -> None:
        bench.listed = {number: ObjectRange(b"%d" % number, b"e", SIZE, 0, SIZE) for number in ALL}
        await bench.fetcher.fetch_ahead([ref(2)])
        bench.carrying._start_missing_processes()
        await until_async(lambda: bench.carrying._least_busy_process() is not None)
        outcomes = await bench.fetcher.fetch_ahead([ref(1)])
        await bench.check(range(1, 2), outcomes)
        assert bench.carried == 1

    async def run(store: OpenStore) -> None:
        async with scripted(script, context) as server:
            options = OriginOptions(endpoint_url=f"https://localhost:{server.port}", anonymous=True)
            await with_process(store, options, scene)

    with opened(store_config(root, memory=16 << 20, ssd=0)) as store:
        asyncio.run(run(store))


# --- with a daemon ----------------------------------------------------------------------------------------------------


@pytest.fixture
def daemon(tmp_path: Path, rclone: S3Server) -> Iterator[Daemon]:
    with Daemon(tmp_path / "node", {"prefetch": {"guess": False, "processes": 2}}, rclone.environment) as running:
        yield running


def under_way(daemon: Daemon, proxy: FaultyProxy) -> DatasetView:
    """A warm-up of which half is brought, and the other half is under way in fetch processes."""
    view = daemon.add_dataset("d", "s3://carried", OriginOptions(endpoint_url=proxy.endpoint, addressing_style="path"))
    # The first one shows the way, and with the next one processes are started.
    for number in (FIRST, 1):
        warm(daemon, number)
    until(lambda: len(daemon.status().fetch_processes) == 2)
    warm(daemon, 2)  # credentials are looked at again where that was long ago
    proxy.add(*(Fault(path=f"/{number:03}", delay=60) for number in ALL if number > COUNT // 2))
    list(daemon.client.stream_responses(WARMUP, WarmupRequest(dataset="d", wait=False)))
    until(lambda: carried_by(daemon) and sum(one.in_flight for one in daemon.status().fetch_processes) >= 5)
    return view


def warm(daemon: Daemon, number: int) -> None:
    list(daemon.client.stream_responses(WARMUP, WarmupRequest(dataset="d", paths=[b"%03d" % number], wait=True)))


def carried_by(daemon: Daemon) -> int:
    return sum(one.blocks for one in daemon.status().fetch_processes)


def is_there(pid: int) -> bool:
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def test_a_daemon_that_is_killed_leaves_no_process_and_loses_nothing(
    daemon: Daemon, proxy: FaultyProxy, bucket: str
) -> None:
    view = under_way(daemon, proxy)
    pids = [one.pid for one in daemon.status().fetch_processes]
    os.kill(pids[0], signal.SIGSTOP)
    daemon.kill9()
    until(lambda: not any(map(is_there, pids)))
    proxy.clear()
    daemon.start()
    for number in ALL:
        assert daemon.read(view, f"{number:03}") == data_of(number, SIZE)
    (memory, *_) = daemon.status().tiers
    assert disk_usage(daemon.memory) <= memory.used + PAGE


def test_systemd_stops_all_at_once_and_the_log_has_nothing_to_say(
    daemon: Daemon, proxy: FaultyProxy, bucket: str
) -> None:
    under_way(daemon, proxy)
    pids = [one.pid for one in daemon.status().fetch_processes]
    said = len(daemon.log.read_text())
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert daemon.stop() == 0
    assert not any(map(is_there, pids))
    log = daemon.log.read_text()[said:]
    assert not [line for line in log.splitlines() if "WARNING" in line or "ERROR" in line or "Traceback" in line]
