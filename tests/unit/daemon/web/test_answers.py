"""However many ask, an answer is made once a second."""

import asyncio

import pytest
from cachefs_daemon.web import answers
from cachefs_daemon.web.answers import MOST_KEPT, Answers

from tests import virtual_time


def test_those_who_ask_at_once_share_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    async def work() -> None:
        kept = Answers()

        def making(question: str) -> asyncio.Future[bytes]:
            async def make() -> bytes:
                await asyncio.sleep(0)
                made.append(question)
                return f"{question} {len(made)}".encode()

            return asyncio.ensure_future(kept.get(question, make))

        monkeypatch.setattr(answers, "FRESH_SECONDS", 1000)
        assert set(await asyncio.gather(*(making("a") for _ in range(20)))) == {b"a 1"}
        monkeypatch.setattr(answers, "FRESH_SECONDS", 0)
        assert await making("a") == b"a 2"
        monkeypatch.setattr(answers, "FRESH_SECONDS", 1000)
        for number in range(MOST_KEPT):
            await making(f"other {number}")
        made.clear()
        await making("a")
        assert made == ["a"], "the oldest answers are not kept"

    virtual_time.run(work())


def test_a_failure_is_not_kept() -> None:
    async def fail() -> bytes:
        raise ValueError("no")

    async def work() -> None:
        kept = Answers()
        with pytest.raises(ValueError, match="no"):
            await kept.get("a", fail)
        assert await kept.get("a", lambda: asyncio.sleep(0, b"well")) == b"well"

    virtual_time.run(work())
