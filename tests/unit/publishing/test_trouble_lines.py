"""A job's user is told of a trouble once when it has lasted, and once when it is over; the summary has all of them."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachefs.messages import Trouble
from cachefs.publishing import exit_summary
from cachefs.publishing.exit_summary import find_failed_read
from cachefs.publishing.exit_summary import summary_lines as summary
from cachefs.publishing.run_record import RUN_VARIABLE, LoaderRecord, ProcessRecord, TroubleRecord
from cachefs.publishing.trouble_lines import MAX_LINES, JobStderr, TroublePrinter
from cachefs.trouble_texts import Cause


class Job:
    def __init__(self) -> None:
        self.now = 1000.0
        self.lines: list[str] = []
        self.troubles = TroublePrinter(self.lines.append, lambda: self.now)

    def see(self, *troubles: Trouble) -> None:
        self.troubles.update_troubles(troubles)


def outage(since: float, waiting: int = 1) -> Trouble:
    return Trouble(Cause.ORIGIN, "S3 at x", since, since, "refused", waiting, 4.0)


def test_an_outage_is_told_when_it_has_lasted_and_when_it_is_over() -> None:
    job = Job()
    job.see(outage(1000.0))
    assert job.lines == []
    assert job.troubles.has_lasting_trouble
    job.now = 1004.0
    job.see(outage(1000.0))
    job.see(outage(1000.0))
    assert job.lines == ["S3 at x has not answered for 4 s; 1 read waits for it, for 4 s (refused)"]
    job.now = 1035.0
    job.see()
    job.see()
    assert job.lines[1:] == ["S3 at x answers again, after 35 s"]
    assert not job.troubles.has_lasting_trouble
    [record] = job.troubles.make_records()
    assert (record.line, record.seconds, record.waited) == ("S3 at x did not answer for 35 s", 35.0, 35.0)


def test_a_read_that_waits_on_after_an_outage_waits_for_the_rest_only() -> None:
    job = Job()
    job.now = 1030.0
    job.see(outage(1000.0))
    slow = Trouble(Cause.SLOW, "S3 at x", 1000.0, 1030.0, "", 1, 30.0)
    job.see(slow)
    job.now = 1031.0
    job.see(slow)
    job.see()
    assert [line.partition(",")[0] for line in job.lines[1:]] == ["S3 at x answers again"]
    assert [record.line for record in job.troubles.make_records()] == ["S3 at x did not answer for 30 s"]


def test_an_outage_that_no_read_waits_for_is_not_the_jobs() -> None:
    job = Job()
    job.now = 1010.0
    job.see(outage(1000.0, waiting=0))
    assert job.lines == []
    assert job.troubles.make_records() == []


def test_failed_reads_are_told_at_once_and_are_not_over() -> None:
    job = Job()
    job.see(Trouble(Cause.REFUSED, "pets", 900.0, 1000.0, "no", failed=1))
    job.now = 1001.0
    job.see(Trouble(Cause.REFUSED, "pets", 900.0, 1001.0, "no", failed=5))
    job.see()
    assert len(job.lines) == 1
    assert job.lines[0] == "1 read of pets failed: no; see `cachectl errors`"
    assert [record.line for record in job.troubles.make_records()] == [
        "5 reads of pets failed: no; see `cachectl errors`"
    ]


def test_an_origin_that_comes_and_goes_fills_no_log() -> None:
    job = Job()
    for _ in range(100):
        job.now += 10
        job.see(outage(job.now - 5))
        job.now += 10
        job.see()
    assert len(job.lines) == MAX_LINES


def test_a_program_that_dies_of_a_failed_read_says_so_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The helper of the job says it first, and the summary follows."""
    said: list[str] = []
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    monkeypatch.setattr(exit_summary, "_printed_keys", [])
    monkeypatch.setattr(
        exit_summary, "_request_cause", lambda *_: "refused pets\n2 reads of pets failed: no; see `errors`"
    )
    monkeypatch.setattr(exit_summary.channel, "print_line", said.append)
    job = Job()
    job.see(Trouble(Cause.REFUSED, "pets", 900.0, 1000.0, "no", failed=1))
    assert len(job.lines) == 1
    exit_summary.print_cause(PermissionError(13, "no"))
    assert said == ["2 reads of pets failed: no; see `errors`"], "behind the traceback, where the user looks"
    exit_summary.print_cause(PermissionError(13, "no"))  # another process of the run
    assert len(said) == 1
    assert summary([ProcessRecord(1, True, troubles=job.troubles.make_records())], exit_summary._printed_keys) == []
    for name in tmp_path.iterdir():
        name.unlink()
    exit_summary.print_cause(PermissionError(13, "no"))
    job = Job()
    job.see(Trouble(Cause.REFUSED, "pets", 900.0, 1000.0, "no", failed=1))
    assert job.lines == []


def test_the_summary_says_what_was_away_and_gives_no_other_advice() -> None:
    loader = LoaderRecord("x", epochs=1, samples=10, busy=50.0, waited=45.0, first_busy=50.0, first_waited=45.0)
    away = TroubleRecord("origin S3 at x", 35.0, 35.0, 0, "S3 at x did not answer for 35 s")
    one = ProcessRecord(1, True, [loader], stalls={"origin": 45.0}, troubles=[away])
    other = ProcessRecord(2, True, [loader], troubles=[TroubleRecord("origin S3 at x", 34.0, 34.0, 0, "for 34 s")])
    found = summary([one, other])
    assert "S3 at x did not answer for 35 s" in found
    assert "for 34 s" not in found
    assert not any("bandwidth" in line for line in found)
    short = TroubleRecord("origin S3 at x", 3.0, 3.0, 0, "S3 at x did not answer for 3 s")
    assert any("bandwidth" in line for line in summary([dataclasses.replace(one, troubles=[short])]))


def test_a_run_whose_loaders_have_given_nothing_says_why() -> None:
    failed = TroubleRecord("refused pets", 1.0, 0.0, 7, "7 reads of pets failed: no")
    assert summary([ProcessRecord(1, True, troubles=[failed])]) == ["7 reads of pets failed: no"]


# --- what a program dies of -----------------------------------------------------------------------------------------


def _raised(cause: BaseException, *, torch: bool) -> BaseException:
    if torch:
        return type(cause)(f"Caught {type(cause).__name__} in DataLoader worker process 0.\nOriginal {cause}")
    try:
        try:
            raise cause
        except OSError as error:
            raise RuntimeError("no picture") from error
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("torch", [False, True])
@pytest.mark.parametrize("number", [5, 13, 116])
def test_the_errno_behind_an_exception_is_found(number: int, torch: bool) -> None:
    assert find_failed_read(_raised(OSError(number, os.strerror(number)), torch=torch)) == (number, "")


@pytest.mark.parametrize("path", ["/ckpt/secret", "/a: 'b", "/it's"])
def test_the_file_is_found_in_the_text_of_a_worker(path: str) -> None:
    cause = PermissionError(13, os.strerror(13), path)
    assert find_failed_read(_raised(cause, torch=True)) == (13, path)


def test_a_refusal_of_a_file_that_is_on_no_mount_has_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_summary, "mount_points", lambda: [SimpleNamespace(path="/m")])
    monkeypatch.setattr(exit_summary.channel, "run_detached", lambda *_: b"a cause")
    assert exit_summary._request_cause(13, "/ckpt/secret") == ""
    assert exit_summary._request_cause(13, "/m/secret") == "a cause"
    for number in (5, 13):
        assert exit_summary._request_cause(number, "") == "a cause", "a read names no file"


def test_other_exceptions_are_none_of_ours() -> None:
    assert find_failed_read(ValueError("[Errno 13]")) == (0, "")
    assert find_failed_read(FileNotFoundError(2, "no", "/x")) == (0, "")
    assert find_failed_read(PermissionError(13, "no", "/x")) == (13, "/x")
    loop = ValueError()
    loop.__context__ = loop
    assert find_failed_read(loop) == (0, "")


# --- the job's stderr -----------------------------------------------------------------------------------------------

_WAITING = "import os, sys; os.close(1); sys.stdin.read(); os.write(2, b'own\\n')"


def _process(stderr: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", _WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
    )


def _stderr_of(process: "subprocess.Popen[bytes]") -> JobStderr:
    started_with = os.stat(f"/proc/{process.pid}/fd/2")
    return JobStderr(process.pid, os.pidfd_open(process.pid), (started_with.st_dev, started_with.st_ino))


def _is_up(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdout is not None
    process.stdout.read()


@pytest.mark.parametrize("flags", [os.O_APPEND, 0])
def test_a_line_is_written_between_those_of_the_job(tmp_path: Path, flags: int) -> None:
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | flags)
    process = _process(fd)
    _is_up(process)
    written = _stderr_of(process).write_line("ours")
    process.communicate(b"")
    assert written
    assert (tmp_path / "log").read_text() == "ours\nown\n"
    os.close(fd)


def test_a_pipe_gets_the_line_and_its_end() -> None:
    process = _process(subprocess.PIPE)
    _is_up(process)
    stderr = _stderr_of(process)
    assert stderr.write_line("ours")
    _, text = process.communicate(b"")
    assert text == b"ours\nown\n"
    assert not stderr.write_line("later")


def test_a_pipe_that_is_full_is_not_waited_for() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    process = _process(writing)
    _is_up(process)
    try:
        while True:
            os.write(writing, bytes(4096))
    except BlockingIOError:
        pass
    assert not _stderr_of(process).write_line("ours")
    process.kill()
    process.communicate()
    with open(reading, "rb", closefd=True) as rest:
        os.close(writing)
        assert b"ours" not in rest.read()


def test_another_file_than_at_the_start_is_left_alone(tmp_path: Path) -> None:
    program = "import os, sys; input(); os.dup2(os.open(sys.argv[1], 65), 2); print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "other")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    stderr = _stderr_of(process)
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()
    assert not stderr.write_line("ours")
    process.communicate(b"\n")
    assert (tmp_path / "other").read_bytes() == b""


def test_a_file_that_the_job_has_put_there_before_its_first_loader_is_left_alone(tmp_path: Path) -> None:
    """As one does that captures its output: what the helper finds when it starts is not the job's own stderr."""
    with open(tmp_path / "captured", "wb") as captured:
        process = _process(captured.fileno())
    _is_up(process)
    other = os.stat(os.devnull)
    for started_with in ((other.st_dev, other.st_ino), None):
        assert not JobStderr(process.pid, os.pidfd_open(process.pid), started_with).write_line("ours")
    process.communicate(b"")
    assert (tmp_path / "captured").read_bytes() == b"own\n"


DIE = """
import errno, signal, sys
from cachefs import mount_table
from cachefs.publishing import channel, exit_summary
mount_table._TABLE = mount_table.Path(sys.argv[1])
signal.signal(signal.SIGCHLD, lambda number, frame: print("SIGCHLD"))
run = channel.run_detached
channel.run_detached = lambda *given: print("asked", run(*given))
exit_summary.print_cause(PermissionError(errno.EACCES, "no", sys.argv[2]))
"""


@pytest.mark.parametrize(("path", "said"), [("/etc/shadow", ""), ("/nowhere/data/file", "asked b''\n")])
def test_a_program_that_dies_asks_only_for_files_of_a_mount_and_gets_no_signal(
    tmp_path: Path, path: str, said: str
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text("31 22 0:57 / /nowhere/data ro - fuse.cachefs cachefs:one ro\n")
    command = [sys.executable, "-c", DIE, str(table), path]
    environment = {**os.environ, "CACHEFS_SOCKET": str(tmp_path / "none")}
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout == said
