"""Stores holders on disk, and encodes them for other nodes."""

import hashlib
import logging
import math
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from cachefs.job_messages import MAX_JOB_NAME
from cachefs.planning.cluster.homes import NO_NODE, NodeNumbers
from cachefs_cluster.membership.view import is_id
from cachefs_cluster.placement.holders import FormerHolders, HolderState
from cachefs_daemon.runtime.autosave import replace_file

log = logging.getLogger(__name__)

# Path on the control endpoint, followed by the id of the snapshot.
HOLDERS_PATH: Final = "/holders"
# Former holders of each block, at most.
MAX_FORMER: Final = 3
# Most bytes per block, and of the form besides.
MAX_BYTES_PER_BLOCK: Final = 2 * (2 + MAX_FORMER)
MAX_OVERHEAD: Final = 1 << 21
# Fast rather than small: a million blocks take 20 ms, and half a megabyte with 4 nodes.
_COMPRESSION_LEVEL: Final = 1
_SUFFIX: Final = ".holders"
_MAX_COUNT: Final = 1 << 53
_MAX_OWNER: Final = 32


class _EncodedState(msgspec.Struct, frozen=True, array_like=True):
    count: int
    job: str
    epoch: int
    ids: list[str]
    # zlib of a u16 per block, little-endian.
    holders: bytes
    # Holders at the start of the next epoch; empty if undecided.
    following: bytes = b""
    # Former holders, their node ids, and the seconds since the ring changed.
    former: list[bytes] = []
    former_ids: list[str] = []
    former_seconds: float = 0.0


def encode_state(known: HolderState, now: float = 0.0) -> bytes:
    """Encode holders. now: loop time. Call in a thread."""
    following = _pack(known.next_holders) if known.next_holders is not None else b""
    form = _EncodedState(known.count, known.job, known.epoch, list(known.ids), _pack(known.holders), following)
    if (former := known.former) is not None:
        nodes = [former.holders, *former.other_holders][:MAX_FORMER]
        form = msgspec.structs.replace(
            form, former=[*map(_pack, nodes)], former_ids=list(former.ids), former_seconds=now - former.changed_at
        )
    return msgspec.msgpack.encode(form)


def _pack(holders: NodeNumbers) -> bytes:
    return zlib.compress(holders.astype("<u2", copy=False).tobytes(), _COMPRESSION_LEVEL)


def _unpack(packed: bytes, blocks: int) -> NodeNumbers:
    """Unpack holders. Raises ValueError."""
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(packed, 2 * blocks + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(data) != 2 * blocks:
        raise ValueError(f"it is not for {blocks:,} blocks")
    return np.frombuffer(data, "<u2").astype(np.uint16)


def decode_state(raw: bytes, blocks: int, now: float = 0.0) -> HolderState:
    """Decode holders. blocks: number of blocks of the snapshot; now: loop time. Call in a thread. Raises ValueError for
    invalid input."""
    form = msgspec.msgpack.decode(raw, type=_EncodedState)
    if not (0 <= form.count < _MAX_COUNT and 0 <= form.epoch < _MAX_COUNT):
        raise ValueError("invalid numbers")
    if len(form.job) > MAX_JOB_NAME + _MAX_OWNER or not form.job.isprintable():
        raise ValueError("an invalid job name")
    for ids in (form.ids, form.former_ids):
        if len(ids) >= NO_NODE or ids != sorted(set(ids)) or not all(map(is_id, ids)):
            raise ValueError("invalid node ids")
    if len(form.former) > MAX_FORMER or not 0 <= form.former_seconds < math.inf:
        raise ValueError("invalid former holders")
    following = _unpack(form.following, blocks) if form.following else None
    holders = _unpack(form.holders, blocks)
    former: FormerHolders | None = None
    if form.former:
        first, *besides = (_unpack(one, blocks) for one in form.former)
        former = FormerHolders(tuple(form.former_ids), first, now - form.former_seconds, tuple(besides))
    return HolderState(form.count, form.job, form.epoch, tuple(form.ids), holders, following, former=former)


def digest_of(known: HolderState) -> str:
    """Return a digest for comparing nodes: 16 hex digits for the members, 16 for the holders. Call in a thread."""
    ids = hashlib.blake2b(" ".join(known.ids).encode(), digest_size=8)
    holders = hashlib.blake2b(known.holders.astype("<u2", copy=False).tobytes(), digest_size=8)
    return ids.hexdigest() + holders.hexdigest()


def differ(one: str, other: str) -> bool:
    """Return whether two nodes with the same members differ in holders. Nodes with different members soon agree on
    these, and then decide alike."""
    return one[:16] == other[:16] and one != other


class HolderFiles:
    """One file per snapshot. Call in threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, snapshot: str, known: HolderState) -> None:
        """Replace the stored holders. Raises OSError."""
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        replace_file(self._directory / (snapshot + _SUFFIX), encode_state(replace(known, former=None)))

    def load(self, snapshot: str, blocks: int) -> HolderState | None:
        """Load holders; None if there are none, or they are invalid."""
        path = self._directory / (snapshot + _SUFFIX)
        try:
            if path.stat().st_size > MAX_BYTES_PER_BLOCK * blocks + MAX_OVERHEAD:
                raise ValueError("it is too long")
            return decode_state(path.read_bytes(), blocks)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s is ignored: %s; blocks count as being at home", path, error)
            return None

    def remove(self, snapshot: str) -> None:
        """Remove the holders of a snapshot. A file that cannot be removed is replaced the next time."""
        with suppress(OSError):
            (self._directory / (snapshot + _SUFFIX)).unlink(missing_ok=True)

    def remove_unwanted(self, is_wanted: Callable[[str], bool]) -> None:
        """Remove the files of snapshots that are not wanted any more. Raises OSError."""
        for path in self._directory.glob("*" + _SUFFIX):
            if not is_wanted(path.name.removesuffix(_SUFFIX)):
                path.unlink(missing_ok=True)
