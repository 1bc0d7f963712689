from cachefs.planning.scheduling.explanation import explain_ranking

from .making import cluster_of, job, node


def words(*nodes, placed=(), now=0.0, **more):
    cluster = cluster_of(*nodes)
    cluster.advance_clock(now)
    return explain_ranking(job(rate=2e9, **more), [one.name for one in nodes], cluster, placed)


def test_it_says_where_the_data_are_and_what_that_costs():
    found = words(node("warm", (0, 1), jobs={"s": 2}), node("half", (0, 0.5)), node("cold"), placed=["cold"])
    assert [row.node for row in found.rows] == ["warm", "half", "cold"]
    assert found.rows[0].score == 1
    assert found.rows[1].estimate.local == found.rows[1].estimate.zone
    text = " ".join(found.text)
    assert "2 nodes have the 100 GB. Jobs read it on 1 node now." in text
    assert "warm is best (as 1 more is, nearly): of what a rank reads, 100 GB there. It waits 0 s in the first" in text
    assert "longer than on warm" in text


def test_nothing_is_left_out_silently():
    found = words(node("off", (0, 1), state="draining"), node("away", (0, 1), state="away"), placed=["ghost", "off"])
    text = " ".join(found.text)
    assert "away is away: its data do not count." in text
    assert "ghost has not reported yet" in text
    assert "off, which is draining, and so no candidate" in text
    old = words(node("a", (0, 1)), now=660.0)
    assert "a did not report for 11 min: its last report counts 50%." in old.text
    gone = words(node("a", (0, 1)), now=9000.0)
    assert "a did not report for 2.5 h: its last report no longer counts." in gone.text


def test_all_alike():
    found = words(node("a"), node("b"))
    assert found.text[0].startswith("No node has any of the 100 GB")
    assert found.text[1].startswith("All 2 candidates are about as good: of what a rank reads, 100 GB at the origin.")


def test_nothing_is_known():
    cluster = cluster_of()
    assert "No node is known" in explain_ranking(job(), [], cluster).text[0]
    cluster.forget_snapshot("s")
    assert "No node has reported snapshot s" in explain_ranking(job(), ["a"], cluster).text[0]


def test_tables_are_short():
    found = explain_ranking(
        job(), [f"n{i}" for i in range(50)], cluster_of(*(node(f"n{i}") for i in range(50))), ["n49"], 3
    )
    assert len(found.rows) == 4
