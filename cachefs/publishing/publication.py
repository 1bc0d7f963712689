"""One consumer's sequence, as the training process that has it publishes it."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy
from numpy.typing import NDArray

from cachefs.publishing.channel import Channel, Line, Op, Unheard, channel, warn

# Environment variables in which launchers of distributed jobs name a process's (rank, world size).
_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


class Publication:
    """What one consumer will read, epoch by epoch.

    Nothing here waits, and no failure is an exception: where something fails, publishing ends with one line on stderr.
    In a forked child a publication begins anew, as a consumer of that process.
    """

    def __init__(
        self,
        files: Sequence[str],
        opening: Mapping[str, Any],
        *,
        rank: int | None = None,
        name: str | None = None,
    ) -> None:
        """files: path of each sample, or none where they are learned or lie below opening["tree"]; opening: fields of
        cachefs.publishing.published_consumer.Opening; rank: where it is None, the environment is asked; name: of the
        consumer, where it is None it is made of the rank or the process number.
        """
        self._files = files
        self._opening = dict(opening)
        self._rank = rank
        self._name = name
        self._channel: Channel | None = None
        self._slot = -1
        self._is_open = True
        self._begin()

    def __enter__(self) -> "Publication":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def slot(self) -> int:
        return self._slot

    def order(self, epoch: int, samples: Any) -> None:
        """The samples of *epoch* (counted from 0) in the order in which they will be read: integers, any sequence.

        To be called as the epoch begins, or before.
        """
        try:
            order = _as_order(samples)
        except (TypeError, ValueError, OverflowError) as error:
            self._fail(error)
            return
        self._send({"op": Op.ORDER, "epoch": epoch}, order)

    def sender(self, epoch: int) -> Callable[[Any], None]:
        """A function that does what `order` does, for a forked child of this process that does not publish itself."""

        def send(samples: Any) -> None:
            if self._channel is not None:
                with contextlib.suppress(OSError, Unheard):
                    message = {"op": Op.ORDER, "epoch": epoch, "slot": self._slot}
                    Line(self._channel.directory).send(message, _as_order(samples))

        return send

    def sampler(self, spec: Mapping[str, Any], epoch: int = 0) -> None:
        """All epochs follow from a SamplerSpec, whose fields these are; *epoch* is the one that begins."""
        self._send({"op": Op.SPEC, "spec": dict(spec), "epoch": epoch})

    def progress(self, epoch: int, position: int) -> None:
        """*position* samples of *epoch* have been read. Costs less than a microsecond: call it for every batch."""
        if self._channel is not None and self._channel.is_ours:
            self._channel.page.set_position(self._slot, epoch, position)

    def close(self, after: float = 0.0) -> None:
        """The consumer ends *after* so many seconds, unless another one has begun in its place by then."""
        if self._is_open and self._channel is not None and self._channel.is_ours:
            self._send({"op": Op.CLOSE, "after": after})
            self._channel.release(self._slot)
        self._is_open = False

    def _begin(self) -> None:
        try:
            self._channel = channel()
            self._slot = self._channel.slot()
            message = {"op": Op.OPEN, "opening": self._describe()}
            bulk = "\0".join(self._files).encode(errors="surrogateescape") if self._files else None
            self._channel.line.send(message, bulk)
        except (OSError, Unheard, IndexError, ValueError) as error:
            self._fail(error)

    def _describe(self) -> dict[str, Any]:
        opening = {"source": "cachefs.publish", "cwd": os.getcwd(), "length": len(self._files), **self._opening}
        rank, world_size = (self._rank, self._opening.get("world_size", 1)) if self._rank is not None else found_rank()
        name = self._name
        if name is None:
            # Processes of one job that have no rank differ in their process numbers.
            name = str(rank) if rank is not None else f"pid-{os.getpid()}"
            name += f".{self._slot}" if self._slot else ""
        return {**opening, "slot": self._slot, "name": name, "rank": rank or 0, "world_size": max(1, world_size)}

    def _send(self, message: dict[str, Any], bulk: Any = None) -> None:
        if not self._is_open:
            return
        if self._channel is not None and not self._channel.is_ours:
            self._begin()
        if self._channel is not None:
            try:
                self._channel.line.send({**message, "slot": self._slot}, bulk)
            except (OSError, Unheard) as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._channel = None
        self._is_open = False
        with contextlib.suppress(Exception):
            warn(f"cannot publish ({error or type(error).__name__})")


def _as_order(samples: Any) -> NDArray[numpy.uint32]:
    """Sample numbers, shape (n,), uint32. Raises TypeError, ValueError, OverflowError for what are no integers."""
    return numpy.ascontiguousarray(numpy.asarray(samples, dtype=numpy.int64), dtype="<u4")


def found_rank() -> tuple[int | None, int]:
    """(rank, world size) as the launcher of a distributed job says; (None, 1) where there is no launcher."""
    for rank, world_size in _RANK_VARIABLES:
        with contextlib.suppress(KeyError, ValueError):
            number, of = int(os.environ[rank]), int(os.environ[world_size])
            if 0 <= number < of:
                return number, of
    return None, 1
