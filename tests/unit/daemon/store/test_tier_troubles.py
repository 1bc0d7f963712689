"""What is wrong with a tier is among the failures: once, for as long as it lasts."""

import dataclasses
from pathlib import Path

from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.store.storage import TierUsage
from cachefs_daemon.troubles import TierTroubles, trouble_of

GIB = 1 << 30
WELL = TierUsage("ssd", Path("/ssd"), 10 * GIB, 10 * GIB, 10 * GIB - 4096, 9, 1, 0, "lru", "")
BROKEN = dataclasses.replace(WELL, problem="/ssd: No space left on device")
SHORT = dataclasses.replace(WELL, limit=GIB, used=GIB)


def test_a_tier_that_is_as_full_as_it_may_be_has_no_trouble() -> None:
    assert trouble_of(WELL) == ("", "")
    assert trouble_of(dataclasses.replace(WELL, limit=GIB, used=0)) == ("", "")


def test_a_trouble_is_one_failure_until_there_is_another_one() -> None:
    errors = ErrorLog()
    troubles = TierTroubles(errors)
    for usage in (WELL, BROKEN, BROKEN, SHORT, dataclasses.replace(SHORT, limit=GIB + 5, used=GIB + 5), WELL, BROKEN):
        troubles.check_tiers([usage])
    assert [(one.subject, one.count) for one in errors.views()] == [("ssd tier", 3)]
    causes = {one.message: one.count for one in errors.causes()}
    assert causes == {
        "takes no new blocks: /ssd: No space left on device": 2,
        "has no more room: 1 GiB of its budget of 10 GiB can be used, as other programs have taken the rest "
        "of the file system of /ssd": 1,
    }
