"""Who is told which reads, and how much is kept."""

import msgspec
import pytest

from cachefs.errors import Busy, ConfigError
from cachefs.read_messages import FileRead, ReadsRequest
from cachefs_daemon.caller import Caller
from cachefs_daemon.jobs.process_reads import (
    HELPER_SECONDS,
    MAX_HELPERS_OF_USER,
    MAX_PATH,
    MAX_PROCESSES,
    MAX_READS,
    ProcessReads,
)

ANN, BOB = Caller(1), Caller(2)


def read(user: int, pid: int, namespace: int = 5, inode: int = 9) -> FileRead:
    return FileRead(user=user, namespace=namespace, pid=pid, thread=pid, inode=inode, path=b"a", when=1)


def ask(told: ProcessReads, caller: Caller, *pids: int, asker: str = "a", now: float = 0.0) -> list[FileRead]:
    return told.take_reads(caller, ReadsRequest(asker=asker, namespace=5, pids=list(pids)), now).reads


def test_one_is_told_of_the_processes_that_one_asks_for_and_owns() -> None:
    told = ProcessReads()
    ask(told, ANN, 10, 11)
    ask(told, BOB, 10)
    told.add_reads([read(1, 10), read(1, 12), read(2, 11), read(1, 11, namespace=6), read(2, 10)])
    assert ask(told, ANN, 10, 11) == [read(1, 10)]
    assert ask(told, ANN, 10, 11) == []
    assert ask(told, BOB, 10) == [read(2, 10)]


def test_two_who_ask_for_the_same_process_are_both_told() -> None:
    told = ProcessReads()
    ask(told, ANN, 10, asker="a")
    ask(told, ANN, 10, asker="b")
    told.add_reads([read(1, 10)])
    assert ask(told, ANN, 10, asker="a") == ask(told, ANN, 10, asker="b") == [read(1, 10)]


def test_who_asks_no_more_is_forgotten() -> None:
    told = ProcessReads()
    ask(told, ANN, 10)
    ask(told, BOB, 10, now=HELPER_SECONDS - 1)
    assert told.users_with_helpers(HELPER_SECONDS - 0.5) == [1, 2]
    assert told.users_with_helpers(HELPER_SECONDS + 0.5) == [2]
    told.add_reads([read(1, 10)])
    assert ask(told, ANN, 10, now=HELPER_SECONDS + 1) == []


def test_the_oldest_reads_go_first_and_are_counted() -> None:
    told = ProcessReads()
    ask(told, ANN, 10)
    told.add_reads([read(1, 10, inode=number) for number in range(MAX_READS + 5)])
    answer = told.take_reads(ANN, ReadsRequest(asker="a", namespace=5, pids=[10]), 0.0)
    assert (len(answer.reads), answer.missed, answer.reads[0].inode) == (MAX_READS, 5, 5)


def test_how_many_may_ask_is_bounded() -> None:
    told = ProcessReads()
    for number in range(MAX_HELPERS_OF_USER):
        ask(told, ANN, 10, asker=str(number))
    with pytest.raises(Busy):
        ask(told, ANN, 10, asker="more")
    ask(told, BOB, 10)
    with pytest.raises(ConfigError):
        ask(told, ANN, *range(MAX_PROCESSES + 1))


def test_somebody_unknown_is_told_nothing() -> None:
    told = ProcessReads()
    assert ask(told, Caller(-1), 10) == []
    assert told.users_with_helpers(0.0) == []


def test_a_path_that_no_file_can_have_is_not_kept() -> None:
    told = ProcessReads()
    ask(told, ANN, 10)
    told.add_reads([msgspec.structs.replace(read(1, 10), path=b"x" * (MAX_PATH + 1))])
    assert ask(told, ANN, 10) == []
