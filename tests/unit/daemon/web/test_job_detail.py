from cachefs.job_messages import StallRow
from cachefs_daemon.web.job_detail import rank_rows


def stall(consumer: str, epoch: int, source: str, count: int, seconds: float, longest: float) -> StallRow:
    return StallRow(
        job="j", consumer=consumer, epoch=epoch, source=source, count=count, seconds=seconds, longest=longest
    )


def test_ranks_that_have_waited_longest_come_first() -> None:
    rows = rank_rows(
        ["10", "9", "0", "val"],
        [
            stall("0", 0, "origin", 3, 2.0, 1.5),
            stall("0", 1, "peer node2", 1, 0.5, 0.5),
            stall("0", 1, "peer node3", 1, 0.25, 0.25),
            stall("gone", 0, "ssd", 1, 4.0, 4.0),
        ],
    )
    assert [one.rank for one in rows] == ["gone", "0", "9", "10", "val"]
    waited = rows[1]
    assert (waited.waits, waited.waited, waited.longest) == (5, 2.75, 1.5)
    assert waited.sources == {"origin": 2.0, "peer": 0.75}
