"""Compiles and runs hotread.c, which measures files per second of open + fstat + read + close."""

import ctypes
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError

SOURCE = Path(__file__).with_name("hotread.c")


@dataclass(frozen=True, slots=True)
class HotRead:
    """The compiled program and the files it reads."""

    program: Path
    listing: Path  # a file with paths relative to a root, one per line

    def run(
        self, root: Path, *, procs: int = 1, rounds: int = 1, seed: int = 1, checksum: bool = False
    ) -> list[dict[str, Any]]:
        """Return the figures of each round, as hotread prints them. With *checksum* each round includes an
        order-independent checksum of all paths and contents."""
        command = [self.program, "--root", root, "--list", self.listing, "--procs", str(procs), "--rounds", str(rounds)]
        command += ["--seed", str(seed)]
        command += ["--sum"] if checksum else []
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CachefsError(f"hotread failed on {root}: {done.stderr.strip()}")
        return [json.loads(line) for line in done.stdout.splitlines()]


def compile_hotread(work: Path, names: list[str]) -> HotRead:
    """Compile hotread in *work* for the paths *names*. Raises CachefsError without a C compiler."""
    program, listing = work / "hotread", work / "names"
    try:
        subprocess.run(["cc", "-O2", "-o", program, SOURCE], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CachefsError(f"hotread.c cannot be compiled ({error}); install gcc") from None
    listing.write_text("\n".join(names))
    return HotRead(program, listing)


def first_round_order(files: int, seed: int) -> list[int]:
    """Return the order in which hotread reads the lines of its list in its first round.

    With N processes, process k reads the positions k, k+N, k+2N and so on of this order.
    """
    library = ctypes.CDLL(None)
    library.random.restype = ctypes.c_long
    library.srandom(ctypes.c_uint(seed))
    order = list(range(files))
    for last in range(files - 1, 0, -1):
        other = library.random() % (last + 1)
        order[last], order[other] = order[other], order[last]
    return order
