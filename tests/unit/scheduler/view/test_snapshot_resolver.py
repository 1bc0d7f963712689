from cachefs.observe_messages import SnapshotReport
from cachefs_scheduler.view.reported_cluster import SnapshotResolver, dataset_name


def report(snapshot: str, *datasets: str) -> SnapshotReport:
    return SnapshotReport(id=snapshot, total=1, blocks=1, datasets=list(datasets))


def test_a_name_means_what_most_nodes_say() -> None:
    names = SnapshotResolver()
    names.replace_node("n1", [report("old", "set"), report("x", "other")])
    names.replace_node("n2", [report("new", "set")])
    names.replace_node("n3", [report("new", "set")])
    assert names.resolve("set") == names.resolve("set@latest") == "new"
    assert names.resolve("set@ol") == "old"
    assert names.resolve("set@z") is None
    assert names.resolve("unknown") is None
    assert names.current_snapshots() == {"set": "new", "other": "x"}
    names.replace_node("n2", [report("old", "set")])
    assert names.resolve("set") == "old"
    for node in ("n1", "n2", "n3"):
        names.remove_node(node)
    assert names.dataset_names() == []


def test_the_dataset_of_a_spec() -> None:
    assert dataset_name("set@latest") == dataset_name("set") == "set"
