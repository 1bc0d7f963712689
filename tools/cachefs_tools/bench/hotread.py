"""hotread.c, compiled and run: files per second of open + fstat + read + close."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError

SOURCE = Path(__file__).with_name("hotread.c")


@dataclass(frozen=True, slots=True)
class HotRead:
    """program: the compiled binary; listing: file with the paths to read, relative to a root, a line each."""

    program: Path
    listing: Path

    def run(self, root: Path, *, procs: int = 1, rounds: int = 1, checksum: bool = False) -> list[dict[str, Any]]:
        """What each round measured, as hotread prints it. checksum: of all paths and contents, order-independent."""
        command = [self.program, "--root", root, "--list", self.listing, "--procs", str(procs), "--rounds", str(rounds)]
        command += ["--sum"] if checksum else []
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CachefsError(f"hotread failed on {root}: {done.stderr.strip()}")
        return [json.loads(line) for line in done.stdout.splitlines()]


def compile_hotread(work: Path, names: list[str]) -> HotRead:
    """Raises CachefsError where there is no C compiler."""
    program, listing = work / "hotread", work / "names"
    try:
        subprocess.run(["cc", "-O2", "-o", program, SOURCE], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CachefsError(f"hotread.c cannot be compiled ({error}); install gcc") from None
    listing.write_text("\n".join(names))
    return HotRead(program, listing)
