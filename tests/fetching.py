"""Fetching blocks as mounts do, from tests: a blocking client of the fetch channel."""

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cachefs import errors
from cachefs.errors import DaemonUnavailable
from cachefs.fetch_frames import (
    MAX_RESPONSE_BYTES,
    VERSION,
    FetchRequestFrame,
    FetchResponseFrame,
    FrameSplitter,
    Hello,
    encode_frame,
    fetch_socket_path,
)
from cachefs.messages import BlockRef, FetchedBlock, FetchRequest


class FetchClient:
    """One connection."""

    def __init__(self, daemon_socket: Path, version: int = VERSION) -> None:
        """Raises DaemonUnavailable, and the error with which the daemon refuses."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.socket.settimeout(30)
        self._frames = FrameSplitter(MAX_RESPONSE_BYTES)
        self._bodies: list[bytes] = []
        try:
            self.socket.connect(str(fetch_socket_path(daemon_socket)))
            with contextlib.suppress(BrokenPipeError):  # a daemon that refuses has hung up, and its Hello says why
                self.socket.sendall(encode_frame(Hello(version=version)))
        except OSError as error:
            raise DaemonUnavailable(str(error)) from None
        hello = msgspec.msgpack.decode(self._body(), type=Hello)
        if hello.refusal:
            raise getattr(errors, hello.kind)(hello.refusal)

    def ask(self, number: int, fetch: FetchRequest) -> None:
        """Send a question."""
        try:
            self.socket.sendall(encode_frame(FetchRequestFrame(number=number, request=fetch)))
        except OSError as error:
            raise DaemonUnavailable(str(error)) from None

    def answer(self) -> FetchResponseFrame:
        """Wait for the next answer."""
        return msgspec.msgpack.decode(self._body(), type=FetchResponseFrame)

    def call(self, fetch: FetchRequest, timeout: float = 30) -> list[FetchedBlock]:
        """Ask, and wait for the answer. Raises as `__init__`."""
        self.socket.settimeout(timeout)
        self.ask(1, fetch)
        answer = self.answer()
        assert answer.number == 1
        if answer.kind:
            raise getattr(errors, answer.kind)(answer.message)
        return answer.blocks

    def close(self) -> None:
        self.socket.close()

    def _body(self) -> bytes:
        while not self._bodies:
            try:
                data = self.socket.recv(1 << 20)
            except OSError as error:
                raise DaemonUnavailable(str(error)) from None
            if not data:
                raise DaemonUnavailable("the daemon has hung up")
            self._bodies += self._frames.split_frames(data)
        return self._bodies.pop(0)


def fetch(daemon_socket: Path, blocks: Sequence[BlockRef], deadline: float = 20, **fields: bool) -> list[FetchedBlock]:
    """Ask once. Returns an answer for each block."""
    client = FetchClient(daemon_socket)
    try:
        return client.call(FetchRequest(blocks=list(blocks), deadline=deadline, **fields), deadline + 10)
    finally:
        client.close()
