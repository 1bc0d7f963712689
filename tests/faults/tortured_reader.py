"""A reader in a process of its own, which never gives up: it reads a tree in the orders of a seed, epoch after epoch.

Arguments: directory, file of digests (JSON: path -> xxh3 of its bytes), seed, heartbeat file. The heartbeat file holds
three numbers: when the read under way began (monotonic; 0: none is), reads that were right, and reads that failed with
an error a mount that goes away may give. Wrong bytes, or any other error, end it with a message.
"""

import errno
import json
import mmap
import struct
import sys
import time
from pathlib import Path

import numpy as np
import xxhash

HEARTBEAT = struct.Struct("<d2Q")
# The mount is gone, or was at that moment; EIO is what a read past its deadline gives.
AWAY = {errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.EIO, errno.ENOENT, errno.EINTR}


def main(directory: str, digests: str, seed: str, heartbeat: str) -> None:
    expected: dict[str, str] = json.loads(Path(digests).read_text())
    # As the daemon numbers samples: all files in order of their path bytes.
    paths = sorted(expected, key=str.encode)
    right = away = 0
    with open(heartbeat, "r+b") as file, mmap.mmap(file.fileno(), HEARTBEAT.size) as page:
        for epoch in range(1 << 30):
            for number in np.random.RandomState(int(seed) + epoch).permutation(len(paths)).tolist():
                page[:] = HEARTBEAT.pack(time.monotonic(), right, away)
                try:
                    content = Path(directory, paths[number]).read_bytes()
                except OSError as error:
                    if error.errno not in AWAY:
                        sys.exit(f"{paths[number]}: {error}")
                    away += 1
                    page[:] = HEARTBEAT.pack(0.0, right, away)
                    time.sleep(0.01)
                    continue
                if xxhash.xxh3_64_hexdigest(content) != expected[paths[number]]:
                    sys.exit(f"{paths[number]}: wrong bytes")
                right += 1
                page[:] = HEARTBEAT.pack(0.0, right, away)
                time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
