"""The local HTTP pages of the daemon: metrics and the web page, which may share an address."""

from cachefs_daemon.api.local_http import LocalHttp
from cachefs_daemon.local_listen import UNIX
from cachefs_daemon.metrics.scrape import Scrape
from cachefs_daemon.node import Node
from cachefs_daemon.web.page import WebPage


class LocalPages:
    """Serves metrics and web page, as far as they are configured. Used on the event loop."""

    def __init__(self, node: Node) -> None:
        metrics, web = node.config.metrics.listen, node.config.web.listen
        self._servers: dict[str, LocalHttp] = {}  # by address
        self._page: WebPage | None = None
        # The pages and their addresses, for messages.
        self.places: list[str] = []
        if metrics:
            self._at(metrics, "metrics.listen").add("/metrics", Scrape(node).answer)
            self.places.append(f"metrics on {metrics}")
        if web:
            self._page = WebPage(node)
            for path, handler in self._page.handlers.items():
                self._at(web, "web.listen").add(path, handler)
            self.places.append(f"web page on {web if web.startswith(UNIX) else f'http://{web}/'}")

    def _at(self, listen: str, key: str) -> LocalHttp:
        if listen not in self._servers:
            self._servers[listen] = LocalHttp(listen, key)
        return self._servers[listen]

    async def start(self) -> None:
        """Listen. Raises CachefsError where that fails."""
        for server in self._servers.values():
            await server.start()

    async def run(self) -> None:
        """Record the history for the web page, as long as the daemon runs; return at once without a page."""
        if self._page is not None:
            await self._page.run()

    async def stop(self) -> None:
        for server in self._servers.values():
            await server.stop()
