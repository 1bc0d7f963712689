"""Which processes that have read a mount still run."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.mount.reads import read_records
from cachefs.mount.reads.read_records import ReaderTable

NO_SUPERVISOR = 1 << 30
# Each says the number of the process that reads, and ends it after a line on stdin; the first one goes on after that.
WORKER = """
import multiprocessing, os, sys
def work(pipe):
    print(os.getpid(), flush=True)
    pipe.recv()
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs,))
    child.start()
    sys.stdin.readline()
    ours.send(None)
    child.join()
    print("ended", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def table() -> ReaderTable:
    return ReaderTable(read_records.create_reader_table(), NO_SUPERVISOR)


@contextlib.contextmanager
def program(*command: str) -> Iterator[tuple[int, Callable[[], int]]]:
    """The number of the process that reads for a program, and a call that ends this process and not the program,
    whose number it returns."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def end() -> int:
            stdin.write("\n")
            stdin.flush()
            assert stdout.readline() == "ended\n"
            return process.pid

        yield int(stdout.readline()), end


def test_a_process_counts_until_it_ends(table: ReaderTable) -> None:
    with program("sh", "-c", "echo $$; read line; exit") as (pid, _):
        assert not table.describe_living_reader()
        table.record_reader(pid)
        assert table.describe_living_reader().startswith(f"process {pid} has read it and still runs: 'sh -c")
    assert not table.describe_living_reader()


def test_a_thread_counts_for_its_process(table: ReaderTable) -> None:
    thread = threading.Thread(target=lambda: table.record_reader(threading.get_native_id()))
    thread.start()
    thread.join()
    assert "has read it" in table.describe_living_reader()


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_a_worker_of_a_loader_counts_for_the_process_that_has_started_it(
    table: ReaderTable, start: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WORKER)
    with program(sys.executable, str(script), start) as (pid, end):
        table.record_reader(pid)
        assert table._read_entry(end())
        assert "still runs" in table.describe_living_reader()


def test_a_program_does_not_count_for_the_shell_that_has_started_it(table: ReaderTable) -> None:
    with program("sh", "-c", "sh -c 'echo $$; read line'; echo ended; read line") as (pid, end):
        table.record_reader(pid)
        assert table.describe_living_reader()
        end()
        assert not table.describe_living_reader()


def test_a_later_process_with_the_same_number_does_not_count(table: ReaderTable) -> None:
    with program("sh", "-c", "echo $$; read line; exit") as (pid, _):
        table._write_entry(pid, 7)
        assert not table.describe_living_reader()


def test_the_processes_of_the_mount_are_no_readers() -> None:
    with program("sh", "-c", "echo $$; read line; exit") as (pid, _):
        table = ReaderTable(read_records.create_reader_table(), pid)
        table.record_reader(pid)
        assert not table.describe_living_reader()


def test_of_processes_without_a_number_none_is_known_to_have_ended(table: ReaderTable) -> None:
    table.record_reader(0)
    assert table.describe_living_reader() == "processes outside of its pid namespace have read it"


def test_all_processes_of_a_mount_see_one_table(table: ReaderTable) -> None:
    with program("sh", "-c", "echo $$; read line; exit") as (pid, _):
        ReaderTable(table._fd, NO_SUPERVISOR).record_reader(pid)
        assert str(pid) in table.describe_living_reader()
