"""How long a child process that ends soon after its start has to wait for the next start, and what is logged of it."""

import logging
from types import SimpleNamespace

import pytest

from cachefs.mount import child_process
from cachefs.mount.child_process import LONGEST_PAUSE, RestartBackoff


class Child:
    """Is started as soon as it may be, and lives for *lives* seconds each time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(child_process, "time", SimpleNamespace(monotonic=lambda: self.now))
        self._restarts = RestartBackoff()

    def pause_after(self, lives: float) -> float:
        assert self._restarts.is_due
        self._restarts.record_start()
        self.now += lives
        ended = self.now
        self._restarts.record_end("it ended")
        while not self._restarts.is_due:
            self.now += 1
        return self.now - ended


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    return Child(monkeypatch)


def test_the_pause_grows_up_to_a_bound_and_then_nothing_is_logged(
    child: Child, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    pauses = [child.pause_after(1) for _ in range(2000)]
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE]
    assert set(pauses[8:]) == {LONGEST_PAUSE}
    assert len(caplog.messages) == 7
    assert caplog.messages[-1] == "it ended; the next is started in 60 s"


def test_one_that_has_lived_long_is_started_soon_and_that_is_logged(
    child: Child, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        child.pause_after(1)
    caplog.clear()
    assert child.pause_after(LONGEST_PAUSE + 1) == 1
    assert caplog.messages == ["it ended; the next is started in 1 s"]
    assert child.pause_after(1) == 2
