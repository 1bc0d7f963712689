"""Tokens."""

import asyncio
import time

import pytest
from cachefs_daemon.origin import bearer


def test_a_token_is_found_once_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def find() -> bearer.Token:
        found.append(f"token-{len(found)}")
        return bearer.Token(found[-1])

    async def work() -> None:
        monkeypatch.setattr(bearer, "RENEW_SECONDS", 1e9)
        tokens = bearer.Bearer(find)
        first, other = await asyncio.gather(tokens.headers(), tokens.headers())
        assert first == other == {"Authorization": "Bearer token-0"}
        assert not tokens.refused(first)  # it was found just now
        monkeypatch.setattr(bearer, "RENEW_SECONDS", 0)
        assert tokens.refused(first)
        second = await tokens.headers()
        monkeypatch.setattr(bearer, "RENEW_SECONDS", 1e9)
        assert tokens.refused(first)  # whoever sent the first one finds the second
        assert not tokens.refused(second)
        assert found == ["token-0", "token-1"]

    asyncio.run(work())


def test_a_token_is_not_used_at_its_end() -> None:
    ends = iter([time.time() + 30, time.time() + 3600])

    async def work() -> None:
        tokens = bearer.Bearer(lambda: bearer.Token("t", next(ends)))
        for _ in range(3):
            await tokens.headers()
        assert list(ends) == []

    asyncio.run(work())
