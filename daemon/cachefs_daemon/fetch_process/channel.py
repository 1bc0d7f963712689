"""A socket between daemon and fetch process that preserves message boundaries, and passes descriptors."""

import os
import socket
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import msgspec

from cachefs_daemon.fetch_process.frames import MAX_BYTES, MAX_SEGMENTS

# Bytes buffered in the socket: some hundred packets.
_BUFFER: Final = 4 << 20

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class ChannelClosed(Exception):
    """The other end is gone, or sent an invalid message."""


class FetchProcessChannel(Generic[Sent, Received]):
    """One end of the channel. Never blocks."""

    def __init__(self, link: socket.socket, received: type[Received]) -> None:
        """received: type of the messages from the other end."""
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._link = link
        self._decoder = msgspec.msgpack.Decoder(received)
        self._encoder = msgspec.msgpack.Encoder()

    def fileno(self) -> int:
        return self._link.fileno()

    def send(self, message: Sent, descriptors: Sequence[int] = ()) -> bool:
        """Send a message. Returns False if the channel is full, or the kernel takes no more descriptors for now. Raises
        ChannelClosed."""
        packet = self._encoder.encode(message)
        if len(packet) > MAX_BYTES:
            return False
        try:
            if descriptors:
                socket.send_fds(self._link, [packet], descriptors, socket.MSG_NOSIGNAL)
            else:
                self._link.send(packet, socket.MSG_NOSIGNAL)
        except ConnectionError as error:
            raise ChannelClosed from error
        except OSError:  # also EAGAIN, ENOBUFS, ETOOMANYREFS
            return False
        return True

    def receive(self) -> tuple[Received, list[int]] | None:
        """Return the next message and its descriptors, which the caller closes; None if there is none yet. Raises
        ChannelClosed."""
        try:
            packet, descriptors, flags, _ = socket.recv_fds(self._link, MAX_BYTES, MAX_SEGMENTS)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed from error
        try:
            if not packet or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ChannelClosed
            return self._decoder.decode(packet), descriptors
        except (ChannelClosed, msgspec.MsgspecError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ChannelClosed from error

    def close(self) -> None:
        """Close this end; the other end notices."""
        self._link.close()
