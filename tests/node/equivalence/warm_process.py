"""`warm_process.py ROOT OUT SETUP[,SETUP]...`: forks a process for each argument, which runs the set-ups that the
argument names, one after the other, and writes down everything that can be seen of each.

Importing torch takes seconds, so it is done once; under `cachefs run` the hooks are there after it. The start and the
end of a process with torch take 0.25 s of a processor, and its helper 0.3 s, so set-ups may share one.
"""

import contextlib
import gc
import hashlib
import json
import os
import random
import re
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

# What the script's directory hides: `python FILE` puts that in front, and not the repository.
sys.path[0] = str(Path(__file__).parents[3])

import numpy  # noqa: E402
import torch  # noqa: E402

from tests.node.equivalence.library_setups import LIBRARY_SETUPS  # noqa: E402
from tests.node.equivalence.own_code_setups import OWN_CODE_SETUPS  # noqa: E402
from tests.node.equivalence.process_setups import PROCESS_SETUPS  # noqa: E402
from tests.node.equivalence.setups import SETUPS, SetUp  # noqa: E402

ALL = {**SETUPS, **PROCESS_SETUPS, **OWN_CODE_SETUPS, **LIBRARY_SETUPS}

# Processes at a time.
AT_ONCE = int(os.environ.get("EQUIVALENCE_AT_ONCE", "2"))


def main(root: str, out: str, processes: list[str]) -> None:
    gc.collect()
    gc.freeze()  # so that the collector of a child does not touch, and copy, every page
    running: dict[int, list[str]] = {}
    waiting = [names.split(",") for names in processes]
    while waiting or running:
        if waiting and len(running) < AT_ONCE:
            names = waiting.pop(0)
            child = os.fork()
            if not child:
                run_together(names, root, out)
                return
            running[child] = names
            continue
        child, status = os.wait()
        for place in (Path(out, name) for name in running.pop(child, [])):
            if place.exists() and not (place / "status").exists():
                (place / "status").write_text(str(status))


def run_together(names: list[str], root: str, out: str) -> None:
    """Run the set-ups in this process. Ends with SystemExit, so that the interpreter ends as usual."""
    *others, last = names
    for name in others:
        status = run(ALL[name], root, Path(out, name))
        Path("status").write_text(f"goes on after {status}")
        gc.collect()  # what one leaves to the collector is not collected while the next one runs
    sys.exit(run(ALL[last], root, Path(out, last)))


def run(setup: SetUp, root: str, place: Path) -> int:
    """Run a set-up, write its state to *place*, and return its exit status."""
    place.mkdir()
    os.chdir(place)
    for name, number in (("stdout", 1), ("stderr", 2)):
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, number)
        os.close(fd)
    begin_with_stderr()
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    status = 0
    try:
        setup(root)
    except SystemExit as error:
        status = int(error.code or 0)
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    if status:
        # An exception of a loader's worker and its frames refer to each other. When the collector comes to them, and
        # the loader's thread ends with them, is chance.
        gc.collect()
    Path("state").write_text(json.dumps(state(), indent=1))
    return status


def begin_with_stderr() -> None:
    """Where the set-up is watched, its process counts as one that began with the standard error that it has now."""
    watching: Any = sys.modules.get("cachefs.publishing.stderr")
    if watching is not None:
        watching.initial_identity = watching.file_identity(2)


def state() -> dict[str, Any]:
    """What can be seen of this process that may not depend on cachefs."""
    for thread in threading.enumerate():
        if thread.name.startswith("QueueFeederThread"):
            thread.join(10)  # it ends, and closes its pipe, soon after the queue was closed
    deadline = time.monotonic() + 2
    while len(os.listdir("/proc/self/task")) > threading.active_count() and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel's part of a thread ends a moment after Python's
    cuda = [bytes(one) for one in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else []
    numpy_state: Any = numpy.random.get_state()
    return {
        "torch": digest(bytes(torch.get_rng_state())),
        "cuda": [digest(one) for one in cuda],
        "numpy": digest(repr([part.tolist() if hasattr(part, "tolist") else part for part in numpy_state]).encode()),
        "random": digest(repr(random.getstate()).encode()),
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("CACHEFS_")},
        "descriptors": sorted(filter(None, map(describe, os.listdir("/proc/self/fd")))),
        "threads": [thread.name for thread in threading.enumerate()],
        "tasks": len(os.listdir("/proc/self/task")),
        "children": children(),
    }


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def describe(fd: str) -> str:
    """A descriptor, but for the two that belong to the helper."""
    with contextlib.suppress(OSError):
        target = os.readlink(f"/proc/self/fd/{fd}").split(":[")[0].replace(os.getcwd(), "")
        target = re.sub(r"pym-\d+-\w+", "pym", target)
        target = re.sub(r"^/dev/shm/\d{6}_", "/dev/shm/mds_", target)  # the first number that no other dataset has
        if re.search(r"/cachefs-.*/page$|memfd:cachefs-page", target):
            return ""  # the memory that is shared with the helper
        if target != "socket":
            return f"{fd} {target}" if int(fd) < 3 else target
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as one:
            return "" if "/cachefs-" in str(one.getpeername()) else target
    return ""


def children() -> list[str]:
    started: list[str] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):  # the thread has just ended
            started += Path(f"/proc/self/task/{task}/children").read_text().split()
    found = []
    for child in started:
        with contextlib.suppress(FileNotFoundError):
            command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            if "cachefs.publishing.helper" not in command:
                found.append(f"{state == 'Z'} {command.partition('main(')[0]}")
    return sorted(found)


if __name__ == "__main__":
    fault = os.environ.get("EQUIVALENCE_FAULT")
    if fault:
        from tests.node.equivalence import faults

        faults.put_in(fault)
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
