"""Answers to calls through the control file: each is one line, written to the FIFO that the caller named.

A caller that does not read or has gone loses its answer; the mount does not wait for it.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec
import trio

from cachefs.control_calls import MAX_LINE_BYTES, CallResponse, response_fifo_name
from cachefs.errors import CachefsError
from cachefs.job_messages import JobView
from cachefs.messages import Message

# Most characters of an error that an answer has.
_MAX_TEXT: Final = 500


class ResponseFifos:
    """Writes to the answer FIFOs of one mount."""

    def __init__(self, directory: Path) -> None:
        """directory: the control directory."""
        self._directory = directory

    async def write_response(self, token: str, answer: CallResponse) -> None:
        line = msgspec.json.encode(answer) + b"\n"
        if len(line) <= MAX_LINE_BYTES:
            await trio.to_thread.run_sync(self._write, token, line, abandon_on_cancel=True)

    def _write(self, token: str, line: bytes) -> None:
        with contextlib.suppress(OSError):
            # Neither call blocks: the open fails without a reader, the write fails where the FIFO is full.
            fd = os.open(self._directory / response_fifo_name(token), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, line)
            finally:
                os.close(fd)


def make_response(number: int, reply: Message) -> CallResponse:
    if isinstance(reply, JobView):  # the caller needs only name and state; a thousand ranks do not fit into a line
        reply = msgspec.structs.replace(reply, consumers=[], dataset="", snapshot="", source="", reason="")
    return CallResponse(number, reply=msgspec.msgpack.encode(reply))


def make_error_response(number: int, error: CachefsError) -> CallResponse:
    """Return an error answer. Unprintable characters, which a caller may have sent, become question marks."""
    text = "".join(one if one.isprintable() else "?" for one in str(error)[:_MAX_TEXT])
    return CallResponse(number, error=type(error).__name__, text=text)
