"""When a process begins to load a batch, and of which samples, for files that no Python code opens.

Libraries in C open files without an audit event. The mount sees which process reads which file cold, and the helper
compares that with when batches began. torch's worker looks up `fetch` of its fetcher once per batch, and so does a
loader without workers: a descriptor sees that. It returns the method itself, so nothing of ours is on the stack while
the job's code runs.

Nothing is told while no helper knows the loader: a batch costs 2 us then, and of 64 samples 8 us otherwise.
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

# Nanoseconds between two messages to the helper, at least: each costs some 50 us. And where it only compares.
PAUSE: Final = 100_000_000
LONG_PAUSE: Final = 1_000_000_000
# The first batches of a process are told one by one.
PROMPT: Final = 16
# Nanoseconds between two looks for the helper: from the one to the other, doubled each time.
FIRST_LOOK: Final = 100_000_000
LAST_LOOK: Final = 10_000_000_000
# Samples of one message, and of a batch that is told, at most: 40 KB.
MOST_SAMPLES: Final = 4000
# Whose batches a thread has loaded last.
_thread = threading.local()
# Datasets that are looked through, one in the other, to see how samples are loaded.
_DEPTH: Final = 8


def install(fetcher: Any) -> None:
    """fetcher: torch's class _MapDatasetFetcher."""
    fetcher.fetch = Fetch(fetcher.fetch)


class Fetch:
    """`_MapDatasetFetcher.fetch`."""

    def __init__(self, method: Any) -> None:
        update_wrapper(self, method)  # type: ignore[arg-type]
        self._method = method

    def __get__(self, fetcher: Any, kind: Any = None) -> Any:
        if fetcher is None:
            return self._method
        try:
            _begin(fetcher, sys._getframe(1))
        except Exception as error:  # whatever is wrong here is no reason to end the job
            if is_foreign(error):
                raise
            warn(f"cannot tell which batches are loaded ({error!r})")
        return MethodType(self._method, fetcher)


def _begin(fetcher: Any, caller: FrameType) -> None:
    """caller: torch's function that is about to have a batch loaded; `index` is what the sampler gave."""
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
        names.clear()  # a copy, before Python 3.13, which the frame would keep until it is asked for again


def _switch(batches: "Batches | None") -> None:
    """This thread loads for a loader, or for one of which nothing is told (None). What it reads now is not of the last
    batch that it has loaded for another one."""
    latest: Batches | None = getattr(_thread, "latest", None)
    if latest is not batches:
        _thread.latest = batches
        if latest is not None:
            latest.pause()


class Batches:
    """Tells the helper which batches this process loads for one loader, and when it has begun each."""

    def __init__(self, reader: opened.Reader, one_by_one: bool) -> None:
        """one_by_one: does the dataset load the samples of a batch one by one, in their order?"""
        self._reader = reader
        self._process = os.getpid()
        self._one_by_one = one_by_one
        self._helper: opened.Helper | None = None
        self._look_at = 0  # when the helper is looked for (monotonic nanoseconds)
        self._pause = FIRST_LOOK  # until the next look, or message
        self._sent = 0  # when the last message went out (monotonic nanoseconds)
        self._messages = 0
        self._begun: list[tuple[int, list[int]]] = []  # not told yet: when each batch began, and its samples
        self._count = 0  # samples in it
        if reader.owner != os.getpid():
            opened.at_exit(self.finish)

    def begin(self, index: Any) -> None:
        """A batch begins. index: what the sampler gave for it."""
        now = clock.monotonic_ns()
        if self._helper is None and not self._finds_helper(now):
            return
        samples = _numbers(index)
        self._begun.append((now, samples))
        self._count += len(samples)
        if self._messages < PROMPT or now >= self._sent + self._pause or self._count > MOST_SAMPLES:
            self._send(now)

    def pause(self) -> None:
        """The thread loads for another loader now."""
        if self._helper is not None and self._messages and self._process == os.getpid():  # else that of a parent
            self._send(clock.monotonic_ns(), has_ended=True)

    def finish(self) -> None:
        """No batch is loaded any more."""
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
    """Are the samples of a batch asked for one after the other? A dataset with `__getitems__` may do as it likes."""
    subset = sys.modules["torch"].utils.data.Subset
    for _ in range(_DEPTH):
        if type(dataset) is not subset:
            break
        dataset = vars(dataset).get("dataset")
    return inspect.getattr_static(dataset, "__getitems__", None) is None


def _numbers(index: Any) -> list[int]:
    """The sample numbers in what a sampler gave; none where they are no numbers, or too many."""
    if type(index) is not list or set(map(type, index)) != {int}:
        index = numbers_in(index) or []
    return list(index) if len(index) <= MOST_SAMPLES else []
