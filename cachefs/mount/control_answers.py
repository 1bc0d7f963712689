"""Answers to calls through the control file: each is a line in the FIFO that the caller has named.

Nobody waits for a caller. Where he does not read, or has gone, the answer is dropped.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec
import trio

from cachefs.control_calls import MAX_LINE_BYTES, Answer, answers_name
from cachefs.errors import CachefsError
from cachefs.job_messages import JobView
from cachefs.messages import Message

# Characters of an error that are told.
_MOST_TEXT: Final = 500


class Answers:
    """The FIFOs for answers of one mount."""

    def __init__(self, directory: Path) -> None:
        """directory: that of the control file."""
        self._directory = directory

    async def give(self, token: str, answer: Answer) -> None:
        line = msgspec.json.encode(answer) + b"\n"
        if len(line) <= MAX_LINE_BYTES:
            await trio.to_thread.run_sync(self._write, token, line, abandon_on_cancel=True)

    def _write(self, token: str, line: bytes) -> None:
        with contextlib.suppress(OSError):
            # Without a reader this fails, and so does a write to a FIFO that is full: neither waits.
            fd = os.open(self._directory / answers_name(token), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, line)
            finally:
                os.close(fd)


def replied(number: int, reply: Message) -> Answer:
    if isinstance(reply, JobView):  # the caller needs its name and its state, and a thousand ranks fill no line
        reply = msgspec.structs.replace(reply, consumers=[], dataset="", snapshot="", source="", reason="")
    return Answer(number, reply=msgspec.msgpack.encode(reply))


def failed(number: int, error: CachefsError) -> Answer:
    """What is not printable, which a caller may have sent, becomes a question mark."""
    text = "".join(one if one.isprintable() else "?" for one in str(error)[:_MOST_TEXT])
    return Answer(number, error=type(error).__name__, text=text)
