"""What all nodes show of a warm-up of the cluster, from what each has published."""

from hypothesis import given
from hypothesis import strategies as st

from cachefs_cluster.sharing.sections import WarmupFacts, WarmupPart, WarmupTotals
from cachefs_cluster.warmups.progress import PartOwner, WarmupScene, end_message, merge, summarise

KEY = ("a" * 32, "b" * 32)
FACTS = WarmupFacts("set", "0" * 16, 1000.0, started=1000.0)
AWAY = "does not answer; after 30 s of that, others take its part over"

versions = st.builds(
    lambda started, end: WarmupFacts("set", "0" * 16, 1.0, started=started, ended=end[0], state=end[1], message=end[2]),
    st.sampled_from([0.0, 2.0, 3.0]),
    st.sampled_from([(0.0, "", ""), (5.0, "done", ""), (5.0, "cancelled", "x"), (6.0, "failed", "y")]),
)


@given(versions, versions, versions)
def test_nodes_agree_in_whichever_order_they_hear_of_changes(
    one: WarmupFacts, two: WarmupFacts, three: WarmupFacts
) -> None:
    assert merge(one, two) == merge(two, one)
    assert merge(merge(one, two), three) == merge(one, merge(two, three))
    assert merge(one, one) == one


def test_once_cancelled_it_stays_so() -> None:
    cancelled = WarmupFacts("set", "0" * 16, 1.0, ended=5.0, state="cancelled")
    assert merge(FACTS, cancelled) == cancelled == merge(cancelled, FACTS)


def part(state: str, done: int, whole: int = 100, **fields: object) -> WarmupPart:
    totals = WarmupTotals(done, whole, 10 * done, 10 * whole)
    return WarmupPart(state, *KEY, totals, **fields)  # type: ignore[arg-type]


def scene(*parts: WarmupPart | None, away: int = -1) -> WarmupScene:
    owners = [PartOwner(f"id{one}", f"node{one}", AWAY if one == away else "") for one in range(len(parts))]
    known = {f"id{number}": one for number, one in enumerate(parts) if one is not None}
    return WarmupScene(owners, known, KEY, (3000, 300))


def test_progress_is_the_sum_and_counts_parts_that_are_not_known_yet() -> None:
    shown = summarise(7, FACTS, scene(part("done", 100), part("running", 40), None), 1001.0)
    assert (shown.state, shown.blocks, shown.blocks_total, shown.bytes, shown.bytes_total) == (
        "running", 140, 300, 1400, 3000,
    )  # fmt: skip
    assert [(node.name, node.state) for node in shown.nodes] == [
        ("node0", "done"), ("node1", "running"), ("node2", "missing"),
    ]  # fmt: skip


def test_parts_of_other_members_or_another_snapshot_do_not_count() -> None:
    old = WarmupPart("done", "c" * 32, KEY[1], WarmupTotals(100, 100, 1000, 1000))
    older = WarmupPart("done", KEY[0], "d" * 32, WarmupTotals(100, 100, 1000, 1000))
    found = scene(part("done", 100), old, older)
    assert [one.name for one in found.unfinished()] == [one.name for one in found.silent()] == ["node1", "node2"]
    assert found.totals().blocks == 100


def test_it_says_which_node_is_behind_and_why() -> None:
    def reason(*parts: WarmupPart | None, away: int = -1) -> str:
        return summarise(7, FACTS, scene(*parts, away=away), 1001.0).reason

    assert reason(part("running", 50), part("running", 45)) == ""
    assert reason(part("running", 50), part("running", 51), part("running", 20)) == (
        "node2 is behind, with 20 % of its part"
    )
    slow = part("running", 20, reason="its origin does not answer it")
    assert reason(part("done", 100), part("done", 100), slow) == (
        "node2 is behind, with 20 % of its part: its origin does not answer it"
    )
    assert reason(part("done", 100), part("running", 40), away=1) == f"node1 {AWAY}"
    waiting = WarmupPart("waiting", KEY[0], "", reason="the dataset is not on this node")
    assert reason(part("done", 100), waiting) == "node1 waits: the dataset is not on this node"
    assert reason(part("done", 100), None) == "not known yet of node1: what is missing there"


def test_the_end_names_nodes_that_lack_something() -> None:
    assert end_message(scene(part("done", 100), part("done", 100))) == ""
    failed = WarmupPart("done", *KEY, WarmupTotals(90, 100, 900, 1000, 0, 10), "access denied")
    assert end_message(scene(part("done", 100), failed, None)) == (
        "nothing is known of the part of node2; node1: access denied"
    )
    no_room = WarmupPart("done", *KEY, WarmupTotals(90, 100, 900, 1000, 10))
    assert end_message(scene(part("done", 100), no_room)) == ""


def test_one_that_waits_says_for_what() -> None:
    job = WarmupFacts("set", "0" * 16, 1000.0, before="train")
    shown = summarise(7, job, scene(), 1090.0)
    assert shown.state == "waiting"
    assert shown.reason == ("it waits until job train publishes what it reads; no node has seen it for 1 min 30 s")
    later = WarmupFacts("set", "0" * 16, 1000.0, at=4690.0)
    assert summarise(7, later, scene(), 1090.0).reason == "it begins in 1 h 0 min"
