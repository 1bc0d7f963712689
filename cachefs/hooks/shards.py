"""The shards of a stream, and the order in which its epochs open them: what all libraries have in common."""

import os
import re
from collections.abc import Iterable
from itertools import zip_longest
from typing import Final, Protocol

# In front of a path; and of what is none.
_FILE: Final = re.compile(r"file:(//(localhost(?=/))?)?")
# In paths that may have to be made simpler, or are none.
_ODD: Final = ("//", "/.", "\0")
_ELSEWHERE: Final = re.compile(r"pipe:|[A-Za-z][A-Za-z0-9+.-]*:/")


class Shards(Protocol):
    """What is read of a dataset as an epoch begins."""

    @property
    def files(self) -> tuple[str, ...]:
        """Absolute paths of the shards, each once."""

    def orders(self, begun: int, workers: int, *, keeps_workers: bool) -> list[list[int]]:
        """Returns the numbers of the shards in the order in which the epoch that begins opens them, and, where the
        library settles it by now, those of the epoch after it. With several workers, each opens one after the other. An
        empty list means that computing the order takes too long.

        begun: epochs of the loader that were begun before; keeps_workers: are those of the epoch before going on?
        """


def in_turns(of_workers: Iterable[Iterable[int]]) -> list[int]:
    """The first of each worker, then the second of each."""
    return [one for together in zip_longest(*of_workers) for one in together if one is not None]


def local_path(url: str) -> str:
    """The absolute path that a URL, or a path, names; empty where it names no file of this machine."""
    if url[:1] == "/" and not any(part in url for part in _ODD) and url[-1] != "/":
        return url  # as most are: what follows takes 2 us
    path = _FILE.sub("", url)
    return os.path.abspath(path) if path and "\0" not in path and not _ELSEWHERE.match(path) else ""
