"""However many ask, an answer is made once a second."""

import asyncio

import pytest

from cachefs_daemon.web import page
from cachefs_daemon.web.page import MAX_RESPONSES, ResponseCache
from tests import virtual_time


def test_those_who_ask_at_once_share_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    async def work() -> None:
        kept = ResponseCache()

        def making(question: str) -> asyncio.Future[bytes]:
            async def make() -> bytes:
                await asyncio.sleep(0)
                made.append(question)
                return f"{question} {len(made)}".encode()

            return asyncio.ensure_future(kept.get_or_make(question, make))

        monkeypatch.setattr(page, "FRESH_SECONDS", 1000)
        assert set(await asyncio.gather(*(making("a") for _ in range(20)))) == {b"a 1"}
        monkeypatch.setattr(page, "FRESH_SECONDS", 0)
        assert await making("a") == b"a 2"
        monkeypatch.setattr(page, "FRESH_SECONDS", 1000)
        for number in range(MAX_RESPONSES):
            await making(f"other {number}")
        made.clear()
        await making("a")
        assert made == ["a"], "the oldest answers are not kept"

    virtual_time.run(work())


def test_a_failure_is_not_kept() -> None:
    async def fail() -> bytes:
        raise ValueError("no")

    async def work() -> None:
        kept = ResponseCache()
        with pytest.raises(ValueError, match="no"):
            await kept.get_or_make("a", fail)
        assert await kept.get_or_make("a", lambda: asyncio.sleep(0, b"well")) == b"well"

    virtual_time.run(work())
