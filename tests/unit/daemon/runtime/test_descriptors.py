import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs_daemon.runtime import descriptors
from cachefs_daemon.runtime.error_log import ErrorLog
from tests import virtual_time


def test_the_soft_limit_becomes_the_hard_one() -> None:
    script = (
        "import resource\n"
        "from cachefs_daemon.runtime import descriptors\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "assert descriptors.open_file_limit() == 64\n"
        "descriptors.raise_limit()\n"
        "assert descriptors.open_file_limit() == min(hard, descriptors.WANTED_LIMIT)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_connections_that_cannot_be_taken_are_one_line_and_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.05)

    async def scene() -> None:
        loop, errors = asyncio.get_running_loop(), ErrorLog()
        descriptors.report_shortage(loop, errors)
        taken = asyncio.Event()
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(tmp_path / "s"))
        server = await asyncio.start_unix_server(lambda *_: taken.set(), sock=listening, backlog=1)
        client = socket.socket(socket.AF_UNIX)
        with at_most(3):
            client.connect(str(tmp_path / "s"))
            while not errors.views() or errors.views()[0].count < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert not taken.is_set()
        async with asyncio.timeout(20):
            await taken.wait()
        [view] = errors.views()
        assert "Too many open files" in view.message
        client.close()
        server.close()

    virtual_time.run(scene())
    [line] = caplog.records
    assert line.exc_info is None
    assert "raise the hard limit" in line.message


def test_what_else_asyncio_finds_is_logged_as_before(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        descriptors.report_shortage(loop, ErrorLog())
        loop.call_exception_handler({"message": "a callback failed", "exception": OSError(5, "other")})

    virtual_time.run(scene())
    assert "a callback failed" in caplog.text


@contextlib.contextmanager
def at_most(files: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
