"""How many origin reads run at once, and which comes next."""

import asyncio
import functools
import itertools
import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import copy_context
from dataclasses import dataclass

import pytest

from cachefs.planning.requests.request_limits import MIN_BYTES
from cachefs.planning.requests.shares import max_min_shares
from cachefs_daemon.fetch.concurrency_limiter import REQUESTER, ConcurrencyLimiter, Permit, ReadPurpose
from tests import virtual_time
from tests.waiting import until_async


@dataclass(eq=False)
class Server:
    width: int = 1000
    readahead_bytes: float = math.inf


class Crowd:
    """Tasks that ask for slots. Each keeps its slot until told to give it back."""

    def __init__(self, slots: ConcurrencyLimiter) -> None:
        self.slots = slots
        self.admitted: list[str] = []  # names of those that have a slot
        self._leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.slot_of: dict[str, Permit] = {}
        self.servers: dict[str, Server] = {}

    async def come(
        self, name: str, size: int = 1, *, ahead: bool = False, needed: float = math.inf, origin: str = ""
    ) -> None:
        self._leave[name] = asyncio.Event()
        server = self.servers.setdefault(origin, Server())
        slot = self.slots.new_permit(name.encode(), size, server, ahead=ahead, purpose=ReadPurpose(needed_at=needed))
        self.tasks[name] = asyncio.create_task(self._visit(name, slot))
        await virtual_time.settle()

    async def until_admitted(self, name: str) -> None:
        await until_async(lambda: name in self.admitted)

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await virtual_time.settle()

    async def _visit(self, name: str, slot: AbstractAsyncContextManager[Permit]) -> None:
        async with slot as self.slot_of[name]:
            self.admitted.append(name)
            try:
                await self._leave[name].wait()
            finally:
                self.admitted.remove(name)


def with_slots(slots: int, capacity: int, scene: Callable[[Crowd], Awaitable[None]]) -> None:
    async def play() -> None:
        crowd = Crowd(ConcurrencyLimiter(slots, capacity))
        await scene(crowd)
        for task in crowd.tasks.values():
            task.cancel()
        await asyncio.gather(*crowd.tasks.values(), return_exceptions=True)
        assert (crowd.slots.in_use, crowd.slots.bytes_in_use, crowd.slots.queued_ahead) == (0, 0, 0)

    virtual_time.run(play())


def test_slots_are_never_exceeded_and_the_first_to_come_goes_first() -> None:
    async def scene(crowd: Crowd) -> None:
        for name in "abcd":
            await crowd.come(name)
        assert crowd.admitted == ["a", "b"]
        await crowd.leave("b")
        assert crowd.admitted == ["a", "c"]

    with_slots(2, 100, scene)


def test_those_who_wait_take_turns_and_one_alone_is_served_as_it_came() -> None:
    async def scene(crowd: Crowd) -> None:
        await crowd.come("running")
        REQUESTER.set(1)
        for number in range(6):
            await crowd.come(f"a{number}")
        REQUESTER.set(2)
        await crowd.come("b0")
        await crowd.come("b1")
        order = []
        while crowd.admitted:
            [name] = crowd.admitted
            order.append(name)
            if name == "a1":
                REQUESTER.set(3)  # who comes later need not make up for the turns of others, nor gets these
                for number in range(3):
                    await crowd.come(f"c{number}")
            await crowd.leave(name)
        assert order == ["running", "a0", "b0", "a1", "b1", "c0", "a2", "c1", "a3", "c2", "a4", "a5"]
        assert crowd.slots._next_ranks.keys() <= {1, 2, 3}

    with_slots(1, 100, scene)


def test_of_those_who_have_waited_only_a_few_are_remembered() -> None:
    slots, server = ConcurrencyLimiter(1, 100), Server()
    slots.new_permit(b"running", 1, server, ahead=False).request(lambda: None)
    waiting: list[Permit] = []

    def play() -> None:
        for number in range(3000):
            REQUESTER.set(number)
            waiting.append(slots.new_permit(b"%d" % number, 1, server, ahead=False))
            waiting[-1].request(lambda: None)
            if number % 100 == 99:
                for one in waiting[:-1]:
                    one.cancel_or_release()  # and the next one has the slot
                del waiting[:-1]

    copy_context().run(play)
    assert len(slots._next_ranks) < 1500


def test_what_one_waits_for_comes_at_the_turn_of_another_who_wants_it_sooner() -> None:
    async def scene(crowd: Crowd) -> None:
        await crowd.come("running")
        REQUESTER.set(1)
        for number in range(6):
            await crowd.come(f"a{number}")
        crowd.slots.promote(b"a5")  # for its own asker that changes nothing
        REQUESTER.set(2)
        crowd.slots.promote(b"a4")
        order = []
        while crowd.admitted:
            [name] = crowd.admitted
            order.append(name)
            await crowd.leave(name)
        assert order == ["running", "a0", "a4", "a1", "a2", "a3", "a5"]

    with_slots(1, 100, scene)


def test_bytes_are_never_exceeded_but_by_one_alone() -> None:
    async def scene(crowd: Crowd) -> None:
        await crowd.come("a", 60)
        await crowd.come("b", 60)
        await crowd.come("c", 10)
        assert crowd.admitted == ["a"]  # c does not overtake b
        await crowd.leave("a")
        assert sorted(crowd.admitted) == ["b", "c"]
        await crowd.come("huge", 1000)
        await crowd.leave("b")
        assert crowd.admitted == ["c"]
        await crowd.leave("c")
        assert crowd.admitted == ["huge"]

    with_slots(8, 100, scene)


def test_demand_goes_before_ahead_and_finds_a_slot_kept_for_it() -> None:
    async def scene(crowd: Crowd) -> None:
        for name in ("a1", "a2", "a3", "a4", "a5"):
            await crowd.come(name, ahead=True)
        assert crowd.admitted == ["a1", "a2", "a3"]
        await crowd.come("d1")
        await crowd.come("d2")
        assert crowd.admitted == ["a1", "a2", "a3", "d1"]
        await crowd.leave("a1")
        assert crowd.admitted == ["a2", "a3", "d1", "d2"]

    with_slots(4, 100, scene)


def test_who_is_waited_for_meanwhile_goes_before_others() -> None:
    async def scene(crowd: Crowd) -> None:
        for name in ("a1", "a2", "a3"):
            await crowd.come(name, ahead=True)
        assert crowd.admitted == ["a1"]
        crowd.slots.promote(b"a3")
        await virtual_time.settle()
        assert crowd.admitted == ["a1", "a3"]
        assert crowd.slots.queued_ahead == 1

    with_slots(2, 100, scene)


def test_who_gives_up_leaves_no_trace() -> None:
    async def scene(crowd: Crowd) -> None:
        for name in "abc":
            await crowd.come(name)
        crowd.tasks["b"].cancel()
        await crowd.leave("a")
        assert crowd.admitted == ["c"]
        # Admitted and cancelled before it could notice.
        await crowd.come("d")
        crowd._leave["c"].set()
        await until_async(lambda: "c" not in crowd.admitted)
        crowd.tasks["d"].cancel()
        await virtual_time.settle()
        assert crowd.admitted == []
        await crowd.come("e")
        assert crowd.admitted == ["e"]

    with_slots(1, 100, scene)


def test_reads_ahead_are_admitted_by_the_time_they_are_needed() -> None:
    async def scene(crowd: Crowd) -> None:
        await crowd.come("first", ahead=True)
        await crowd.come("whenever", ahead=True)
        await crowd.come("later", ahead=True, needed=20.0)
        await crowd.come("soon", ahead=True, needed=10.0)
        await crowd.come("also whenever", ahead=True)
        order = []
        while crowd.admitted:
            [name] = crowd.admitted
            order.append(name)
            await crowd.leave(name)
        assert order == ["first", "soon", "later", "whenever", "also whenever"]

    with_slots(2, 100, scene)


def test_an_origin_that_hangs_holds_up_no_other_one() -> None:
    async def scene(crowd: Crowd) -> None:
        for number in range(20):
            await crowd.come(f"hung {number}", origin="hung")
        for number in range(3):
            await crowd.come(f"good {number}", 2, origin="good")
        assert [name for name in crowd.admitted if "good" in name] == ["good 0", "good 1"]
        assert crowd.slots.in_use == 16 + 2
        await crowd.leave("good 1")
        assert "good 2" in crowd.admitted
        await crowd.come("ahead", ahead=True, origin="good")
        assert "ahead" not in crowd.admitted

    with_slots(16, 100, scene)


def test_a_server_gets_no_more_reads_than_it_takes_and_holds_up_no_other_one() -> None:
    async def scene(crowd: Crowd) -> None:
        crowd.servers["busy"] = Server(2)
        for number in range(4):
            await crowd.come(f"busy {number}", ahead=number < 2, origin="busy")
        assert crowd.admitted == ["busy 0", "busy 2"]  # one of two is kept for demand
        await crowd.come("other", origin="other")
        await crowd.come("other ahead", ahead=True, origin="other")
        assert crowd.admitted[2:] == ["other", "other ahead"]
        crowd.servers["busy"].width = 1
        await crowd.leave("busy 0")
        assert "busy 3" not in crowd.admitted
        await crowd.leave("busy 2")
        assert "busy 3" in crowd.admitted
        crowd.servers["busy"].width = 4
        await crowd.leave("other")
        assert "busy 1" in crowd.admitted

    with_slots(16, 100, scene)


def test_a_slot_that_is_given_back_is_for_others_until_it_is_taken_again() -> None:
    async def scene(crowd: Crowd) -> None:
        await crowd.come("a")
        await crowd.come("b")
        assert crowd.admitted == ["a"]
        crowd.slot_of["a"].release()
        await virtual_time.settle()
        assert crowd.admitted == ["a", "b"]
        again = asyncio.create_task(crowd.slot_of["a"].acquire(ahead=False))
        await virtual_time.settle()
        assert not again.done()
        await crowd.leave("b")
        assert again.done()

    with_slots(1, 100, scene)


def test_reads_ahead_that_no_longer_wait_are_forgotten_behind_one_that_does() -> None:
    slots, server = ConcurrencyLimiter(1, 100), Server()
    slots.new_permit(b"running", 1, server, ahead=True).request(lambda: None)
    slots.new_permit(b"first", 1, server, ahead=True, purpose=ReadPurpose(needed_at=1)).request(lambda: None)
    for number in range(2000):
        one = slots.new_permit(b"%d" % number, 1, server, ahead=True)
        one.request(lambda: None)
        one.cancel_or_release()
    (lane,) = slots._queues.values()
    assert (len(lane.jobs[""].ahead.heap) < 300, slots.queued_ahead) == (True, 1)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_second_read_of_a_key_leaves_nothing_behind(ahead: bool) -> None:
    slots, server = ConcurrencyLimiter(1, 100), Server()
    running = slots.new_permit(b"running", 1, server, ahead=False)
    former, later = (slots.new_permit(b"key", 1, server, ahead=ahead) for _ in range(2))
    assert running.request(lambda: None)
    for one in (former, later):
        assert not one.request(lambda: None)
    for one in (former, later, running):
        one.cancel_or_release()
    assert (slots.in_use, slots.queued_ahead, slots._queued_demand, slots._queues) == (0, 0, 0, {})


def test_who_asks_has_a_slot_at_once_or_is_told_later() -> None:
    told: list[str] = []
    slots = ConcurrencyLimiter(1, 100)
    server = Server()
    first, second, third = (slots.new_permit(name, 1, server, ahead=False) for name in (b"1", b"2", b"3"))
    assert first.request(lambda: told.append("first"))
    assert not second.request(lambda: told.append("second"))
    assert not third.request(lambda: told.append("third"))
    second.cancel_or_release()
    assert (told, slots.in_use) == ([], 1)
    first.cancel_or_release()
    assert (told, slots.in_use) == (["third"], 1)
    first.cancel_or_release()  # it has nothing any more
    third.release()
    assert slots.in_use == slots.bytes_in_use == 0


def test_reads_ahead_have_no_more_bytes_under_way_than_their_server_is_to_have() -> None:
    async def scene(crowd: Crowd) -> None:
        crowd.servers["narrow"] = Server(readahead_bytes=10)
        for number in range(3):
            await crowd.come(f"ahead {number}", 4, ahead=True, needed=number, origin="narrow")
        assert crowd.admitted == ["ahead 0", "ahead 1"]
        await crowd.come("other", 4, ahead=True, origin="wide")
        await crowd.come("demand", 4, origin="narrow")
        assert crowd.admitted[2:] == ["other", "demand"]
        await crowd.leave("ahead 0")
        assert "ahead 2" in crowd.admitted

    with_slots(20, 1000, scene)


HALF = MIN_BYTES // 2


async def six_ahead(crowd: Crowd) -> list[str]:
    """Reads ahead of a server that is to have four of them. Returns those that are admitted."""
    crowd.servers.setdefault("narrow", Server()).readahead_bytes = 2 * MIN_BYTES
    for number in range(6):
        await crowd.come(f"ahead {number}", HALF, ahead=True, needed=number, origin="narrow")
    return [name for name in crowd.admitted if name.startswith("ahead")]


def test_beside_what_is_waited_for_a_server_has_half_of_that_and_the_rest_soon_after() -> None:
    async def scene(crowd: Crowd) -> None:
        await crowd.come("demand", 9 * MIN_BYTES, origin="narrow")
        assert await six_ahead(crowd) == ["ahead 0", "ahead 1"]
        await crowd.leave("demand")
        assert "ahead 2" not in crowd.admitted  # who has just waited waits again
        await crowd.until_admitted("ahead 3")
        assert "ahead 4" not in crowd.admitted

    with_slots(20, 1 << 40, scene)


def test_who_has_just_waited_waits_again_though_nothing_is_under_way() -> None:
    async def scene(crowd: Crowd) -> None:
        await crowd.come("demand", 4, origin="narrow")
        await crowd.leave("demand")
        assert await six_ahead(crowd) == ["ahead 0", "ahead 1"]

    with_slots(20, 1 << 40, scene)


def test_what_hangs_does_not_take_the_room_of_reads_ahead_of_an_unknown_link() -> None:
    async def scene(crowd: Crowd) -> None:
        crowd.servers["narrow"] = Server(readahead_bytes=MIN_BYTES)
        for number in range(3):
            await crowd.come(f"hangs {number}", HALF, origin="narrow")
        for number in range(20):
            await crowd.come(f"ahead {number}", HALF // 10, ahead=True, origin="narrow")
        assert len(crowd.admitted) == 3 + 20

    with_slots(40, 1 << 40, scene)


def test_a_read_that_came_along_is_waited_for() -> None:
    async def scene(crowd: Crowd) -> None:
        server = crowd.servers["narrow"] = Server()
        await crowd.come("first", 4, ahead=True, origin="narrow")
        other = crowd.slot_of["first"].split_off()
        crowd.slot_of["first"].count_as_demand()
        assert crowd.slots._queues[server].has_waiting_reader
        await crowd.leave("first")
        other.release()
        assert (crowd.slots.in_use, crowd.slots.bytes_in_use, crowd.slots.has_waiting_reader) == (0, 0, False)

    with_slots(20, 1000, scene)


def test_beside_a_read_ahead_that_somebody_comes_to_wait_for_there_are_as_few() -> None:
    async def scene(crowd: Crowd) -> None:
        crowd.servers["narrow"] = Server()
        assert len(await six_ahead(crowd)) == 4
        crowd.slot_of["ahead 0"].count_as_demand()
        assert not crowd.slots.has_waiting_reader, "it holds back none that nobody has promised to read"
        await crowd.leave("ahead 1")
        assert "ahead 4" not in crowd.admitted
        for number in (0, 2, 3):
            await crowd.leave(f"ahead {number}")
        assert crowd.admitted == ["ahead 4", "ahead 5"]
        for number in (4, 5):
            await crowd.leave(f"ahead {number}")
        assert (crowd.slots.in_use, crowd.slots.bytes_in_use, crowd.slots.has_waiting_reader) == (0, 0, False)

    with_slots(20, 1 << 40, scene)


def test_a_read_ahead_that_is_larger_than_its_server_is_to_have_goes_alone() -> None:
    async def scene(crowd: Crowd) -> None:
        crowd.servers["narrow"] = Server(readahead_bytes=10)
        await crowd.come("large", 30, ahead=True, origin="narrow")
        await crowd.come("small", 1, ahead=True, origin="narrow")
        assert crowd.admitted == ["large"]
        await crowd.leave("large")
        assert crowd.admitted == ["small"]

    with_slots(20, 1000, scene)


# --- jobs that share a server ---------------------------------------------------------------------------------------


@dataclass
class SharingJob:
    """A job that always has as many reads at a server as it may: on demand by some readers, or ahead."""

    name: str
    size: int
    readers: int = 0  # of reads on demand; 0: reads ahead
    urgent_after: float = 0.0  # seconds after the request
    until: float = math.inf  # seconds until its last request
    rate: float = math.inf  # bytes a second that it wants
    served: int = 0  # bytes


class Link:
    """A server behind a link that all reads share, chunk by chunk in turns."""

    def __init__(self, bandwidth: float, *, readahead_bytes: float = 8 << 20, weights: dict[str, float] | None = None):
        self.slots = ConcurrencyLimiter(64, 256 << 20)
        self.slots.weights.update(weights or {})
        self.server = Server(64, readahead_bytes)
        self._bandwidth = bandwidth
        self._sending: deque[tuple[Permit, int, SharingJob]] = deque()
        self._wake = asyncio.Event()
        self._number = itertools.count()
        self.sent = 0

    async def send(self) -> None:
        while True:
            while not self._sending:
                self._wake.clear()
                await self._wake.wait()
            permit, left, job = self._sending.popleft()
            chunk = min(left, 64 << 10)
            await asyncio.sleep(chunk / self._bandwidth)
            self.sent += chunk
            job.served += chunk
            if left > chunk:
                self._sending.append((permit, left - chunk, job))
                continue
            permit.release()

    async def read(self, job: SharingJob, *, ahead: bool) -> None:
        now = asyncio.get_running_loop().time()
        permit = self.slots.new_permit(
            next(self._number).to_bytes(8, "big"), job.size, self.server, ahead=ahead,
            purpose=ReadPurpose(job.name, now + 0.1, now + job.urgent_after),
        )  # fmt: skip
        await permit.acquire(ahead=ahead)
        done = asyncio.Event()
        release = permit.release

        def released() -> None:
            release()
            done.set()

        self._sending.append((_Released(released), job.size, job))  # type: ignore[arg-type]
        self._wake.set()
        await done.wait()


@dataclass
class _Released:
    release: Callable[[], None]


def share(link: Callable[[], Link], jobs: list[SharingJob], seconds: float = 20.0) -> Link:
    """Let *jobs* read for some seconds of virtual time."""

    async def reader(link: Link, job: SharingJob, width: int) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        end = due + job.until
        while loop.time() < end:
            await asyncio.sleep(max(0.0, due - loop.time()))
            due += width * job.size / job.rate if job.rate < math.inf else 0.0
            await link.read(job, ahead=not job.readers)

    async def play() -> Link:
        made = link()
        tasks = [asyncio.create_task(made.send())]
        for job in jobs:
            width = job.readers or 72
            tasks += [asyncio.create_task(reader(made, job, width)) for _ in range(width)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return made

    return virtual_time.run(play())


MB = 1_000_000


@pytest.mark.parametrize("weights", [{}, {"large": 2.0}, {"small": 3.0, "waiting": 2.0}])
def test_jobs_share_a_server_by_bytes_whatever_the_sizes_of_their_reads(weights: dict[str, float]) -> None:
    jobs = [
        SharingJob("large", 4 << 20),
        SharingJob("small", 30_000),
        SharingJob("waiting", 110_000, readers=32),
    ]
    made = share(lambda: Link(40 * MB, weights=weights), jobs)
    assert made.sent > 0.99 * 40 * MB * 20
    expected = max_min_shares({job.name: math.inf for job in jobs}, weights, made.sent)
    assert {job.name: job.served for job in jobs} == pytest.approx(expected, rel=0.08)


def test_readers_with_many_large_reads_get_no_more_than_their_share_beside_reads_ahead() -> None:
    jobs = [SharingJob("ahead", 110_000), SharingJob("", 4 << 20, readers=60)]
    share(lambda: Link(40 * MB), jobs)
    assert jobs[0].served == pytest.approx(jobs[1].served, rel=0.1)


def test_what_one_job_does_not_want_goes_to_the_others_at_once() -> None:
    jobs = [
        SharingJob("3x", 110_000),
        SharingJob("ends", 110_000, until=10.0),
        SharingJob("slow", 110_000, readers=8, rate=4 * MB),
    ]
    made = share(lambda: Link(40 * MB), jobs)
    assert made.sent > 0.99 * 40 * MB * 20
    assert jobs[2].served == pytest.approx(4 * MB * 20, rel=0.05)
    assert jobs[1].served == pytest.approx(18 * MB * 10, rel=0.05)
    assert jobs[0].served == pytest.approx(18 * MB * 10 + 36 * MB * 10, rel=0.05)


def test_a_job_that_has_time_gives_way_to_all_that_need_their_reads_now() -> None:
    jobs = [
        SharingJob("has time", 110_000, urgent_after=1e6),
        SharingJob("late", 110_000, until=10.0),
        SharingJob("waits", 110_000, readers=40, until=10.0),
    ]
    made = share(lambda: Link(40 * MB), jobs)
    assert jobs[0].served == pytest.approx(40 * MB * 10, rel=0.05)
    assert jobs[1].served == pytest.approx(20 * MB * 10, rel=0.05)
    assert made.sent > 0.99 * 40 * MB * 20


def test_reads_on_demand_do_not_wait_for_the_share_of_reads_ahead_that_hang() -> None:
    async def scene() -> None:
        slots, server = ConcurrencyLimiter(64, 1 << 30), Server(64, MIN_BYTES)
        hanging = [
            slots.new_permit(b"a%d" % number, 4 << 20, server, ahead=True, purpose=ReadPurpose("ahead", 0.0, 0.0))
            for number in range(8)
        ]
        held = [one.request(lambda: None) for one in hanging]
        assert held == [True] * 2 + [False] * 6
        admitted: list[int] = []
        for number in range(8):
            one = slots.new_permit(b"d%d" % number, 4 << 20, server, ahead=False, purpose=ReadPurpose("reader"))
            if one.request(functools.partial(admitted.append, number)):
                admitted.append(number)
            if number == 0:
                one.release()  # the server answers, so the next ones wait for the share of the others
        assert len(admitted) < 8
        await asyncio.sleep(1.0)
        assert len(admitted) == 8

    virtual_time.run(scene())
