from cachefs.scheduling_messages import DatasetPart, NodesStatus, NodeStatus
from cachefs_scheduler.slurm.feature_keeper import CachedShares, partitions_of
from cachefs_scheduler.slurm.node_records import parse_nodes

INVENTORY = parse_nodes("n1|main*|idle|4||\nn2|main*|idle|4||\nn2|gpu|idle|4||\nn3|main*|down|4||\n")


def said(**nodes: int) -> NodesStatus:
    return NodesStatus(
        [NodeStatus(name, "active", 0.0, datasets=[DatasetPart("a", held, 100)]) for name, held in nodes.items()]
    )


def test_only_nodes_that_get_jobs_and_have_spoken_of_late_count() -> None:
    parts = CachedShares(max_datasets=10, max_age=60)
    status = said(n1=100, n3=100, elsewhere=100)
    old = NodeStatus("n2", "active", 61.0, datasets=[DatasetPart("a", 100, 100)])
    parts.record_status(NodesStatus([*status.nodes, old]), 0.0)
    assert parts.dataset_levels(INVENTORY)["a"].nested == {"some": {"n1"}}


def test_a_few_bytes_more_or_less_change_nothing() -> None:
    parts = CachedShares(max_datasets=10, max_age=60)
    parts.record_status(said(n1=50, n2=40), 0.0)
    before = parts.dataset_levels(INVENTORY)
    parts.record_status(said(n1=49, n2=41), 5.0)
    assert parts.dataset_levels(INVENTORY) == before


def test_the_datasets_that_most_is_cached_of() -> None:
    parts = CachedShares(max_datasets=2, max_age=60)
    held = [
        DatasetPart("a", 10, 100),
        DatasetPart("b", 90, 100),
        DatasetPart("c", 50, 100),
        DatasetPart("no feature!", 1, 1),
    ]
    parts.record_status(
        NodesStatus([NodeStatus("n1", "active", 0.0, datasets=[*held, DatasetPart("empty", 0, 0)])]), 0.0
    )
    assert set(parts.dataset_levels(INVENTORY)) == {"b", "c"}


def test_a_service_that_was_started_again_and_has_heard_nobody_changes_nothing_for_a_while() -> None:
    parts = CachedShares(max_datasets=10, max_age=600)
    parts.record_status(said(n1=100, n2=100), 0.0)
    parts.record_status(NodesStatus([]), 5.0)
    assert parts.dataset_levels(INVENTORY)["a"].nested == {"some": {"n1", "n2"}}
    # It hears n2, which has nothing any more, and knows of n1 only that there is such a node.
    parts.record_status(NodesStatus([NodeStatus("n1", "unknown", -1.0), NodeStatus("n2", "active", 0.0)]), 60.0)
    assert parts.dataset_levels(INVENTORY)["a"].nested == {"some": {"n1"}}
    parts.record_status(NodesStatus([NodeStatus("n1", "unknown", -1.0), NodeStatus("n2", "active", 0.0)]), 121.0)
    assert not parts.dataset_levels(INVENTORY)


def test_nobody_is_kept_for_longer_than_words_of_nodes_count() -> None:
    parts = CachedShares(max_datasets=10, max_age=10)
    parts.record_status(said(n1=100), 0.0)
    parts.record_status(NodesStatus([]), 11.0)
    assert not parts.dataset_levels(INVENTORY)


def test_partitions() -> None:
    assert partitions_of(INVENTORY) == {"main": {"n1", "n2"}, "-": {"n1", "n2"}, "gpu": {"n2"}}
