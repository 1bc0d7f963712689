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

from cachefs.hooks import opened_files
from cachefs.hooks.order.foresee import numbers_in
from cachefs.publishing import clock
from cachefs.publishing.channel import HelperUnreachable, MessageKind, warn_once
from cachefs.publishing.job_exceptions import is_from_job, suppress_own
from cachefs.publishing.page import WantedSamples

# Minimum nanoseconds between two messages to the helper, each of which costs some 50 us; and where the helper only
# compares published files with opened ones.
MESSAGE_PAUSE_NS: Final = 100_000_000
LONG_MESSAGE_PAUSE_NS: Final = 1_000_000_000
# Number of the first batches of a process, which are reported one by one.
PROMPT_BATCHES: Final = 16
# Pause in nanoseconds between two searches for the helper: from the first to the last one, doubled each time.
FIRST_SEARCH_PAUSE_NS: Final = 100_000_000
MAX_SEARCH_PAUSE_NS: Final = 10_000_000_000
# Maximum number of samples in one message, and of a batch that is reported: 40 KB.
MAX_SAMPLES: Final = 4000
# `latest`: the Batches of the loader for which a thread loaded last.
_thread = threading.local()
# Maximum depth of nested datasets that are examined to see how samples are loaded.
_DEPTH: Final = 8


def install(fetcher: Any) -> None:
    """Watch a fetcher. fetcher: torch's class _MapDatasetFetcher."""
    fetcher.fetch = FetchDescriptor(fetcher.fetch)


class FetchDescriptor:
    """Descriptor in place of `_MapDatasetFetcher.fetch`."""

    def __init__(self, method: Any) -> None:
        update_wrapper(self, method)  # type: ignore[arg-type]
        self._method = method

    def __get__(self, fetcher: Any, kind: Any = None) -> Any:
        if fetcher is None:
            return self._method
        try:
            _report_batch(fetcher, sys._getframe(1))
        except Exception as error:  # no failure here may end the job
            if is_from_job(error):
                raise
            warn_once(f"cannot report which batches a process loads ({error!r})")
        return MethodType(self._method, fetcher)


def _report_batch(fetcher: Any, caller: FrameType) -> None:
    """Record that a batch begins. caller: torch's function, whose `index` is the sampler's item for the batch."""
    reader = opened_files.recorder_of(caller)
    if reader is None:
        _switch_reporter(None)
        return
    if reader.batch_reporter is None:
        reader.batch_reporter = BatchReporter(reader, is_one_by_one(fetcher.dataset))
    _switch_reporter(reader.batch_reporter)
    names = caller.f_locals
    reader.batch_reporter.record_batch(names.get("index"))
    if type(names) is dict and caller.f_code.co_flags & inspect.CO_OPTIMIZED:
        names.clear()  # a copy, before Python 3.13, which the frame would keep until the next access


def _switch_reporter(batches: "BatchReporter | None") -> None:
    """Record that this thread loads for another loader, or for one without reports (None). Its reads from now on do not
    belong to the last batch of the previous loader."""
    latest: BatchReporter | None = getattr(_thread, "latest", None)
    if latest is not batches:
        _thread.latest = batches
        if latest is not None:
            latest.end_last_batch()


class BatchReporter:
    """Tells the helper which batches this process loads for one loader, and when each began."""

    def __init__(self, reader: opened_files.OpenRecorder, one_by_one: bool) -> None:
        """one_by_one: whether the dataset loads the samples of a batch one by one, in their order."""
        self._reader = reader
        self._process = os.getpid()
        self._one_by_one = one_by_one
        self._helper: opened_files.LoaderHelper | None = None
        self._search_at = 0  # time of the next search for the helper (monotonic nanoseconds)
        self._pause = FIRST_SEARCH_PAUSE_NS  # until the next search, or message
        self._sent_at = 0  # when the last message went out (monotonic nanoseconds)
        self._messages = 0
        self._unsent: list[tuple[int, list[int]]] = []  # not sent yet: when each batch began, and its samples
        self._unsent_samples = 0  # samples in it
        if reader.owner != os.getpid():
            opened_files.call_at_exit(self.send_unsent)

    def record_batch(self, index: Any) -> None:
        """Record the beginning of a batch. index: the sampler's item for it."""
        now = clock.monotonic_ns()
        if self._helper is None and not self._find_helper(now):
            return
        samples = _sample_numbers(index)
        self._unsent.append((now, samples))
        self._unsent_samples += len(samples)
        if self._messages < PROMPT_BATCHES or now >= self._sent_at + self._pause or self._unsent_samples > MAX_SAMPLES:
            self._send_unsent(now)

    def end_last_batch(self) -> None:
        """Record that the thread now loads for another loader."""
        if self._helper is not None and self._messages and self._process == os.getpid():  # not a parent's object
            self._send_unsent(clock.monotonic_ns(), has_ended=True)

    def send_unsent(self) -> None:
        """Send what is left, as no batch is loaded any more."""
        if self._helper is not None and self._unsent:
            self._send_unsent(clock.monotonic_ns(), has_ended=True)

    def _find_helper(self, now: int) -> bool:
        if now < self._search_at:
            return False
        self._helper = opened_files.find_helper(self._reader.number, self._reader.owner)
        self._search_at = now + self._pause
        self._pause = min(2 * self._pause, MAX_SEARCH_PAUSE_NS)
        return self._helper is not None

    def _send_unsent(self, now: int, *, has_ended: bool = False) -> None:
        assert self._helper is not None
        self._messages += 1
        begun, self._unsent, self._unsent_samples = self._unsent, [], 0
        need = self._helper.wanted_samples
        self._pause, self._sent_at = MESSAGE_PAUSE_NS if need is WantedSamples.UNKNOWN else LONG_MESSAGE_PAUSE_NS, now
        if need is WantedSamples.NONE:
            self._reader.is_needed = False
            return
        message = {
            "op": MessageKind.BATCHES,
            "pid": os.getpid(),
            "thread": threading.get_native_id(),
            "begun": begun,
            "one_by_one": self._one_by_one,
            "is_prompt": self._messages < PROMPT_BATCHES,
            "ended": now if has_ended else 0,
        }
        with suppress_own(OSError, HelperUnreachable):  # the helper is behind, or gone
            self._helper.send_message(message)


def is_one_by_one(dataset: Any) -> bool:
    """Return whether the samples of a batch are loaded one by one. `__getitems__` may load them in any way."""
    subset = sys.modules["torch"].utils.data.Subset
    for _ in range(_DEPTH):
        if type(dataset) is not subset:
            break
        dataset = vars(dataset).get("dataset")
    return inspect.getattr_static(dataset, "__getitems__", None) is None


def _sample_numbers(index: Any) -> list[int]:
    """Return the sample numbers in a sampler's item; none where they are no numbers, or too many."""
    if type(index) is not list or set(map(type, index)) != {int}:
        index = numbers_in(index) or []
    return list(index) if len(index) <= MAX_SAMPLES else []
