"""A reader of the fault campaign, in a process of its own. It reads files in the ways programs do and checks each byte.

Arguments: directory of the dataset in a mount of all, number of files, seed, heartbeat file. The heartbeat file holds
when the read under way began (monotonic seconds; 0: none is), how many reads were right, how many met no mount, and how
many met an object that had just been replaced. Wrong bytes, or an error that no reader may get, end it with a message.
"""

import errno
import mmap
import os
import random
import struct
import sys
import time
from pathlib import Path

import numpy as np

HEARTBEAT = struct.Struct("<d3Q")
HEADER = struct.Struct("<QQ")  # number of the file, version
# The mount is being made again.
AWAY = {errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.ENOENT, errno.EINTR}
# The object has another version than the snapshot says; the next snapshot has it.
REPLACED = {errno.ESTALE}


def name_of(number: int) -> str:
    return f"class{number % 7}/{number:05}.bin"


def size_of(number: int) -> int:
    if number % 60 == 7:
        return (5 << 20) + number
    return 20_000 + (number * 7919) % 260_000


def content_of(number: int, version: int) -> bytes:
    """The whole file. Every part of it depends on both numbers."""
    body = np.random.RandomState(number * 1009 + version).bytes(size_of(number) - HEADER.size)
    return HEADER.pack(number, version) + body


def main(directory: str, files: str, seed: str, heartbeat: str) -> None:
    rng = random.Random(int(seed))
    right = away = replaced = 0
    with open(heartbeat, "r+b") as file, mmap.mmap(file.fileno(), HEARTBEAT.size) as page:
        while True:
            number = rng.randrange(int(files))
            page[:] = HEARTBEAT.pack(time.monotonic(), right, away, replaced)
            try:
                problem = _problem(Path(directory, name_of(number)), number, rng)
            except OSError as error:
                if error.errno in REPLACED:
                    replaced += 1
                elif error.errno in AWAY and not _is_missing(Path(directory), name_of(number)):
                    away += 1
                else:
                    sys.exit(f"{name_of(number)}: {error}")
                problem = ""
                time.sleep(0.02)
            else:
                right += 1
            if problem:
                sys.exit(f"{name_of(number)}: {problem}")
            page[:] = HEARTBEAT.pack(0.0, right, away, replaced)
            time.sleep(0.002)


def _read_fully(fd: int, start: int, length: int) -> bytes:
    """Where the mount goes away in the middle, the kernel gives what it has, and an error only to who asks again."""
    content = b""
    while len(content) < length and (piece := os.pread(fd, length - len(content), start + len(content))):
        content += piece
    return content


def _is_missing(directory: Path, name: str) -> bool:
    """Return whether the mount is there, and does not have the file.

    The kernel answers a stat of the mount's root from its memory for some time after the mount has died, so that only
    the file's own error tells that.
    """
    for _ in range(50):
        if not os.path.ismount(directory.parent):
            return False
        try:
            os.stat(directory / name)
        except FileNotFoundError:
            time.sleep(0.1)
        except OSError as error:
            return error.errno not in AWAY
        else:
            return False
    return True


def _problem(path: Path, number: int, rng: random.Random) -> str:
    """What is wrong with the file at *path*; an empty text if nothing is. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = size_of(number)
        got, version = HEADER.unpack(_read_fully(fd, 0, HEADER.size).ljust(HEADER.size, b"\xff"))
        if got != number or version >= 1 << 32:
            return f"it begins as file {got}, version {version}"
        expected = content_of(number, version)
        if rng.random() < 0.5:
            content = b"".join(iter(lambda: os.read(fd, 1 << 20), b""))
            if content != expected:
                return f"{len(content)} of {size} bytes, and not those of version {version}"
        for _ in range(3):
            start = rng.randrange(size)
            length = rng.randrange(1, 200_000)
            if _read_fully(fd, start, length) != expected[start : start + length]:
                return f"bytes {start} to {start + length} are not those of version {version}"
        return ""
    finally:
        os.close(fd)


if __name__ == "__main__":
    main(*sys.argv[1:])
