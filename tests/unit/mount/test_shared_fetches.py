"""Reads that wait for the daemon: how long, and which share their waiting."""

import contextlib
import errno
import math
from typing import Any, cast

import pytest
import trio
import trio.testing

from cachefs.block import MEMORY, BlockLocation
from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.messages import BlockRef, FetchedBlock, FetchRequest
from cachefs.mount.reads import read_records
from cachefs.mount.reads.fetch_channel import FetchChannelClient, SharedFetches
from cachefs.mount.reads.read_records import ReadMarks

KEY = b"k" * 16 + bytes(4)
REF = BlockRef(snapshot="s", entry=1, number=0)
PLACE = BlockLocation(MEMORY, 1, 2, 3, bytes(8))
DEADLINE = 10.0


class Daemon:
    """Answers each call with the next of *answers*: a reply, None for silence, or an error. Stands in for a
    FetchChannelClient."""

    is_disconnected = False

    def __init__(self, *answers: FetchedBlock | Exception | None) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def call(self, fetch: FetchRequest, seconds: float) -> list[FetchedBlock]:
        self.asked += 1
        await trio.sleep(0.1)
        answer = self.answers.pop(0)
        if isinstance(answer, FetchedBlock) and answer.message == "at the deadline":
            await trio.sleep(seconds - 0.5)
        if answer is None:
            await trio.sleep(seconds - 0.1)
            raise DaemonUnavailable("away")
        if isinstance(answer, Exception):
            raise answer
        return [answer]


class Forgetful:
    """Marks that are gone at once: the others go by the clock of the machine."""

    def set(self, key: bytes) -> None:
        pass

    def age(self, key: bytes) -> float:
        return math.inf


def fetches(daemon: Daemon, marks: ReadMarks | None = None) -> SharedFetches:
    return SharedFetches(
        cast(FetchChannelClient, daemon), marks or ReadMarks(read_records.create_read_marks()), lambda *_: None
    )


def run(test: Any) -> None:
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


def test_who_comes_later_waits_on_when_the_time_of_the_first_is_over() -> None:
    async def test() -> None:
        daemon = Daemon(None, FetchedBlock(PLACE.pack()))
        ours = fetches(daemon, cast(ReadMarks, Forgetful()))
        found: list[object] = []

        async def read(after: float) -> None:
            await trio.sleep(after)
            try:
                found.append(await ours.fetch_block(KEY, REF, trio.current_time() + DEADLINE))
            except CachefsError as error:
                found.append(type(error))

        async with trio.open_nursery() as nursery:
            for after in (0, 5, 6):
                nursery.start_soon(read, after)
        assert found == [DaemonUnavailable, FetchedBlock(PLACE.pack()), FetchedBlock(PLACE.pack())]
        assert daemon.asked == 2

    run(test)


@pytest.mark.parametrize("failure", [None, FetchedBlock(b"", errno.EIO, "at the deadline")], ids=["daemon", "origin"])
def test_what_one_worker_has_waited_for_in_vain_no_other_waits_for_again(failure: FetchedBlock | None) -> None:
    async def test() -> None:
        shared = ReadMarks(read_records.create_read_marks())
        one = fetches(Daemon(failure), shared)
        with pytest.raises(CachefsError):
            await one.fetch_block(KEY, REF, trio.current_time() + DEADLINE)
        other = Daemon()
        began = trio.current_time()
        with pytest.raises(DaemonUnavailable):
            await fetches(other, shared).fetch_block(KEY, REF, trio.current_time() + DEADLINE)
        assert (other.asked, trio.current_time()) == (0, began)

    run(test)


@pytest.mark.parametrize("answer", [FetchedBlock(b"", errno.EIO, "at once"), FetchedBlock(PLACE.pack())])
def test_what_has_failed_early_or_came_is_asked_for_by_other_workers(answer: FetchedBlock) -> None:
    async def test() -> None:
        shared = ReadMarks(read_records.create_read_marks())
        with contextlib.suppress(CachefsError):
            await fetches(Daemon(answer), shared).fetch_block(KEY, REF, trio.current_time() + DEADLINE)
        found = await fetches(Daemon(FetchedBlock(PLACE.pack())), shared).fetch_block(
            KEY, REF, trio.current_time() + DEADLINE
        )
        assert found.location == PLACE.pack()

    run(test)


def test_the_reason_of_the_daemon_is_the_readers() -> None:
    async def test() -> None:
        ours = fetches(Daemon(FetchedBlock(b"", 116, "it has changed")))
        with pytest.raises(CachefsError, match="changed") as caught:
            await ours.fetch_block(KEY, REF, trio.current_time() + DEADLINE)
        assert caught.value.errno == 116

    run(test)
