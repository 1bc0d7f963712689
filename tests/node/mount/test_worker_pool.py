"""Workers that stand still, that do not die, or that others end, as the pool sees them. They are `sleep` here."""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from cachefs.mount.processes import worker_pool
from cachefs.mount.processes.session import FuseSession
from cachefs.mount.processes.worker import MountState, WorkerMessage
from cachefs.mount.processes.worker_pool import MAX_CRASHES, MAX_HANGING, SILENT_SECONDS, UNSERVED_SECONDS, WorkerPool


class Workers:
    """Starts `sleep` in place of workers, and notes what the pool makes of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self.blamed: list[int] = []
        monkeypatch.setattr(worker_pool, "fork_watched", self._start)
        # Answers poll(2) as the device of a mount does: with POLLERR, once there is nobody at the other end.
        self._device = os.pipe()
        session = SimpleNamespace(
            clone=lambda: os.open(os.devnull, os.O_RDWR),
            connection=SimpleNamespace(has_waiting=lambda: True),
            device=self._device[1],
        )
        self.pool = WorkerPool(
            cast(MountState, SimpleNamespace(directory=Path("/mnt/one"))), cast(FuseSession, session), 1
        )
        monkeypatch.setattr(self.pool._poison_requests, "record_death", self.blamed.append)

    def _start(self, name: str, directory: Path, work: Callable[[], None]) -> tuple[int, int]:
        child = subprocess.Popen(["sleep", "1000"])
        self.started.append(child)
        return child.pid, os.pidfd_open(child.pid)

    def serve(self) -> None:
        """Have the pool start who is missing, and hear from all."""
        self.pool.handle_events(0, [])
        for worker in self.pool._workers:
            self.pool._handle_message(worker, WorkerMessage.READY, "")

    def unmount(self) -> None:
        os.close(self._device[0])

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < deadline
            self.pool.handle_events(0.1, [])

    def be_silent(self, seconds: int = SILENT_SECONDS + 1) -> None:
        for _ in range(seconds):
            self.pool.check_workers()


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    ours = Workers(monkeypatch)
    ours.serve()
    yield ours
    for child in ours.started:
        child.kill()
        child.wait(20)


def test_one_that_stands_still_is_blamed_on_its_request_and_replaced(workers: Workers) -> None:
    workers.be_silent()
    assert workers.blamed == [0]
    workers.until(lambda: len(workers.started) == 2)


def test_one_that_somebody_has_stopped_is_replaced_and_no_request_is_blamed(workers: Workers) -> None:
    (child,) = workers.started
    child.send_signal(signal.SIGSTOP)
    workers.until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    workers.be_silent()
    assert workers.blamed == []
    workers.until(lambda: len(workers.started) == 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_those_that_somebody_ends_are_no_crashes(workers: Workers, number: int) -> None:
    for count in range(1, MAX_CRASHES + 2):
        workers.started[-1].send_signal(number)
        workers.until(lambda before=count: len(workers.started) > before)  # type: ignore[misc]
        workers.serve()
    assert workers.pool.failure is None
    assert workers.blamed == []


def test_one_that_crashes_is_blamed_on_its_request(workers: Workers) -> None:
    workers.started[-1].send_signal(signal.SIGSEGV)
    workers.until(lambda: len(workers.started) == 2)
    assert workers.blamed == [0]


@pytest.fixture
def hanging(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> Workers:
    """As many as may be have been killed, and do not die."""
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    for count in range(1, MAX_HANGING + 1):
        workers.be_silent()
        workers.serve()
        workers.serve()
        assert len(workers.started) == min(count + 1, MAX_HANGING)
    return workers


def test_while_many_do_not_die_no_other_is_started(hanging: Workers) -> None:
    hanging.serve()
    assert len(hanging.started) == MAX_HANGING
    hanging.started[0].kill()
    hanging.until(lambda: len(hanging.started) == MAX_HANGING + 1)
    assert hanging.pool.failure is None


def test_waiting_for_one_that_dies_takes_no_processor(hanging: Workers) -> None:
    began = time.monotonic()
    hanging.pool.handle_events(0.2, [])
    assert time.monotonic() - began >= 0.2


def test_a_mount_that_nobody_can_serve_any_more_fails(hanging: Workers) -> None:
    hanging.be_silent(UNSERVED_SECONDS - 1)
    assert hanging.pool.failure is None
    hanging.be_silent(2)
    said = str(hanging.pool.failure)
    assert "do not die" in said
    assert all(str(child.pid) in said for child in hanging.started)


def test_a_mount_that_nobody_begins_to_serve_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Workers(monkeypatch)
    ours.pool.handle_events(0, [])
    cast(Any, ours.pool._session.connection).has_waiting = lambda: False
    ours.be_silent(UNSERVED_SECONDS + 1)
    assert "has begun" in str(ours.pool.failure)
    ours.started[0].kill()
    ours.started[0].wait(20)


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM])
def test_those_that_end_before_they_serve_are_started_later_and_later_and_no_request_is_blamed(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: int
) -> None:
    monkeypatch.setattr(worker_pool, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(worker_pool, "LONGEST_PAUSE", 0.128)
    caplog.set_level(logging.WARNING)
    for count in range(1, 3 * MAX_CRASHES):
        workers.started[-1].send_signal(ends)
        workers.until(lambda before=count: len(workers.started) > before)  # type: ignore[misc]
    pauses = [line.rpartition("started in ")[2] for line in caplog.messages if "before it served" in line]
    assert pauses == [f"{0.001 * 2**count:.4g} s" for count in range(8)]
    assert workers.pool.failure is None
    assert workers.blamed == []
    workers.serve()
    caplog.clear()
    workers.started[-1].send_signal(ends)
    before = len(workers.started)
    workers.until(lambda: len(workers.started) > before)
    assert caplog.messages[-1].endswith("is replaced")


def test_one_that_cannot_be_started_is_tried_again(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, refused = worker_pool.fork_watched, [BlockingIOError(11, "no process is free")] * (MAX_CRASHES + 1)

    def refuse(name: str, directory: Path, work: Callable[[], None]) -> tuple[int, int]:
        if refused:
            raise refused.pop()
        return fork(name, directory, work)

    monkeypatch.setattr(worker_pool, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(worker_pool, "fork_watched", refuse)
    workers.started[-1].kill()
    workers.until(lambda: len(workers.started) == 2)
    assert workers.pool.failure is None


def test_a_mount_that_was_served_once_and_that_nobody_begins_to_serve_again_fails(workers: Workers) -> None:
    workers.started[-1].kill()
    workers.until(lambda: len(workers.started) == 2)
    cast(Any, workers.pool._session.connection).has_waiting = lambda: False
    workers.be_silent(UNSERVED_SECONDS)
    assert workers.pool.failure is None
    workers.be_silent(1)
    assert "no worker has served" in str(workers.pool.failure)


def test_the_end_of_the_mount_is_noticed_while_nobody_serves_it(workers: Workers) -> None:
    workers.be_silent(1)
    assert not workers.pool.has_ended
    workers.unmount()
    workers.be_silent(1)
    assert workers.pool.has_ended
