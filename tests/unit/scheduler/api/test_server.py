"""Where the API listens."""

import socket
from pathlib import Path

import pytest

from cachefs.errors import AlreadyExists
from cachefs_scheduler.api.server import _remove_stale_socket


def test_a_socket_that_nobody_listens_on_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    _remove_stale_socket(path)
    assert not path.exists()


def test_a_service_that_is_too_busy_to_answer_keeps_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    waiting = []
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        try:
            while True:  # until no more may wait
                client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                waiting.append(client)
                try:
                    client.connect(str(path))
                except BlockingIOError:
                    break
            with pytest.raises(AlreadyExists, match="another cachefs-scheduler answers"):
                _remove_stale_socket(path)
            assert path.exists()
        finally:
            for client in waiting:
                client.close()
