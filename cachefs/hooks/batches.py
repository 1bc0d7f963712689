"""Reports when a process begins to load a batch, and its samples, for files that no Python code opens.

Libraries in C open files without an audit event. The mount sees which process reads which file cold, and the helper
compares these reads with the beginnings of batches. torch's worker, and a loader without workers, look up `fetch` of
the fetcher once per batch, which a descriptor sees. The descriptor returns the method itself, so no frame of ours is on
the stack while the job's code runs.

Nothing is sent until a helper knows the loader: a batch costs 2 us then, and 8 us for 64 samples otherwise.
"""

import inspect
import os
import sys
import threading
from functools import update_wrapper
from types import FrameType, MethodType
from typing import Any, Final

from cachefs.hooks import opened
from cachefs.hooks.order import numbers_in
from cachefs.publishing import clock
from cachefs.publishing.channel import Op, Unheard, warn
from cachefs.publishing.foreign import is_foreign, suppress_own
from cachefs.publishing.page import Need

# Minimum nanoseconds between two messages to the helper, each of which costs some 50 us; and where the helper only
# compares published files with opened ones.
PAUSE: Final = 100_000_000
LONG_PAUSE: Final = 1_000_000_000
# Number of the first batches of a process, which are reported one by one.
PROMPT: Final = 16
# Pause in nanoseconds between two searches for the helper: from the first to the last one, doubled each time.
FIRST_LOOK: Final = 100_000_000
LAST_LOOK: Final = 10_000_000_000
# Maximum number of samples in one message, and of a batch that is reported: 40 KB.
MOST_SAMPLES: Final = 4000
# `latest`: the Batches of the loader for which a thread loaded last.
_thread = threading.local()
# Maximum depth of nested datasets that are examined to see how samples are loaded.
_DEPTH: Final = 8


def install(fetcher: Any) -> None:
    """Watch a fetcher. fetcher: torch's class _MapDatasetFetcher."""
    fetcher.fetch = Fetch(fetcher.fetch)


class Fetch:
    """Descriptor in place of `_MapDatasetFetcher.fetch`."""

    def __init__(self, method: Any) -> None:
        update_wrapper(self, method)  # type: ignore[arg-type]
        self._method = method

    def __get__(self, fetcher: Any, kind: Any = None) -> Any:
        if fetcher is None:
            return self._method
        try:
            _begin(fetcher, sys._getframe(1))
        except Exception as error:  # no failure here may end the job
            if is_foreign(error):
                raise
            warn(f"cannot tell which batches are loaded ({error!r})")
        return MethodType(self._method, fetcher)


def _begin(fetcher: Any, caller: FrameType) -> None:
    """Record that a batch begins. caller: torch's function, whose `index` is the sampler's item for the batch."""
    reader = opened.reader_of(caller)
    if reader is None:
        _switch(None)
        return
    if reader.batches is None:
        reader.batches = Batches(reader, is_one_by_one(fetcher.dataset))
    _switch(reader.batches)
    names = caller.f_locals
    reader.batches.begin(names.get("index"))
    if type(names) is dict and caller.f_code.co_flags & inspect.CO_OPTIMIZED:
        names.clear()  # a copy, before Python 3.13, which the frame would keep until the next access


def _switch(batches: "Batches | None") -> None:
    """Record that this thread loads for another loader, or for one without reports (None). Its reads from now on do not
    belong to the last batch of the previous loader."""
    latest: Batches | None = getattr(_thread, "latest", None)
    if latest is not batches:
        _thread.latest = batches
        if latest is not None:
            latest.pause()


class Batches:
    """Tells the helper which batches this process loads for one loader, and when each began."""

    def __init__(self, reader: opened.Reader, one_by_one: bool) -> None:
        """one_by_one: whether the dataset loads the samples of a batch one by one, in their order."""
        self._reader = reader
        self._process = os.getpid()
        self._one_by_one = one_by_one
        self._helper: opened.Helper | None = None
        self._look_at = 0  # time of the next search for the helper (monotonic nanoseconds)
        self._pause = FIRST_LOOK  # until the next search, or message
        self._sent = 0  # when the last message went out (monotonic nanoseconds)
        self._messages = 0
        self._begun: list[tuple[int, list[int]]] = []  # not sent yet: when each batch began, and its samples
        self._count = 0  # samples in it
        if reader.owner != os.getpid():
            opened.at_exit(self.finish)

    def begin(self, index: Any) -> None:
        """Record the beginning of a batch. index: the sampler's item for it."""
        now = clock.monotonic_ns()
        if self._helper is None and not self._finds_helper(now):
            return
        samples = _numbers(index)
        self._begun.append((now, samples))
        self._count += len(samples)
        if self._messages < PROMPT or now >= self._sent + self._pause or self._count > MOST_SAMPLES:
            self._send(now)

    def pause(self) -> None:
        """Record that the thread now loads for another loader."""
        if self._helper is not None and self._messages and self._process == os.getpid():  # not a parent's object
            self._send(clock.monotonic_ns(), has_ended=True)

    def finish(self) -> None:
        """Send what is left, as no batch is loaded any more."""
        if self._helper is not None and self._begun:
            self._send(clock.monotonic_ns(), has_ended=True)

    def _finds_helper(self, now: int) -> bool:
        if now < self._look_at:
            return False
        self._helper = opened.helper_of(self._reader.number, self._reader.owner)
        self._look_at = now + self._pause
        self._pause = min(2 * self._pause, LAST_LOOK)
        return self._helper is not None

    def _send(self, now: int, *, has_ended: bool = False) -> None:
        assert self._helper is not None
        self._messages += 1
        begun, self._begun, self._count = self._begun, [], 0
        need = self._helper.need
        self._pause, self._sent = PAUSE if need is Need.UNKNOWN else LONG_PAUSE, now
        if need is Need.NONE:
            self._reader.is_needed = False
            return
        message = {
            "op": Op.BATCHES,
            "pid": os.getpid(),
            "thread": threading.get_native_id(),
            "begun": begun,
            "one_by_one": self._one_by_one,
            "is_prompt": self._messages < PROMPT,
            "ended": now if has_ended else 0,
        }
        with suppress_own(OSError, Unheard):  # the helper is behind, or gone
            self._helper.tell(message)


def is_one_by_one(dataset: Any) -> bool:
    """Return whether the samples of a batch are loaded one by one. `__getitems__` may load them in any way."""
    subset = sys.modules["torch"].utils.data.Subset
    for _ in range(_DEPTH):
        if type(dataset) is not subset:
            break
        dataset = vars(dataset).get("dataset")
    return inspect.getattr_static(dataset, "__getitems__", None) is None


def _numbers(index: Any) -> list[int]:
    """Return the sample numbers in a sampler's item; none where they are no numbers, or too many."""
    if type(index) is not list or set(map(type, index)) != {int}:
        index = numbers_in(index) or []
    return list(index) if len(index) <= MOST_SAMPLES else []
