"""Which files a dataset opens for a sample, seen in the process that loads it.

An audit hook sees every `open` of Python itself; a library that opens files in C is not seen.
"""

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any, Final

from cachefs.publishing.channel import DIRECTORY_VARIABLE, PAGE_NAME, Line, Page, Unheard
from cachefs.publishing.places import Places

# Which consumer a worker loads for: its slot, and how many samples the dataset has.
CONSUMER_VARIABLE: Final = "CACHEFS_CONSUMER"
# Of a packet, in characters of paths; JSON may escape one to six.
MAX_CHARACTERS: Final = 9_000

_is_auditing = False


class _Opening(threading.local):
    """What this thread has opened for the sample it loads; None while it loads none."""

    paths: list[Any] | None = None


_opening = _Opening()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opening.paths is not None:
        _opening.paths.append(arguments[0])


class Observer:
    """Tells the helper which files under a mount were opened for which sample, once for each."""

    def __init__(self, slot: int, length: int, directory: Path) -> None:
        """Raises OSError where the helper is gone."""
        global _is_auditing
        self._slot = slot
        self._length = length
        self._places = Places()
        self._page = Page(directory / PAGE_NAME)
        self._line = Line(directory)
        self._seen: set[int] = set()
        self._pairs: list[tuple[int, list[str]]] = []
        self._characters = 0
        if not _is_auditing:
            sys.addaudithook(_audit)
            _is_auditing = True

    @property
    def is_needed(self) -> bool:
        return not self._page.learned(self._slot)

    def saw(self, sample: Any, opened: list[Any]) -> None:
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
        pairs, self._pairs, self._characters = self._pairs, [], 0
        if pairs:
            message = {"op": "opened", "slot": self._slot, "length": self._length, "pairs": pairs}
            try:
                self._line.send(message, wait=False)
            except Unheard:
                # It is behind, or gone: there is another epoch.
                self._seen.difference_update(sample for sample, _ in pairs)


class Watched:
    """A dataset as a fetcher uses it: `dataset[index]`."""

    def __init__(self, dataset: Any, observer: Observer) -> None:
        self.dataset = dataset
        self.observer = observer

    def __getitem__(self, index: Any) -> Any:
        opened = _opening.paths = []
        try:
            return self.dataset[index]
        finally:
            _opening.paths = None
            self.observer.saw(index, opened)


class WatchedBatches(Watched):
    """One that fetches whole batches: whose files they are can be told where each sample has equally many."""

    def __getitems__(self, indices: Any) -> Any:
        opened = _opening.paths = []
        try:
            return self.dataset.__getitems__(indices)
        finally:
            _opening.paths = None
            each, rest = divmod(len(opened), len(indices)) if len(indices) else (0, 0)
            if each and not rest:
                for number, index in enumerate(indices):
                    self.observer.saw(index, opened[number * each : (number + 1) * each])


def watched(dataset: Any) -> Any:
    """*dataset*, watched where this process loads for a consumer whose samples' files are to be learned."""
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
    """Empty for what is no path (a descriptor)."""
    with contextlib.suppress(TypeError):
        return os.fsdecode(opened)
    return ""
