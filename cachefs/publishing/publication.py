"""Publishes the sequence of one consumer from its training process."""

import os
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import index
from types import TracebackType
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from cachefs.publishing.channel import HelperChannel, MessageKind, own_channel, process_name, warn_once
from cachefs.publishing.job_exceptions import is_from_job, suppress_own
from cachefs.publishing.page import MAX_NUMBER, LoaderCounts
from cachefs.publishing.rank import find_rank

# Maximum bits of a number in a message.
_MAX_BITS: Final = 64
# Fields of an opening that are numbers, and the minimum of each.
_NUMBER_FIELDS: Final = {"length": 0, "world_size": 1, "workers": 0, "batch_size": 1, "prefetch": 0}


class Publication:
    """Publishes what one consumer will read, epoch by epoch. Made by `cachefs.publish`.

    No method waits or raises. Invalid input is left out, and where publishing itself fails the publication ends; the
    first failure prints one line on stderr. In a forked child a publication begins anew, as a consumer of that process.
    """

    def __init__(
        self,
        files: Sequence[str],
        opening: Mapping[str, Any],
        *,
        rank: Any = None,
        name: Any = None,
    ) -> None:
        """files: path of each sample; empty where they are learned or lie below opening["tree"]; opening: fields of
        cachefs.publishing.published_consumer.ConsumerOpening; rank: None for that of the environment; name: of the
        consumer, None for one made of the rank or the process number."""
        self._files = files
        self._opening = dict(opening)
        self._rank = rank
        self._name = name
        self._channel: HelperChannel | None = None
        self._slot = -1
        self._is_open = True
        self._open_consumer()

    @classmethod
    def failed(cls, problem: object) -> "Publication":
        """Return a publication that has failed from the start, and print the problem on stderr."""
        failed = cls.__new__(cls)
        failed._slot = -1
        failed._fail(problem)
        return failed

    def __enter__(self) -> "Publication":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def slot(self) -> int:
        return self._slot

    def order(self, epoch: int, samples: Any, part: tuple[int, int] | None = None) -> None:
        """Publish the order of one epoch, as the epoch begins, or before.

        Args:
            epoch: Number of the epoch, counted from 0.
            samples: The epoch's samples in the order in which they will be read: integers, any sequence.
            part: Where *samples* are only a part of an epoch of the job: the number of that epoch, and how many of its
                samples come before.
        """
        try:
            number, order = _checked_number("epoch", epoch, 0), as_order(samples)
        except Exception as error:
            if is_from_job(error):
                raise
            _warn(f"cannot publish the order of epoch {epoch!r:.80}", error)
            return
        self._send_message({"op": MessageKind.ORDER, "epoch": number, "part": part}, order)

    def sampler(self, spec: Mapping[str, Any], epoch: int = 0) -> None:
        """Publish a sampler from which all epochs follow.

        Args:
            spec: The fields of a SamplerSpec.
            epoch: Number of the epoch that begins.
        """
        try:
            fields = {name: value if isinstance(value, (str, bool)) else index(value) for name, value in spec.items()}
            if any(not isinstance(value, str) and value.bit_length() > _MAX_BITS for value in fields.values()):
                raise ValueError(f"a number of more than {_MAX_BITS} bits")
            number = _checked_number("epoch", epoch, 0)
        except Exception as error:
            if is_from_job(error):
                raise
            _warn("cannot publish a sampler", error)
            return
        self._send_message({"op": MessageKind.SPEC, "spec": fields, "epoch": number})

    def publish_columns(self, length: int, described: Sequence[tuple[str, bool, int]], bulk: bytes) -> None:
        """Publish a dataset's columns. described: name, whether it is of numbers, and bytes in *bulk* of each
        column."""
        self._send_message({"op": MessageKind.COLUMNS, "length": length, "columns": described}, bulk)

    def publish_note(self, unknown: str, opened: str = "") -> None:
        """Publish what is not understood of the consumer (diagnostics.UnknownProperty, or ""). opened: a file that it
        reads."""
        self._send_message({"op": MessageKind.NOTE, "unknown": unknown, "opened": opened})

    def progress(self, epoch: int, position: int) -> None:
        """Publish the position in an epoch. Takes less than a microsecond: call it for every batch.

        Args:
            epoch: Number of the epoch, counted from 0.
            position: Number of samples of the epoch that were read.
        """
        channel = self._channel
        if channel is None or not channel.is_ours:
            return
        try:
            channel.page.set_position(self._slot, index(epoch), index(position))
            channel.print_helper_lines()
        except Exception as error:
            if is_from_job(error):
                raise
            _warn("cannot publish how far the job is", error)

    def publish_counts(self, counts: LoaderCounts) -> None:
        """Publish what the consumer's loader has delivered, and how long that took."""
        if self._channel is not None and self._channel.is_ours and self._slot >= 0:
            self._channel.page.set_counts(self._slot, counts)

    def close(self) -> None:
        """End the consumer at once."""
        if self._is_open and self._channel is not None and self._channel.is_ours:
            self._send_message({"op": MessageKind.CLOSE, "after": 0.0})
            if self._channel is not None:
                self._channel.release_slot(self._slot)
        self._is_open = False

    def record_end(self) -> None:
        """Record that the loader has ended. The helper ends the consumer unless another one replaces it soon. Never
        sends, prints, waits or takes a lock, as Python may be collecting garbage in the middle of anything."""
        if self._is_open and self._channel is not None and self._channel.is_ours:
            self._channel.page.set_ended(self._slot)
            self._channel.release_slot(self._slot)
            self._is_open = False

    def _open_consumer(self) -> None:
        try:
            self._channel = own_channel()
            self._slot = self._channel.take_slot()
            self._channel.page.clear_slot(self._slot)
            message = {"op": MessageKind.OPEN, "opening": self._opening_fields(self._channel)}
            self._channel.connection.send(message, _join_paths(self._files))
        except Exception as error:
            if is_from_job(error):
                self._release_slot()
                raise
            self._fail(error)

    def _release_slot(self) -> None:
        """Release the slot. A later consumer in the slot replaces one that was only half opened."""
        if self._channel is not None and self._slot >= 0:
            self._channel.release_slot(self._slot)
        self._channel, self._is_open = None, False

    def _opening_fields(self, channel: HelperChannel) -> dict[str, Any]:
        """Return the fields of Opening. Raises TypeError and ValueError for invalid input."""
        opening = {
            "source": "cachefs.publish",
            "length": len(self._files),
            **self._opening,
        }
        opening["cwd"] = working_directory(chain(self._files, [opening.get("tree") or "/"]))
        for field, least in _NUMBER_FIELDS.items():
            if field in opening:
                opening[field] = _checked_number(field, opening[field], least)
        rank, world_size = find_rank()
        if self._rank is not None:
            rank, world_size = _checked_number("rank", self._rank, 0), opening.get("world_size", 1)
        name = self._name
        if name is None:
            # Processes of one job without a rank, or with the same rank, differ in their process numbers.
            own = f"pid-{process_name()}"
            name = own if rank is None else str(rank) if channel.claim_rank(rank) else f"{rank}.{own}"
            name += f".{self._slot}" if self._slot else ""
        return {**opening, "slot": self._slot, "name": str(name), "rank": rank or 0, "world_size": world_size}

    def _send_message(self, message: dict[str, Any], bulk: Any = None) -> None:
        if not self._is_open:
            return
        if self._channel is not None and not self._channel.is_ours:
            self._open_consumer()
        if self._channel is not None and not self._channel.is_closed:
            try:
                self._channel.print_helper_lines()
                self._channel.connection.send({**message, "slot": self._slot}, bulk)
            except Exception as error:
                if is_from_job(error):
                    raise
                self._fail(error)

    def _fail(self, problem: object) -> None:
        self._channel = None
        self._is_open = False
        _warn("cannot publish", problem)


def close_after(owner: Any, publication: Publication) -> None:
    """Close the publication once *owner*, a part of a loader, is collected, in this process only. A script may make a
    loader anew for each epoch, so its consumer ends only some seconds later."""
    weakref.finalize(owner, _record_end, publication, os.getpid()).atexit = False


def _record_end(publication: Publication, process: int) -> None:
    if os.getpid() == process:
        publication.record_end()


def _warn(what: str, problem: object) -> None:
    with suppress_own(Exception):  # the text of a problem may come from code of the job
        warn_once(f"{what} ({str(problem) or type(problem).__name__})")


def _checked_number(field: str, value: Any, least: int) -> int:
    """Return an integer. Raises TypeError where *value* is none, ValueError where it is too small or too large."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{field} is {value!r:.80}, which is not an integer") from None
    if not least <= number < MAX_NUMBER:
        shown = str(number) if number.bit_length() <= _MAX_BITS else f"a number of {number.bit_length()} bits"
        raise ValueError(f"{field} is {shown}, which is not between {least} and 2^32 - 2")
    return number


def _join_paths(files: Sequence[str]) -> bytes | None:
    """Return the paths separated by NUL; None without any. Raises ValueError for a path with a NUL."""
    if not files:
        return None
    joined = "\0".join(files).encode(errors="surrogateescape")
    if joined.count(b"\0") != len(files) - 1:
        raise ValueError("a path with a NUL in it")
    return joined


def as_order(samples: Any) -> NDArray[numpy.uint32]:
    """Return sample numbers, shape (n,), uint32. Raises TypeError for other than integers, ValueError and OverflowError
    for integers that are no sample numbers."""
    if hasattr(samples, "__array__"):
        numbers = numpy.asarray(samples).reshape(-1)
        if numbers.dtype.kind not in "iu" and len(numbers):
            raise TypeError(f"samples of type {numbers.dtype}, which are not integers")
    else:
        # Accepts only objects with __index__: no float, and no text.
        numbers = numpy.frombuffer(array("q", samples), dtype=numpy.int64)
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) <= MAX_NUMBER:
        raise ValueError("sample numbers that are not between 0 and 2^32 - 1")
    return numpy.ascontiguousarray(numbers, dtype="<u4")


def working_directory(paths: Iterable[str]) -> str:
    """Return the directory of relative *paths*. Raises FileNotFoundError where it was deleted, and is needed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        if all(path.startswith("/") for path in paths):
            return "/"
        raise
