"""How much may be on the way to one node: enough for its link, and no more than its switch holds."""

import pytest

from cachefs.planning.requests.receive_window import GRAIN_BYTES, INITIAL_QUEUE_BYTES, MAX_QUEUE_BYTES, ReceiveWindow

BLOCK = 110_000


def run(window: ReceiveWindow, link: float, base: float, queue: float, seconds: float) -> tuple[float, int]:
    """Ask for blocks as fast as the window lets, on a link of *link* bytes a second with *base* seconds of latency and
    a switch that holds *queue* bytes. Returns the share of the link that was used, and how often packets were lost."""
    now, came, losses = 0.0, 0, 0
    while now < seconds:
        in_flight = max(BLOCK, window.size // BLOCK * BLOCK)
        if in_flight > link * base + queue:
            losses += 1
            window.note_retransmissions(3, now)
            now += 0.05
        # A round: what was asked for comes at the link's rate, but not before the latency is over.
        took = max(base + BLOCK / link, in_flight / link)
        now += took
        came += in_flight
        window.note_latency(took - BLOCK / link, base, now)
        window.note_received(in_flight, now, is_full=True)
    return came / seconds / link, losses


def test_window_for_one_gigabit_fills_it_without_a_drop() -> None:
    window = ReceiveWindow()
    share, losses = run(window, 125e6, 0.0003, 256 << 10, 20)
    assert share > 0.9
    assert losses <= 6  # trials of a larger queue, ever more seldom


def test_window_grows_with_the_link() -> None:
    window = ReceiveWindow()
    share, losses = run(window, 1.25e9, 0.0005, 16 << 20, 10)
    assert share > 0.85
    assert losses == 0
    assert window.size > 600_000


def test_window_holds_two_grains_and_is_bounded() -> None:
    window = ReceiveWindow()
    for step in range(1000):
        window.note_retransmissions(10, step * 100.0)
    assert window.queue == INITIAL_QUEUE_BYTES
    assert window.size >= 2 * GRAIN_BYTES
    run(window, 1e11, 0.01, 1e12, 5)
    assert window.queue <= MAX_QUEUE_BYTES * 1.5


def test_something_may_always_be_asked_for() -> None:
    window = ReceiveWindow(100_000)
    assert window.size == 100_000
    assert window.can_request(0, 64 << 20)
    assert not window.can_request(60_000, 64 << 20)
    assert window.can_request(50_000, 64 << 20)  # its first half comes with the rest of the other one
    assert not window.can_request(60_000, 40_001)
    run(window, 1e9, 0.001, 1e9, 1)
    assert window.size == 100_000


@pytest.mark.parametrize("latency", [0.0, -1.0, 10.0])
def test_odd_measurements_do_no_harm(latency: float) -> None:
    window = ReceiveWindow()
    for step in range(100):
        window.note_latency(latency, latency, step * 0.001)
        window.note_received(BLOCK, step * 0.001, is_full=step % 3 > 0)
    assert 2 * GRAIN_BYTES <= window.size <= 64 << 20


def test_a_pause_is_no_rate() -> None:
    """As of a process that was stopped for ten seconds: it would never ask again."""
    window = ReceiveWindow()
    now = 0.0
    for _ in range(100):
        window.note_received(BLOCK, now, is_full=True)
        now += 0.001
    rate = window.rate
    now += 10.0
    window.note_received(BLOCK, now, is_full=True)
    window.note_received(BLOCK, now + 0.001, is_full=True)
    assert window.rate == rate


def test_a_single_peer_may_have_more_on_the_way_until_something_is_sent_twice() -> None:
    window = ReceiveWindow()
    assert window.single_peer_size == 4 * window.size
    assert window.can_request(3 * window.size, BLOCK, is_single_peer=True)
    assert not window.can_request(3 * window.size, BLOCK)
    for step in range(5):
        window.note_retransmissions(10, step * 100.0)
    assert window.single_peer_size == window.size
    assert ReceiveWindow(100_000).single_peer_size == 100_000
