"""How often fetching ahead looks for work."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from cachefs.planning.sequences.plan import Plan
from cachefs_daemon.fetch import step_timer as pacing
from cachefs_daemon.fetch.step_timer import StepTimer
from tests import virtual_time
from tests.simulated import space_of


def plan_of_a_job() -> Plan:
    plan = Plan()
    fill(plan)
    return plan


def fill(plan: Plan) -> None:
    """Have a job whose future is known."""
    plan.add_space(space_of([100] * 10))
    plan.set_epoch("job", "space", 0, np.arange(10), is_last=True)
    plan.set_progress("job", 0, 0, 10.0)


def steps_in(seconds: float, pace: StepTimer, step: Callable[[], Awaitable[None]], news: int = 0) -> None:
    """Repeat *step* for a while, and wake it so many times meanwhile."""

    async def play() -> None:
        task = asyncio.create_task(pace.repeat_step(step))
        for _ in range(news):
            await asyncio.sleep(seconds / news)
            pace.wake()
        await asyncio.sleep(0 if news else seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(play())


class Counted:
    def __init__(self, failing: bool = False) -> None:
        self.calls = 0
        self._failing = failing

    async def step(self) -> None:
        self.calls += 1
        if self._failing:
            raise ZeroDivisionError


def test_news_lead_to_steps_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "MAX_INTERVAL", 10.0)
    left_alone, woken = Counted(), Counted()
    steps_in(0.3, StepTimer(plan_of_a_job()), left_alone.step)
    steps_in(0.3, StepTimer(plan_of_a_job()), woken.step, news=10)
    assert left_alone.calls == 1
    assert 2 <= woken.calls <= 11


def test_without_any_future_nothing_is_looked_for() -> None:
    nobody = Counted()
    steps_in(0.2, StepTimer(Plan()), nobody.step, news=5)
    assert nobody.calls == 0


def test_while_no_future_is_known_it_looks_twice_a_second_and_at_once_when_there_is_one() -> None:
    class Watched(Plan):
        looks = 0

        @property
        def is_empty(self) -> bool:
            self.looks += 1
            return super().is_empty

    plan, counted = Watched(), Counted()

    async def play() -> None:
        pace = StepTimer(plan)
        task = asyncio.create_task(pace.repeat_step(counted.step))
        await asyncio.sleep(10)
        assert plan.looks <= 50
        assert counted.calls == 0
        fill(plan)
        pace.wake()
        await asyncio.sleep(pacing.MIN_INTERVAL)
        assert counted.calls == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(play())


def test_after_a_failure_there_is_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "FAILURE_PAUSE", 10.0)
    failing = Counted(failing=True)
    steps_in(0.2, StepTimer(plan_of_a_job()), failing.step, news=5)
    assert failing.calls == 1
