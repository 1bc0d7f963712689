"""Which files and blocks a Selection means in a snapshot. Plain iteration over the snapshot: call it in a thread."""

from collections.abc import Iterator, Sequence

from cachefs.block import block_count, block_key
from cachefs.errors import NotFound
from cachefs.snapshot import Entry, Snapshot


def normal_path(path: bytes) -> bytes:
    """`/a/b/`, `./a/b` and `a/b` are one path; the root is b""."""
    return b"/".join(part for part in path.split(b"/") if part not in (b"", b"."))


def distinct(paths: Sequence[bytes]) -> list[bytes]:
    """*paths* in normal form, but none that is at or below another one: so no file is selected twice."""
    kept: list[bytes] = []
    for parts in sorted({tuple(normal_path(path).split(b"/")) for path in paths}):
        path = b"/".join(parts)
        if not kept or not is_below(path, kept[-1]):
            kept.append(path)
    return kept


def is_below(path: bytes, top: bytes) -> bool:
    """Whether *path* is at or below *top*. Both are in normal form."""
    return not top or path == top or path.startswith(top + b"/")


def files(snapshot: Snapshot, paths: Sequence[bytes]) -> Iterator[Entry]:
    """The files at or below *paths*, or all files where there are no paths.

    Raises NotFound, before anything is selected, where a path is not in the snapshot.
    """
    tops = []
    for path in distinct(paths or [b""]):
        entry = snapshot.find(path)
        if entry is None:
            raise NotFound(f"no {path.decode(errors='backslashreplace')!r} in snapshot {snapshot.id} of {snapshot.url}")
        tops.append(entry)
    return (entry for top in tops for entry in snapshot.walk(top))


def block_keys(snapshot: Snapshot, entry: Entry) -> Iterator[bytes]:
    """The keys of all blocks of a file, in order of their offsets."""
    return (block_key(entry.content, number) for number in range(block_count(entry.size, snapshot.block_size)))
