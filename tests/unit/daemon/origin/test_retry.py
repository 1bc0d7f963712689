import asyncio

import pytest
from cachefs_daemon.origin import retry
from cachefs_daemon.origin.retry import Failure, longest_wait, retrying

from cachefs.errors import ObjectChanged, OriginAccessDenied, OriginUnavailable


class Flaky:
    """Fails with each of *failures*, then succeeds."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.attempts = 0

    async def __call__(self) -> str:
        self.attempts += 1
        if self.failures:
            raise self.failures.pop(0)
        return "done"


def judge(error: Exception) -> Failure:
    if isinstance(error, OSError):
        return Failure(OriginUnavailable(str(error)), True)
    if isinstance(error, PermissionError | ObjectChanged):
        return Failure(ObjectChanged("changed"), False)
    raise error


def run(work: Flaky, attempts: int = 5, deadline: float = 30) -> str:
    return asyncio.run(retrying(work, judge, "the thing", attempts, deadline))


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST", 0.001)


def test_transient_failures_are_tried_again() -> None:
    work = Flaky(OSError("1"), OSError("2"))
    assert run(work) == "done"
    assert work.attempts == 3


def test_attempts_are_bounded_and_the_last_error_is_raised() -> None:
    work = Flaky(*(OSError(str(number)) for number in range(9)))
    with pytest.raises(OriginUnavailable, match="4"):
        run(work)
    assert work.attempts == 5


def test_a_permanent_failure_ends_it_at_once() -> None:
    work = Flaky(OSError("1"), ObjectChanged("x"), OSError("3"))
    with pytest.raises(ObjectChanged):
        run(work)
    assert work.attempts == 2


def test_an_unknown_exception_is_not_swallowed() -> None:
    with pytest.raises(OriginAccessDenied):
        run(Flaky(OriginAccessDenied("never judged")))


def test_the_deadline_ends_an_attempt_that_hangs() -> None:
    async def hang() -> str:
        await asyncio.Event().wait()
        return "never"

    with pytest.raises(OriginUnavailable, match="the thing"):
        asyncio.run(retrying(hang, judge, "the thing", 5, 0.05))


def test_the_deadline_ends_a_wait_with_the_error_that_caused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: 1000)
    with pytest.raises(OriginUnavailable, match="reset by peer"):
        run(Flaky(OSError("reset by peer")), deadline=0.05)


def test_waits_double_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST", 0.1)
    waits = [longest_wait(failed) for failed in range(1, 2000)]
    assert waits[:4] == [0.1, 0.2, 0.4, 0.8]
    assert max(waits) == waits[-1] == 5.0
