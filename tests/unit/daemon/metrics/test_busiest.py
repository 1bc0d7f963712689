"""Counts by dataset: bounded, and none ever shrinks."""

import random

from cachefs_daemon.metrics.busiest import BusiestDatasets


def test_a_thousand_datasets_have_as_many_counts_as_may_be() -> None:
    busiest = BusiestDatasets(20)
    for number in range(1000):
        busiest.count_block(f"d{number}", "origin", 10)
    assert list(busiest.rows) == [f"d{number}" for number in range(20)]
    assert (busiest.others.blocks["origin"], busiest.others.bytes["origin"]) == (980, 9800)


def test_the_busiest_ones_come_to_have_counts_and_the_others_lose_them() -> None:
    busiest = BusiestDatasets(2)
    for name in ("a", "b", "c"):
        busiest.count_block(name, "origin", 100)
    busiest.count_block("c", "origin", 1000)
    busiest.select_busiest(100)
    assert set(busiest.rows) == {"b", "c"}
    assert busiest.rows["c"].bytes["origin"] == 0, "what came before counts for the others"
    busiest.count_block("c", "origin", 5)
    busiest.count_block("a", "origin", 5000)
    assert (busiest.rows["c"].bytes["origin"], busiest.others.bytes["origin"]) == (5, 6100)
    busiest.select_busiest(200)
    busiest.count_block("a", "origin", 1)
    assert busiest.rows["a"].bytes["origin"] == 101, "it goes on where it was"


def test_nothing_ever_shrinks() -> None:
    chance = random.Random(5)
    busiest = BusiestDatasets(3)
    seen: dict[str, int] = {}
    for step in range(5000):
        busiest.count_block(f"d{chance.randrange(step // 500, step // 500 + 6)}", chance.choice(("origin", "peer")), 7)
        if step % 20 == 0:
            busiest.select_busiest(float(step))
        rows = {**busiest.rows, "": busiest.others}
        for name, row in rows.items():
            now = row.bytes.total()
            assert now >= seen.get(name, 0)
            seen[name] = now
    assert sum(seen.values()) == 5000 * 7, "each block has counted once"


def test_blocks_of_nobody_count_for_the_others() -> None:
    busiest = BusiestDatasets(3)
    busiest.count_block("", "origin", 4)
    assert not busiest.rows
    assert busiest.others.blocks["origin"] == 1
