"""What is brought from the SSD tier nearer to its readers."""

import numpy as np

from cachefs.planning.blocks.presence import IN_MEMORY, IN_SSD, Presence
from cachefs.planning.prefetch.fetch_plan import REFRESH_SECONDS, WINDOW_SECONDS, PromotionPlan
from cachefs.planning.sequences.plan import Plan
from tests.simulated import space_of

SIZE = 100
RATE = 10.0
SPACE = space_of([SIZE] * 100)


def promotions_of(order: list[int], memory_ahead: int = 1 << 30) -> tuple[PromotionPlan, Presence]:
    plan, presence = Plan(), Presence()
    plan.add_space(SPACE)
    presence.add_space(SPACE)
    presence.states["space"][:] = IN_SSD
    plan.set_epoch("job", "space", 0, np.array(order), is_last=True)
    plan.set_progress("job", 0, 0, RATE)
    return PromotionPlan(plan, presence, memory_ahead), presence


def keys(*blocks: int) -> list[bytes]:
    return SPACE.keys(np.array(blocks, np.int32))


def test_free_memory_is_filled_soonest_first() -> None:
    promotions, presence = promotions_of([5, 3, 8, 1])
    presence.states["space"][3] = IN_MEMORY
    assert promotions.choose_for_memory(0) == []
    assert promotions.choose_for_memory(2 * SIZE) == keys(5, 8)
    assert promotions.choose_for_memory(2 * SIZE) == keys(1), "no block is given twice"


def test_the_page_cache_gets_what_is_read_shortly() -> None:
    promotions, _ = promotions_of(list(range(100)))
    assert WINDOW_SECONDS == 1.0
    assert promotions.choose_for_page_cache(margin=0.0) == keys(*range(11))
    assert promotions.choose_for_page_cache(margin=0.55) == keys(*range(11, 16))
    few, _ = promotions_of(list(range(100)), memory_ahead=3 * SIZE)
    assert few.choose_for_page_cache(margin=0.0) == keys(0, 1, 2)


def test_what_was_given_is_looked_at_again_after_a_second() -> None:
    promotions, _ = promotions_of([5, 3])
    promotions.refresh(1000.0)
    assert promotions.choose_for_memory(2 * SIZE) == keys(5, 3)
    promotions.refresh(1000.0 + REFRESH_SECONDS / 2)
    assert promotions.choose_for_memory(2 * SIZE) == []
    promotions.refresh(1000.0 + 1.1 * REFRESH_SECONDS)
    assert promotions.choose_for_memory(2 * SIZE) == keys(5, 3)
