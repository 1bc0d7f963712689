"""What this machine's programs and browsers may read, and where: metrics, the web page. Both may have one address."""

from cachefs_daemon.api.local_http import LocalHttp
from cachefs_daemon.local_listen import UNIX
from cachefs_daemon.metrics.scrape import Scrape
from cachefs_daemon.node import Node
from cachefs_daemon.web.page import WebPage


class LocalPages:
    """Used on the event loop."""

    def __init__(self, node: Node) -> None:
        metrics, web = node.config.metrics.listen, node.config.web.listen
        self._servers: dict[str, LocalHttp] = {}  # by address
        self._page: WebPage | None = None
        # For people: what there is, and where.
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
        """Raises CachefsError where it cannot listen there."""
        for server in self._servers.values():
            await server.start()

    async def run(self) -> None:
        """Keeps what the page shows of the past. Runs as long as the daemon, or has nothing to do."""
        if self._page is not None:
            await self._page.run()

    async def stop(self) -> None:
        for server in self._servers.values():
            await server.stop()
