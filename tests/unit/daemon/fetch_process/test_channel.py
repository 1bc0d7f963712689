"""The channel to a fetch process: whole messages with their descriptors, or none; and no descriptor is left open."""

import os
import socket
from collections.abc import Iterator

import pytest

from cachefs_daemon.fetch_process.channel import ChannelClosed, FetchProcessChannel
from cachefs_daemon.fetch_process.frames import (
    MAX_BYTES,
    BlockFailed,
    BlockWritten,
    CommandBatch,
    FetchReport,
    SegmentToWrite,
)
from cachefs_daemon.runtime import descriptors

Ours = FetchProcessChannel[CommandBatch, FetchReport]
Theirs = FetchProcessChannel[FetchReport, CommandBatch]


@pytest.fixture
def links() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def ends(links: tuple[socket.socket, socket.socket]) -> tuple[Ours, Theirs]:
    return FetchProcessChannel(links[0], FetchReport), FetchProcessChannel(links[1], CommandBatch)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_messages_arrive_with_their_descriptors(ends: tuple[Ours, Theirs]) -> None:
    ours, theirs = ends
    assert theirs.receive() is None
    reading, writing = os.pipe()
    batch = CommandBatch([], [SegmentToWrite(7, False)], [])
    assert ours.send(batch, [writing])
    os.close(writing)
    received = theirs.receive()
    assert received is not None
    assert received[0] == batch
    (descriptor,) = received[1]
    os.write(descriptor, b"x")
    assert os.read(reading, 2) == b"x"
    os.close(descriptor)
    os.close(reading)
    report = FetchReport([BlockWritten(1, b"checksum", 0.5)], [BlockFailed(2, "why not", True)])
    assert theirs.send(report)
    assert ours.receive() == (report, [])


def test_a_channel_that_is_full_says_so_and_goes_on(ends: tuple[Ours, Theirs]) -> None:
    ours, theirs = ends
    sent = 0
    while theirs.send(FetchReport([BlockWritten(sent, b"c" * 4096, 0.0)])):
        sent += 1
    for number in range(sent):
        received = ours.receive()
        assert received is not None
        assert received[0].done[0].number == number
    assert ours.receive() is None
    assert theirs.send(FetchReport())


def test_a_message_that_is_too_large_is_not_sent(ends: tuple[Ours, Theirs]) -> None:
    ours, theirs = ends
    assert not theirs.send(FetchReport([BlockWritten(1, b"c" * MAX_BYTES, 0.0)]))
    assert ours.receive() is None


def test_the_end_of_the_other_side_is_noticed(ends: tuple[Ours, Theirs]) -> None:
    ours, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.receive()
    with pytest.raises(ChannelClosed):
        ours.send(CommandBatch([], [], []))


@pytest.mark.parametrize("packet", [b"\xc1", b"\x93", b"x" * (MAX_BYTES + 1), b"\x91\x01"])
def test_nonsense_ends_it_and_leaves_no_descriptor_open(
    packet: bytes, links: tuple[socket.socket, socket.socket], ends: tuple[Ours, Theirs]
) -> None:
    descriptors.raise_limit()
    before = open_files()
    with open("/dev/null", "rb") as file:
        socket.send_fds(links[0], [packet], [file.fileno()])
    with pytest.raises(ChannelClosed):
        ends[1].receive()
    assert open_files() == before
