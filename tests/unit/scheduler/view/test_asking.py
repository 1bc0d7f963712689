"""What the service says of daemons that do not answer it: which one, and the way out."""

import asyncio
import logging

import pytest
from cachefs_scheduler.config import ClusterSection, Config
from cachefs_scheduler.view.asking import Asking
from cachefs_scheduler.view.cluster_view import ClusterView
from cachefs_scheduler.view.following import Following


async def _closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")  # what is left unread would reset the connection
    writer.close()


async def _until_said(caplog: pytest.LogCaptureFixture, where: str) -> None:
    server = await asyncio.start_server(_closes, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = Config(cluster=ClusterSection(nodes=(f"127.0.0.1:{port - 1}",)))
    asking = Asking(config.cluster)
    following = asyncio.create_task(Following(ClusterView(config), asking, [("127.0.0.1", port)]).run())
    try:
        async with asyncio.timeout(20):
            while where not in caplog.text:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.02)
    finally:
        following.cancel()
        await asking.close()
        server.close()
    assert f"127.0.0.1:{port - 1}: it has closed the connection" in caplog.text


def test_a_daemon_with_certificates_closes_the_connection_of_a_service_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        asyncio.run(_until_said(caplog, "does it have certificates? Then give cluster.tls_ca"))
