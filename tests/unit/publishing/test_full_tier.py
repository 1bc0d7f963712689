"""A job on a node whose disk is full is not advised what would not help."""

from cachefs.publishing.exit_summary import summary_lines
from cachefs.publishing.run_record import LoaderRecord, MountBytes, ProcessRecord, TroubleRecord


def test_neither_a_warmup_nor_a_budget_is_advised_where_a_disk_is_full() -> None:
    loader = LoaderRecord("x", epochs=1, samples=10, busy=50.0, waited=45.0, first_busy=50.0, first_waited=45.0)
    one = ProcessRecord(1, True, [loader], {"m": (MountBytes(), MountBytes(missed=1 << 20))}, stalls={"origin": 45.0})
    assert "cachectl warmup" in summary_lines([one])[-1]
    one.troubles.append(TroubleRecord("tier ssd", 1.0, 0.0, 0, "the ssd tier has no more room"))
    advice = summary_lines([one])[-1]
    assert "make room there" in advice
    assert "warmup" not in advice
