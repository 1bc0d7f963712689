"""Who is told which reads, and how much is kept."""

import msgspec
import pytest
from cachefs_daemon.caller import Caller
from cachefs_daemon.jobs.told_reads import ASKING_SECONDS, MOST_OF_ONE, MOST_PATH, MOST_PROCESSES, MOST_READS, ToldReads

from cachefs.errors import Busy, ConfigError
from cachefs.read_messages import FileRead, ReadsAsked

ANN, BOB = Caller(1), Caller(2)


def read(user: int, pid: int, namespace: int = 5, inode: int = 9) -> FileRead:
    return FileRead(user=user, namespace=namespace, pid=pid, thread=pid, inode=inode, path=b"a", when=1)


def ask(told: ToldReads, caller: Caller, *pids: int, asker: str = "a", now: float = 0.0) -> list[FileRead]:
    return told.ask(caller, ReadsAsked(asker=asker, namespace=5, pids=list(pids)), now).reads


def test_one_is_told_of_the_processes_that_one_asks_for_and_owns() -> None:
    told = ToldReads()
    ask(told, ANN, 10, 11)
    ask(told, BOB, 10)
    told.add([read(1, 10), read(1, 12), read(2, 11), read(1, 11, namespace=6), read(2, 10)])
    assert ask(told, ANN, 10, 11) == [read(1, 10)]
    assert ask(told, ANN, 10, 11) == []
    assert ask(told, BOB, 10) == [read(2, 10)]


def test_two_who_ask_for_the_same_process_are_both_told() -> None:
    told = ToldReads()
    ask(told, ANN, 10, asker="a")
    ask(told, ANN, 10, asker="b")
    told.add([read(1, 10)])
    assert ask(told, ANN, 10, asker="a") == ask(told, ANN, 10, asker="b") == [read(1, 10)]


def test_who_asks_no_more_is_forgotten() -> None:
    told = ToldReads()
    ask(told, ANN, 10)
    ask(told, BOB, 10, now=ASKING_SECONDS - 1)
    assert told.users(ASKING_SECONDS - 0.5) == [1, 2]
    assert told.users(ASKING_SECONDS + 0.5) == [2]
    told.add([read(1, 10)])
    assert ask(told, ANN, 10, now=ASKING_SECONDS + 1) == []


def test_the_oldest_reads_go_first_and_are_counted() -> None:
    told = ToldReads()
    ask(told, ANN, 10)
    told.add([read(1, 10, inode=number) for number in range(MOST_READS + 5)])
    answer = told.ask(ANN, ReadsAsked(asker="a", namespace=5, pids=[10]), 0.0)
    assert (len(answer.reads), answer.missed, answer.reads[0].inode) == (MOST_READS, 5, 5)


def test_how_many_may_ask_is_bounded() -> None:
    told = ToldReads()
    for number in range(MOST_OF_ONE):
        ask(told, ANN, 10, asker=str(number))
    with pytest.raises(Busy):
        ask(told, ANN, 10, asker="more")
    ask(told, BOB, 10)
    with pytest.raises(ConfigError):
        ask(told, ANN, *range(MOST_PROCESSES + 1))


def test_somebody_unknown_is_told_nothing() -> None:
    told = ToldReads()
    assert ask(told, Caller(-1), 10) == []
    assert told.users(0.0) == []


def test_a_path_that_no_file_can_have_is_not_kept() -> None:
    told = ToldReads()
    ask(told, ANN, 10)
    told.add([msgspec.structs.replace(read(1, 10), path=b"x" * (MOST_PATH + 1))])
    assert ask(told, ANN, 10) == []
