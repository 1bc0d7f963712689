"""Which files a dataset opens for a sample, seen in the process that loads it.

An audit hook sees every `open` of Python itself. It does not see a library that opens files in C.
"""

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any, Final

from cachefs.publishing.channel import DIRECTORY_VARIABLE, PAGE_NAME, Line, Op, Page, Unheard
from cachefs.publishing.places import Places

# Tells a worker for which consumer it loads: the consumer's slot, and how many samples the dataset has.
CONSUMER_VARIABLE: Final = "CACHEFS_CONSUMER"
# Characters of paths that one packet has, at most. JSON may make six characters of one.
MAX_CHARACTERS: Final = 9_000

_is_auditing = False


class _Opening(threading.local):
    """What a thread opens for the sample that it loads."""

    # None while the thread loads no sample.
    paths: list[Any] | None = None


_opening = _Opening()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opening.paths is not None:
        _opening.paths.append(arguments[0])


class Observer:
    """Tells the helper, once for each sample, which files under a mount were opened for it."""

    def __init__(self, slot: int, length: int, directory: Path) -> None:
        """Raises OSError where the helper is gone."""
        global _is_auditing
        self._slot = slot
        self._length = length
        self._places = Places()
        self._page = Page(directory / PAGE_NAME)
        self._line = Line(directory)
        self._seen: set[int] = set()  # samples
        self._pairs: list[tuple[int, list[str]]] = []  # samples with their paths, not sent yet
        self._characters = 0  # of these paths
        if not _is_auditing:
            sys.addaudithook(_audit)
            _is_auditing = True

    @property
    def is_needed(self) -> bool:
        return not self._page.learned(self._slot)

    def note(self, sample: Any, opened: list[Any]) -> None:
        """These paths were opened for the sample."""
        if type(sample) is not int or sample in self._seen:
            return
        paths = [os.path.abspath(path) for path in map(_path, opened) if path and self._places.mount_of(path)]
        paths = list(dict.fromkeys(paths))
        length = sum(map(len, paths)) + 16
        if paths and length < MAX_CHARACTERS:
            if self._characters + length > MAX_CHARACTERS:
                self.flush()
            self._seen.add(sample)
            self._pairs.append((sample, paths))
            self._characters += length

    def flush(self) -> None:
        """Send what was noted."""
        pairs, self._pairs, self._characters = self._pairs, [], 0
        if pairs:
            message = {"op": Op.OPENED, "slot": self._slot, "length": self._length, "pairs": pairs}
            try:
                self._line.send(message, wait=False)
            except Unheard:
                # The helper is behind, or gone. The samples are noted again in the next epoch.
                self._seen.difference_update(sample for sample, _ in pairs)


class Watched:
    """A dataset of which single samples are fetched: `dataset[index]`."""

    def __init__(self, dataset: Any, observer: Observer) -> None:
        self.dataset = dataset
        self.observer = observer

    def __getitem__(self, index: Any) -> Any:
        opened = _opening.paths = []
        try:
            return self.dataset[index]
        finally:
            _opening.paths = None
            self.observer.note(index, opened)


class WatchedBatches(Watched):
    """A dataset of which whole batches are fetched. Which files belong to which sample is known where all samples have
    equally many."""

    def __getitems__(self, indices: Any) -> Any:
        opened = _opening.paths = []
        try:
            return self.dataset.__getitems__(indices)
        finally:
            _opening.paths = None
            each, rest = divmod(len(opened), len(indices)) if len(indices) else (0, 0)
            if each and not rest:
                for number, index in enumerate(indices):
                    self.observer.note(index, opened[number * each : (number + 1) * each])


def watched(dataset: Any) -> Any:
    """*dataset*, watched if this process loads for a consumer of which the files of samples have to be learned."""
    consumer, directory = os.environ.get(CONSUMER_VARIABLE, ""), os.environ.get(DIRECTORY_VARIABLE, "")
    if not consumer or not directory:
        return dataset
    slot, _, length = consumer.partition(":")
    try:
        if len(dataset) != int(length):
            return dataset
        observer = Observer(int(slot), int(length), Path(directory))
    except (OSError, TypeError, ValueError):
        return dataset
    if not observer.is_needed:
        return dataset
    return (WatchedBatches if getattr(dataset, "__getitems__", None) else Watched)(dataset, observer)


def _path(opened: Any) -> str:
    """The path; empty for what is none, as a descriptor."""
    with contextlib.suppress(TypeError):
        return os.fsdecode(opened)
    return ""
