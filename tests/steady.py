"""Runs the suite several times beside busy processes, and names the tests that wavered: `make steady`.

A test wavers where it fails beside others in any of the runs, whether it passes alone or not. The exit status is 1
where one did. What each run printed stays in a directory that is named first.

    python -m tests.steady [--runs 5] [--processes 6] [--busy 2.0] [-- PYTEST OPTIONS AND FILES]
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.second_chance import VERDICT

# Lines of second_chance and of pytest: `tests/x.py::test_y: unsteady: ...` and `FAILED tests/x.py::test_y - error`.
_WAVERED: Final = re.compile(rf"^(?:(\S+::.+): {re.escape(VERDICT)}|(?:FAILED|ERROR) (\S+::\S+(?: [^-]\S*)*))", re.M)
_SPIN: Final = (sys.executable, "-c", "while True: pass")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the suite again and again, and name the tests that waver.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--processes", type=int, default=6, help="test processes side by side (pytest -n)")
    parser.add_argument("--busy", type=float, default=2.0, help="busy processes beside them, for each processor")
    parser.add_argument("options", nargs="*", help="for pytest")
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="", dir="/tmp"))
    print(f"what the runs print: {place}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the busy processes would go on
    wavered: dict[str, list[int]] = defaultdict(list)
    are_whole = True
    with _busy(round(given.busy * (os.cpu_count() or 1))):
        for number in range(1, given.runs + 1):
            began = time.monotonic()
            status, names = _run(place / f"{number}", given.processes, given.options)
            are_whole &= status in (0, 1)
            for name in names:
                wavered[name].append(number)
            print(f"run {number}: {time.monotonic() - began:.0f} s, exit {status}, {len(names)} wavered", flush=True)
    for name, runs in sorted(wavered.items(), key=lambda item: -len(item[1])):
        print(f"{len(runs)} of {given.runs}: {name} (runs {', '.join(map(str, runs))})")
    return 1 if wavered or not are_whole else 0


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keeps so many processes busy."""
    spinning = [subprocess.Popen(_SPIN) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def _run(place: Path, processes: int, options: list[str]) -> tuple[int, list[str]]:
    """Runs the suite once. Returns its exit status, and the tests that failed beside others."""
    command = [
        sys.executable, "-m", "pytest", "-p", "tests.forked_workers", "-p", "tests.second_chance",
        "-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "4",
        "-o", "faulthandler_timeout=400", "-o", "faulthandler_exit_on_timeout=true", f"--basetemp={place}", *options,
    ]  # fmt: skip
    with place.with_suffix(".out").open("w+") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        output.seek(0)
        return status, wavering(output.read())


def wavering(printed: str) -> list[str]:
    """Returns the tests that failed beside others, as a run with `tests.second_chance` has printed them."""
    return list(dict.fromkeys(found[1] or found[2] for found in _WAVERED.finditer(printed)))


if __name__ == "__main__":
    sys.exit(main())
