"""Sockets whose path others remove or take. Real sockets, and no daemon."""

import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachefs.errors import Busy, CachefsError
from cachefs_daemon.api.socket_path import SOCKET_MODE, PathOwner, SocketKeeper, SocketPath
from tests import virtual_time


class Listener:
    """Listens at a place, as the daemon does."""

    def __init__(self, path: Path, sockets: ExitStack) -> None:
        self.place = SocketPath(path)
        self.keeper = SocketKeeper(self.place, self.listen)
        self._sockets = sockets

    async def listen(self) -> None:
        self.take()

    def take(self) -> None:
        self.place.claim(lambda path: listen(path, self._sockets))

    def look(self) -> None:
        virtual_time.run(self.keeper.check())


def listen(path: str | Path, sockets: ExitStack) -> socket.socket:
    listening = sockets.enter_context(socket.socket(socket.AF_UNIX))
    listening.bind(str(path))
    listening.listen()
    return listening


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def ours(tmp_path: Path, sockets: ExitStack) -> Listener:
    listener = Listener(tmp_path / "run/s", sockets)
    listener.take()
    return listener


def test_it_is_for_everybody_and_nothing_else_is_left(ours: Listener) -> None:
    path = ours.place.path
    assert answers(path)
    assert stat.S_IMODE(path.stat().st_mode) == SOCKET_MODE
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    assert os.listdir(path.parent) == ["s"]
    ours.place.remove()
    assert os.listdir(path.parent) == []


def test_a_path_of_the_greatest_length(tmp_path: Path, sockets: ExitStack) -> None:
    listener = Listener(tmp_path / ("s" * (107 - len(str(tmp_path)) - 1)), sockets)
    listener.take()
    assert answers(listener.place.path)


def test_what_was_removed_is_made_again(ours: Listener, caplog: pytest.LogCaptureFixture) -> None:
    ours.look()
    assert caplog.messages == []
    ours.place.path.unlink()
    ours.look()
    assert answers(ours.place.path)
    ours.place.path.unlink()
    ours.place.path.parent.rmdir()
    ours.look()
    assert answers(ours.place.path)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def test_another_daemons_socket_is_never_removed(
    ours: Listener, sockets: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    path = ours.place.path
    path.unlink()
    other = listen(path, sockets)
    inode = path.stat().st_ino
    with pytest.raises(Busy, match="another daemon listens"):
        ours.take()
    for _ in range(4):
        ours.look()
    ours.place.remove()
    assert path.stat().st_ino == inode
    assert answers(path)
    [said] = caplog.messages
    assert "another daemon listens" in said
    # It was killed: its socket stays, and nobody listens there.
    other.close()
    ours.look()
    assert answers(path)
    assert ours.place.owner() == PathOwner.OURS


def test_one_that_does_not_listen_yet_is_left_alone_at_first(ours: Listener) -> None:
    path = ours.place.path
    path.unlink()
    with socket.socket(socket.AF_UNIX) as beginning:
        beginning.bind(str(path))
        ours.look()
        assert ours.place.owner() == PathOwner.TAKEN
        ours.look()
        assert ours.place.owner() == PathOwner.OURS


def test_a_file_in_the_way_is_named_once_and_waited_for(ours: Listener, caplog: pytest.LogCaptureFixture) -> None:
    path = ours.place.path
    path.unlink()
    path.touch()
    with pytest.raises(CachefsError, match="is not a socket; remove it"):
        ours.take()
    for _ in range(3):
        ours.look()
    [said] = caplog.messages
    assert "remove it" in said
    path.unlink()
    ours.look()
    assert answers(path)
