import pytest

from cachefs.observe_messages import NodeReport
from cachefs_scheduler.view.reported_cluster import ReportedNode


@pytest.mark.parametrize(
    ("said", "member", "problem", "state"),
    [
        ("draining", "draining", "", "draining"),
        ("draining", "draining", "no answer within 45 s", "draining"),
        # It has drained and ended; others of the list say that it is away.
        ("draining", "away", "no answer within 45 s", "away"),
        # Others do not reach it, and we do.
        ("draining", "away", "", "draining"),
        ("active", "away", "no answer within 45 s", "up"),
    ],
)
def test_a_node_that_has_drained_and_left_is_away(said: str, member: str, problem: str, state: str) -> None:
    node = ReportedNode("n1", "1" * 32, "h", 7381, member_state=member)
    node.merge_report(NodeReport("1" * 32, "n1", "a", 1, full=True, state=said), 5.0)
    node.problem = problem
    assert node.state == state
