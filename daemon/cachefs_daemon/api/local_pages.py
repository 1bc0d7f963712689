"""The local HTTP pages of the daemon: metrics and the web page, which may share an address."""

from cachefs_daemon.api.local_http import LocalHttpServer
from cachefs_daemon.local_listen import UNIX
from cachefs_daemon.metrics.scrape import ScrapeHandler
from cachefs_daemon.node import Node
from cachefs_daemon.web.page import WebPage


class LocalPages:
    """Serves metrics and web page, as far as they are configured. Used on the event loop."""

    def __init__(self, node: Node) -> None:
        metrics, web = node.config.metrics.listen, node.config.web.listen
        self._servers: dict[str, LocalHttpServer] = {}  # by address
        self._page: WebPage | None = None
        # The pages and their addresses, for messages.
        self.descriptions: list[str] = []
        if metrics:
            self._server_at(metrics, "metrics.listen").add_route("/metrics", ScrapeHandler(node).handle)
            self.descriptions.append(f"metrics on {metrics}")
        if web:
            self._page = WebPage(node)
            for path, handler in self._page.handlers.items():
                self._server_at(web, "web.listen").add_route(path, handler)
            self.descriptions.append(f"web page on {web if web.startswith(UNIX) else f'http://{web}/'}")

    def _server_at(self, listen: str, key: str) -> LocalHttpServer:
        if listen not in self._servers:
            self._servers[listen] = LocalHttpServer(listen, key)
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
