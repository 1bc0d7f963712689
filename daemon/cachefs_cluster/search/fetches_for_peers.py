"""Serves the blocks that other nodes request, as far as they are in no tier: the node's peer servers pass such requests
to its daemon.

A request for a block of a snapshot that is on its way to this node waits for the snapshot. A dataset added on one node
is known to the others about a second later, and readers of the first node begin at once. If a home answered "no such
snapshot" meanwhile, its blocks would go to other nodes, and later be fetched from the origin once more. So a request
waits here until the snapshot has arrived: a few seconds if it is on its way, and an instant if this node has not heard
of it, since the news may be on its way too. Each snapshot is waited for once: later requests are answered immediately
until it is here.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from cachefs.messages import FetchedBlock, FetchRequest
from cachefs_cluster.search.missing_snapshots import MissingSnapshots
from cachefs_daemon.fetch.fetcher import Fetcher, PeerResultCallback

# Seconds after the first request for a snapshot during which requests wait: if the snapshot is on its way (a file of a
# million entries is validated in about 3 s), and if this node has not heard of it (news takes 0.1 s).
AWAITED_SECONDS: Final = 4.0
UNKNOWN_SECONDS: Final = 0.3
# Snapshots remembered, and blocks waiting, at most: requests beyond these do not wait.
MAX_SNAPSHOTS: Final = 1024
MAX_WAITING: Final = 6144

# Continues a request, whether or not the snapshot has arrived.
Continuation = Callable[[], None]

_NO_SNAPSHOT: Final = FetchedBlock(location=b"", lacks_snapshot=True)


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    resume: Continuation
    # Loop times: of the first request for the snapshot, and of this request's deadline.
    first_request_at: float
    deadline: float
    timer: asyncio.TimerHandle = field(init=False)


class AwaitedSnapshots:
    """Waiting requests by snapshot. Used on the event loop."""

    def __init__(self, is_here: Callable[[str], bool], is_coming: Callable[[str], bool]) -> None:
        """is_coming: returns whether this node is fetching a snapshot."""
        self._is_here = is_here
        self._is_coming = is_coming
        self._first_requests: dict[str, float] = {}  # by snapshot: loop time of the first request
        self._waiting: dict[str, set[_WaitingRequest]] = {}  # by snapshot
        self._count = 0

    def has_snapshot(self, snapshot: str) -> bool:
        """Return whether the snapshot has arrived."""
        return self._is_here(snapshot)

    def delay_request(self, snapshot: str, until: float, resume: Continuation) -> bool:
        """Call *resume* once: when the snapshot has arrived, at *until* (loop time), or after the wait for the snapshot
        is over. Returns False, and never calls *resume*, if the request need not wait, or may not any more."""
        if self._is_here(snapshot):
            return False
        now = asyncio.get_running_loop().time()
        one = _WaitingRequest(resume, self._first_request_at(snapshot, now), until)
        if self._wait_end(snapshot, one) <= now or self._count >= MAX_WAITING:
            return False
        self._waiting.setdefault(snapshot, set()).add(one)
        self._count += 1
        self._schedule_check(snapshot, one, now)
        return True

    def resume_requests(self, snapshot: str) -> None:
        """Continue the requests for a snapshot that has arrived."""
        self._first_requests.pop(snapshot, None)
        waiting = self._waiting.pop(snapshot, set())
        self._count -= len(waiting)
        for one in waiting:
            one.timer.cancel()
            asyncio.get_running_loop().call_soon(one.resume)

    def _first_request_at(self, snapshot: str, now: float) -> float:
        if len(self._first_requests) >= MAX_SNAPSHOTS and snapshot not in self._first_requests:
            del self._first_requests[next(iter(self._first_requests))]
        return self._first_requests.setdefault(snapshot, now)

    def _wait_end(self, snapshot: str, one: _WaitingRequest) -> float:
        """Return the loop time at which the request stops waiting, as things are now."""
        return min(
            one.deadline, one.first_request_at + (AWAITED_SECONDS if self._is_coming(snapshot) else UNKNOWN_SECONDS)
        )

    def _schedule_check(self, snapshot: str, one: _WaitingRequest, now: float) -> None:
        """Check again later, as the snapshot may be on its way by then, or no longer."""
        when = min(self._wait_end(snapshot, one), now + UNKNOWN_SECONDS)
        one.timer = asyncio.get_running_loop().call_at(when, self._check_again, snapshot, one)

    def _check_again(self, snapshot: str, one: _WaitingRequest) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._wait_end(snapshot, one):
            self._schedule_check(snapshot, one, now)
            return
        waiting = self._waiting[snapshot]
        waiting.discard(one)
        self._count -= 1
        if not waiting:
            del self._waiting[snapshot]
        one.resume()


class FetchesForPeers:
    """Passes the requests of other nodes to the fetcher. Requests for a snapshot that is on its way to this node wait
    for it; others are told that this node lacks it. Used on the event loop."""

    def __init__(
        self, fetcher: Fetcher, awaited_snapshots: AwaitedSnapshots, missing_snapshots: MissingSnapshots
    ) -> None:
        self._fetcher = fetcher
        self._awaited_snapshots = awaited_snapshots
        self._missing_snapshots = missing_snapshots

    def request(self, fetch: FetchRequest, seconds: float, on_result: PeerResultCallback) -> None:
        """Fetch blocks for another node within *seconds* seconds, as `Fetcher.request_for_peer` does. The response may
        instead tell the other node to ask the next node, if this one lacks the snapshot."""
        until = asyncio.get_running_loop().time() + seconds
        request_now = partial(self._request_now, fetch, until, on_result)
        delays = fetch.await_snapshot and self._awaited_snapshots.delay_request(
            fetch.blocks[0].snapshot, until, request_now
        )
        if not delays:
            request_now()

    def _request_now(self, fetch: FetchRequest, until: float, on_result: PeerResultCallback) -> None:
        snapshot = fetch.blocks[0].snapshot
        if self._awaited_snapshots.has_snapshot(snapshot):
            self._fetcher.request_for_peer(fetch, until, on_result)
        else:
            self._missing_snapshots.note_reading_node(snapshot, fetch.peer)
            on_result([_NO_SNAPSHOT] * len(fetch.blocks))
