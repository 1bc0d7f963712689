"""What systemd is told."""

import socket
from pathlib import Path

import pytest

from cachefs import systemd
from cachefs.systemd import StartupTimer


def test_a_start_that_gets_on_asks_for_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "EXTENSION_INTERVAL_SECONDS", 3600.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        told.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        start = StartupTimer()
        start.extend_timeout()
        with pytest.raises(BlockingIOError):  # a short start asks for nothing
            told.recv(100)
        monkeypatch.setattr(systemd, "EXTENSION_INTERVAL_SECONDS", 0.0)
        long = StartupTimer()
        monkeypatch.setattr(systemd, "EXTENSION_INTERVAL_SECONDS", 3600.0)
        for _ in range(1000):
            long.extend_timeout()
        assert told.recv(100) == b"EXTEND_TIMEOUT_USEC=900000000"
        with pytest.raises(BlockingIOError):
            told.recv(100)
