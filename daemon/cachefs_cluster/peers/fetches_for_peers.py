"""Serves the blocks that other nodes request, as far as they are in no tier: the node's peer servers pass such requests
to its daemon."""

import asyncio
from functools import partial
from typing import Final

from cachefs_daemon.fetch.fetcher import Fetcher, PeerResultCallback

from cachefs.messages import FetchedBlock, FetchRequest
from cachefs_cluster.search.awaited_snapshots import AwaitedSnapshots
from cachefs_cluster.search.missing_snapshots import MissingSnapshots

_NO_SNAPSHOT: Final = FetchedBlock(location=b"", lacks_snapshot=True)


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
        ask = partial(self._request_now, fetch, until, on_result)
        delays = fetch.await_snapshot and self._awaited_snapshots.delay_request(fetch.blocks[0].snapshot, until, ask)
        if not delays:
            ask()

    def _request_now(self, fetch: FetchRequest, until: float, on_result: PeerResultCallback) -> None:
        snapshot = fetch.blocks[0].snapshot
        if self._awaited_snapshots.is_here(snapshot):
            self._fetcher.request_for_peer(fetch, until, on_result)
        else:
            self._missing_snapshots.note_reading_node(snapshot, fetch.peer)
            on_result([_NO_SNAPSHOT] * len(fetch.blocks))
