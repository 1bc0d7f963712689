"""Faults that the product has had, or nearly had, as patches: the simulation has to find each of them.

Each is taken from CHANGELOG.md or from reviews; docs/simulation.md has the table.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

from cachefs.errors import CachefsError
from cachefs_cluster.peers import connection
from cachefs_cluster.peers.in_flight import BytesInFlight
from cachefs_cluster.peers.rail import RailHealth
from cachefs_cluster.search.home_routes import HomeRoutes
from cachefs_cluster.search.peer_search import PeerSearch
from cachefs_cluster.search.search_state import PeerSearchState
from cachefs_daemon.datasets.stamps import Removals
from cachefs_daemon.fetch.block_fetch import BlockFetch, FetchWaiter
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter, Permit
from cachefs_daemon.fetch.in_flight import InFlightFetches
from cachefs_daemon.fetch.origin_source import OriginSource
from tests.simulation.scenario import Size

Patch = Callable[[], "contextlib.AbstractContextManager[object]"]


@dataclass(frozen=True)
class Planted:
    """A fault."""

    name: str
    # Names of the invariants of which one is broken.
    breaks: tuple[str, ...]
    # What goes wrong in the schedules that are to find it; empty: anything.
    faults: tuple[str, ...]
    patch: Patch
    # Do these schedules have more files and more faults than others? For what goes wrong with few blocks only.
    has_more: bool = False
    # Is it found in schedules of datasets? Then any faults happen.
    of_datasets: bool = False

    @property
    def size(self) -> Size:
        """The schedules that are to find it."""
        return Size(only=self.faults, files=(6, 12), events=(3, 5)) if self.has_more else Size(only=self.faults)


def _replace(owner: Any, name: str, value: Any) -> Patch:
    return lambda: mock.patch.object(owner, name, value)


@contextlib.contextmanager
def _unshared() -> Iterator[None]:
    """Begin a fetch for each reader."""
    join = InFlightFetches.join_or_start_fetch

    def join_alone(self: Any, source: Any, **how: Any) -> BlockFetch:
        self._fetches.pop(source.key, None)
        return join(self, source, **how)

    with mock.patch.object(InFlightFetches, "join_or_start_fetch", join_alone):
        yield


@contextlib.contextmanager
def _kept_permit() -> Iterator[None]:
    """Keep the slot of a fetch that fails."""
    leave = Permit.cancel_or_release

    async def run_fetch(self: Any, fetch: Any, found: Any = None) -> None:
        def leave_queue(permit: Permit) -> None:
            if permit is not fetch.permit or not isinstance(fetch.deadline.last_error, CachefsError):
                leave(permit)

        with mock.patch.object(Permit, "cancel_or_release", leave_queue):
            await original(self, fetch, found)

    original = InFlightFetches._run_fetch
    with mock.patch.object(InFlightFetches, "_run_fetch", run_fetch):
        yield


@contextlib.contextmanager
def _cancelled_permit() -> Iterator[None]:
    """Keep the place in the queue for a slot, or the slot, of a search that is cancelled."""
    cancel = PeerSearch.cancel

    def cancel_search(self: Any) -> None:
        with mock.patch.object(Permit, "cancel_or_release"):
            cancel(self)

    with mock.patch.object(PeerSearch, "cancel", cancel_search):
        yield


@contextlib.contextmanager
def _unwoken() -> Iterator[None]:
    """Wake nobody where a fetch has failed."""
    land = BlockFetch.finish

    def land_quietly(self: Any, outcome: Any) -> None:
        if isinstance(outcome, CachefsError):
            self._done_callbacks = []
        land(self, outcome)

    with mock.patch.object(BlockFetch, "finish", land_quietly):
        yield


@contextlib.contextmanager
def _answered_twice() -> Iterator[None]:
    """Answer a reader at its deadline although it was answered before."""

    def tell(self: Any, _: object = None) -> None:
        self._on_result(self._fetch)

    with mock.patch.object(FetchWaiter, "_notify", tell):
        yield


@contextlib.contextmanager
def _deadline_on_the_whole() -> Iterator[None]:
    """Take a peer for silent so long after the question, whatever signs it gives."""

    def silent_at(self: Any, node_id: str, length: int, asked: float, *, fetch: bool) -> float:
        return asked + 0.5

    with mock.patch.object(PeerSearchState, "silent_from", silent_at):
        yield


@contextlib.contextmanager
def _lost_key_check() -> Iterator[None]:
    """Take what a peer sends for the block, whatever it is."""
    with mock.patch.object(connection, "pieces_match", return_value=True):
        yield


@contextlib.contextmanager
def _short_read() -> Iterator[None]:
    """Take what an origin sends for the block, however long it is."""
    read = OriginSource._read_from_origin

    async def read_padded(self: Any, fetch: Any, parts: Any) -> Any:
        data = await read(self, fetch, parts)
        return bytes(data) + bytes(fetch.source.length - len(data))

    with mock.patch.object(OriginSource, "_read_from_origin", read_padded):
        yield


@contextlib.contextmanager
def _nobody_asked() -> Iterator[None]:
    """Fail where the origin refuses a block to this node."""
    with mock.patch.object(InFlightFetches, "_search_all_nodes", return_value=False):
        yield


@contextlib.contextmanager
def _refused_for_peer() -> Iterator[None]:
    """Tell a reader what the origin has refused to another node a moment ago (found by the simulation: seed 65)."""
    known = InFlightFetches.recent_outcome_or_source

    def known_of_all(self: Any, source: Any, looked: float, *, for_peer: bool = False) -> Any:
        return known(self, source, looked, for_peer=True)

    with mock.patch.object(InFlightFetches, "recent_outcome_or_source", known_of_all):
        yield


def _forget_removal(self: Any, name: str, added: Any, elsewhere: Any) -> Removals:
    return self  # type: ignore[no-any-return]


def _stale_home(self: Any, view: Any) -> None:
    """Go on with the ring of the start."""
    if not self._view.ring:
        ring = dataclasses.replace(self._ring)
        self._view, self._ring = view, type(ring).from_view(view, self._replicas)


def _never_alive(self: Any, *, alive: bool, now: float, chance: float) -> None:
    self._schedule_probe(now, chance)


def _held(self: Any, batch: Any, blocks: int, size: int) -> None:
    batch.bytes_left -= size


PLANTED: Final = (
    Planted("a fetch is not shared by its readers", ("single flight",), (), _unshared),
    Planted(
        "a slot is kept where its fetch has failed",
        ("nothing is left behind", "budgets are held"),
        ("change", "origin_bad"),
        _kept_permit,
    ),
    Planted("a slot is kept by a search that is cancelled", ("nothing is left behind",), (), _cancelled_permit),
    Planted("a peer's block is not checked", ("no wrong bytes",), ("rot",), _lost_key_check),
    Planted("an origin's answer that is too short is taken", ("no wrong bytes",), ("origin_bad",), _short_read),
    Planted(
        "the home of a block is taken from an old ring",
        ("each byte leaves the origin once", "one home per block and ring"),
        ("join", "leave"),
        _replace(HomeRoutes, "_on_view", _stale_home),
        has_more=True,
    ),
    Planted(
        "a reader is not woken where the fetch fails", ("errors have a cause", "a read ends"), ("change",), _unwoken
    ),
    Planted("a reader is answered twice", ("a read ends", "no internal errors"), (), _answered_twice),
    Planted(
        "a peer that brings a block has a deadline on the whole, not on signs of life",
        ("each byte leaves the origin once",),
        ("origin_slow",),
        _deadline_on_the_whole,
        has_more=True,
    ),
    Planted(
        "a peer that was away is never asked again",
        ("nodes converge",),
        ("restart", "power"),
        _replace(RailHealth, "note_probe", _never_alive),
    ),
    Planted(
        "bytes that were asked of peers stay counted",
        ("nothing is left behind",),
        (),
        _replace(BytesInFlight, "release", _held),
    ),
    Planted(
        "bytes in flight have no limit",
        ("budgets are held",),
        (),
        _replace(ConcurrencyLimiter, "_fits", lambda self, size: True),
    ),
    Planted("other nodes are not asked where the origin refuses", ("errors have a cause",), ("denied",), _nobody_asked),
    Planted(
        "what the origin refused to another node is told to readers",
        ("errors have a cause",),
        ("denied",),
        _refused_for_peer,
    ),
    Planted(
        "a removal of a dataset is forgotten",
        ("what was removed stays removed", "nodes converge"),
        (),
        _replace(Removals, "with_removal", _forget_removal),
        of_datasets=True,
    ),
)
