"""Lines of the control file on their way to the daemon."""

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import trio
import trio.testing

from cachefs.control_calls import RequestEnd, RequestPart
from cachefs.errors import CachefsError, ConfigError, DaemonUnavailable
from cachefs.job_messages import JobProgress, JobPublication
from cachefs.messages import Empty
from cachefs.mount.control import line_reader
from cachefs.mount.control.calls import ControlCall, decode_line, translate_call, translate_line
from cachefs.mount.control.line_reader import ControlReader, LineQueue, ResponseFifos
from cachefs.mount.daemon_link import DaemonLink
from cachefs.rpc import JOB_PUBLISH


class Daemon:
    """Stands in for a DaemonLink."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.is_there = trio.Event()

    async def call(self, method: object, request: object, seconds: float) -> object:
        with trio.move_on_after(seconds):
            await self.is_there.wait()
            self.told.append(request)
            return Empty()
        raise DaemonUnavailable("away")


def _understood(line: bytes) -> ControlCall:
    found = decode_line(line)
    assert not isinstance(found, RequestPart | RequestEnd)
    return translate_line(found, {"tree": "snapshot"})


def said(**fields: object) -> ControlCall:
    return _understood(json.dumps(fields).encode())


def beat(job: str, position: int, consumer: str = "0") -> ControlCall:
    return said(op="progress", job=job, position=position, consumer=consumer)


def run(test: Callable[[Daemon, LineQueue], Awaitable[None]]) -> Daemon:
    async def inside() -> Daemon:
        daemon = Daemon()
        async with trio.open_nursery() as nursery:
            outbox = LineQueue(cast(DaemonLink, daemon), nursery, ResponseFifos(Path("nowhere")))
            await test(daemon, outbox)
            daemon.is_there.set()
            await outbox.empty.wait()
        return daemon

    return trio.run(inside, clock=trio.testing.MockClock(autojump_threshold=0))


def positions(daemon: Daemon) -> list[tuple[str, int]]:
    return [(one.consumer, one.position) for one in daemon.told if isinstance(one, JobProgress)]


def test_of_heartbeats_only_the_latest_of_each_consumer_waits() -> None:
    async def test(daemon: Daemon, outbox: LineQueue) -> None:
        outbox.queue_line(beat("a", 0), 10)
        await trio.testing.wait_all_tasks_blocked()  # that one is on its way
        for position in range(1, 5000):
            outbox.queue_line(beat("a", position, str(position % 2)), 10)
        outbox.queue_line(said(op="progress", job="a", ended=True), 10)
        outbox.queue_line(beat("a", 7), 10)

    assert positions(run(test)) == [("0", 0), ("1", 4999), ("0", 0), ("0", 7)]


def test_where_too_much_waits_lines_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_reader, "MAX_LINES", 3)
    monkeypatch.setattr(line_reader, "MAX_BYTES", 100)

    async def test(daemon: Daemon, outbox: LineQueue) -> None:
        outbox.queue_line(beat("a", 1), 40)
        with pytest.raises(CachefsError, match="too many lines"):
            outbox.queue_line(beat("b", 1), 61)
        outbox.queue_line(beat("b", 1), 40)
        outbox.queue_line(beat("c", 1), 1)
        with pytest.raises(CachefsError, match="too many lines"):
            outbox.queue_line(beat("d", 1), 1)
        outbox.queue_line(beat("c", 2), 1)

    assert sorted(one.job for one in run(test).told) == ["a", "b", "c"]


def test_the_user_who_has_most_of_the_room_loses_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_reader, "MAX_LINES", 20)
    monkeypatch.setattr(line_reader, "MAX_BYTES", 1000)

    async def test(daemon: Daemon, outbox: LineQueue) -> None:
        for number in range(20):
            outbox.queue_line(beat(f"flood{number}", 1), 50, 1000)
        outbox.queue_line(beat("mine", 1), 500, 2000)
        outbox.queue_line(beat("unknown", 1), 1)
        for number in range(20):
            with pytest.raises(CachefsError, match="too many lines"):
                outbox.queue_line(beat(f"more{number}", 1), 50, 1000)

    told = [one.job for one in run(test).told]
    assert {"mine", "unknown"} < set(told)
    assert len(told) == 2 + 9


def test_a_line_waits_for_the_daemon_for_a_while_and_jobs_not_for_each_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(daemon: Daemon, outbox: LineQueue) -> None:
        began = trio.current_time()
        for job in "abc":
            for consumer in "01":
                outbox.queue_line(beat(job, 1, consumer), 10)
        await outbox.empty.wait()
        assert trio.current_time() - began == line_reader.CALL_SECONDS

    assert run(test).told == []
    assert len(caplog.records) == 6


@pytest.mark.parametrize("user", [None, 1000])
def test_who_has_sent_a_call_is_what_the_kernel_says_and_not_what_the_call_says(user: int | None) -> None:
    request = msgspec.msgpack.encode(JobPublication(job="a", dataset="tree", snapshot="snapshot", sent_by=0))
    call = RequestEnd("0" * 9, 1, JOB_PUBLISH.name, len(request), 0, request)
    told = translate_call(call, request, {"tree": "snapshot"}, user)
    assert isinstance(told.request, JobPublication)
    assert told.request.sent_by == user


def test_lines_are_found_in_what_a_pipe_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(line_reader, "MAX_LINE", 200_000)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    found: list[bytes] = []
    ours = ControlReader(Path("fifo"), -1, dict)

    async def take(line: bytes, _: LineQueue) -> None:
        found.append(line)

    monkeypatch.setattr(ours, "_process_line", take)
    lines = [b"one", b"x" * 150_000, b"", b"y" * 300_000, b"two", b"the last"]

    async def write() -> None:
        await trio.to_thread.run_sync(os.write, writer, b"")
        with os.fdopen(writer, "wb", buffering=0) as pipe:
            rest = memoryview(b"\n".join(lines))
            while rest:
                rest = rest[await trio.to_thread.run_sync(pipe.write, rest) :]

    async def test() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            assert await ours._read_lines(reader, cast(LineQueue, None))

    trio.run(test)
    os.close(reader)
    assert [line for line in found if line] == [lines[0], lines[1], lines[4], lines[5]]
    assert "longer than 200000 bytes" in caplog.text


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b"nonsense", "malformed"),
        (b'{"op": "progress", "job": "x", "epoch": 99999999999999999999999}', "more than 64 bits"),
        (b'{"op": "epoch", "job": "x", "epoch": 0, "order": [-1]}', "bounds"),
        (b'{"op": "publish", "job": "x", "dataset": "no"}', "name one of tree"),
        (b'{"op": "publish", "job": "\xff"}', "(?i)utf-8"),
        (b'{"op": "publish", "job": "%s"}' % (b"x" * 129), "length <= 128"),
        (b'{"op": "publish", "job": "x", "consumer": "%s"}' % (b"x" * 257), "length <= 256"),
        (b'{"op": "epoch", "job": "%s", "epoch": 0, "order": []}' % (b"x" * 129), "length <= 128"),
        (b'{"op": "progress", "job": "x", "consumer": "%s"}' % (b"x" * 257), "length <= 256"),
    ],
)
def test_what_makes_no_sense_is_one_error(line: bytes, wrong: str) -> None:
    with pytest.raises(CachefsError, match=wrong) as caught:
        _understood(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", [b"?" * 100_000, json.dumps({"op": "publish", "a\nforged" * 10_000: 1}).encode()])
def test_what_is_logged_of_a_line_is_short_and_one_line(line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def test(daemon: Daemon, outbox: LineQueue) -> None:
        await ControlReader(Path("fifo"), -1, dict)._process_line(line, outbox)

    run(test)
    (message,) = caplog.messages
    assert len(message) < 1000
    assert message.isprintable()


def test_what_is_logged_of_a_failure_is_short_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def test(daemon: Daemon, outbox: LineQueue) -> None:
        async def fail(*_: object) -> None:
            raise DaemonUnavailable("a\nforged" * 10_000)

        daemon.call = fail  # type: ignore[assignment,method-assign]
        outbox.queue_line(beat("\x1b" * 128, 1), 10)

    run(test)
    (message,) = caplog.messages
    assert len(message) < 1000
    assert message.isprintable()


def test_the_error_is_of_the_caller() -> None:
    with pytest.raises(ConfigError):
        _understood(b"")
