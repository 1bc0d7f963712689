"""Answers a scrape: samples are taken on the event loop, which takes a millisecond, and a thread formats them."""

from aiohttp import web

from cachefs_daemon.metrics.busiest import BusiestDatasets
from cachefs_daemon.metrics.exposition import Exposition
from cachefs_daemon.metrics.samples import collect_samples
from cachefs_daemon.node import Node


class ScrapeHandler:
    """Handles scrapes. Used on the event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._busiest = BusiestDatasets(node.config.metrics.datasets)
        self._exposition = Exposition()
        node.fetcher.in_flight_fetches.add_block_listener(self._count_block)

    async def handle(self, request: web.Request) -> web.Response:
        """Handle `/metrics`."""
        usage = await self._node.threads.run(self._node.storage.usage)
        found = list(collect_samples(self._node, self._busiest, usage))
        accept = request.headers.get("Accept", "")
        text, content_type = await self._node.threads.run(self._exposition.format_samples, found, accept)
        return web.Response(body=text, headers={"Content-Type": content_type})

    def _count_block(self, snapshot: str, source: str, size: int) -> None:
        self._busiest.count_block(self._node.catalog.dataset_of(snapshot), source, size)
