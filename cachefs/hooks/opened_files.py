"""Finds which files a dataset opens for a sample, in the process that loads the sample.

An audit hook sees every `open` of Python itself, but no library that opens files in C. The sample is in torch's own
frame: the hook goes from the `open` down the stack to the fetcher that has called the dataset. So nothing of the job is
wrapped, and a loader that opens no file under a mount costs nothing.
"""

import atexit
import contextlib
import functools
import itertools
import os
import stat
import sys
import tempfile
import threading
from collections import deque
from multiprocessing.process import current_process
from pathlib import Path
from types import CodeType, FrameType, MethodType
from typing import Any, Final

from cachefs.hooks.order.foresee import number_in, numbers_in
from cachefs.publishing import clock
from cachefs.publishing.channel import (
    PAGE_NAME,
    HelperConnection,
    HelperUnreachable,
    MessageKind,
    SharedPage,
    WantedSamples,
    mount_readers,
)
from cachefs.publishing.job_exceptions import is_from_job, suppress_own
from cachefs.publishing.mount_resolver import MountResolver

# Entry in the configuration that multiprocessing passes to each process, with any start method: the number of the
# loader that the process works for, and the loader's process.
_LOADER_KEY: Final = "cachefs_loader"
# Maximum number of samples whose files are learned: the helper keeps a path for each.
MAX_SAMPLES: Final = 1 << 24
# Maximum number of characters of paths in one packet. JSON may make six characters of one.
MAX_CHARACTERS: Final = 9_000
# Interval of the loaded samples whose opened files are compared with the published ones.
COMPARE_INTERVAL: Final = 8
# Maximum number of samples that wait for the helper.
MAX_WAITING: Final = 4096
# Maximum number of loaders for which this process loads. Files opened for a dropped (oldest) one are sent again.
MAX_RECORDERS: Final = 256
# Seconds between two searches for the helper.
SEARCH_SECONDS: Final = 0.1


_loader_numbers = itertools.count()


def new_loader_number() -> int:
    """Return a number for a loader that no other loader of this process has."""
    return next(_loader_numbers)


def install(fetcher: Any, stream_fetcher: Any) -> None:
    """Recognise the code of torch's classes _MapDatasetFetcher and _IterableDatasetFetcher."""
    for method in (stream_fetcher.__init__, stream_fetcher.fetch):
        _fetcher_codes[method.__code__] = method.__code__
        _stream_fetcher_codes.add(method.__code__)
    code = fetcher.fetch.__code__
    _fetcher_codes[code] = code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):  # its list comprehension, before Python 3.12
            _fetcher_codes[inner] = code


class FetcherInitDescriptor:
    """Descriptor in place of `_BaseDatasetFetcher.__init__`, which runs when a worker begins."""

    def __init__(self, method: Any) -> None:
        functools.update_wrapper(self, method)  # type: ignore[arg-type]
        self._method = method

    def __get__(self, fetcher: Any, kind: Any = None) -> Any:
        if fetcher is None:
            return self._method
        if (
            not _is_auditing and _configured_loader() is not None
        ):  # a worker that was not forked by the loader's process
            watch_opens()
        return MethodType(self._method, fetcher)


def watch_opens() -> None:
    """Watch the files that this process, and the processes that it forks, open from now on."""
    global _is_auditing, _resolver
    _resolver = MountResolver()
    if not _is_auditing:
        _is_auditing = True
        sys.addaudithook(_audit)
        atexit.register(_end_process)


def set_loader(number: int | None) -> None:
    """Set the loader for the workers that this thread is about to start."""
    _thread.loader = None if number is None else (number, os.getpid())
    if number is not None:
        _configuration()[_LOADER_KEY] = _InheritedLoader()


class _InheritedLoader:
    """Unpickles, in a worker that does not inherit memory, as the pair of the thread that started the worker."""

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return tuple, (_thread.loader or (),)


def _configuration() -> dict[str, Any]:
    """Return the dictionary that multiprocessing pickles with each process that this one starts."""
    return current_process()._config  # type: ignore[attr-defined, no-any-return]


def has_opened_file(number: int, mark: str) -> bool:
    """Return whether a file under a mount was opened for a sample of this loader, here or in a worker. Takes 1 us."""
    if number in _opened_here:
        return True
    with suppress_own(OSError):
        os.unlink(mark)
        mount_readers.add(os.getpid())
        return True
    return False


def opened_file(number: int, mark: str) -> str:
    """Return a file under a mount that was opened for this loader; "" where there is none, or its name is too long."""
    with suppress_own(OSError):
        _opened_here.setdefault(number, os.readlink(mark))
        os.unlink(mark)
    return _opened_here.get(number, "")


def record_end(number: int, mark: str, owner: int) -> None:
    """Record that this loader of the process *owner* has ended. Python may be collecting garbage in the middle of
    anything, so the loader's records are removed later."""
    _ended.append((number, mark, owner))


def remove_ended() -> None:
    """Remove the records of loaders that have ended."""
    while _ended:
        number, mark, owner = _ended.popleft()
        if os.getpid() == owner:
            _opened_here.pop(number, None)
            _recorders.pop((number, owner), None)
            with suppress_own(OSError):
                os.unlink(mark)
                mount_readers.add(owner)


def _end_process() -> None:
    """Record, as this process ends, what workers have opened for loaders that have not ended."""
    with suppress_own(OSError):
        if any(name.startswith(f"opened-{os.getpid()}-") for name in os.listdir(_user_directory())):
            mount_readers.add(os.getpid())
    remove_ended()


def open_mark_path(number: int, owner: int) -> str:
    """Return the path of the link to a file that was opened for a sample of a loader of the process *owner*."""
    return f"{_user_directory()}/opened-{owner}-{number}"


def register_consumer(number: int, slot: int, length: int, directory: Path) -> None:
    """Record that this loader is a consumer, so that processes that open its files find the helper in *directory*."""
    with suppress_own(OSError):
        (directory / f"loader-{number}").symlink_to(f"{slot}:{length}")


class _ThreadState(threading.local):
    # Number and process of the loader for which workers are being started.
    loader: tuple[int, int] | None = None
    # Set while the hook handles an `open`, and may itself cause others.
    is_busy: bool = False


_thread = _ThreadState()
_ended: deque[tuple[int, str, int]] = deque()  # loaders with records that may have to be removed
_opened_here: dict[int, str] = {}  # by number of a loader of this process: a file opened for it
_fetcher_codes: dict[CodeType, CodeType] = {}  # code of the fetcher, and of its comprehension -> code of the fetcher
_stream_fetcher_codes: set[CodeType] = set()  # code of the fetcher without numbered samples
_is_auditing = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and not _thread.is_busy and type(arguments[0]) in (str, bytes):
        try:
            _thread.is_busy = True
            _record_open(os.fsdecode(arguments[0]))
        except Exception as error:  # a failure here would be raised from the job's `open`
            if is_from_job(error):
                raise
        finally:
            _thread.is_busy = False


def _record_open(path: str) -> None:
    path = os.path.abspath(path)
    if _resolver.mount_of(path) is None:
        return
    frame: FrameType | None = sys._getframe(2)
    inner = None
    while frame is not None and frame.f_code not in _fetcher_codes:
        frame = frame.f_back
    if frame is None:
        return
    if _fetcher_codes[frame.f_code] is not frame.f_code:
        inner, frame = frame, frame.f_back
    assert frame is not None
    reader = recorder_of(frame.f_back)
    if reader is not None and reader.owner == os.getpid():
        mount_readers.add(reader.owner)
    if reader is not None and frame.f_code in _stream_fetcher_codes:
        reader.notify_owner(path)
        reader.is_needed = False
    elif reader is not None:
        reader.record_open(frame.f_locals, inner.f_locals if inner is not None else {}, path)


def recorder_of(caller: FrameType | None) -> "OpenRecorder | None":
    """Return the reader of the loader that called the fetcher: of this process, or the one that this worker serves."""
    iterator = caller.f_locals.get("self") if caller is not None else None
    watched = getattr(iterator, "_cachefs", None)
    if iterator is not None:
        key = (watched.watch.number, os.getpid()) if watched is not None else None
    else:
        key = _thread.loader or _configured_loader()
    if key is None:
        return None
    reader = _recorders.get(key)
    if reader is None:
        reader = _recorders[key] = OpenRecorder(*key)
        while len(_recorders) > MAX_RECORDERS:
            _recorders.pop(next(iter(_recorders)), None)
    return reader if reader.is_needed else None


def _configured_loader() -> tuple[int, int] | None:
    found = _configuration().get(_LOADER_KEY)
    return found if type(found) is tuple and len(found) == 2 else None


class _LoadingSamples(threading.local):
    """The samples that a thread is loading. Several threads of a job may iterate one loader at once."""

    def __init__(self) -> None:
        # Identifies the samples: the batch, and the item of it that is being loaded.
        self.item: tuple[Any, Any] | None = None
        # The sample numbers, and the files opened for them.
        self.samples: list[int] = []
        self.paths: list[str] = []


class OpenRecorder:
    """A process that loads samples for a loader. Tells the helper which files under a mount were opened for them: once
    for each sample while the files are being learned, later for some samples."""

    def __init__(self, number: int, owner: int) -> None:
        """number: of the loader in the process *owner*."""
        self.is_needed = True
        self.number = number
        self.owner = owner
        self.batch_reporter: Any = (
            None  # the Batches that tells the helper which batches are loaded (cachefs.hooks.batch_reports)
        )
        self._helper: LoaderHelper | None = None
        self._searched_at = 0.0  # when the helper was last searched for (monotonic seconds)
        self._seen = bytearray()  # by sample
        # Samples and the files opened for them, not sent yet.
        self._observed: list[tuple[list[int], list[str]]] = []
        self._wanted = WantedSamples.UNKNOWN
        self._since_compared = COMPARE_INTERVAL  # samples since the last compared one
        self._loading = _LoadingSamples()
        if owner != os.getpid():
            call_at_exit(self.send_loaded)

    def record_open(self, fetching: Any, each: Any, path: str) -> None:
        """Record that *path* was opened. fetching, each: variables of torch's fetcher, and of its comprehension."""
        batch = fetching.get("possibly_batched_index")
        if "data" in fetching:
            return  # the samples are loaded, and being collated
        one = each.get("idx", fetching.get("idx", self))
        loading = (batch, one)
        now = self._loading
        known = now.item
        if not (known is not None and known[0] is batch and known[1] is one):
            self.send_loaded()
            now.item = loading
            now.samples = _sample_numbers(batch) if one is self else _sample_number(one)
        now.paths.append(path)

    def notify_owner(self, path: str) -> None:
        """Tell the process with the loader that this file was opened."""
        if self.owner == os.getpid():
            _opened_here[self.number] = path
        else:
            _make_open_mark(self.number, self.owner, path)

    def send_loaded(self) -> None:
        """Complete the samples that were being loaded, and send them."""
        now = self._loading
        samples, paths = now.samples, now.paths
        now.item, now.samples, now.paths = None, [], []
        if self._wanted is WantedSamples.NONE or not samples or not paths:
            return
        if self._wanted is WantedSamples.SOME:
            self._since_compared += len(samples)
            if self._since_compared < COMPARE_INTERVAL:
                return
            self._since_compared = 0
        self._add_observation(samples, list(dict.fromkeys(paths)) if len(samples) == 1 else paths)
        if self._observed:
            self._send_observations()

    def _add_observation(self, samples: list[int], paths: list[str]) -> None:
        if not 0 <= min(samples) <= max(samples) < MAX_SAMPLES or len(self._observed) >= MAX_WAITING:
            return
        if sum(map(len, paths)) > MAX_CHARACTERS:
            each, remainder = divmod(len(paths), len(samples))
            if each and not remainder and len(samples) > 1:
                for number, sample in enumerate(samples):
                    self._add_observation([sample], paths[number * each : (number + 1) * each])
            return
        if max(samples) >= len(self._seen):
            self._seen.extend(bytes(max(samples) + 1 - len(self._seen)))
        if self._wanted is WantedSamples.SOME or not all(self._seen[sample] for sample in samples):
            self._set_seen(samples, 1)
            self._observed.append((samples, paths))

    def _set_seen(self, samples: list[int], seen: int) -> None:
        for sample in samples:
            self._seen[sample] = seen

    def _send_observations(self) -> None:
        now = clock.monotonic()
        if self._helper is None:
            if now < self._searched_at + SEARCH_SECONDS:
                return
            self._searched_at = now
            self._helper = find_helper(self.number, self.owner)
        if self._helper is None:
            self.notify_owner(self._observed[0][1][0])
            return
        while self._observed:
            count = _count_fitting(self._observed)
            observed, self._observed = self._observed[:count], self._observed[count:]
            try:
                self._helper.send_message({"op": MessageKind.OPENED, "observed": observed})
            except (OSError, HelperUnreachable) as error:
                if is_from_job(error):
                    raise
                # The helper is behind, or has ended. The samples are recorded again in the next epoch.
                for samples, _ in observed:
                    self._set_seen(samples, 0)
        before, self._wanted = self._wanted, self._helper.wanted_samples
        if before is WantedSamples.SOME and self._wanted is WantedSamples.UNKNOWN:
            self._seen = bytearray()  # what was known is wrong, and has to be sent again
        self.is_needed = self._wanted is not WantedSamples.NONE


class LoaderHelper:
    """The helper of the process with the loader."""

    def __init__(self, directory: Path, slot: int, length: int) -> None:
        self._directory = directory
        self._slot = slot
        self._length = length

    @property
    def wanted_samples(self) -> WantedSamples:
        """The samples whose opened files the helper wants."""
        with suppress_own(OSError, ValueError), contextlib.closing(SharedPage(self._directory / PAGE_NAME)) as page:
            return page.wanted_samples(self._slot)
        return WantedSamples.NONE

    def send_message(self, message: dict[str, Any]) -> None:
        """Send a message, without keeping a connection: one more descriptor in the job. Raises OSError,
        HelperUnreachable."""
        line = HelperConnection(self._directory)
        try:
            line.send({"slot": self._slot, "length": self._length, **message}, wait=False)
        finally:
            line.close()


_recorders: dict[tuple[int, int], OpenRecorder] = {}
_resolver = MountResolver([])


def _sample_numbers(batch: Any) -> list[int]:
    """Return the sample numbers in a sampler's item; none where they are no numbers."""
    return numbers_in(batch) or []


def _sample_number(item: Any) -> list[int]:
    """Return the sample number in one item of a batch; none where it is anything else."""
    number = number_in(item)
    return [] if number is None else [number]


def _count_fitting(observed: list[tuple[list[int], list[str]]]) -> int:
    """Return how many of the observations one packet takes."""
    characters = 0
    for count, (samples, paths) in enumerate(observed):
        characters += sum(map(len, paths)) + 16 * len(samples)
        if count and characters > MAX_CHARACTERS:
            return count
    return len(observed)


def _user_directory() -> Path:
    """Return the user's directory, which contains those of helpers."""
    name = f"cachefs-{os.geteuid()}"
    for shared in ("/dev/shm", None):  # as in cachefs.publishing.channel
        directory = Path(shared or tempfile.gettempdir(), name)
        try:
            found = directory.lstat()
        except OSError as error:
            if is_from_job(error):
                raise
            if os.access(directory.parent, os.W_OK | os.X_OK):
                return directory
        else:
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                return directory
    return directory


def _make_open_mark(number: int, owner: int, path: str) -> None:
    with suppress_own(OSError):
        directory = _user_directory()
        with suppress_own(FileExistsError):
            directory.mkdir(0o700)
        if directory.lstat().st_uid != os.geteuid():
            return  # another user may have put a link there
        for old in os.listdir(directory):
            if old.startswith("opened-"):
                try:
                    os.stat(f"/proc/{old.split('-')[1]}")
                except FileNotFoundError:
                    os.unlink(directory / old)  # of a job that has ended without reading the link
        os.symlink(path, open_mark_path(number, owner))


def find_helper(number: int, owner: int) -> LoaderHelper | None:
    """Return the helper of the process *owner*, once it knows this loader. Avoids pathlib, which would take an
    exception of the job's signal handler for a failure of its own."""
    top = _user_directory()
    with suppress_own(OSError):
        for job in os.listdir(top):
            with suppress_own(NotADirectoryError, FileNotFoundError):
                for name in os.listdir(top / job):
                    if name.startswith(f"{owner}-"):
                        with suppress_own(OSError, ValueError):  # the loader is not known there
                            slot, _, length = os.readlink(top / job / name / f"loader-{number}").partition(":")
                            return LoaderHelper(top / job / name, int(slot), int(length))
    return None


def call_at_exit(finish: Any) -> None:
    """Call *finish* when this process, a worker of multiprocessing, ends."""
    from multiprocessing import util

    util.Finalize(None, finish, exitpriority=0)
