"""The shards of a stream, and the order in which its epochs open them, for all libraries."""

import os
import re
from collections.abc import Iterable
from itertools import zip_longest
from typing import Final, Protocol

# Prefix of a file URL.
_FILE: Final = re.compile(r"file:(//(localhost(?=/))?)?")
# Parts of paths that may need normalising, or are invalid.
_UNUSUAL_PARTS: Final = ("//", "/.", "\0")
_REMOTE_URL: Final = re.compile(r"pipe:|[A-Za-z][A-Za-z0-9+.-]*:/")


class StreamShards(Protocol):
    """The state of a dataset as an epoch begins."""

    @property
    def files(self) -> tuple[str, ...]:
        """Absolute paths of the shards, each once."""

    def epoch_orders(self, earlier_epochs: int, workers: int, *, keeps_workers: bool) -> list[list[int]]:
        """Return the numbers of the shards in the order in which the epoch that begins opens them, and, where the
        library has settled it, those of the next epoch. With several workers, each opens one after the other. An empty
        list means that computing the order takes too long.

        earlier_epochs: number of earlier epochs of the loader; keeps_workers: whether the workers of the previous epoch
        continue.
        """


def interleave(of_workers: Iterable[Iterable[int]]) -> list[int]:
    """Return the first item of each worker, then the second of each, and so on."""
    return [one for together in zip_longest(*of_workers) for one in together if one is not None]


def local_path(url: str) -> str:
    """Return the absolute path of a URL or a path; "" where it names no file of this machine."""
    if url[:1] == "/" and not any(part in url for part in _UNUSUAL_PARTS) and url[-1] != "/":
        return url  # as most are: the rest takes 2 us
    path = _FILE.sub("", url)
    return os.path.abspath(path) if path and "\0" not in path and not _REMOTE_URL.match(path) else ""
