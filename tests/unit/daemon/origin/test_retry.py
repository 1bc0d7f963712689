import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cachefs.errors import ObjectChanged, OriginAccessDenied, OriginUnavailable
from cachefs_daemon.origin import retry
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.retry import Failure, run_with_retries
from tests import virtual_time


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


def run(work: Callable[[], Awaitable[str]], deadline: float = 30) -> str:
    async def once() -> str:
        return await run_with_retries(work, judge, "the thing", Deadline.after(deadline))

    return virtual_time.run(once())


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST", 0.0001)
    monkeypatch.setattr(retry, "_LONGEST", 0.001)


def test_transient_failures_are_tried_again() -> None:
    work = Flaky(OSError("1"), OSError("2"))
    assert run(work) == "done"
    assert work.attempts == 3


def test_not_their_number_but_the_time_bounds_attempts_and_the_last_error_is_raised() -> None:
    assert run(Flaky(*[OSError("down")] * 100)) == "done"
    work = Flaky(*(OSError(str(number)) for number in range(10_000)))
    with pytest.raises(OriginUnavailable) as raised:
        run(work, deadline=0.05)
    assert str(raised.value) == str(work.attempts - 1)


def test_what_still_fails_after_some_time_may_be_given_up() -> None:
    async def once() -> str:
        now = asyncio.get_running_loop().time()
        return await run_with_retries(work, judge, "the thing", Deadline(now + 30), give_up_at=now)

    work = Flaky(OSError("refused"))
    with pytest.raises(OriginUnavailable, match="refused"):
        virtual_time.run(once())
    assert work.attempts == 1


def test_patience_that_grows_lets_an_attempt_go_on() -> None:
    async def once() -> tuple[str, bool]:
        patience, answer = Deadline.after(0.05), asyncio.Event()

        async def work() -> str:
            await answer.wait()
            return "done"

        task = asyncio.create_task(run_with_retries(work, judge, "the thing", patience))
        await asyncio.sleep(0)
        assert patience.extend(asyncio.get_running_loop().time() + 30)
        await asyncio.sleep(0.1)
        answer.set()
        return await task, patience.extend(0)

    assert virtual_time.run(once()) == ("done", True)


def test_patience_that_has_ended_does_not_grow() -> None:
    async def once() -> bool:
        patience = Deadline.after(0)
        with patience.enforced():
            return patience.extend(asyncio.get_running_loop().time() + 30)

    assert virtual_time.run(once()) is False


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
        run(hang, deadline=0.05)


def test_the_deadline_ends_a_wait_with_the_error_that_caused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_SPREAD", (1.0, 1.0))
    monkeypatch.setattr(retry, "_FIRST", 1000)
    monkeypatch.setattr(retry, "_LONGEST", 1000)
    with pytest.raises(OriginUnavailable, match="reset by peer"):
        run(Flaky(OSError("reset by peer")), deadline=0.05)
