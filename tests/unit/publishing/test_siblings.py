"""What a helper tells the helpers of the job's other processes. The siblings here are sockets that nobody serves."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.inodes import inode_of
from cachefs.mount_table import MountPoint
from cachefs.publishing.channel import MAX_PACKET, SOCKET_NAME
from cachefs.publishing.files import learned as module
from cachefs.publishing.files.inference import OpenedFiles
from cachefs.publishing.mount_resolver import MountResolver
from cachefs.publishing.published_consumer import ConsumerOpening, PublishedConsumer
from cachefs.publishing.siblings import MAX_PAUSE_SECONDS, SiblingHelpers

POINT = MountPoint(Path("/mnt"), "0:1", "cachefs:images")
PLACES = MountResolver([POINT])
LENGTH = 100_000


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> PublishedConsumer:
    monkeypatch.setattr(module, "find_file", lambda path, places: (POINT, inode_of(1, int(Path(path).name))))
    return PublishedConsumer(ConsumerOpening(3, "0", "test", LENGTH, learn=True))


@contextlib.contextmanager
def sibling(directory: Path) -> Iterator[socket.socket]:
    directory.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / SOCKET_NAME))
        listener.listen(8)
        listener.settimeout(0)
        yield listener


def received(connection: socket.socket) -> list[int]:
    """The samples in a message."""
    packet, fds, _, _ = socket.recv_fds(connection, MAX_PACKET, 1)
    assert json.loads(packet) == {
        "op": "learned",
        "slot": 3,
        "length": LENGTH,
        "mounts": [["/mnt", "0:1", POINT.source]],
    }
    with open(fds[0], "rb") as file:
        file.seek(0)
        words = memoryview(file.read()).cast("q")
    return words[::2].tolist()


def learn(consumer: PublishedConsumer, pairs: list[tuple[int, list[str]]]) -> None:
    for sample, paths in pairs:
        consumer.record_opened(OpenedFiles((sample,), tuple(paths)), PLACES)


def test_each_sibling_is_told_what_it_has_not_heard(tmp_path: Path, consumer: PublishedConsumer) -> None:
    siblings = SiblingHelpers(tmp_path / "us")
    with sibling(tmp_path / "us"), sibling(tmp_path / "a") as first:
        siblings.send_learned([consumer], 0)
        learn(consumer, [(5, ["/mnt/5"]), (7, ["/mnt/1", "/mnt/2"])])
        siblings.send_learned([consumer], 1)
        a, _ = first.accept()
        assert received(a) == [5, 7, 7]
        with sibling(tmp_path / "b") as second:
            learn(consumer, [(9, ["/mnt/9"])])
            siblings.send_learned([consumer], 1.5)  # not again so soon
            siblings.send_learned([consumer], 2)
            b, _ = second.accept()
            assert (received(a), received(b)) == ([9], [5, 7, 7, 9])
            # One that has no such consumer hangs up, and is told from the start, at growing intervals.
            b.close()
            for now in range(3, 200):
                siblings.send_learned([consumer], now)
                with contextlib.suppress(BlockingIOError):
                    last, _ = second.accept()
                    heard = received(last)
                    last.close()
            assert heard == [5, 7, 7, 9]
            calls = 0
            for now in range(200, 400):
                siblings.send_learned([consumer], now)
                with contextlib.suppress(BlockingIOError):
                    second.accept()[0].close()
                    calls += 1
            assert calls <= 1 + 200 // MAX_PAUSE_SECONDS
        with pytest.raises(BlockingIOError):
            first.accept()
        a.close()


def test_one_that_does_not_listen_costs_one_connection_and_misses_nothing(
    tmp_path: Path, consumer: PublishedConsumer
) -> None:
    siblings = SiblingHelpers(tmp_path / "us")
    now = 0.0
    with sibling(tmp_path / "stuck") as listener:
        for sample in range(1000):  # more packets than fit into a socket
            learn(consumer, [(sample, [f"/mnt/{sample}"])])
            now += 1
            siblings.send_learned([consumer], now)
        connection, _ = listener.accept()
        connection.settimeout(0)
        heard = []
        while len(heard) < 1000:
            with contextlib.suppress(BlockingIOError):
                while True:
                    heard += received(connection)
            now += MAX_PAUSE_SECONDS
            siblings.send_learned([consumer], now)
        assert heard == list(range(1000))
        with pytest.raises(BlockingIOError):
            listener.accept()
        connection.close()
        # A new dataset in the same place is told from its start.
        other = PublishedConsumer(consumer.opening)
        learn(other, [(4, ["/mnt/4"])])
        siblings.send_learned([other], now + MAX_PAUSE_SECONDS)
        assert received(listener.accept()[0]) == [4]
