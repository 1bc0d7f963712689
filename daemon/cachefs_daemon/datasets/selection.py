"""Resolves a Selection to files and blocks of a snapshot. Iterates over the snapshot: call it in a thread."""

from collections.abc import Iterator, Sequence

from cachefs.block import block_count, block_key
from cachefs.errors import NotFound
from cachefs.snapshot import Entry, Snapshot


def normal_path(path: bytes) -> bytes:
    """Normalize a path: `/a/b/`, `./a/b` and `a/b` are the same; the root is b""."""
    return b"/".join(part for part in path.split(b"/") if part not in (b"", b"."))


def distinct(paths: Sequence[bytes]) -> list[bytes]:
    """Return *paths* in normal form, without those at or below another one, so that no file is selected twice."""
    kept: list[bytes] = []
    for parts in sorted({tuple(normal_path(path).split(b"/")) for path in paths}):
        path = b"/".join(parts)
        if not kept or not is_below(path, kept[-1]):
            kept.append(path)
    return kept


def is_below(path: bytes, top: bytes) -> bool:
    """Return whether *path* is at or below *top*. Both are in normal form."""
    return not top or path == top or path.startswith(top + b"/")


def split_existing(snapshot: Snapshot, paths: Sequence[bytes]) -> tuple[list[Entry], list[bytes]]:
    """Return the entries at *paths*, none of them below another, and the paths that are not in the snapshot."""
    tops: list[Entry] = []
    missing: list[bytes] = []
    for path in distinct(paths or [b""]):
        entry = snapshot.find_path(path)
        if entry is None:
            missing.append(path)
        else:
            tops.append(entry)
    return tops, missing


def files(snapshot: Snapshot, paths: Sequence[bytes]) -> Iterator[Entry]:
    """Return an iterator over the files at or below *paths*, or all files without paths. Raises NotFound, before
    anything is selected, where a path is not in the snapshot."""
    tops, missing = split_existing(snapshot, paths)
    if missing:
        raise not_in_snapshot_error(snapshot, missing)
    return walk(snapshot, tops)


def walk(snapshot: Snapshot, tops: Sequence[Entry]) -> Iterator[Entry]:
    """Return an iterator over the files at or below *tops*."""
    return (entry for top in tops for entry in snapshot.walk_files(top))


def not_in_snapshot_error(snapshot: Snapshot, missing: Sequence[bytes]) -> NotFound:
    """Return the error for paths that are not in the snapshot."""
    first = missing[0].decode(errors="backslashreplace")
    more = f" (and {len(missing) - 1:,} more of the paths are not there)" if len(missing) > 1 else ""
    return NotFound(
        f"no {first!r} in snapshot {snapshot.id} of {snapshot.url}{more}; paths are relative to the dataset, as "
        "`cachectl ls` shows them"
    )


def block_keys(snapshot: Snapshot, entry: Entry) -> Iterator[bytes]:
    """Return an iterator over the keys of all blocks of a file, in order of their offsets."""
    return (block_key(entry.content, number) for number in range(block_count(entry.size, snapshot.block_size)))
