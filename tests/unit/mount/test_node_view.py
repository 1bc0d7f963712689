"""What the workers of a mount have heard from the daemon, in one order for all."""

import fcntl
import os
import signal
from typing import Any

import pytest

from cachefs.messages import NodeView
from cachefs.mount import node_view
from cachefs.mount.namespace import SnapshotSlot
from cachefs.mount.node_view import ViewLog


def view(instance: str, **others: Any) -> NodeView:
    fields: dict[str, Any] = {"index": "i", "tiers": {}, "datasets": [], "capacity": 9, "used": 1, "read_deadline": 5.0}
    return NodeView(instance=instance, **(fields | others))


def instances(log: ViewLog) -> list[str]:
    return [heard.view.instance for heard in log.read_new()]


def test_news_are_told_once_and_in_order() -> None:
    log = ViewLog(view("a"))
    assert instances(log) == ["a"]
    assert [heard.view.instance for heard in log.append_view(view("b"))] == ["b"]
    assert instances(log) == []


def test_what_only_counts_bytes_is_no_news() -> None:
    log = ViewLog(view("a"))
    log.read_new()
    assert log.append_view(view("a", used=2, capacity=8)) == []
    assert len(log.append_view(view("a", read_deadline=6.0))) == 1


def test_processes_see_each_others_news_in_one_order() -> None:
    log = ViewLog(view("first"))
    children = []
    for child in range(4):
        pid = os.fork()
        if not pid:
            log.read_new()
            for number in range(25):
                log.append_view(view(f"{child}.{number}"))
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    seen = instances(log)
    assert seen[0] == "first"
    assert sorted(seen[1:]) == sorted(f"{child}.{number}" for child in range(4) for number in range(25))
    assert all([name for name in seen if name.startswith(f"{child}.")][-1] == f"{child}.24" for child in range(4))


def test_a_process_that_was_stopped_while_it_writes_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_view, "LOCK_SECONDS", 0.01)
    log = ViewLog(view("a"))
    log.read_new()
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        fcntl.lockf(log._fd, fcntl.LOCK_EX)
        os.write(writer, b"x")
        signal.pause()
    os.read(reader, 1)
    assert log.append_view(view("b")) == []
    log.append_summary([slot(1)], 17)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert [heard.view.instance for heard in log.append_view(view("b"))] == ["b"]
    for fd in (reader, writer):
        os.close(fd)


def test_half_a_record_is_not_read_and_is_written_over() -> None:
    log = ViewLog(view("a"))
    log.read_new()
    os.pwrite(log._fd, b"\xff" * 40, os.fstat(log._fd).st_size)  # its writer was killed before it stored the new end
    assert instances(log) == []
    assert [heard.view.instance for heard in log.append_view(view("b"))] == ["b"]


def slot(number: int) -> SnapshotSlot:
    return SnapshotSlot(number, "one", f"{number:032x}", "/one")


def test_a_log_that_was_summed_up_tells_the_first_view_and_what_came_of_the_others() -> None:
    log = ViewLog(view("first"))
    late = ViewLog.__new__(ViewLog)  # another process, which has the same file
    late.__dict__.update(log.__dict__)
    for number in range(5):
        log.append_view(view(f"{number}"))
    assert not log.is_long
    for number in range(3000):
        log.append_view(view(f"long {number}", index="i" * 1000))
    assert log.is_long
    log.append_summary([slot(1), slot(2)], 17)
    assert not log.is_long
    assert os.fstat(log._fd).st_blocks * 512 < 64 << 10
    assert log.append_view(view("after"))[-1].view.instance == "after"
    first, summary, after = late.read_new()
    assert (first.view.instance, first.slots) == ("first", None)
    assert (summary.view.instance, summary.slots, summary.changed_ns) == ("long 2999", [slot(1), slot(2)], 17)
    assert (after.view.instance, after.slots) == ("after", None)


def test_who_is_in_the_middle_of_what_is_thrown_away_goes_on_from_the_summary() -> None:
    log = ViewLog(view("first"))
    late = ViewLog.__new__(ViewLog)
    log.append_view(view("second"))
    late.__dict__.update(log.__dict__)
    for number in range(5):
        log.append_view(view(f"{number}"))
    log.append_summary([slot(1)], 17)
    assert instances(late) == ["4"]


def test_nothing_is_summed_up_that_was_not_read() -> None:
    log = ViewLog(view("first"))
    late = ViewLog.__new__(ViewLog)
    late.__dict__.update(log.__dict__)
    log.append_view(view("second"))
    late.append_summary([], 0)
    assert instances(late) == ["first", "second"]
