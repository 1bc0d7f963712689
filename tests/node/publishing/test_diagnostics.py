"""`cachefs run` says of each loader that is not understood what would help: once on stderr, and in `job show`."""

import contextlib
import subprocess
import sys
from pathlib import Path

from cachefs.errors import NotFound
from cachefs.job_messages import JobName
from cachefs.rpc import JOB_SHOW
from cachefs_tools.cachectl.job_page import describe
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.node.publishing.strange_loaders import hashed
from tests.waiting import until
from tests.warm_python import WarmPython

SCRIPT = Path(__file__).with_name("strange_loaders.py")
CACHEFS = Path(sys.executable).with_name("cachefs")
FILES = 320
SECONDS = 100.0
PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)


def test_what_is_not_understood_is_said_once_with_what_would_help(torch_jobs: WarmPython, tmp_path: Path) -> None:
    top = tmp_path / "origin"
    top.mkdir()
    for number in range(FILES):
        (top / hashed(number)).write_text(str(number))
    with Daemon(tmp_path / "node") as daemon:
        daemon.add_dataset("numbers", f"file://{top}")
        with mounted(daemon.socket, "numbers", tmp_path / "mnt") as mount:
            line = [CACHEFS, "run", "--job", "strange", "--socket", daemon.socket, "--", sys.executable, SCRIPT, mount]
            with torch_jobs.start(list(map(str, line)), **PIPES) as job:
                assert job.stdout is not None
                for printed in job.stdout:
                    if printed == "all are read\n":
                        break
                notes = wait_for_notes(daemon, 3)
                shown = "\n".join(map(str, describe(daemon.client.call(JOB_SHOW, JobName(job="strange")))))
                _, stderr = job.communicate("go on\n", timeout=SECONDS)
    with torch_jobs.start([sys.executable, SCRIPT, top], **PIPES) as alone:
        _, problems = alone.communicate("go on\n", timeout=SECONDS)
    assert job.returncode == 0, stderr
    assert alone.returncode == 0, problems
    # The first loader, the last one, and the order of the second are understood.
    numbered = {name.rpartition(".")[2]: note for name, note in notes.items()}
    hashes, unruly, stream = numbered["1"], numbered["2"], numbered["3"]
    place = f"({SCRIPT.name}:"
    assert hashes.startswith(f"loader Hashed {place}")
    assert "the dataset lists nothing that tells the file of a sample" in hashes
    assert unruly.startswith(f"loader Listed {place}")
    assert "not understood: the order of Unruly becomes known only while the loader draws it" in unruly
    assert stream.startswith(f"loader Stream {place}")
    assert "not understood: cachefs cannot see in advance what an IterableDataset reads" in stream
    said = [text for text in stderr.splitlines() if text.endswith("; the job continues")]
    assert sorted(said) == sorted(f"cachefs: {note}; the job continues" for note in notes.values())
    assert all(f"? {note}" in shown for note in notes.values())


def wait_for_notes(daemon: Daemon, many: int) -> dict[str, str]:
    """The notes of the job's consumers, by name, once there are so many."""

    def notes() -> dict[str, str]:
        with contextlib.suppress(NotFound):
            view = daemon.client.call(JOB_SHOW, JobName(job="strange"))
            return {one.consumer: one.note for one in view.consumers if one.note}
        return {}

    return until(notes, f"{many} notes", is_right=lambda found: len(found) == many)
