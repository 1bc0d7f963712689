"""How many bytes reads ahead may have under way, on links of all kinds."""

from dataclasses import dataclass

import pytest

from cachefs.planning.requests.request_limits import MIN_BYTES, ReadaheadLimit

BLOCK = 4 << 20
SLOTS = 48


@dataclass(frozen=True)
class Link:
    """What a server's answers are like."""

    latency: float  # seconds to the first byte
    bandwidth: float  # bytes per second of all answers together
    each: float  # bytes per second of one answer, at most


def play(link: Link, seconds: float, size: int = BLOCK, *, bounded: bool = True) -> tuple[ReadaheadLimit, float]:
    """As many requests as are allowed, all the time; not bounded: as there are slots. Returns what was learned, and the
    bytes per second in the last half."""
    ahead, now, step = ReadaheadLimit(), 0.0, 0.002
    running: list[list[float]] = []  # [when it was sent, bytes that are left]
    used = 0.0
    while now < seconds:
        while len(running) < SLOTS and (not running or not bounded or (len(running) + 1) * size <= ahead.max_bytes):
            running.append([now, size])
        now += step
        flowing = [one for one in running if now - one[0] > link.latency]
        for one in flowing:
            part = min(link.each, link.bandwidth / len(flowing)) * step
            used += min(part, one[1]) if now > seconds / 2 else 0
            one[1] -= part
        for one in [one for one in flowing if one[1] <= 0]:
            running.remove(one)
            ahead.note_response(size, now - one[0], now)
    return ahead, used / (seconds / 2)


def share_used(link: Link, seconds: float, size: int = BLOCK) -> float:
    """Of what the same slots bring without any bound."""
    return play(link, seconds, size)[1] / play(link, seconds, size, bounded=False)[1]


def test_a_narrow_link_has_few_blocks_on_it_and_is_used() -> None:
    link = Link(0.025, 40e6, 40e6)
    assert play(link, 10)[0].max_bytes <= 12 * BLOCK
    assert share_used(link, 10) > 0.9


@pytest.mark.parametrize(
    "link",
    [Link(0.025, 2.5e9, 80e6), Link(0.1, 10e9, 20e6), Link(0.2, 1e9, 5e6), Link(0.005, 1.2e9, 1.2e9)],
    ids=["data centre", "slow answers", "very slow answers", "local"],
)
def test_a_wide_link_is_used_whole(link: Link) -> None:
    assert share_used(link, 12) > 0.75


def test_it_is_found_soon() -> None:
    ahead, _ = play(Link(0.025, 2.5e9, 80e6), 1)
    assert ahead.max_bytes >= SLOTS * BLOCK * 0.75


def test_small_requests_are_not_held_up() -> None:
    assert share_used(Link(0.025, 1e9, 50e6), 3, size=110_000) > 0.95


def test_what_was_learned_is_forgotten() -> None:
    ahead, _ = play(Link(0.025, 2.5e9, 80e6), 2)
    assert ahead.max_bytes > 20 * BLOCK
    for tenth in range(100, 4000):
        ahead.note_response(BLOCK, 0.13, tenth / 10)
    assert ahead.max_bytes <= 12 * BLOCK


def test_at_first_there_are_two_blocks() -> None:
    assert ReadaheadLimit().max_bytes == MIN_BYTES == 2 * BLOCK
