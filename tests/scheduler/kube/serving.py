"""The extender with TLS on loopback, in a thread with a loop of its own, as kube-scheduler meets it."""

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import msgspec

from cachefs_scheduler.config import KubeSection
from cachefs_scheduler.kube.integration import KubeIntegration, open_integration
from tests.advising import FakeAdvisor
from tests.certificates import Authority

NAME = "cachefs-scheduler.cachefs.svc"


@dataclass(frozen=True, slots=True)
class Served:
    """A service that runs."""

    port: int
    context: ssl.SSLContext
    advice: FakeAdvisor
    part: KubeIntegration
    section: KubeSection

    def connect(self, seconds: float = 60) -> HTTPSConnection:
        """A connection of a client that knows the authority, and checks the name."""
        connection = HTTPSConnection("127.0.0.1", self.port, timeout=seconds, context=self.context)
        connection._tunnel_host = NAME  # type: ignore[attr-defined]  # whose name the certificate must have
        connection._tunnel = lambda: None  # type: ignore[attr-defined]
        return connection

    def ask(self, verb: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer."""
        connection = self.connect()
        try:
            connection.request("POST", f"/{verb}", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def answer(self, verb: str, body: bytes) -> Any:
        """What it answers with 200."""
        status, found = self.ask(verb, body)
        assert status == 200, found
        return msgspec.json.decode(found)

    def scores(self, body: bytes) -> dict[str, int]:
        return {entry["Host"]: entry["Score"] for entry in self.answer("prioritize", body)}


@contextmanager
def serving(directory: Path, advice: FakeAdvisor, **settings: Any) -> Iterator[Served]:
    """settings: of [kube]."""
    files = Authority(directory / "authority").issue(NAME)
    section = KubeSection(listen="127.0.0.1:0", tls_cert=files.cert, tls_key=files.key, **settings)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="extender", daemon=True)
    thread.start()

    async def opened() -> KubeIntegration:
        part = open_integration(section, advice, lambda: "the_rest 1\n")
        await part.start()
        return part

    part = asyncio.run_coroutine_threadsafe(opened(), loop).result(60)
    try:
        yield Served(part.server.port, _context(files.ca), advice, part, section)
    finally:
        asyncio.run_coroutine_threadsafe(part.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def _context(ca: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    # Python 3.13 and later want more in certificates than those of tests have.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
