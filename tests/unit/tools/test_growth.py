"""The benchmark of a large cluster computes what nodes of a cluster compute."""

import pytest

from cachefs_bench import growth


@pytest.mark.parametrize("nodes", [2, 300])
def test_placement_and_copies_are_those_of_so_many_nodes(nodes: int) -> None:
    found = growth.measure(30_000, nodes, 4)
    assert found["placement"]["moved_by_join"] == pytest.approx(1, abs=0.3)
    assert 1 / nodes < found["local_reads_in_last_epoch"] < 1.1 * found["local_reads_in_theory"]
    assert set(found["cpu_ms_per_node_and_epoch"]) == {"order", "reads", "copies", "duty", "what is mine", "all"}
    assert found["messages_per_second_and_node"]["nothing_happens"] < nodes
