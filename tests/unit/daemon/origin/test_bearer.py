"""Tokens."""

import asyncio
import threading
import time

import pytest

from cachefs.errors import OriginAccessDenied
from cachefs_daemon.origin.web import bearer
from tests import virtual_time


def test_a_token_is_found_once_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def find() -> bearer.Token:
        found.append(f"token-{len(found)}")
        return bearer.Token(found[-1])

    async def work() -> None:
        monkeypatch.setattr(bearer, "RENEW_SECONDS", 1e9)
        tokens = bearer.BearerTokens(find)
        first, other = await asyncio.gather(tokens.headers(), tokens.headers())
        assert first == other == {"Authorization": "Bearer token-0"}
        assert not tokens.handle_refusal(first)  # it was found just now
        monkeypatch.setattr(bearer, "RENEW_SECONDS", 0)
        assert tokens.handle_refusal(first)
        second = await tokens.headers()
        monkeypatch.setattr(bearer, "RENEW_SECONDS", 1e9)
        assert tokens.handle_refusal(first)  # whoever sent the first one finds the second
        assert not tokens.handle_refusal(second)
        assert found == ["token-0", "token-1"]

    virtual_time.run(work())


def test_a_token_is_not_used_at_its_end() -> None:
    async def work() -> None:
        ends = iter([time.time() + 30, time.time() + 3600])
        tokens = bearer.BearerTokens(lambda: bearer.Token("t", next(ends)))
        for _ in range(3):
            await tokens.headers()
        assert list(ends) == []

    virtual_time.run(work())


def test_a_token_that_is_still_good_is_used_while_no_other_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    searching, hanging = threading.Event(), threading.Event()

    def refuse() -> bearer.Token:
        raise OriginAccessDenied("the metadata server is being updated")

    def hang() -> bearer.Token:
        searching.set()
        hanging.wait(30)
        return bearer.Token("late")

    finds = iter([lambda: bearer.Token("t", time.time() + 1e5), refuse, hang])

    async def work() -> None:
        monkeypatch.setattr(bearer, "_MARGIN", 1e6)  # it is looked for from now on, and good for longer than any test
        monkeypatch.setattr(bearer, "RENEWAL_WAIT_SECONDS", 0.01)
        tokens = bearer.BearerTokens(lambda: next(finds)())
        try:
            while not searching.is_set():  # found, refused, and a third search, which hangs
                assert await tokens.headers() == {"Authorization": "Bearer t"}
            assert await tokens.headers() == {"Authorization": "Bearer t"}  # does not wait for that
        finally:
            hanging.set()
        monkeypatch.setattr(bearer, "RENEWAL_WAIT_SECONDS", 30)
        assert await tokens.headers() == {"Authorization": "Bearer late"}

    asyncio.run(work())  # a real thread hangs


def test_a_search_that_ends_as_its_waiter_gives_up_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = 0

    async def refuse(find: object) -> bearer.Token:
        nonlocal searches
        searches += 1
        for _ in range(2):  # so it ends in the turn of the loop in which its waiter goes on
            await asyncio.sleep(0)
        raise OriginAccessDenied("the metadata server is being updated")

    async def work() -> None:
        tokens = bearer.BearerTokens(lambda: bearer.Token("t", time.time() + 1e5))
        await tokens.headers()
        monkeypatch.setattr(bearer, "_MARGIN", 1e6)
        monkeypatch.setattr(bearer, "RENEWAL_WAIT_SECONDS", 0)
        monkeypatch.setattr(asyncio, "to_thread", refuse)
        for _ in range(10):
            assert await tokens.headers() == {"Authorization": "Bearer t"}
        assert searches > 1

    asyncio.run(work())


def test_a_token_that_has_ended_is_not_used_where_no_other_is_found() -> None:
    finds = iter([lambda: bearer.Token("t", time.time() - 1)])

    def find() -> bearer.Token:
        for one in finds:
            return one()
        raise OriginAccessDenied("no")

    async def work() -> None:
        tokens = bearer.BearerTokens(find)
        await tokens.headers()
        with pytest.raises(OriginAccessDenied):
            await tokens.headers()

    virtual_time.run(work())
