"""The log of a mount in the background."""

import logging
import socket
import threading
from pathlib import Path

from cachefs.mount.cli import Syslog


def test_a_system_log_that_takes_no_lines_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(tmp_path / "log"))
        handler = Syslog(str(tmp_path / "log"))
        handler.handleError = lambda record: lost.append(record)  # type: ignore[method-assign]
        lost: list[logging.LogRecord] = []

        def write() -> None:
            while not lost:
                handler.emit(logging.makeLogRecord({"msg": "x" * 1000}))

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(20)
        assert lost
        log.recv(2000)
        lost.clear()
        handler.emit(logging.makeLogRecord({"msg": "again"}))
        assert not lost
        handler.close()
