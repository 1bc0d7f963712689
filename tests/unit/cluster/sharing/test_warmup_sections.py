"""Warm-ups that other nodes publish are checked like input of users."""

import pytest

from cachefs_cluster.sharing.sections import (
    MAX_WARMUP_PATHS,
    WARMUP_PARTS,
    WARMUPS,
    WarmupFacts,
    WarmupPart,
    WarmupTotals,
)  # fmt: skip

NODE = "0" * 16


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("17", WarmupFacts("set", NODE, 1.0)),
        ("1234567", WarmupFacts("../set", NODE, 1.0)),
        ("1234567", WarmupFacts("set", "someone", 1.0)),
        ("1234567", WarmupFacts("set", NODE, 1.0, fraction=1.5)),
        ("1234567", WarmupFacts("set", NODE, 1.0, fraction=float("nan"))),
        ("1234567", WarmupFacts("set", NODE, 1.0, at=float("nan"))),
        ("1234567", WarmupFacts("set", NODE, 1.0, at=1e300)),
        ("1234567", WarmupFacts("set", NODE, 1.0, before="a\nb")),
        ("1234567", WarmupFacts("set", NODE, 1.0, state="done")),
        ("1234567", WarmupFacts("set", NODE, 1.0, ended=2.0, state="running")),
        ("1234567", WarmupFacts("set", NODE, 1.0, paths=[b"x" * (MAX_WARMUP_PATHS + 1)])),
        ("1234567", WarmupFacts("set", NODE, 1.0, totals=WarmupTotals(blocks=-1))),
    ],
)
def test_facts_that_make_no_sense_are_rejected(name: str, facts: WarmupFacts) -> None:
    with pytest.raises(ValueError, match=r"invalid|too many"):
        WARMUPS.decode(name, WARMUPS.encode(facts))


@pytest.mark.parametrize(
    "part",
    [WarmupPart("asleep"), WarmupPart("done", "x"), WarmupPart("done", "", "x"), WarmupPart("done", reason="a\x1bb")],
)
def test_parts_that_make_no_sense_are_rejected(part: WarmupPart) -> None:
    with pytest.raises(ValueError, match="invalid"):
        WARMUP_PARTS.decode("1234567", WARMUP_PARTS.encode(part))


def test_sensible_ones_are_accepted() -> None:
    facts = WarmupFacts("set", NODE, 1.0, ended=2.0, state="cancelled", message="cancelled on node3", paths=[b"a/b"])
    assert WARMUPS.decode("1234567", WARMUPS.encode(facts)) == facts
    part = WarmupPart("running", "a" * 32, "b" * 32, WarmupTotals(1, 2, 3, 4), "slow")
    assert WARMUP_PARTS.decode("1234567", WARMUP_PARTS.encode(part)) == part
